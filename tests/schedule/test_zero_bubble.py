"""Interleaved, zero-bubble and automatic schedules: textbook bubbles, and invariants for every graph and limit."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from interlace.layout import Layout, ParallelSpec
from interlace.schedule import (
    GENERATORS,
    Op,
    Schedule,
    StageGraph,
    StepTable,
    automatic,
    check,
    interleaved,
    lower_bound,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)  # fmt: skip
from interlace.schedule.actions import COMPUTE, OP, OPS
from interlace.simulate import simulate, simulate_arrays
from tests.plan.place import model
from tests.schedule.graphs import Case, random_case, table_of
from tests.schedule.oracle import Demand, Events, Job, compute_text
from tests.schedule.text import text_of

SPLIT = {"zb_h1": zb_h1, "zb_h2": zb_h2, "zb_v": zb_v, "auto": automatic}
OURS = {"interleaved": interleaved, **SPLIT}
Work = tuple[Op, Job]
COUNT = 240
"""Random cases of each property test."""


def equal(scale: float = 1.0) -> dict[Op, float]:
    """F = I = W, and B both of them."""
    return {
        Op.FORWARD: scale, Op.BACKWARD: 2 * scale, Op.BACKWARD_INPUT: scale, Op.BACKWARD_WEIGHT: scale,
    }  # fmt: skip


def chain(ranks: int, virtual: int = 1, order: str = "loop") -> StageGraph:
    """One module with one layer per stage, as placed by a layout."""
    spec = ParallelSpec(pp=ranks, virtual=virtual, order=order)
    layout = Layout.from_specs(model(language_model=spec.stages), {"language_model": spec})
    return StageGraph(layout, (), {"language_model": (True,) * spec.stages})


def aligned(graph: StageGraph, chunks: int) -> StepTable:
    return StepTable.aligned(graph.links, [graph.modules] * chunks)


def times(generate, graph, chunks, scale=1.0, **options):
    """(timeline at F = I = W, peak bytes of any rank if a stage of a whole rank holds 1 per chunk)."""
    schedule = generate(graph, aligned(graph, chunks), **options)
    sizes = {(s.module, s.index): scale for s in graph.layout.stages()}
    return simulate(schedule, equal(scale)), max(check(schedule, activation_bytes=sizes).peak_memory)


def busy_share(timeline):
    """Per rank, the share of compute between its first compute action's start and its last one's finish."""
    shares = []
    for rank, busy in enumerate(timeline.busy_per_rank):
        own = [record for record in timeline.records() if record.rank == rank and record.action.op in COMPUTE]
        shares.append(busy / (own[-1].finish - own[0].start))
    return tuple(shares)


def test_the_bubbles_of_the_papers() -> None:
    """4 stages, 8 microbatches, F = I = W: 24 seconds of work for each rank."""
    plain, loop, v = chain(4), chain(4, 2), chain(4, 2, "v")
    known, most = times(one_f_one_b, plain, 8)
    assert known.makespan == 33.0 and known.bubble == pytest.approx(3 / 11, abs=1e-9)
    result, _ = times(interleaved, loop, 8, 0.5)
    assert result.makespan == 28.5 and result.bubble == pytest.approx(4.5 / 28.5, abs=1e-9)
    h1, held = times(zb_h1, plain, 8)
    assert h1.makespan == 27.0 and h1.bubble == pytest.approx(1 / 9, abs=1e-9) and held <= most
    h2, held = times(zb_h2, plain, 8)
    assert busy_share(h2) == pytest.approx((1.0,) * 4, abs=1e-9) and h2.makespan <= h1.makespan and held <= 7
    both, held = times(zb_v, v, 8, 0.5)
    assert both.bubble < h1.bubble and held <= most
    assert both.makespan == lower_bound(v, aligned(v, 8), equal(0.5)) == 25.5


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (2, 3), (3, 2), (4, 3), (6, 2), (8, 3)])
def test_textbook_times_of_other_sizes(ranks: int, rounds: int) -> None:
    chunks = ranks * rounds
    plain = chain(ranks)
    work = 3 * chunks
    assert times(one_f_one_b, plain, chunks)[0].makespan == work + 3 * (ranks - 1)
    for laps in (2, 3):
        result, _ = times(interleaved, chain(ranks, laps), chunks, 1 / laps)
        assert result.makespan == pytest.approx(work + 3 * (ranks - 1) / laps, abs=1e-9)
    h1, held = times(zb_h1, plain, chunks)
    assert h1.makespan == work + ranks - 1 and held == ranks
    if chunks >= 2 * ranks - 1:
        h2, held = times(zb_h2, plain, chunks)
        assert busy_share(h2) == pytest.approx((1.0,) * ranks, abs=1e-9) and held <= 2 * ranks - 1
    both, held = times(zb_v, chain(ranks, 2, "v"), chunks, 0.5)
    assert both.makespan < h1.makespan and held <= ranks


def test_many_stages_and_chunks_in_arrays() -> None:
    graph, chunks = StageGraph.build({"m": list(range(32))}), 128
    of_op = np.array([equal().get(op, 0.0) for op in OPS])
    for generate, held in ((zb_h1, 32), (zb_h2, 63)):
        schedule = generate(graph, aligned(graph, chunks))
        assert max(check(schedule).peak_in_flight) == held
        result = simulate_arrays(schedule, of_op[schedule.rows[:, OP]])
        assert result.makespan == 3 * chunks + 31 == lower_bound(graph, schedule.table, equal())


def test_interleaved_is_the_classical_order_written_out() -> None:
    """Megatron-LM's: 2 (P - 1 - i) + (v - 1) P forwards, then one forward and one backward in turn."""
    for ranks, laps, rounds in itertools.product((2, 3, 4), (2, 3), (1, 2)):
        graph, chunks = chain(ranks, laps), ranks * rounds
        schedule = interleaved(graph, aligned(graph, chunks))
        turns = [(g * ranks + k, lap) for g in range(rounds) for lap in range(laps) for k in range(ranks)]
        for rank in range(ranks):
            forwards = [f"F:language_model/{lap * ranks + rank}@{k}" for k, lap in turns]
            backwards = [f"B:language_model/{(laps - 1 - lap) * ranks + rank}@{k}" for k, lap in turns]
            warm_up = min(len(turns), 2 * (ranks - 1 - rank) + (laps - 1) * ranks)
            want = forwards[:warm_up]
            for ahead, back in zip(forwards[warm_up:], backwards):
                want += [ahead, back]
            want += backwards[len(turns) - warm_up :]
            assert [str(a) for a in schedule.actions[rank] if a.op in (Op.FORWARD, Op.BACKWARD)] == want


