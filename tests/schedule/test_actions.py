"""Actions, their rows and their text form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.schedule import Action, Op, Schedule, StageGraph, StepTable, one_f_one_b
from interlace.schedule.actions import CODES, OPS, action_of, rows_of
from tests.schedule.text import parse, parse_lists, text_of

names = st.text("abcXYZ019_.-é", min_size=1, max_size=12)
numbers = st.integers(0, 10_000)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    op = draw(st.sampled_from(Op))
    chunk = draw(st.integers(-1, 10_000))
    if op in (Op.SEND, Op.RECV):
        chunk = abs(chunk)
        return Action(op, draw(names), draw(numbers), chunk, draw(numbers), draw(numbers), draw(st.booleans()))
    # The text form omits `other` if it is the chunk itself; only messages have another one.
    other = draw(st.integers(-1, 10_000).filter(lambda value: value < 0 or value != chunk))
    return Action(op, draw(names), draw(numbers), chunk, other, draw(st.integers(-1, 5)))


@given(actions())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_action_survives_its_text_and_its_row(action: Action) -> None:
    assert parse(str(action)) == action
    row = rows_of([action], ["other", action.module])
    assert row.dtype == np.int32 and row.shape == (1, 7)
    assert action_of(row[0].tolist(), ["other", action.module]) == action


def test_texts_are_short_and_readable() -> None:
    assert str(Action(Op.FORWARD, "vision", 0, 3)) == "F:vision/0@3"
    assert str(Action(Op.SEND, "vision", 0, 3, 5, 2)) == "SEND:vision/0@3+5>2"
    assert str(Action(Op.RECV, "vision", 0, 3, 5, 2, True)) == "RECV_GRAD:vision/0@3+5<2"
    assert str(Action(Op.SEND, "language_model", 0, 3, 3, 2)) == "SEND:language_model/0@3>2"
    assert str(Action(Op.REDUCE_GRAD, "language_model", 1, other=2)) == "REDUCE_GRAD:language_model/1+2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an action"),
        ("F:vision@3", "not an action"),
        ("X:vision/0@3", "unknown op 'X'"),
        ("F_GRAD:vision/0@3", "unknown op 'F_GRAD'"),
        ("SEND:vision/0@3<2", "SEND writes its peer after '>'"),
    ],
)
def test_other_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_rows_of_unknown_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown module 'x': use one of a, b"):
        rows_of([Action(Op.FORWARD, "x", 0, 0)], ["a", "b"])


def test_a_schedule_survives_its_text_and_its_objects() -> None:
    links = [("vision", "language_model")]
    graph = StageGraph.build({"vision": [0], "language_model": [1, 2]}, links, replicas=2)
    schedule = one_f_one_b(graph, StepTable.aligned(links, [graph.modules] * 3, replicas=2))
    assert text_of(schedule).count("\n") == 6
    assert parse_lists(text_of(schedule)) == schedule.actions
    again = Schedule.of_actions(schedule.name, graph, schedule.table, schedule.actions)
    assert (again.rows == schedule.rows).all() and (again.first == schedule.first).all()
    assert again.rows.dtype == schedule.rows.dtype and again.first.dtype == schedule.first.dtype
    with pytest.raises(ValueError, match="rank 1: not an action"):
        parse_lists("F:a/0@0\nF a\n")


def test_ops_compare_and_hash_as_their_codes() -> None:
    assert {Op.FORWARD: 1.0}["F"] == 1.0  # type: ignore[index]
    assert str(Op.FORWARD) == "FORWARD"
    assert [CODES[op] for op in OPS] == list(range(len(Op)))
