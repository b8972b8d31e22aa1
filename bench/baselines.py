"""Other systems' steps as step tables and schedules, for comparison.

Each has the same two parts as a step of ours, so the checker proves it and the simulator runs it:

- `static`: samples in their given order, the same number in each microbatch; 1F1B. Megatron-LM's.
- `disttrain`: the same microbatches in the order of DistTrain's algorithm 3 (section 6.2), as printed; 1F1B.
- `dip`: each rank has a stage of the encoder and one of the language model. Encoder microbatches are cut into
  sub-microbatches of about equal work. All of them go forward before the language model, and backward after it
  (dissertation 4.2.3, 4.7.2 and figure 4.2c on DIP; its own paper is not among our sources).
- `eager`: any table, with as many forwards ahead as a stage may hold. Entrain's, beside `interlace.run.tables.assign`.
- `optimus`: the same number of stages of both on each rank. Whole encoder microbatches run while the language model's
  1F1B leaves a rank idle, and the language model waits only for its own inputs (dissertation 4.2.3 on Optimus;
  its own paper is not among our sources either).

DIP and Optimus follow the dissertation's description. Details that it leaves open are named in the functions.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interlace import balance
from interlace.schedule import Action, Chunk, Edge, Op, Schedule, StageGraph, StepTable, check, one_f_one_b

ENCODER, LLM = "encoder", "language_model"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Durations = Callable[[Op, str, int, int], float]
Work = tuple[Op, str, int, int]
"""A compute action: op, module, stage, chunk."""


@dataclass(frozen=True, eq=False)
class Step:
    """A step for the simulator. durations: seconds of its compute actions."""

    schedule: Schedule
    durations: Durations

    @property
    def llm_loads(self) -> Floats:
        """Seconds of a forward of each microbatch of the language model, all stages together."""
        stages = len(self.schedule.graph.layout.pipelines(LLM)[0].stages)
        chunks = [i for i, chunk in enumerate(self.schedule.table.chunks) if chunk.module == LLM]
        return np.array([sum(self.durations(Op.FORWARD, LLM, s, c) for s in range(stages)) for c in chunks])


@dataclass(frozen=True, eq=False)
class Problem:
    """Samples of one replica of an encoder and a language model. A backward takes `backward` times a forward.

    encoder, llm: float64 [n], seconds of a forward of each sample on one rank; 0 for one without media. ranks: in all.
    """

    encoder: Floats
    llm: Floats
    ranks: int
    backward: float = 2.0

    def split(self) -> tuple[int, int]:
        """Numbers of ranks of encoder and language model if each has its own: in proportion to their work."""
        share = self.encoder.sum() / (self.encoder.sum() + self.llm.sum())
        own = min(self.ranks - 1, max(1, round(self.ranks * float(share))))
        return own, self.ranks - own

    def graph(self, *, colocated: bool = False) -> StageGraph:
        """Encoder stages before those of the language model, or one stage of each on every rank."""
        own, rest = self.split()
        places: dict[str, Sequence[int | Sequence[int]]] = {ENCODER: range(own), LLM: range(own, own + rest)}
        if colocated:
            places = {ENCODER: range(self.ranks), LLM: range(self.ranks)}
        return StageGraph.build(places, [(ENCODER, LLM)])

    def durations(self, graph: StageGraph, table: StepTable) -> Durations:
        """Seconds of the actions of a table's chunks; stages share the work evenly."""
        costs, counts = {ENCODER: self.encoder, LLM: self.llm}, {}
        for name in graph.modules:
            counts[name] = len(graph.layout.pipelines(name)[0].stages)
        forward = [float(costs[c.module][c.samples].sum()) / counts[c.module] for c in table.chunks]
        return lambda op, module, stage, chunk: forward[chunk] * (1.0 if op is Op.FORWARD else self.backward)


