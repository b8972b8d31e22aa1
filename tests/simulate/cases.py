"""Random valid schedules, made without the generators of the package, and rules for their times."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.schedule import Action, Chunk, Edge, Op, Schedule, StageGraph, StepTable
from interlace.schedule.actions import COMPUTE
from tests.schedule.text import parse

LLM = "llm"
HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def lanes_graph(modules: dict[str, list[tuple[int, ...]]], world: int) -> StageGraph:
    """Modules given as the ranks of each stage; all feed the last one."""
    made = {}
    for name, ranks in modules.items():
        stages = tuple(Stage(name, i, i, i + 1, Lane(own)) for i, own in enumerate(ranks))
        made[name] = (ParallelSpec(tp=len(ranks[0]), pp=len(ranks)), (Pipeline(name, 0, stages),))
    *encoders, last = modules
    trainable = {name: (True,) * len(ranks) for name, ranks in modules.items()}
    return StageGraph(Layout(made, world), tuple((name, last) for name in encoders), trainable)


def by_hand(graph: StageGraph, lists: list[str], microbatches: int = 1) -> Schedule:
    """A schedule from lists in text form, actions separated by spaces; all modules run in each microbatch."""
    table = StepTable.aligned(graph.links, [graph.modules] * microbatches)
    actions = [[parse(cell) for cell in own.split()] for own in lists]
    return Schedule.of_actions("by hand", graph, table, actions)


def random_graph(rng: np.random.Generator) -> StageGraph:
    """Up to two encoders and a language model, each with its own degrees, on separate or shared ranks."""
    names = [*("audio", "vision")[: rng.integers(0, 3)], LLM]
    modules, end, world = {}, 0, 0
    for name in names:
        tp, dp, pp = (int(degree) for degree in rng.integers(1, 3, 3))
        folded = rng.random() < 0.2  # all stages of a replica on one lane
        begin = 0 if rng.random() < 0.3 else end  # shares the ranks of the modules before it

        def lane(replica: int, index: int) -> Lane:
            first = begin + tp * (replica if folded else replica * pp + index)  # noqa: B023
            return Lane(tuple(range(first, first + tp)))  # noqa: B023

        copies = ()
        if name != LLM and tp == pp == dp == 1 and rng.random() < 0.7:
            copies = tuple(Lane((rank,)) for rank in rng.permutation(world).tolist() if rank != begin)
        pipelines = tuple(
            Pipeline(name, d, tuple(Stage(name, i, i, i + 1, lane(d, i), copies) for i in range(pp))) for d in range(dp)
        )
        modules[name] = (ParallelSpec(tp=tp, pp=pp, dp=dp), pipelines)
        end = begin + tp * dp * (1 if folded else pp)
        world = end = max(world, end)
    trainable = {name: tuple((rng.random(spec.pp) < 0.8).tolist()) for name, (spec, _) in modules.items()}
    tied = [((LLM, 0), (LLM, 1))] if modules[LLM][0].pp == 2 and rng.random() < 0.5 else []
    links = tuple((name, LLM) for name in names[:-1])
    in_part = frozenset(name for name in modules if rng.random() < 0.3)
    return StageGraph(Layout(modules, world), links, trainable, tuple(tied), in_part)


def random_table(rng: np.random.Generator, graph: StageGraph) -> StepTable:
    """Replicas with unequal numbers of chunks; an encoder's chunk is read by up to three of the language model."""
    layout = graph.layout
    owners = [
        (p.module, p.replica)
        for p in layout.pipelines()
        for _ in range(rng.integers(1 if (p.module, p.replica) == (LLM, 0) else 0, 5))
    ]
    owners = [owners[i] for i in rng.permutation(len(owners))]
    count: dict[tuple[str, int], int] = defaultdict(int)
    chunks = []
    for i, owner in enumerate(owners):
        chunks.append(Chunk(*owner, count[owner], np.array([i], np.int32)))
        count[owner] += 1
    readers = [i for i, chunk in enumerate(chunks) if chunk.module == LLM]
    edges = []
    for producer, consumer in graph.links:
        pieces = [
            (i, 0, int(reader), 0, 1)
            for i, chunk in enumerate(chunks)
            if chunk.module == producer
            for reader in rng.permutation(readers)[: rng.integers(0, 4)]
        ]
        edges.append(Edge(producer, consumer, "embeds", np.array(pieces, np.int32).reshape(-1, 5)))
    return StepTable(tuple(chunks), tuple(edges))


