"""Predicted steps against hand-computed figures and an independent replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.costs.host_overhead import NO_HOST_OVERHEAD, HostOverhead
from interlace.costs.links import NO_LINK, Link, Links
from interlace.costs.step import Size
from interlace.estimate.predict import (
    Traffic,
    duration_array,
    layered_backward,
    layered_forward,
    predict,
    predict_arrays,
)
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.plan import LayerTimes, LinkModel, ModuleCosts
from interlace.plan.memory import WeightSize
from interlace.schedule import Action, Chunk, Edge, Op, StageGraph, StepTable, check, one_f_one_b
from interlace.schedule.actions import CODES
from tests.simulate.reference import simulate_in_python

LLM = "language_model"
UPDATE = LinkModel(2.0, 0.5)
LINKS = Links(host=Link(LinkModel(0.5, 0.01), LinkModel(0.25, 0.002)))


@dataclass
class PerRow:
    """Costs of each layer: `forward` seconds per row; twice that for its input gradient; three times for its weights;
    four times for these alone. Each stage adds 0.125 s in a forward and 0.0625 s in a backward.
    """

    layers: Mapping[str, int]
    forward: float = 1.0
    trained: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    optimizer: LinkModel = UPDATE
    host_overhead: HostOverhead = NO_HOST_OVERHEAD

    def of(self, module: str, size: Size, tp: int = 1, cp: int = 1, link: Link = NO_LINK) -> ModuleCosts:
        count = self.layers[module]
        one = np.multiply.outer(np.full(count, self.forward), size.rows / (tp * cp))  # of many chunks: [layers, n]
        flags = np.array(self.trained.get(module, (True,) * count))
        return ModuleCosts(np.arange(count), LayerTimes(one, 2 * one, 3 * one, 4 * one), flags)

    def beside(self, module: str, size: Size, tp: int = 1, cp: int = 1, link: Link = NO_LINK) -> tuple[float, float]:
        return 0.125, 0.0625


def graph_of(
    stages: Mapping[str, list[list[tuple[int, ...]]]], specs: Mapping[str, ParallelSpec], trainable: Any = None
) -> StageGraph:
    """module -> per replica the ranks of each stage, one layer each."""
    modules = {}
    for name, replicas in stages.items():
        pipelines = tuple(
            Pipeline(name, r, tuple(Stage(name, i, i, i + 1, Lane(ranks)) for i, ranks in enumerate(lanes)))
            for r, lanes in enumerate(replicas)
        )
        modules[name] = (specs[name], pipelines)
    world = 1 + max(rank for replicas in stages.values() for lanes in replicas for ranks in lanes for rank in ranks)
    links = (("vision", LLM),) if "vision" in modules else ()
    flags = {name: (True,) * len(replicas[0]) for name, replicas in stages.items()} | (trainable or {})
    return StageGraph(Layout(modules, world), links, flags)


def chunks(*of: tuple[str, int, int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(name, replica, index, np.array([i], np.int32)) for i, (name, replica, index) in enumerate(of))


def weight(name: str, module: str, layers: tuple[int, ...], rows: int, **more: Any) -> WeightSize:
    return WeightSize(name, module, layers, (rows,), 1, 4, True, **more)


def test_a_step_by_hand() -> None:
    """An encoder of one layer on rank 0 feeds a language model of two layers on ranks 1 and 2; one chunk each.

    The encoder's first layer computes no gradient of its input: 4 s per row. Messages: 5 rows of 8 bytes of features,
    0.5 + 0.4 s; 6 rows of 10 bytes between the stages, 0.5 + 0.6 s. All of it is sequential.
    """
    specs = {"vision": ParallelSpec(), LLM: ParallelSpec(pp=2)}
    graph = graph_of({"vision": [[(0,)]], LLM: [[(1,), (2,)]]}, specs)
    pieces = np.array([[0, 0, 1, 0, 5]], np.int32)
    table = StepTable(chunks(("vision", 0, 0), (LLM, 0, 0)), (Edge("vision", LLM, "embeds", pieces),))
    schedule = one_f_one_b(graph, table)
    check(schedule)
    weights = [weight("a", "vision", (0,), 3), weight("b", LLM, (0,), 5), weight("c", LLM, (1,), 7)]
    traffic = Traffic({"vision": [0, 9], LLM: [99, 10, 99]}, 8.0, weights)
    costs = PerRow({"vision": 1, LLM: 2})
    sizes = [Size(3, 0), Size(6, 0)]
    result = predict(schedule, costs, sizes, LINKS, traffic)
    ways = {
        Action(Op.FORWARD, "vision", 0, 0): (0.0, 3.125),
        Action(Op.FORWARD, LLM, 0, 1): (4.025, 10.15),
        Action(Op.FORWARD, LLM, 1, 1): (11.25, 17.375),
        Action(Op.BACKWARD, LLM, 1, 1): (17.375, 47.4375),
        Action(Op.BACKWARD, LLM, 0, 1): (48.5375, 78.6),
        Action(Op.BACKWARD, "vision", 0, 0): (79.5, 91.5625),
    }
    seen = {record.action: (record.start, record.finish) for record in result.records()}
    for action, (start, finish) in ways.items():
        assert seen[action] == pytest.approx((start, finish))
    # The optimizer waits for all: 2 s, and half a second per byte of 12, 20 and 28.
    ends = [(r.rank, r.start, r.finish) for r in result.records() if r.action.op is Op.OPTIMIZER_STEP]
    assert ends == [
        (rank, *map(pytest.approx, (91.5625, 91.5625 + 2 + size / 2))) for rank, size in enumerate((12, 20, 28))
    ]
    assert result.makespan == pytest.approx(91.5625 + 16)
    lists = predict(schedule, costs, sizes, LINKS, traffic, optimizer=False)
    assert lists.makespan == pytest.approx(91.5625) == predict_arrays(schedule, costs, sizes, LINKS, traffic).makespan
    assert sum(lists.busy_per_rank) == pytest.approx(3.125 + 6.125 * 2 + 30.0625 * 2 + 12.0625)
    whole = predict_arrays(schedule, costs, sizes, LINKS, traffic, optimizer=True)
    assert whole.makespan == pytest.approx(result.makespan) and whole.bubble == pytest.approx(result.bubble)
    assert whole.bubble > predict_arrays(schedule, costs, sizes, LINKS, traffic).bubble
    # Made of equal samples, with a row for two.
    doubled = predict(schedule, costs, sizes, LINKS, replace(traffic, rows_of={"vision": 2.0}), optimizer=False)
    assert doubled.makespan == pytest.approx(91.5625 + 2 * 0.4)


def test_halves_of_a_backward_and_recomputed_layers() -> None:
    specs = {LLM: ParallelSpec()}
    graph = graph_of({LLM: [[(0,)]]}, specs)
    graph = replace(graph, trainable={LLM: (True,)})
    table = StepTable(chunks((LLM, 0, 0)))
    result = duration_array(graph, table, PerRow({LLM: 1}), [Size(2, 0)], LINKS)
    # The first trained layer: 4 s per row for its weights alone, of which 3 can wait.
    assert result[CODES[Op.BACKWARD], 0, 0] == pytest.approx(8.0625)
    assert result[CODES[Op.BACKWARD_INPUT], 0, 0] == pytest.approx(2.0625)
    assert result[CODES[Op.BACKWARD_WEIGHT], 0, 0] == pytest.approx(6.0)
    again = duration_array(graph, table, PerRow({LLM: 1}), [Size(2, 0)], LINKS, recompute=True)
    assert again[CODES[Op.BACKWARD], 0, 0] == pytest.approx(10.0625)
    assert again[CODES[Op.BACKWARD_WEIGHT], 0, 0] == pytest.approx(6.0)
    frozen = duration_array(
        replace(graph, trainable={LLM: (False,)}), table, PerRow({LLM: 1}, trained={LLM: (False,)}), [Size(2, 0)], LINKS
    )
    assert frozen[CODES[Op.BACKWARD], 0, 0] == 0.0
    with pytest.raises(ValueError, match="2 sizes for 1 chunks"):
        duration_array(graph, table, PerRow({LLM: 1}), [Size(2, 0)] * 2, LINKS)


@pytest.mark.parametrize(
    ("shard", "summed"),
    [
        ("none", 4 * 0.25 + 2 * (40 + 100) / 2 * 0.002),  # 2 layers: all-reduces of 40 and 100 bytes over 2 ranks
        ("optimizer", 2 * 0.25 + (40 + 100) / 2 * 0.002),  # reduce-scatters
    ],
)
def test_sums_of_replicas_by_hand(shard: str, summed: float) -> None:
    """Two replicas of two layers on one rank each: sums over the same ranks follow each other."""
    pipelines = tuple(
        Pipeline(LLM, r, (Stage(LLM, 0, 0, 1, Lane((r,))), Stage(LLM, 1, 1, 2, Lane((r,))))) for r in (0, 1)
    )
    graph = StageGraph(Layout({LLM: (ParallelSpec(pp=2, dp=2, shard=shard), pipelines)}, 2), (), {LLM: (True, True)})
    table = StepTable(chunks((LLM, 0, 0), (LLM, 1, 0)))
    weights = [weight("a", LLM, (0,), 10), weight("b", LLM, (1,), 25)]
    schedule = one_f_one_b(graph, table)
    check(schedule)
    traffic, sizes = Traffic({LLM: [0, 10, 0]}, 0.0, weights), [Size(1, 0), Size(2, 0)]
    result = predict_arrays(schedule, PerRow({LLM: 2}), sizes, LINKS, traffic)
    # The slower replica computes 2 + 2 forward, then 10 and 8 backward, plus the overhead of the stage. The sum of its
    # layer 1 ends long before that of layer 0 begins.
    computed = 2 * 2.125 + 10.0625 + 8.0625
    first = {"none": 2 * (0.25 + 20 * 0.002), "optimizer": 0.25 + 20 * 0.002}[shard]
    gathered = 0.0
    if shard == "optimizer":  # trained rows of the last step: before the first forward, both
        gathered = 2 * 0.25 + (20 + 50) * 0.002
    assert result.makespan == pytest.approx(gathered + computed + first)
    timeline = predict(schedule, PerRow({LLM: 2}), sizes, LINKS, traffic)
    lengths = {r.action.other: 0.0 for r in timeline.records() if r.action.op is Op.REDUCE_GRAD}
    assert len(lengths) == 2
    alone = sum(predicted_sums(schedule, traffic))
    assert alone == pytest.approx(summed)
    # The optimizer updates all rows, or those owned by the rank.
    last = max(r.finish - r.start for r in timeline.records() if r.action.op is Op.OPTIMIZER_STEP)
    assert last == pytest.approx(2 + 0.5 * {"none": 140, "optimizer": 5 * 4 + 13 * 4}[shard])


def predicted_sums(schedule: Any, traffic: Traffic) -> list[float]:
    from interlace.estimate.predict import _Step

    return _Step(schedule, PerRow({LLM: 2}), [Size(1, 0), Size(2, 0)], LINKS, traffic, False).sums


@st.composite
def steps(draw: st.DrawFn) -> Any:
    """A chain of 1 to 3 stages, with or without an encoder before it, 1 or 2 replicas, a few chunks of any size."""
    pp, dp, fed = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.booleans())
    count = draw(st.integers(1, 3))
    rank = 0
    stages: dict[str, list[list[tuple[int, ...]]]] = {}
    specs = {}
    for name, depth in ([("vision", 1)] if fed else []) + [(LLM, pp)]:
        stages[name] = []
        for _ in range(dp):
            stages[name].append([(rank + i,) for i in range(depth)])
            rank += depth
        specs[name] = ParallelSpec(pp=depth, dp=dp)
    graph = graph_of(stages, specs)
    table = StepTable.aligned(graph.links, [frozenset(stages)] * count, replicas=dp)
    sizes = [Size(draw(st.integers(1, 9)), 0) for _ in table.chunks]
    rows = {name: [draw(st.integers(0, 50)) for _ in range(len(replicas[0]) + 1)] for name, replicas in stages.items()}
    weights = [
        weight(f"{name}{i}", name, (i,), draw(st.integers(0, 99)))
        for name, replicas in stages.items()
        for i in range(len(replicas[0]))
    ]
    return graph, table, sizes, Traffic(rows, float(draw(st.integers(0, 50))), weights)


@settings(max_examples=40, deadline=None)
@given(steps())
def test_against_a_replay_in_python(step: Any) -> None:
    """The cost of each action is computed independently here, and simulated with the simulator's oracle."""
    graph, table, sizes, traffic = step
    schedule = one_f_one_b(graph, table)
    costs = PerRow({name: len(graph.layout.pipelines(name)[0].stages) for name in graph.modules})
    bytes_of = {each.name: each.rows[0] * 4 for each in traffic.weights}

    def seconds(op: Op, module: str, stage: int, chunk: int) -> float:
        rows = sizes[chunk].rows
        first = stage == 0 and (module == "vision" or "vision" not in graph.modules)
        return rows + 0.125 if op is Op.FORWARD else (4 if first else 5) * rows + 0.0625

    def travel(action: Action, source: int, lane: int) -> float:
        rows = 1 if action.other != action.chunk else sizes[action.chunk].rows
        each = (
            traffic.feature_bytes
            if action.other != action.chunk
            else traffic.row_bytes[action.module][action.stage + 1]
        )
        return 0.5 + 0.01 * rows * each if rows * each else 0.0

    def total(action: Action) -> float:
        size = bytes_of[f"{action.module}{graph.reductions[action.other].start}"]
        return 2 * (0.25 + 0.002 * size / 2) if size else 0.0

    wanted = simulate_in_python(schedule, seconds, transfer=travel, reduce_grad=total, overhead=0.03125)
    result = predict(schedule, costs, sizes, replace(LINKS, overhead=0.03125), traffic, optimizer=False)
    for mine, theirs in zip(result.records(), wanted.records(), strict=True):
        assert mine.action == theirs.action
        assert (mine.start, mine.finish) == pytest.approx((theirs.start, theirs.finish))


