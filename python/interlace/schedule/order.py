"""Orders the work of ranks that feed each other in a cycle, or with known costs, by playing it in time.

Stages of one rank compete when, say, rank 0 hosts stages 0 and 2 of a chain whose stages 1 and 3 are on rank 1.
There is no closed form for that, so the work is played on a clock: a rank that is idle takes a backward that is
ready, or else a forward that is ready and within its copy's cap. Among several, microbatches go in groups of as
many as there are ranks, like interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2); within a group
forwards of early stages and backwards of late stages come first.

It never gets stuck, whatever the graph, caps (at least 1) and costs. Every copy takes its forwards, and its
backwards, in the order of microbatches. Take the lowest microbatch with work left, and its first action whose
dependencies are met. A backward may always run. A forward may run as well: the copy holds no microbatch, as
lower ones are finished and higher ones wait for this one. And since the result is the order in which a real
execution happened, the lists replay without deadlock with any other costs too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from interlace.schedule.actions import Op
from interlace.schedule.graph import Node, StageGraph
from interlace.schedule.schedule import Compute
from interlace.schedule.work import Work

Cost = Callable[[Op, Node, int], float]


def play(
    graph: StageGraph,
    step: Sequence[Work],
    caps: Mapping[Node, int],
    cost: Cost,
    *,
    ops: tuple[Op, ...] = (Op.FORWARD, Op.BACKWARD),
) -> list[list[Compute]]:
    """Per rank, the order in which greedy execution under `caps` starts the actions.

    ops: which of FORWARD and BACKWARD to order; what is left out counts as finished.
    cost: seconds of an action; transfers take none.
    """
    player = _Player(graph, step, caps, cost, ops)
    player.run()
    return player.lists


def span(step: Sequence[Work], lists: Sequence[Sequence[Compute]], cost: Cost) -> float:
    """Seconds until the last action finishes if each rank runs its list in order, transfers taking none."""
    finish: dict[Compute, float] = {}
    at, clocks = [0] * len(lists), [0.0] * len(lists)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                op, node, k = actions[at[rank]]
                needs = step[k].inputs[node] if op is Op.FORWARD else step[k].gradients[node]
                times = [finish.get((op, other, k)) for other in needs]
                if any(time is None for time in times):
                    break
                ready = max((time for time in times if time is not None), default=0.0)
                clocks[rank] = max(clocks[rank], ready) + cost(op, node, k)
                finish[op, node, k] = clocks[rank]
                at[rank] += 1
                progress = True
    if any(place < len(actions) for place, actions in zip(at, lists)):
        raise ValueError("the lists never finish: an action waits for one that comes later")
    return max(clocks)


class _Player:
    def __init__(
        self, graph: StageGraph, step: Sequence[Work], caps: Mapping[Node, int], cost: Cost, ops: tuple[Op, ...]
    ) -> None:
        self.step, self.caps, self.cost, self.ops = step, caps, cost, ops
        self.lists: list[list[Compute]] = [[] for _ in range(graph.num_ranks)]
        self.done: set[Compute] = set()
        self.held = dict.fromkeys(graph.nodes, 0)
        self.queue: dict[tuple[Op, Node], list[int]] = {}
        self.next: dict[tuple[Op, Node], int] = {}
        for node in graph.nodes:
            self.queue[Op.FORWARD, node] = [k for k, work in enumerate(step) if node in work.inputs]
            self.queue[Op.BACKWARD, node] = [k for k, work in enumerate(step) if node in work.gradients]
        for key in self.queue:
            self.next[key] = 0 if key[0] in ops else len(self.queue[key])
        self.hosted = [[node for node in graph.nodes if node[1] == rank] for rank in range(graph.num_ranks)]

    def run(self) -> None:
        clock = 0.0
        idle = set(range(len(self.lists)))
        running: list[tuple[float, int, Compute]] = []
        while True:
            for rank in sorted(idle):
                chosen = self.choose(rank)
                if chosen is not None:
                    op, node, k = chosen
                    self.next[op, node] += 1
                    if op is Op.FORWARD:
                        self.held[node] += node in self.step[k].gradients
                    idle.discard(rank)
                    self.lists[rank].append(chosen)
                    heapq.heappush(running, (clock + self.cost(op, node, k), rank, chosen))
            if not running:
                return
            clock = running[0][0]
            while running and running[0][0] <= clock:
                _, rank, finished = heapq.heappop(running)
                self.done.add(finished)
                self.held[finished[1]] -= finished[0] is Op.BACKWARD
                idle.add(rank)

    def choose(self, rank: int) -> Compute | None:
        for op in (Op.BACKWARD, Op.FORWARD):
            best: tuple[tuple[int, int], Compute] | None = None
            for place, node in enumerate(self.hosted[rank]):
                queue, at = self.queue[op, node], self.next[op, node]
                if at == len(queue) or not self.ready(op, node, queue[at]):
                    continue
                priority = (queue[at] // len(self.lists), place if op is Op.FORWARD else -place)
                if best is None or priority < best[0]:
                    best = (priority, (op, node, queue[at]))
            if best is not None:
                return best[1]
        return None

    def ready(self, op: Op, node: Node, k: int) -> bool:
        work = self.step[k]
        if op is Op.FORWARD:
            within = self.held[node] < self.caps[node] or node not in work.gradients
            return within and all((Op.FORWARD, producer, k) in self.done for producer in work.inputs[node])
        if Op.FORWARD in self.ops and (Op.FORWARD, node, k) not in self.done:
            return False
        return all((Op.BACKWARD, consumer, k) in self.done for consumer in work.gradients[node])