def table_of(encoder_chunks: Sequence[Ints], llm_slot: Ints) -> StepTable:
    """The table of one replica: the encoder's chunks of samples, and the microbatch that reads each sample."""
    chunks = [Chunk(ENCODER, 0, i, samples.astype(np.int32)) for i, samples in enumerate(encoder_chunks)]
    home = {int(s): (i, row) for i, samples in enumerate(encoder_chunks) for row, s in enumerate(samples)}
    pieces = []
    slots = [members for k in range(int(llm_slot.max()) + 1) if len(members := np.flatnonzero(llm_slot == k))]
    for index, members in enumerate(slots):
        reads = [s for s in members.tolist() if s in home]
        pieces += [(*home[s], len(chunks), row, 1) for row, s in enumerate(reads)]
        chunks.append(Chunk(LLM, 0, index, members.astype(np.int32)))
    edge = Edge(ENCODER, LLM, "embeds", np.array(pieces, np.int32).reshape(-1, 5))
    return StepTable(tuple(chunks), (edge,))


def together(problem: Problem, slot: Ints) -> StepTable:
    """The table of an encoder that computes the samples of a microbatch together, if they have media."""
    members = [np.flatnonzero((slot == k) & (problem.encoder > 0)) for k in range(int(slot.max()) + 1)]
    return table_of([each for each in members if len(each)], slot)


def one_by_one(problem: Problem, microbatches: int) -> Ints:
    """The microbatch of each sample in the given order, the same number (or one more) in each."""
    return np.arange(len(problem.llm)) * microbatches // len(problem.llm)


def static(problem: Problem, microbatches: int) -> Step:
    """1F1B over microbatches in the given order."""
    return by_1f1b(problem, together(problem, one_by_one(problem, microbatches)))


def by_1f1b(problem: Problem, table: StepTable) -> Step:
    """1F1B over any table."""
    graph = problem.graph()
    durations = problem.durations(graph, table)
    return proven(one_f_one_b(graph, table, durations=durations, reduce_grad=False), durations)


def disttrain(problem: Problem, microbatches: int, *, evaluations: int = 0) -> Step:
    """1F1B over microbatches in DistTrain's order. evaluations: of our search that starts from it; 0: as printed.

    Its reordering among data-parallel groups (algorithm 2) applies to several replicas, and is not included.
    """
    slot = one_by_one(problem, microbatches)
    stages = problem.split()
    forward = np.concatenate(
        [
            np.repeat(np.bincount(slot, cost, microbatches)[:, None] / count, count, axis=1)
            for cost, count in zip((problem.encoder, problem.llm), stages, strict=True)
        ],
        axis=1,
    )
    order = balance.reorder_microbatches(forward, problem.backward * forward, evaluations=evaluations).order
    place = np.empty(microbatches, np.int64)
    place[order] = np.arange(microbatches)
    return by_1f1b(problem, together(problem, place[slot]))


def dip(problem: Problem, microbatches: int, *, parts: int = 2) -> Step:
    """Encoder and language model on the same ranks, phase by phase, encoder microbatches in `parts` sub-microbatches.

    Open in the dissertation: the number of parts (here parts of equal work, by `balance.assign`) and the order of the
    encoder's backwards (here that of its forwards, whose gradients are ready first).
    """
    slot = one_by_one(problem, microbatches)
    cut: list[Ints] = []
    for k in range(microbatches):
        members = np.flatnonzero((slot == k) & (problem.encoder > 0))
        if not len(members):
            continue
        count = min(parts, len(members))
        part = balance.assign(problem.encoder[members], count)
        cut += [members[part == p] for p in range(count) if (part == p).any()]
    table = table_of(cut, slot)
    graph = problem.graph(colocated=True)
    durations = problem.durations(graph, table)
    # The phase of an action decides: a rank runs a ready action of the earliest phase, in the order of chunks.
    phase = {(Op.FORWARD, ENCODER): 0, (Op.BACKWARD, ENCODER): 2}
    inner = llm_order(table, problem.ranks)
    place = {work: i for i, work in enumerate(inner)}
    order = play(graph, table, durations, lambda work: (phase.get(work[:2], 1), place.get(work, work[3])), strict=True)
    return proven(lists(graph, table, order), durations)