# ---------------------------------------------------------------------- layer by layer


def test_layer_by_layer_by_hand() -> None:
    # Weights outside the layers 1 s, layers 2 s each. The first is there at 3, the second at 5; the first computes
    # until 7.
    assert layered_forward([4.0, 4.0], [1, 2, 2]) == 11.0
    # The first computes for 1 s: the second, begun at 3, comes at 10.
    assert layered_forward([1.0, 1.0], [1, 2, 7]) == 11.0
    # Weights outside the layers, and layer 2, at 3. Layer 1 comes during the backward of 2 (until 7), whose sum follows
    # (to 8). The backward of 1 takes until 11, its sum to 12, that of the weights outside the layers to 13.
    assert layered_backward([4.0, 4.0], [1, 2, 2], [1, 1, 1]) == 13.0
    # Nothing before layer 2 is trained: layer 1 is neither gathered nor summed.
    assert layered_backward([4.0, 4.0], [1, 2, 2], [1, 1, 1], lowest=2) == 9.0
    assert layered_backward([4.0, 4.0], [1, 2, 2], [1, 1, 1], lowest=3) == 2.0


class Recorded:
    """The order in which `interlace.run.execute.layers.LayerByLayer` begins, awaits and computes, on clocks, with one
    link.
    """

    def __init__(self) -> None:
        self.now = self.link = 0.0
        self.ends: dict[Any, float] = {}

    def begin(self, key: Any, seconds: float) -> None:
        self.ends[key] = self.link = max(self.now, self.link) + seconds

    def wait(self, key: Any) -> None:
        self.now = max(self.now, self.ends.pop(key))