def test_zb_h1_is_the_textbook_written_out() -> None:
    graph = chain(3)
    lists = zb_h1(graph, aligned(graph, 5))
    assert [compute_text(lists, rank) for rank in range(3)] == [
        "F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4",
    ]


def limits_of(case: Case, rng: random.Random) -> dict[str, object]:
    """Sizes of all chunks, and a memory limit of at least the need of 1F1B."""
    jobs = {(s.module, s.index) for s in case.graph.layout.stages()}
    sizes = {(*job, c): float(rng.randint(1, 9)) for job in sorted(jobs) for c in range(len(case.table.chunks))}
    needed = check(one_f_one_b(case.graph, case.table), activation_bytes=sizes).peak_memory
    return {"activation_bytes": sizes, "memory_limit": [size + rng.choice([0, 0, 5, 50]) for size in needed]}


def seconds_of(case: Case, rng: random.Random) -> dict[object, float]:
    result: dict[object, float] = {}
    for stage in sorted({(s.module, s.index) for s in case.graph.layout.stages()}):
        forward, first, second = (rng.randint(0, 5) for _ in range(3))
        result |= {(Op.FORWARD, *stage): forward, (Op.BACKWARD_INPUT, *stage): first}
        result |= {(Op.BACKWARD_WEIGHT, *stage): second, (Op.BACKWARD, *stage): first + second}
    return result


