"""Puts SEND and RECV between the compute actions of every rank.

- A SEND follows right after the action that produced its content: the FORWARD for an output, the last BACKWARD
  on this rank that adds to the gradient of an input. One message per microbatch, stage and destination, however
  many stages read it there.
- A RECV stands right before the first action that needs it. Messages between two ranks arrive in the order in
  which they were sent (the channel is FIFO per directed pair), so those sent earlier are received first even if
  they are needed later. That adds no waiting: whoever waits for a message also waits for those sent before it.
- Stages on the same rank hand tensors over directly.

Sends never block, so the lists are free of deadlock exactly when the compute actions alone are.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.schedule.actions import Action, Op
from interlace.schedule.graph import Node, StageGraph
from interlace.schedule.work import Work

Message = tuple[int, int, bool]
"""(position of the producing stage, microbatch, is it the gradient)."""


def insert_communication(
    graph: StageGraph, step: Sequence[Work], compute: Sequence[Sequence[Action]]
) -> list[list[Action]]:
    """The lists `compute` (one per rank, compute actions only) with SEND and RECV added.

    step: the Work of each microbatch.
    """
    sending = [_insert_sends(graph, step, rank, actions) for rank, actions in enumerate(compute)]
    arrivals: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(sending):
        for action in actions:
            if action.op is Op.SEND:
                arrivals.setdefault((rank, action.peer), []).append(action)
    return [_insert_receives(graph, step, rank, actions, arrivals) for rank, actions in enumerate(sending)]


def _insert_sends(graph: StageGraph, step: Sequence[Work], rank: int, actions: Sequence[Action]) -> list[Action]:
    targets: dict[tuple[int, Node], list[int]] = {}  # (id of the Work, producer) -> other ranks that read it
    shares: dict[tuple[int, Node], int] = {}  # (id of the Work, producer) -> stages here that give it gradients
    for work in {id(work): work for work in step}.values():
        for node, producers in work.inputs.items():
            for producer in producers:
                if producer[1] == rank != node[1]:
                    ranks = targets.setdefault((id(work), producer), [])
                    if node[1] not in ranks:
                        ranks.append(node[1])
                if node[1] == rank != producer[1] and producer in work.gradients and node in work.gradients:
                    shares[id(work), producer] = shares.get((id(work), producer), 0) + 1

    done: dict[tuple[int, Node], int] = {}
    out: list[Action] = []
    for action in actions:
        out.append(action)
        k = action.microbatch
        work = step[k]
        node = (graph.position[action.module, action.stage], rank)
        if action.op is Op.FORWARD:
            for target in targets.get((id(work), node), ()):
                out.append(Action(Op.SEND, action.module, action.stage, k, action.part, target))
        elif action.op is Op.BACKWARD or action.op is Op.BACKWARD_INPUT:
            for producer in work.inputs[node]:
                needed = shares.get((id(work), producer), 0)
                if not needed:
                    continue
                done[k, producer] = done.get((k, producer), 0) + 1
                if done[k, producer] == needed:
                    stage = graph.stages[producer[0]]
                    out.append(Action(Op.SEND, stage.module, stage.index, k, action.part, producer[1], True))
    return out


def _insert_receives(
    graph: StageGraph,
    step: Sequence[Work],
    rank: int,
    actions: Sequence[Action],
    arrivals: dict[tuple[int, int], list[Action]],
) -> list[Action]:
    queues = {source: queue for (source, target), queue in arrivals.items() if target == rank}
    places: dict[tuple[int, Message], int] = {}
    for source, queue in queues.items():
        for i, sent in enumerate(queue):
            places[source, (graph.position[sent.module, sent.stage], sent.microbatch, sent.grad)] = i
    received = dict.fromkeys(queues, 0)
    out: list[Action] = []

    def receive(source: int, message: Message) -> None:
        place = places[source, message]
        while received[source] <= place:
            sent = queues[source][received[source]]
            out.append(Action(Op.RECV, sent.module, sent.stage, sent.microbatch, sent.part, source, sent.grad))
            received[source] += 1

    for action in actions:
        if action.op is Op.FORWARD or action.op is Op.BACKWARD or action.op is Op.BACKWARD_INPUT:
            k = action.microbatch
            node = (graph.position[action.module, action.stage], rank)
            if action.op is Op.FORWARD:
                for producer in step[k].inputs[node]:
                    if producer[1] != rank:
                        receive(producer[1], (producer[0], k, False))
            else:
                for consumer in step[k].gradients[node]:
                    if consumer[1] != rank:
                        receive(consumer[1], (node[0], k, True))
        out.append(action)
    return out