tenths = st.integers(0, 40).map(lambda n: n / 8)


@settings(deadline=None)
@given(st.integers(1, 5), st.data())
def test_layer_by_layer_is_what_the_executor_does(count: int, data: st.DataObject) -> None:
    draw = lambda n: [data.draw(tenths) for _ in range(n)]  # noqa: E731
    compute, gathers, scatters = draw(count), draw(count + 1), draw(count + 1)
    lowest = data.draw(st.integers(1, count + 1))
    play = Recorded()
    play.begin(("g", 0), gathers[0])
    play.begin(("g", 1), gathers[1])
    play.wait(("g", 0))
    for layer in range(1, count + 1):
        if layer < count:
            play.begin(("g", layer + 1), gathers[layer + 1])
        play.wait(("g", layer))
        play.now += compute[layer - 1]
    assert layered_forward(compute, gathers) == play.now

    play = Recorded()  # as LayerByLayer.backward, _next, _sum and _add
    at, summing = count + 1, list[Any]()

    def add() -> None:
        while summing:
            play.wait(summing.pop())

    def summed(unit: int) -> None:
        add()
        play.begin(("s", unit), scatters[unit])
        summing.append(("s", unit))

    play.begin(("g", 0), gathers[0])
    if at > lowest:
        play.begin(("g", at - 1), gathers[at - 1])
    play.wait(("g", 0))
    while at > lowest:
        done, at = at, at - 1
        if at > lowest:
            play.begin(("g", at - 1), gathers[at - 1])
        if done < count + 1:
            summed(done)
        play.wait(("g", at))
        play.now += compute[at - 1]
    if at < count + 1:
        summed(at)
    summed(0)
    add()
    assert layered_backward(compute, gathers, scatters, lowest) == play.now