def random_schedule(rng: np.random.Generator) -> Schedule:
    """All actions in a random order that respects dependencies; each rank's list is its part of that order."""
    graph = random_graph(rng)
    table = random_table(rng, graph)
    layout, chunks = graph.layout, table.chunks
    stages = [layout.pipelines(chunk.module)[chunk.replica].stages for chunk in chunks]

    def producer(c: int, reader: Lane) -> tuple[int, int, Lane]:
        lanes = stages[c][-1].lanes
        return c, len(stages[c]) - 1, reader if reader in lanes else lanes[0]

    jobs = [(c, stage.index, lane) for c in range(len(chunks)) for stage in stages[c] for lane in stage.lanes]
    reads: dict[tuple, list[tuple]] = defaultdict(list)  # job -> [(job that it reads, chunk that reads)]
    for c, index, lane in jobs:
        if index:
            reads[c, index, lane].append(((c, index - 1, stages[c][index - 1].lane), c))
    for a, b in table.links.tolist():
        first = (b, 0, stages[b][0].lane)
        reads[first].append((producer(a, first[2]), b))
    readers: dict[tuple, list[tuple]] = defaultdict(list)
    for job, sources in reads.items():
        for source, other in sources:
            readers[source].append((job, other))
    steps: dict[tuple, list[tuple]] = {(Op.FORWARD, job): [(Op.FORWARD, s) for s, _ in reads[job]] for job in jobs}
    if rng.random() < 0.8:
        for job in jobs:
            if readers[job] or job[2] == stages[job[0]][job[1]].lane:
                after = [(Op.BACKWARD, reader) for reader, _ in readers[job]]
                steps[Op.BACKWARD, job] = [(Op.FORWARD, job), *after]

    lists: list[list[Action]] = [[] for _ in range(layout.world)]
    wires: dict[tuple[Lane, Lane], list[tuple]] = defaultdict(list)  # sent and not yet received
    done: set[tuple] = set()

    def message(op: Op, wire: tuple[Lane, Lane], content: tuple) -> None:
        (c, index, _), other, grad = content
        own, peer = wire if op is Op.SEND else wire[::-1]
        for rank in own.ranks:
            lists[rank].append(Action(op, chunks[c].module, index, c, other, layout.lane_number(peer), grad))

    while len(done) < len(steps):
        ready = [step for step, needs in steps.items() if step not in done and all(need in done for need in needs)]
        op, job = ready[rng.integers(len(ready))]
        c, index, lane = job
        if op is Op.FORWARD:
            inputs = [((source[2], lane), (source, other, False)) for source, other in reads[job]]
            outputs = [((lane, reader[2]), (job, other, False)) for reader, other in readers[job]]
        else:
            inputs = [((reader[2], lane), (job, other, True)) for reader, other in readers[job]]
            outputs = [((lane, source[2]), (source, other, True)) for source, other in reads[job]]
        for wire, content in inputs:
            while wire[0] != wire[1] and content in wires[wire]:
                message(Op.RECV, wire, wires[wire].pop(0))
        parts = HALVES if op is Op.BACKWARD and rng.random() < 0.3 else (op,)
        for part in parts:
            for rank in lane.ranks:
                lists[rank].append(Action(part, chunks[c].module, index, c))
        for wire, content in outputs:
            if wire[0] != wire[1] and (not content[2] or (Op.BACKWARD, content[0]) in steps):
                wires[wire].append(content)
                message(Op.SEND, wire, content)
        done.add((op, job))
    add_reductions(rng, graph, lists)
    return Schedule.of_actions("random", graph, table, lists)


