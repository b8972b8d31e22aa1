"""The compiled simulator against the Python one: bitwise equal, also if an action never finishes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import _core
from interlace.schedule import Op, Schedule, ScheduleError, StageGraph, StepTable, one_f_one_b
from interlace.schedule.actions import CODES, COMPUTE, OP, OPS
from interlace.simulate import Timeline, simulate, simulate_arrays
from tests.counted_calls import python_calls
from tests.simulate.cases import LLM, by_hand, lanes_graph, random_schedule
from tests.simulate.reference import memory_and_scratch, simulate_in_python

SEEDS = st.integers(0, 2**32 - 1)


def outcome(play, *args, **options):
    try:
        return play(*args, **options)
    except ScheduleError as error:
        return error


def costs_of(schedule: Schedule, rng: np.random.Generator) -> dict:
    """Random seconds of every compute action, whose sums are rounded."""
    names = list(dict.fromkeys((a.op, a.module, a.stage, a.chunk) for own in schedule.actions for a in own))
    return dict(zip(names, (rng.random(len(names)) * rng.integers(0, 3, len(names))).tolist()))


def agree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng)
    if rng.random() < 0.3:  # exchange two actions or remove one: often a deadlock
        lists = [list(actions) for actions in schedule.actions]
        actions = lists[rng.integers(len(lists))]
        if len(actions) > 1:
            i, j = rng.integers(len(actions), size=2)
            actions[i], actions[j] = actions[j], actions[i]
            if rng.random() < 0.5:
                del actions[i]
        schedule = Schedule.of_actions("broken", schedule.graph, schedule.table, lists)
    seconds = costs_of(schedule, rng)
    some = rng.random(64).tolist()
    options = {
        "transfer": (lambda action, source, lane: some[(source * 7 + lane + action.chunk) % 64])
        if rng.random() < 0.5
        else some[0],
        "overhead": some[1] * (rng.random() < 0.5),
        "reduce_grad": (lambda action: some[action.other]) if rng.random() < 0.5 else 0.3,
        "unshard": (lambda action: some[action.other]) if rng.random() < 0.5 else 0.2,
    }
    expected = outcome(simulate_in_python, schedule, seconds, **options)
    found = outcome(simulate, schedule, seconds, **options)
    if not isinstance(expected, Timeline):
        assert isinstance(found, ScheduleError)
        return
    assert isinstance(found, Timeline), found
    assert found.start == expected.start and found.finish == expected.finish
    # Costs under general keys, which are looked up once for each op and stage.
    keys = [key[: rng.integers(2, 4)] if rng.random() < 0.8 else key[0] for key in seconds]
    general = dict(zip(keys, seconds.values())) | dict.fromkeys(COMPUTE, 0.1)
    found, expected = (play(schedule, general, **options) for play in (simulate, simulate_in_python))
    assert found.start == expected.start and found.finish == expected.finish

    # On arrays alone: values that the Timeline derives in Python.
    every = [action for actions in schedule.actions for action in actions]
    own = [seconds[a.op, a.module, a.stage, a.chunk] if a.op in COMPUTE else 0.0 for a in every]
    bytes_of = {("audio", 0): 3.5, (LLM, 0): 1.25, (LLM, 1): 0.75} | {(LLM, 0, k): float(k) for k in range(0, 9, 2)}
    memory, scratch = memory_and_scratch(schedule, bytes_of)
    result = simulate_arrays(schedule, own, transfer=0.25, memory=memory, scratch=scratch)
    plain = simulate_in_python(schedule, seconds, transfer=0.25)
    assert result.finish.tolist() == [time for times in plain.finish for time in times]
    assert result.start.tolist() == [time for times in plain.start for time in times]
    assert result.makespan == plain.makespan
    assert tuple(result.peak_memory) == plain.peak_memory(bytes_of)
    assert tuple(result.rank_busy) == pytest.approx(plain.busy_per_rank)
    assert result.bubble == pytest.approx(plain.bubble, abs=1e-12)


@settings(max_examples=150)
@given(SEEDS)
def test_compiled_and_python_agree_exactly(seed):
    agree(seed)


@pytest.mark.slow
@settings(max_examples=700)
@given(SEEDS)
def test_compiled_and_python_agree_exactly_on_many(seed):
    agree(seed)


def paired() -> StageGraph:
    """Vision on the lane of ranks 0 and 1, the language model on rank 2."""
    return lanes_graph({"vision": [(0, 1)], LLM: [(2,)]}, 3)


VISION = "F:vision/0@0 SEND:vision/0@0+1>1"


def test_slowest_rank_of_a_lane_determines_its_cost():
    schedule = by_hand(paired(), [VISION, VISION, "RECV:vision/0@0+1<0 F:llm/0@1"])
    result = simulate_arrays(schedule, [1.0, 0.0, 3.0, 0.0, 0.0, 2.0], transfer=[0.0, 1.0, 0.0, 0.5, 0.0, 0.0])
    assert result.finish.tolist() == [3.0, 3.0, 3.0, 3.0, 4.0, 6.0]
    assert result.rank_busy.tolist() == [3.0, 3.0, 2.0] and result.makespan == 6.0


def test_the_codes_are_the_order_of_op():
    """csrc/schedule/step_graph.h depends on it."""
    assert [
        op.value for op in OPS
    ] == "F B I W SEND RECV DISPATCH UNSHARD UNSHARD_LAYERS RESHARD REDUCE_GRAD OPTIMIZER_STEP".split()


@pytest.mark.parametrize(
    ("lists", "lines"),
    [
        (
            [VISION, "F:vision/0@0", "RECV:vision/0@0+1<0 F:llm/0@1"],
            ["rank 2: RECV:vision/0@0+1<0 (action 0) waits for rank 0, which has finished its list"
             " and for rank 1, which has finished its list"],
        ),
        (
            ["F:vision/0@0 RECV_GRAD:vision/0@0+1<1 B:vision/0@0", "F:vision/0@0", "RECV:vision/0@0+1<0"],
            ["rank 0: RECV_GRAD:vision/0@0+1<1 (action 1) waits for rank 2, which is at RECV:vision/0@0+1<0",
             "rank 2: RECV:vision/0@0+1<0 (action 0) waits for rank 0, which is at RECV_GRAD:vision/0@0+1<1"
             " and for rank 1, which has finished its list"],
        ),
        (
            ["F:vision/0@0 B:vision/0@0", "B:vision/0@0 F:vision/0@0", ""],
            ["rank 0: F:vision/0@0 (action 0) waits for rank 1, which is at B:vision/0@0",
             "rank 1: B:vision/0@0 (action 0) waits for rank 0, which is at F:vision/0@0"],
        ),
    ],
)  # fmt: skip
def test_a_deadlock_says_who_waits_for_whom(lists, lines):
    schedule = by_hand(paired(), lists)
    with pytest.raises(ScheduleError) as caught:
        simulate_arrays(schedule, np.ones(len(schedule.rows)))
    assert str(caught.value) == "\n  ".join(["deadlock: these ranks wait forever", *lines])
    assert str(caught.value.action) in lines[0] and f"rank {caught.value.rank}:" in lines[0]
    with pytest.raises(ScheduleError):
        simulate(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 1.0})


def test_a_reduction_that_a_rank_lacks_never_ends():
    graph = StageGraph.build({"m": [0]}, replicas=2)
    schedule = by_hand(graph, ["REDUCE_GRAD:m/0+0", ""])
    message = (
        r"rank 0: REDUCE_GRAD:m/0\+0 \(action 0\) waits for ranks 0\+1\n"
        r".*a rank of these reductions does not have them in its list"
    )
    with pytest.raises(ScheduleError, match=message):
        simulate_arrays(schedule, [0.0])


# Arguments


def good() -> dict[str, np.ndarray]:
    schedule = by_hand(paired(), [VISION, VISION, "RECV:vision/0@0+1<0 F:llm/0@1"])
    arrays = schedule.graph.arrays
    names = ("node_pipeline", "node_stage", "node_lane", "pipeline_module", "lane_first", "lane_rank")
    names += ("reduction_first", "reduction_rank", "reduction_tied")
    names += ("shard_by_layer", "shard_member_first", "shard_member")
    return {
        "rows": schedule.rows,
        "first": schedule.first,
        "chunk_pipeline": np.array([0, 1]),
        **{name: getattr(arrays, name) for name in names},
        "seconds": np.array([1.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
        "transfer": np.array([0.0, 2.0, 0.0, 2.0, 0.0, 0.0]),
        "memory": np.array([5.0, -5.0, 0.0, 0.0, 0.0, 0.0]),
        "scratch": np.array([0.0, 1.0, 0.0, 0.0, 0.0, 3.0]),
    }


def changed(array: np.ndarray, place, value) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("first", 0, 1, "first must run from 0 to 6"),
        ("first", 1, 5, r"first\[2\] is below"),
        ("first", 3, 9, r"first\[3\] is 9"),
        ("chunk_pipeline", 0, 2, r"chunk_pipeline\[0\] is 2"),
        ("node_pipeline", 0, 1, "node 0 stands out of order"),
        ("node_stage", 1, 1, "node 1 stands out of order"),
        ("node_lane", 0, 2, r"node_lane\[0\] is 2"),
        ("lane_rank", 2, 3, r"lane_rank\[2\] is 3"),
        ("lane_first", 1, 0, "lane 0 has no rank"),
        ("rows", (0, 0), 12, r"rows\[0\], of rank 0, has op 12"),
        ("rows", (0, 1), 1, r"rows\[0\], of rank 0, names chunk 0, which is of another module"),
        ("rows", (0, 2), 1, r"rows\[0\], of rank 0, names stage 1, which is none"),
        ("rows", (2, 3), -1, r"rows\[2\], of rank 1, names chunk -1"),
        ("rows", (5, slice(1, 4)), [0, 0, 0], r"rows\[5\], of rank 2, is for lane 0, of which this rank is no member"),
        ("rows", (1, 5), 2, r"rows\[1\], of rank 0, names lane 2"),
        ("rows", (4, 4), 2, r"rows\[4\], of rank 2, is read by chunk 2"),
        ("rows", (4, 4), 0, r"rows\[4\], of rank 2, is read by the stage after the last one"),
        ("rows", (5, slice(0, 5)), [CODES[Op.REDUCE_GRAD], 0, 0, -1, 0], "names reduction 0, which is none"),
        ("seconds", 1, np.nan, r"seconds\[1\] is nan"),
        ("seconds", 2, -1.0, r"seconds\[2\] is -1"),
        ("transfer", 1, np.inf, r"transfer\[1\] is inf"),
        ("scratch", 1, -1.0, r"scratch\[1\] is -1"),
    ],
)
def test_bad_entries_are_named(name, place, value, message):
    result = _core.simulate(**good())
    assert result["finish"].tolist() == [1.0, 1.0, 1.0, 1.0, 3.0, 3.0] and result["peak_memory"].tolist() == [
        5.0,
        0.0,
        3.0,
    ]
    with pytest.raises(ValueError, match=message):
        _core.simulate(**good() | {name: changed(good()[name], place, value)})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", good()["rows"].astype(np.int64), r"rows must be int32 \[n, 7\], got int64 \(6, 7\)"),
        ("rows", good()["rows"][:, :6], r"rows must be int32 \[n, 7\], got int32 \(6, 6\)"),
        ("first", np.zeros(0, int), "first must run from 0"),
        ("node_lane", np.zeros(1, int), r"node_lane must have shape \(2,\), got \(1,\)"),
        ("memory", np.ones((6, 1)), r"memory must have shape \(6,\), got \(6, 1\)"),
        ("seconds", np.ones(6, bool), "seconds must be an array of real numbers"),
        ("seconds", np.full(6, 1e308), "the sum of seconds overflows"),
    ],
)
def test_bad_arrays_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        _core.simulate(**good() | {name: value})


def test_reductions_are_joined_once_and_by_those_that_take_part():
    graph = StageGraph.build({"m": [0], "n": [1]}, [("m", "n")], replicas=2)
    assert [reduction.ranks for reduction in graph.reductions] == [(0, 2), (1, 3)]
    with pytest.raises(ValueError, match=r"rows\[0\], of rank 0, joins reduction 1, which is of other ranks"):
        simulate_arrays(by_hand(graph, ["REDUCE_GRAD:n/0+1", "", "", ""]), [0.0])
    twice = by_hand(graph, ["REDUCE_GRAD:m/0+0 REDUCE_GRAD:m/0+0", "", "", ""])
    with pytest.raises(ValueError, match=r"rows\[1\], of rank 0, joins reduction 0 a second time"):
        simulate_arrays(twice, [0.0, 0.0])


@settings(max_examples=100)
@given(SEEDS)
def test_random_integers_never_crash(seed):
    rng = np.random.default_rng(seed)
    arguments = good()
    for _ in range(rng.integers(1, 4)):
        name = list(arguments)[rng.integers(len(arguments))]
        array = arguments[name].copy()
        if array.size:
            array.flat[rng.integers(array.size)] = rng.integers(-1, 6)
        arguments[name] = array
    try:
        result = _core.simulate(**arguments)
    except ValueError as error:
        assert str(error)
        return
    assert (result["reached"] <= np.diff(arguments["first"])).all()
    assert result["complete"] == (result["reached"].sum() == len(arguments["rows"]))


def test_a_million_actions_are_one_call():
    """No Python is called per action. (Seconds: `bench.scheduling`.)"""
    graph = StageGraph.build({"m": list(range(64))})
    table = StepTable.aligned((), [graph.modules] * 528)
    schedule = one_f_one_b(graph, table, reduce_grad=False)
    # Five steps in a row, as one list per rank.
    places = [np.tile(np.arange(a, b), 5) for a, b in zip(schedule.first[:-1], schedule.first[1:])]
    rows = schedule.rows[np.concatenate(places)]
    many = dataclasses.replace(schedule, rows=rows, first=schedule.first * 5)
    assert len(rows) > 900_000
    seconds = np.where(rows[:, OP] <= 3, 1.0, 0.0)
    result, calls = python_calls(lambda: simulate_arrays(many, seconds))
    assert calls < 1000
    assert result.rank_busy.tolist() == [5 * 528 * 2.0] * 64