def assert_split_where_something_trains(schedule: Schedule, always: bool) -> None:
    """Backwards of trained stages have two halves (or may be whole); all others are whole."""
    demand = Demand(schedule.graph, schedule.table, schedule.backward, schedule.reduce_grad)
    ops = {}
    for actions in schedule.actions:
        for a in actions:
            ops.setdefault((a.module, a.stage, a.chunk), set()).add(a.op)
    for node, chunk in demand.backwards:
        result = ops[demand.table.chunks[chunk].module, demand.graph.nodes[node].stage, chunk]
        halves = {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT} <= result
        assert halves != (Op.BACKWARD in result)
        assert halves <= demand.trains(node) and (halves or not always or not demand.trains(node))


def test_every_schedule_is_sound() -> None:
    for seed in range(COUNT):
        rng, case = random.Random(seed), random_case(seed)
        name = rng.choice(sorted(OURS))
        options = {"backward": rng.random() < 0.9, "reduce_grad": rng.random() < 0.9}
        if rng.random() < 0.5:
            options["durations"] = seconds_of(case, rng)
        schedule = OURS[name](case.graph, case.table, **options)
        report = check(schedule)
        assert schedule.name == name and report.actions == sum(map(len, schedule.actions))
        Events(schedule)  # raises an error if invalid
        assert_split_where_something_trains(schedule, name.startswith("zb_"))


def test_limits_are_kept_or_refused_with_rank_and_bytes() -> None:
    refused = kept = 0
    for seed in range(COUNT):
        rng, case = random.Random(seed), random_case(seed)
        limits = limits_of(case, rng)
        name = rng.choice([*sorted(OURS), "1f1b"])
        try:
            schedule = GENERATORS[name](case.graph, case.table, **limits)
        except ValueError as error:
            assert "would hold" in str(error) and "over its limit of" in str(error)
            refused += 1
            assert name != "auto"  # 1F1B itself respects them
            continue
        check(schedule, **limits)  # raises an error if exceeded
        kept += 1
    assert kept > 10 * refused


def test_too_little_memory_is_refused() -> None:
    graph = chain(3)
    with pytest.raises(ValueError, match="rank 0 would hold 5 bytes of activations, over its limit of 4: allow more"):
        zb_h1(graph, aligned(graph, 4), activation_bytes={("language_model", 0): 5.0}, memory_limit=4.0)
    table = table_of({("a", 0): 2, ("b", 0): 1}, [("a", 0, 0, "b", 0, 0), ("a", 0, 1, "b", 0, 0)])
    both = StageGraph.build({"a": [0], "b": [1]}, [("a", "b")])
    with pytest.raises(ValueError, match="would hold more than in_flight = 1 forwards"):
        one_f_one_b(both, table, in_flight=1)
    with pytest.raises(ValueError, match="in_flight is 0: it must be at least 1"):
        one_f_one_b(both, table, in_flight=0)
    with pytest.raises(ValueError, match=r"memory_limit has 1 entries, expected one or 2 \(ranks\)"):
        one_f_one_b(both, table, memory_limit=[3.0])


def test_forwards_run_ahead_as_far_as_the_limits_allow() -> None:
    graph = chain(4)
    for in_flight in range(1, 9):
        schedule = one_f_one_b(graph, aligned(graph, 8), in_flight=in_flight)
        peaks = check(schedule).peak_in_flight
        assert peaks[0] == in_flight and max(peaks) <= in_flight
        limited = one_f_one_b(graph, aligned(graph, 8), memory_limit=float(in_flight))
        assert text_of(limited) == text_of(schedule)  # without sizes a forward counts 1


def test_eager_forwards_hide_an_encoder_chunk_that_takes_long() -> None:
    graph = StageGraph.build({"vision": [0], "language_model": [1]}, [("vision", "language_model")])
    table = aligned(graph, 8)
    seconds: dict[object, float] = {(op, "language_model"): 3.0 for op in equal()} | {
        (op, "vision"): 1.0 for op in equal()
    }
    (long,) = (place for place, c in enumerate(table.chunks) if (c.module, c.index) == ("vision", 5))
    seconds[Op.FORWARD, "vision", 0, long] = 20.0
    plain, eager = (one_f_one_b(graph, table, durations=seconds, **more) for more in ({}, {"in_flight": 6}))
    assert check(plain).peak_in_flight == (2, 1) and 2 < check(eager).peak_in_flight[0] <= 6
    assert simulate(eager, seconds).makespan <= simulate(plain, seconds).makespan - 10.0