def test_layerwise_gathers_cost_their_waiting_time() -> None:
    """Two replicas with shard = "full" and one chunk each, of different sizes: both take as long as the slower one."""
    stages = tuple(Pipeline(LLM, r, (Stage(LLM, 0, 0, 2, Lane((r,))),)) for r in (0, 1))
    graph = StageGraph(Layout({LLM: (ParallelSpec(dp=2, shard="full"), stages)}, 2), (), {LLM: (True, True)})
    table = StepTable(chunks((LLM, 0, 0), (LLM, 1, 0)))
    schedule = one_f_one_b(graph, table)
    check(schedule)
    assert any(action.op is Op.UNSHARD_LAYERS for actions in schedule.actions for action in actions)
    weights = [
        weight("e", LLM, (0,), 8, beside=True), weight("a", LLM, (0,), 250), weight("b", LLM, (1,), 500)
    ]  # fmt: skip
    traffic, sizes = Traffic({LLM: [0, 0, 0]}, 0.0, weights), [Size(0.5, 0), Size(1, 0)]
    result = predict(schedule, PerRow({LLM: 2}), sizes, LINKS, traffic, optimizer=False)
    ways = [0.25 + size / 2 * 0.002 for size in (32, 1000, 2000)]
    forward, backward = layered_forward([1, 1], ways) + 0.125, layered_backward([4, 5], ways, ways) + 0.0625
    for rank in (0, 1):
        spans = {
            a.op: (s, f) for a, s, f in zip(result.actions[rank], result.start[rank], result.finish[rank], strict=True)
        }
        assert spans[Op.FORWARD] == pytest.approx((0.0, forward))
        assert spans[Op.BACKWARD] == pytest.approx((forward, forward + backward))