def add_reductions(rng: np.random.Generator, graph: StageGraph, lists: list[list[Action]]) -> None:
    """Adds some reductions anywhere in the lists, in one order on all ranks, tied ones last."""
    order = [r for r in rng.permutation(len(graph.reductions)).tolist() if rng.random() < 0.8]
    lowest = [0] * len(lists)
    for r in sorted(order, key=lambda r: graph.reductions[r].tied >= 0):
        reduction = graph.reductions[r]
        for rank in reduction.ranks:
            place = int(rng.integers(lowest[rank], len(lists[rank]) + 1))
            lists[rank].insert(place, Action(Op.REDUCE_GRAD, reduction.module, 0, other=r))
            lowest[rank] = place + 1


def assert_times_obey_the_model(schedule: Schedule, timeline, seconds, transfer: float, overhead: float, reduce: float):
    """Checks every time against the equations of the model; the lists have no cycle, so the solution is unique."""
    graph, chunks, lists = schedule.graph, schedule.table.chunks, schedule.actions
    layout = graph.layout
    at = {}  # (rank, action, of a reduction its number alone) -> place; actions are unique in a list
    for rank, actions in enumerate(lists):
        at |= {(rank, a.other if a.op is Op.REDUCE_GRAD else a): i for i, a in enumerate(actions)}

    def lanes_of(chunk: Chunk, index: int) -> tuple[Lane, ...]:
        return layout.pipelines(chunk.module)[chunk.replica].stages[index].lanes

    def reached(rank: int, i: int) -> float:
        if i == 0:
            return 0.0
        before = lists[rank][i - 1]
        return (timeline.start if before.op is Op.REDUCE_GRAD else timeline.finish)[rank][i - 1]

    arrived: dict[tuple[int, Action], float] = {}  # of the part of one rank
    free: dict[tuple, float] = defaultdict(float)
    for rank, actions in enumerate(lists):
        for i, a in enumerate(actions):
            if a.op is Op.SEND:
                assert timeline.start[rank][i] == reached(rank, i)
                assert timeline.finish[rank][i] == reached(rank, i) + overhead
                link = (rank, source_lanes(a, chunks, lanes_of, rank), a.peer)
                arrived[rank, a] = free[link] = max(timeline.finish[rank][i], free[link]) + transfer
    for rank, actions in enumerate(lists):
        for i, a in enumerate(actions):
            start, finish = timeline.start[rank][i], timeline.finish[rank][i]
            if a.op is Op.RECV:
                own = layout.lane_number(source_lanes(a, chunks, lanes_of, rank))
                sent = Action(Op.SEND, a.module, a.stage, a.chunk, a.other, own, a.grad)
                parts = [arrived[other, sent] for other in layout.lanes()[a.peer].ranks]
                assert start == reached(rank, i) and finish == max(start, *parts) + overhead
            elif a.op in COMPUTE:
                lane = next(lane for lane in lanes_of(chunks[a.chunk], a.stage) if rank in lane.ranks)
                assert start == max(reached(other, at[other, a]) for other in lane.ranks)
                assert finish == start + seconds[a.op, a.module, a.stage, a.chunk]
            elif a.op is Op.REDUCE_GRAD:
                assert start == reached(rank, i)
                ranks = graph.reductions[a.other].ranks
                begins = [timeline.start[other][at[other, a.other]] for other in ranks]
                for other in ranks:
                    for j, b in enumerate(lists[other]):
                        if b.op is not Op.REDUCE_GRAD or b.other == a.other:
                            continue
                        same = graph.reductions[b.other].ranks == ranks and j < at[other, a.other]
                        tied = [graph.reductions[r.other].tied >= 0 for r in (a, b)]
                        if same or tied == [True, False]:
                            begins.append(timeline.finish[other][j])
                assert finish == max(begins) + reduce


def source_lanes(a: Action, chunks, lanes_of, rank: int) -> Lane:
    """Lane on `rank` of this SEND or RECV."""
    chunk, index = chunks[a.chunk], a.stage
    if (a.op is Op.SEND) == a.grad:
        chunk, index = (chunk, index + 1) if a.other == a.chunk else (chunks[a.other], 0)
    return next(lane for lane in lanes_of(chunk, index) if rank in lane.ranks)