def spans(case: Case, seconds: dict[object, float], **limits: object) -> dict[str, float]:
    result = {}
    for name, generate in GENERATORS.items():
        try:
            schedule = generate(case.graph, case.table, durations=seconds, **limits)
        except ValueError:
            continue
        result[name] = simulate(schedule, seconds).makespan
    return result


def test_auto_is_between_the_lower_bound_and_named_schedules() -> None:
    better = tight = 0
    for seed in range(COUNT // 3):
        rng, case = random.Random(seed), random_case(seed)
        seconds, limits = seconds_of(case, rng), limits_of(case, rng)
        result = spans(case, seconds, **limits)
        chosen = result.pop("auto")
        assert chosen <= min(result.values()) + 1e-9
        bound = lower_bound(case.graph, case.table, seconds)
        assert bound <= chosen + 1e-9
        better += chosen < min(result.values())
        tight += chosen == bound
    assert better > 0 and tight > COUNT // 10


def test_no_order_is_below_the_bound() -> None:
    """Results of generators are not below the minimal span of all orders, by brute force."""
    graph = StageGraph.build({"a": [0], "b": [1, 0]}, [("a", "b")], trainable={"b": [True, False]})
    table = aligned(graph, 2)
    rng = random.Random(1)
    for _ in range(20):
        case = Case(graph, table)
        seconds = seconds_of(case, rng)
        result = spans(case, seconds, memory_limit=100.0)
        assert lower_bound(graph, table, seconds) <= best_of_all(graph, table, seconds) <= min(result.values())


def best_of_all(graph: StageGraph, table: StepTable, seconds: dict[object, float]) -> float:
    """The least span of any order of all jobs with whole backwards, and of any with split ones."""
    demand = Demand(graph, table)

    def back(job: Job, split: bool) -> Work:
        return (Op.BACKWARD_INPUT if split and demand.trains(job[0]) else Op.BACKWARD, job)

    best = float("inf")
    for split in (False, True):
        needs: dict[Work, set[Work]] = {}
        for job in demand.forwards:
            needs[Op.FORWARD, job] = {(Op.FORWARD, source) for source in demand.feeds[job]}
            if job in demand.backwards:
                own = back(job, split)
                needs[own] = {(Op.FORWARD, job), *(back(reader, split) for reader in demand.readers[job])}
                if own[0] is Op.BACKWARD_INPUT:
                    needs[Op.BACKWARD_WEIGHT, job] = {own}
        ranks = {(op, job): demand.ranks(demand.lane(job[0]))[0] for op, job in needs}
        costs = {(op, (n, c)): float(seconds[op, table.chunks[c].module, graph.nodes[n].stage]) for op, (n, c) in needs}
        best = min(best, Orders(needs, costs, ranks).least({}, (0.0,) * graph.layout.world, best))
    return best


@dataclass
class Orders:
    """All orders in which every rank starts ready jobs one after the other, each as early as possible."""

    needs: dict[Work, set[Work]]
    costs: dict[Work, float]
    ranks: dict[Work, int]
    seen: dict[frozenset[Work], list[tuple[float, ...]]] = field(default_factory=dict)

    def least(self, finish: dict[Work, float], clock: tuple[float, ...], best: float) -> float:
        """The least span from here on, if it is below `best`."""
        if len(finish) == len(self.needs):
            return min(best, max(clock))
        left = [work for work in self.needs if work not in finish]
        waited_for = sorted(set().union(*(self.needs[work] for work in left)) & finish.keys())
        state = (*clock, *(finish[work] for work in waited_for))
        earlier = self.seen.setdefault(frozenset(finish), [])
        if any(all(a <= b for a, b in zip(old, state, strict=True)) for old in earlier):
            return best
        earlier.append(state)
        for work in left:
            if self.needs[work] <= finish.keys():
                rank = self.ranks[work]
                end = max([clock[rank], *(finish[need] for need in self.needs[work])]) + self.costs[work]
                if end < best:
                    now = tuple(end if r == rank else t for r, t in enumerate(clock))
                    best = self.least({**finish, work: end}, now, best)
        return best