def test_layerwise_gathers_wait_for_the_last_replica() -> None:
    """Two replicas of one size; the encoder's chunk for the second comes after the one for the first."""
    vision = Pipeline("vision", 0, (Stage("vision", 0, 0, 1, Lane((0,))),))
    stages = tuple(Pipeline(LLM, r, (Stage(LLM, 0, 0, 1, Lane((1 + r,))),)) for r in (0, 1))
    links, trainable = (("vision", LLM),), {"vision": (False,), LLM: (True,)}
    pieces = np.array([[0, 0, 2, 0, 3], [1, 0, 3, 0, 3]], np.int32)
    table = StepTable(
        chunks(("vision", 0, 0), ("vision", 0, 1), (LLM, 0, 0), (LLM, 1, 0)), (Edge("vision", LLM, "embeds", pieces),)
    )
    traffic = Traffic({"vision": [0, 0], LLM: [0, 0]}, 8.0, [weight("a", LLM, (0,), 250)])
    costs, sizes = PerRow({"vision": 1, LLM: 1}), [Size(3, 0), Size(5, 0), Size(1, 0), Size(1, 0)]

    def begin(shard: Any) -> list[float]:
        """Time at which each replica begins its forward."""
        layout = Layout({"vision": (ParallelSpec(), (vision,)), LLM: (ParallelSpec(dp=2, shard=shard), stages)}, 3)
        schedule = one_f_one_b(StageGraph(layout, links, trainable), table)
        check(schedule)
        result = predict(schedule, costs, sizes, LINKS, traffic, optimizer=False)
        return [
            start
            for rank in (1, 2)
            for action, start in zip(result.actions[rank], result.start[rank], strict=True)
            if action.op is Op.FORWARD
        ]

    first, second = begin("none")
    assert second >= first + 5
    assert begin("full") == pytest.approx([second, second])