def optimus(problem: Problem, microbatches: int) -> Step:
    """Encoder and language model on the same ranks; encoder work fills the idle time of the language model's 1F1B.

    Open in the dissertation: how bubbles are selected. Here a rank without a ready action of the language model runs
    the encoder's backward that is ready, else its next forward. A started action is not interrupted.
    """
    table = together(problem, one_by_one(problem, microbatches))
    graph = problem.graph(colocated=True)
    durations = problem.durations(graph, table)
    place = {work: i for i, work in enumerate(llm_order(table, problem.ranks))}

    def urgency(work: Work) -> tuple[int, int]:
        if work[1] == LLM:
            return 0, place[work]
        return (1 if work[0] is Op.BACKWARD else 2), work[3]

    return proven(lists(graph, table, play(graph, table, durations, urgency)), durations)


def llm_order(table: StepTable, stages: int) -> list[Work]:
    """1F1B of the language model alone: one sequence; each rank runs its part."""
    chunks = [i for i, chunk in enumerate(table.chunks) if chunk.module == LLM]
    graph = StageGraph.build({LLM: range(stages)})
    alone = one_f_one_b(graph, StepTable.aligned((), [(LLM,)] * len(chunks)), reduce_grad=False)
    return [
        (action.op, LLM, action.stage, chunks[action.chunk])
        for actions in alone.actions
        for action in actions
        if action.op in (Op.FORWARD, Op.BACKWARD)
    ]


def play(
    graph: StageGraph,
    table: StepTable,
    durations: Durations,
    urgency: Callable[[Work], tuple[int, int]],
    *,
    strict: bool = False,
    limits: Mapping[tuple[str, int], int] | None = None,
) -> list[Work]:
    """The order in which ranks start their compute actions, the most urgent ready one first; transfers take no time.

    Only the language model's actions of a rank start strictly in the order of their urgency. strict: all actions do, so
    a rank waits for the next action instead of running a later one. limits: (module, stage) -> forwards that it may
    hold; then the language model's forwards are in order, and so are its backwards, each among themselves alone. Raises
    ValueError on a deadlock.
    """
    needs, work_of = demands(graph, table)
    readers: dict[Work, list[Work]] = {}
    for work, before in needs.items():
        for other in before:
            readers.setdefault(other, []).append(work)
    waits = {work: len(before) for work, before in needs.items()}
    queues = {rank: sorted(works, key=urgency) for rank, works in work_of.items()}
    idle, order = dict.fromkeys(queues, True), list[Work]()
    held: Counter[tuple[str, int]] = Counter()
    running: list[tuple[float, int, int, Work]] = []
    clock = 0.0
    while True:
        for rank, queue in queues.items():
            if not idle[rank]:
                continue
            blocked = set[object]()
            for i, work in enumerate(queue):
                # Actions of one kind are in order.
                kind = work[:3] if limits is not None else strict or work[1] == LLM
                full = limits is not None and work[0] is Op.FORWARD and held[work[1:3]] >= limits[work[1:3]]
                if waits[work] == 0 and kind not in blocked and not full:
                    idle[rank] = False
                    held[work[1:3]] += 1 if work[0] is Op.FORWARD else -1
                    heapq.heappush(running, (clock + durations(*work), len(order), rank, work))
                    order.append(work)
                    del queue[i]
                    break
                if kind:
                    blocked.add(kind)
                if strict:
                    break
        if not running:
            break
        clock = running[0][0]
        while running and running[0][0] <= clock:
            _, _, rank, work = heapq.heappop(running)
            idle[rank] = True
            for reader in readers.get(work, ()):
                waits[reader] -= 1
    if any(queues.values()):
        raise ValueError("the order waits for what comes later in it: nothing can run")
    return order


def eager(problem: Problem, table: StepTable, in_flight: int) -> Step:
    """1F1B with as many forwards ahead as a stage may hold (dissertation 4.5.3); backwards still come first."""
    graph = problem.graph()
    durations = problem.durations(graph, table)
    schedule = one_f_one_b(graph, table, reduce_grad=False, durations=durations)
    held: dict[tuple[str, int], list[int]] = {}
    limits: dict[tuple[str, int], int] = {}
    for actions in schedule.actions:  # no stage holds less than under 1F1B
        for action in actions:
            if action.op in (Op.FORWARD, Op.BACKWARD):
                own = held.setdefault((action.module, action.stage), [0, 0])
                own[0] += 1 if action.op is Op.FORWARD else -1
                own[1] = max(own)
                limits[action.module, action.stage] = max(own[1], in_flight)
    place = {(a.op, a.module, a.stage, a.chunk): i for actions in schedule.actions for i, a in enumerate(actions)}
    order = play(graph, table, durations, lambda w: (int(w[0] is Op.FORWARD), place[w]), limits=limits)
    return proven(lists(graph, table, order), durations)


