"""Random schedules for property tests, and oracles written out independently of the package."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from interlace.schedule import Action, Op, Schedule, Stage, StageGraph

HOLDING = {Op.BACKWARD, Op.BACKWARD_WEIGHT}


@dataclass(frozen=True)
class Case:
    """A graph, a presence, and which stages (positions) have something to train."""

    graph: StageGraph
    presence: tuple[frozenset[str], ...]
    trainable: tuple[bool, ...]


@st.composite
def cases(
    draw: st.DrawFn, max_modules: int = 4, max_stages: int = 3, max_ranks: int = 4, max_microbatches: int = 6
) -> Case:
    """Any acyclic graph of modules on any ranks: merged, folded, interleaved, replicated, frozen, absent."""
    num_ranks = draw(st.integers(1, max_ranks))
    counts = draw(st.lists(st.integers(1, max_stages), min_size=1, max_size=max_modules))
    names = [(f"m{m}", index) for m, count in enumerate(counts) for index in range(count)]
    edges = {(i, i + 1) for i in range(len(names) - 1) if names[i][0] == names[i + 1][0]}
    pairs = [(i, j) for i in range(len(names)) for j in range(i + 1, len(names)) if (i, j) not in edges]
    if pairs:
        edges |= set(draw(st.lists(st.sampled_from(pairs), max_size=4)))
    places = []
    for _ in names:
        copies = draw(st.integers(1, num_ranks)) if draw(st.integers(0, 4)) == 0 else 1
        places.append(tuple(draw(st.permutations(range(num_ranks)))[:copies]))
    trainable = tuple(draw(st.booleans()) for _ in names)
    declared = draw(st.booleans())  # whether stages that only pass gradients on are declared as such

    before = [False] * len(names)
    for _ in names:
        for i, j in edges:
            before[j] = before[j] or before[i] or trainable[i]
    stages = [
        Stage(module, index, ranks, own or earlier, earlier, declared and earlier and not own)
        for (module, index), ranks, own, earlier in zip(names, places, trainable, before)
    ]
    # Positions in `stages` carry no meaning: shuffle them.
    order = draw(st.permutations(range(len(stages))))
    new = {old: i for i, old in enumerate(order)}
    graph = StageGraph(
        tuple(stages[old] for old in order), tuple(sorted((new[i], new[j]) for i, j in edges)), num_ranks
    )
    modules = sorted({module for module, _ in names})
    some = st.frozensets(st.sampled_from(modules))
    presence = draw(st.lists(st.one_of(some, st.just(frozenset(modules))), min_size=1, max_size=max_microbatches))
    return Case(graph, tuple(presence), tuple(trainable[old] for old in order))


def expected_compute(graph: StageGraph, present: frozenset[str]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(stage, rank) that run FORWARD and BACKWARD in a microbatch, straight from the definitions."""
    here = [i for i, stage in enumerate(graph.stages) if stage.module in present]
    forward = {(i, rank) for i in here for rank in graph.stages[i].ranks}

    def wants(i: int) -> bool:
        stage = graph.stages[i]
        if not stage.backward:
            return False
        return not stage.pass_through or any(wants(p) for p, c in graph.edges if c == i and p in here)

    def runs(i: int, rank: int) -> bool:
        return wants(i) and (
            read(i, rank) or (rank == graph.stages[i].ranks[0] and not any(read(i, r) for r in graph.stages[i].ranks))
        )

    def read(i: int, rank: int) -> bool:
        for p, c in graph.edges:
            if p == i and c in here:
                for reader in graph.stages[c].ranks:
                    source = reader if reader in graph.stages[i].ranks else graph.stages[i].ranks[0]
                    if source == rank and runs(c, reader):
                        return True
        return False

    return forward, {(i, rank) for i, rank in forward if runs(i, rank)}


def fixpoint_times(
    schedule: Schedule, seconds: dict[tuple[Op, str, int, int], float], transfer: float, overhead: float = 0.0
) -> list[list[float]]:
    """Finish times by relaxing every dependency until nothing changes: no queues, no clever order."""
    lists = schedule.actions
    finish = [[0.0] * len(actions) for actions in lists]
    ranks_of = {(s.module, s.index): s.ranks for s in schedule.graph.stages}
    changed = True
    rounds = 0
    while changed:
        changed = False
        rounds += 1
        assert rounds <= sum(map(len, lists)) + 2, "the dependencies form a cycle"
        sent: dict[tuple[int, int], list[float]] = {}
        for rank, actions in enumerate(lists):
            for i, action in enumerate(actions):
                if action.op is Op.SEND:
                    queue = sent.setdefault((rank, action.peer), [])
                    queue.append(max(finish[rank][i], queue[-1] if queue else 0.0) + transfer)
        for rank, actions in enumerate(lists):
            seen: dict[int, int] = {}
            for i, action in enumerate(actions):
                start = finish[rank][i - 1] if i else 0.0
                if action.op is Op.RECV:
                    n = seen[action.peer] = seen.get(action.peer, -1) + 1
                    time = max(start, sent[action.peer, rank][n]) + overhead
                elif action.op is Op.SEND:
                    time = start + overhead
                elif action.op is Op.REDUCE_GRAD:
                    time = start
                    for other in ranks_of[action.module, action.stage]:
                        j = lists[other].index(action)
                        time = max(time, finish[other][j - 1] if j else 0.0)
                else:
                    time = start + seconds[action.op, action.module, action.stage, action.microbatch]
                if time != finish[rank][i]:
                    finish[rank][i] = time
                    changed = True
    return finish


def in_flight(actions: list[Action], module: str, stage: int) -> int:
    """The most microbatches that one copy of a stage holds, counted over its backward-bearing microbatches."""
    own = [a for a in actions if (a.module, a.stage) == (module, stage)]
    held = {a.microbatch for a in own if a.op in HOLDING}
    most = count = 0
    for a in own:
        count += (a.op is Op.FORWARD and a.microbatch in held) - (a.op in HOLDING)
        most = max(most, count)
    return most


def compute_text(actions: list[Action]) -> str:
    """The compute actions of a list without the module: 'F0 B0'."""
    return " ".join(f"{a.op.value}{a.microbatch}" for a in actions if a.op in (Op.FORWARD, Op.BACKWARD))