def test_what_a_rank_does_beside_its_lists_is_in_the_step() -> None:
    """Reading slows the first actions of the reading rank and all later ones; the trainer's work comes last."""
    specs = {"vision": ParallelSpec(), LLM: ParallelSpec()}
    graph = graph_of({"vision": [[(0,)]], LLM: [[(1,)]]}, specs)
    pieces = np.array([[0, 0, 1, 0, 5]], np.int32)
    table = StepTable(
        (Chunk("vision", 0, 0, np.arange(2, dtype=np.int32)), Chunk(LLM, 0, 0, np.arange(3, dtype=np.int32))),
        (Edge("vision", LLM, "embeds", pieces),),
    )
    schedule = one_f_one_b(graph, table)
    weights = [weight("a", "vision", (0,), 3), weight("b", LLM, (0,), 5)]
    traffic, sizes = Traffic({"vision": [0, 9], LLM: [99, 10]}, 8.0, weights), [Size(3, 0), Size(6, 0)]
    plain = PerRow({"vision": 1, LLM: 1})

    def times(costs: PerRow) -> dict[Op, list[tuple[float, float]]]:
        result: dict[Op, list[tuple[float, float]]] = {}
        for record in predict(schedule, costs, sizes, LINKS, traffic).records():
            result.setdefault(record.action.op, []).append((record.start, record.finish))
        return result

    before = times(plain)
    # Rank 0 reads 3 samples and decodes 2 of vision: 3 * 0.25 + 2 * 0.5. Rank 1 reads 3, in its own first action.
    after = times(replace(plain, host_overhead=HostOverhead(sample=0.125, read=0.25, decode={"vision": 0.5})))
    assert after[Op.FORWARD][0] == pytest.approx((0.0, 3.125 + 1.75))
    (start, finish), (began, ended) = before[Op.FORWARD][1], after[Op.FORWARD][1]
    assert (began, ended) == pytest.approx((start + 1.75, finish + 1.75 + 0.75))
    for (start, finish), (began, ended) in zip(before[Op.BACKWARD], after[Op.BACKWARD], strict=True):
        assert (began, ended) == pytest.approx((start + 2.5, finish + 2.5))
    for (start, finish), (began, ended) in zip(before[Op.OPTIMIZER_STEP], after[Op.OPTIMIZER_STEP], strict=True):
        told = 0.25 + 32 * 0.002  # of 32 bytes from each rank
        assert (began, ended) == pytest.approx((start + 2.5 + told, finish + 2.5 + told + 3 * 0.125))


def test_reading_that_takes_longer_than_all_actions_of_a_rank() -> None:
    """The remaining reading is added to the last action: a step cannot be shorter than the reading of its data."""
    graph = graph_of({LLM: [[(0,)]]}, {LLM: ParallelSpec()})
    table = StepTable((Chunk(LLM, 0, 0, np.arange(4, dtype=np.int32)),))
    schedule = one_f_one_b(graph, table)
    traffic, sizes = Traffic({LLM: [0, 10]}, 0.0, [weight("a", LLM, (0,), 1)]), [Size(1, 0)]
    short = predict(schedule, PerRow({LLM: 1}), sizes, LINKS, traffic, optimizer=False).makespan
    costs = PerRow({LLM: 1}, host_overhead=HostOverhead(read=100.0))
    assert predict(schedule, costs, sizes, LINKS, traffic, optimizer=False).makespan == pytest.approx(short + 400.0)
