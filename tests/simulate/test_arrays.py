"""The compiled simulator against the one in Python: equal to the last bit, also where nothing ever finishes."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import _core
from interlace.schedule import Action, Op, Schedule, ScheduleError, StageGraph, check, gpipe, one_f_one_b
from interlace.simulate import OPS, ActionArrays, Timeline, simulate, simulate_arrays
from interlace.simulate.reference import simulate_in_python
from tests.schedule.graphs import Case, cases

COMPUTE = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@st.composite
def priced_schedules(draw):
    """A random schedule, sometimes with split backwards or broken, and random costs that round."""
    case: Case = draw(cases())
    schedule = draw(st.sampled_from((one_f_one_b, gpipe)))(case.graph, case.presence)
    lists = [list(actions) for actions in schedule.actions]
    if draw(st.booleans()):
        for actions in lists:
            for i in reversed(range(len(actions))):
                if actions[i].op is Op.BACKWARD and draw(st.integers(0, 2)) == 0:
                    actions[i : i + 1] = [dataclasses.replace(actions[i], op=op) for op in COMPUTE[2:]]
    if draw(st.integers(0, 3)) == 0:  # take something away, or exchange two actions: often a deadlock
        actions = draw(st.sampled_from(lists))
        if len(actions) > 1:
            i, j = draw(st.integers(0, len(actions) - 1)), draw(st.integers(0, len(actions) - 1))
            actions[i], actions[j] = actions[j], actions[i]
            if draw(st.booleans()):
                del actions[i]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = [(op, s.module, s.index, k) for op in COMPUTE for s in case.graph.stages for k in range(len(case.presence))]
    seconds = dict(zip(names, rng.random(len(names)) * rng.integers(0, 3, len(names))))
    return dataclasses.replace(schedule, actions=lists), seconds, rng


def outcome(play, *args, **options):
    try:
        return play(*args, **options)
    except ScheduleError as error:
        return error


def agree(case) -> None:
    schedule, seconds, rng = case
    transfers = dict(zip(range(64), rng.random(64)))
    options = {
        "transfer": (lambda action, source, target: transfers[(source * 7 + target + action.microbatch) % 64])
        if rng.random() < 0.5
        else float(rng.random()),
        "overhead": float(rng.random() * (rng.random() < 0.5)),
        "reduce_grad": (lambda action: transfers[action.stage + 8 * action.part]) if rng.random() < 0.5 else 0.3,
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

    # On arrays alone: what the Timeline derives in Python.
    arrays = ActionArrays.of_schedule(schedule)
    every = [action for actions in schedule.actions for action in actions]
    assert [arrays.action(i) for i in range(len(arrays))] == every
    own = [seconds[a.op, a.module, a.stage, a.microbatch] if a.op in COMPUTE else 0.0 for a in every]
    bytes_of = {(s.module, s.index): float(rng.random()) for s in schedule.graph.stages}
    memory, scratch = arrays.memory(bytes_of)
    result = simulate_arrays(arrays, own, transfer=0.25, memory=memory, scratch=scratch)
    plain = simulate_in_python(schedule, seconds, transfer=0.25)
    assert result.finish.tolist() == [time for times in plain.finish for time in times]
    assert result.start.tolist() == [time for times in plain.start for time in times]
    assert result.makespan == plain.makespan
    assert tuple(result.peak_memory) == plain.peak_memory(bytes_of)
    assert result.rank_busy == pytest.approx(plain.busy_per_rank)
    assert result.bubble == pytest.approx(plain.bubble, abs=1e-12)
    busy = dict.fromkeys(arrays.stages, 0.0)
    for action, cost in zip(every, own):
        busy[action.module, action.stage] += cost
    assert result.stage_busy == pytest.approx([busy[name] for name in arrays.stages])


@given(priced_schedules())
def test_compiled_and_python_agree_exactly(case):
    agree(case)


@pytest.mark.slow
@settings(max_examples=2000)
@given(priced_schedules())
def test_compiled_and_python_agree_exactly_on_many(case):
    agree(case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "F"}, r"actions\[1\].op is 'F': it must be an Op"),
        ({"stage": 2**31}, r"actions\[1\].stage is 2147483648: more than int32 holds"),
        ({"microbatch": -(2**70)}, r"actions\[1\].microbatch is -1180591620717411303424: more than int32 holds"),
    ],
)
def test_bad_actions_are_named(change, message):
    good = Action(Op.FORWARD, "m", 0)
    with pytest.raises(ValueError, match=message):
        ActionArrays.of([[good, dataclasses.replace(good, **change)]])


def test_actions_of_another_kind_are_type_errors():
    good = Action(Op.FORWARD, "m", 0)
    with pytest.raises(TypeError):
        ActionArrays.of([[dataclasses.replace(good, part=0.5)]])
    with pytest.raises(AttributeError, match="op"):
        ActionArrays.of([[good], ["F:m/0@0"]])


def test_the_codes_are_the_order_of_op():
    """csrc/simulate/events.h counts on it."""
    assert [op.value for op in OPS] == "F B I W SEND RECV DISPATCH UNSHARD RESHARD REDUCE_GRAD OPTIMIZER_STEP".split()


def test_a_deadlock_says_who_waits_for_whom():
    graph = StageGraph.build({"a": [0], "b": [1]}, [("a", "b")])
    schedule = one_f_one_b(graph, graph.everything(2))
    lists = [list(actions) for actions in schedule.actions]
    lists[1].remove(Action(Op.SEND, "a", 0, 1, peer=0, grad=True))
    arrays = ActionArrays.of(lists)
    message = r"rank 0: RECV_GRAD:a/0@1<1 \(action 6\) waits for rank 1, which has finished its list"
    with pytest.raises(ScheduleError, match=message) as caught:
        simulate_arrays(arrays, np.ones(len(arrays)))
    assert caught.value.rank == 0
    broken = Schedule("broken", graph, schedule.presence, lists)
    with pytest.raises(ScheduleError, match="rank 1 lacks SEND_GRAD"):
        simulate(broken, {Op.FORWARD: 1.0, Op.BACKWARD: 1.0})
    with pytest.raises(ScheduleError, match="lacks"):
        check(broken)
    # A reduction that one copy never reaches.
    lone = ActionArrays.of([[Action(Op.REDUCE_GRAD, "a", 0)], []], {Action(Op.REDUCE_GRAD, "a", 0): 2})
    with pytest.raises(ScheduleError, match=r"rank 0: REDUCE_GRAD:a/0 \(action 0\) waits for the 2 ranks"):
        simulate_arrays(lone, [0.0])


GOOD = {
    "offsets": [0, 2, 3],
    "op": [0, 4, 5],
    "stage": [0, 0, 0],
    "microbatch": [0, 0, 0],
    "peer": [-1, 1, 0],
    "copies": [1],
    "seconds": [1.0, 0.0, 0.0],
    "transfer": [0.0, 2.0, 0.0],
    "memory": [5.0, -5.0, 0.0],
    "scratch": [0.0, 1.0, 0.0],
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("offsets", [0], "offsets must run from 0"),
        ("offsets", [0, 3, 2], "offsets must run from 0"),
        ("offsets", [0, 3, 1, 3], r"offsets\[2\] is below"),
        ("offsets", [0, 2, 9], r"offsets\[2\] is 9"),
        ("op", [0, 4, 11], r"op\[2\] is 11"),
        ("op", [0.0, 4.0, 5.0], "op must be an array of integers, got dtype float64"),
        ("stage", [0, 1, 0], r"stage\[1\] is 1"),
        ("stage", [0, 0], r"stage must have shape \(3,\), got \(2,\)"),
        ("microbatch", [0, -1, 0], r"microbatch\[1\] is -1"),
        ("peer", [-1, 2, 0], r"peer\[1\] is 2"),
        ("peer", [-1, 1, -1], r"peer\[2\] is -1, but the action is a SEND or RECV"),
        ("peer", [-1, 2**62, 0], r"peer\[1\] is"),
        ("copies", [3], r"copies\[0\] is 3"),
        ("seconds", [1.0, np.nan, 0.0], r"seconds\[1\] is nan"),
        ("seconds", [1.0, 0.0, -1.0], r"seconds\[2\] is -1"),
        ("transfer", [0.0, np.inf, 0.0], r"transfer\[1\] is inf"),
        ("memory", [[1.0], [2.0], [3.0]], r"memory must have shape \(3,\), got \(3, 1\)"),
        ("scratch", [0.0, -1.0, 0.0], r"scratch\[1\] is -1"),
        ("seconds", [True, False, True], "seconds must be an array of real numbers"),
    ],
)
def test_bad_arrays_are_named(name, value, message):
    arguments = {key: np.array(entry) for key, entry in GOOD.items()}
    found = _core.simulate(**arguments)
    assert found["finish"].tolist() == [1.0, 1.0, 3.0] and found["peak_memory"].tolist() == [5.0, 0.0]
    with pytest.raises(ValueError, match=message):
        _core.simulate(**{**arguments, name: np.array(value)})


@settings(max_examples=200)
@given(st.data())
def test_random_integers_never_crash(data):
    ranks, n = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 30))
    draw = lambda low, high, size: np.array(  # noqa: E731
        data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size)), dtype=np.int64
    )
    offsets = np.concatenate([[0], np.sort(draw(0, n, ranks - 1)), [n]]).astype(np.int64)
    seconds = np.array(data.draw(st.lists(st.sampled_from([0.0, 1.0, 1e308]), min_size=n, max_size=n)), np.float64)
    arguments = (draw(0, 10, n), draw(0, 2, n), draw(0, 1, n), draw(-1, ranks - 1, n), draw(1, ranks, 3))
    try:
        found = _core.simulate(offsets, *arguments, seconds, seconds, seconds, seconds)
    except ValueError as error:
        assert "peer" in str(error) or ("overflows" in str(error) and max(seconds) > 1)
        return
    assert (found["reached"] <= np.diff(offsets)).all()
    assert found["complete"] == (found["reached"].sum() == n)


def test_a_million_actions_take_less_than_a_second():
    graph = StageGraph.build({"m": list(range(64))})
    schedule = one_f_one_b(graph, graph.everything(528), reduce_grad=False)
    arrays = ActionArrays.of_schedule(schedule)
    # Five steps in a row, as one list per rank.
    places = np.concatenate(
        [np.tile(np.arange(start, stop), 5) for start, stop in zip(arrays.offsets[:-1], arrays.offsets[1:])]
    )
    names = ("op", "stage", "microbatch", "part", "peer", "grad")
    many = dataclasses.replace(
        arrays, offsets=arrays.offsets * 5, **{name: getattr(arrays, name)[places] for name in names}
    )
    assert len(many) > 900_000
    seconds = np.where(many.op <= 3, 1.0, 0.0)
    start = time.process_time()
    found = simulate_arrays(many, seconds)
    assert time.process_time() - start < 1.0
    assert found.rank_busy.tolist() == [5 * 528 * 2.0] * 64