def demands(graph: StageGraph, table: StepTable) -> tuple[dict[Work, list[Work]], Mapping[int, list[Work]]]:
    """Predecessors of every compute action; and the actions of each rank."""
    stages = {name: graph.layout.pipelines(name)[0].stages for name in graph.modules}
    feeds: dict[int, list[int]] = {}
    read: dict[int, list[int]] = {}
    for producer, consumer in table.links.tolist():
        feeds.setdefault(consumer, []).append(producer)
        read.setdefault(producer, []).append(consumer)
    needs: dict[Work, list[Work]] = {}
    work_of: dict[int, list[Work]] = {rank: [] for rank in range(graph.layout.world)}
    for c, chunk in enumerate(table.chunks):
        name, last = chunk.module, len(stages[chunk.module]) - 1
        for stage in stages[name]:
            s = stage.index
            ahead = [(Op.FORWARD, name, s - 1, c)] if s else []
            if s == 0:
                ahead = [(Op.FORWARD, p := table.chunks[i].module, len(stages[p]) - 1, i) for i in feeds.get(c, ())]
            back = [(Op.BACKWARD, name, s + 1, c)] if s < last else []
            if s == last:
                back = [(Op.BACKWARD, table.chunks[i].module, 0, i) for i in read.get(c, ())]
            needs[Op.FORWARD, name, s, c] = ahead
            needs[Op.BACKWARD, name, s, c] = [(Op.FORWARD, name, s, c), *back]
            work_of[stage.ranks[0]] += [(Op.FORWARD, name, s, c), (Op.BACKWARD, name, s, c)]
    return needs, work_of


def lists(graph: StageGraph, table: StepTable, order: Sequence[Work]) -> Schedule:
    """Action lists of ranks, one stage of a module each, for this compute order, with sends and receives."""
    needs, _ = demands(graph, table)
    readers: dict[Work, list[Work]] = {}
    for work, before in needs.items():
        for other in before:
            if other[:1] == work[:1]:
                readers.setdefault(other, []).append(work)
    rank_of = {(stage.module, stage.index): stage.ranks[0] for stage in graph.layout.stages()}
    lane = {rank: graph.layout.lane_number(one) for one in graph.layout.lanes() for rank in one.ranks}
    made: list[list[Action]] = [[] for _ in range(graph.layout.world)]
    wires: dict[tuple[int, int], list[Action]] = {}

    def message(op: Op, source: Work, reader: Work, peer: int) -> Action:
        """SEND or RECV of the result of `source` for `reader`; a gradient is named by its forward."""
        grad = source[0] is Op.BACKWARD
        forward, other = (reader, source) if grad else (source, reader)
        return Action(op, forward[1], forward[2], forward[3], other[3], lane[peer], grad)

    for work in order:
        here = rank_of[work[1:3]]
        for source in needs[work]:
            there = rank_of[source[1:3]]
            if there == here or source[0] is not work[0]:
                continue
            wanted = message(Op.RECV, source, work, there)
            wire = wires[there, here]
            while wanted in wire:  # earlier sends come first
                made[here].append(wire.pop(0))
        made[here].append(Action(work[0], work[1], work[2], work[3]))
        for reader in readers.get(work, ()):
            there = rank_of[reader[1:3]]
            if there != here:
                made[here].append(message(Op.SEND, work, reader, there))
                wires.setdefault((here, there), []).append(message(Op.RECV, work, reader, here))
    return Schedule.of_actions("baseline", graph, table, made, reduce_grad=False)


def proven(schedule: Schedule, durations: Durations) -> Step:
    """The step, its schedule checked."""
    check(schedule)
    return Step(schedule, durations)
