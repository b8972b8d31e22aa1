"""Actions and their text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.schedule import Action, Op, Schedule, StageGraph, one_f_one_b

names = st.text("abcXYZ019_.-é", min_size=1, max_size=12)
numbers = st.integers(0, 10_000)


@given(st.data())
def test_every_action_survives_its_text(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(Op))
    message = op in (Op.SEND, Op.RECV)
    action = Action(
        op,
        data.draw(names),
        data.draw(numbers),
        data.draw(numbers),
        data.draw(numbers),
        data.draw(numbers) if message else data.draw(st.integers(-1, 5)),
        data.draw(st.booleans()) if message else False,
    )
    assert Action.parse(str(action)) == action


def test_texts_are_short_and_readable() -> None:
    assert str(Action(Op.FORWARD, "vision", 0, 3)) == "F:vision/0@3"
    assert str(Action(Op.SEND, "vision", 0, 3, peer=2)) == "SEND:vision/0@3>2"
    assert str(Action(Op.RECV, "vision", 0, 3, part=1, peer=2, grad=True)) == "RECV_GRAD:vision/0@3+1<2"
    assert str(Action(Op.REDUCE_GRAD, "language_model", 1)) == "REDUCE_GRAD:language_model/1"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not an action"),
        ("F:vision@3", "not an action"),
        ("X:vision/0@3", "unknown op 'X'"),
        ("F_GRAD:vision/0@3", "unknown op 'F_GRAD'"),
        ("SEND:vision/0@3<2", "writes its peer after '>'"),
    ],
)
def test_other_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Action.parse(text)


def test_a_schedule_survives_its_text() -> None:
    graph = StageGraph.build({"vision": [0], "language_model": [1, 2]}, [("vision", "language_model")], num_ranks=4)
    schedule = one_f_one_b(graph, graph.everything(3))
    assert schedule.to_text().count("\n") == 4
    assert Schedule.parse_actions(schedule.to_text()) == schedule.actions
    with pytest.raises(ValueError, match="rank 1: not an action"):
        Schedule.parse_actions("F:a/0@0\nF a\n")


def test_ops_compare_and_hash_as_their_codes() -> None:
    assert {Op.FORWARD: 1.0}["F"] == 1.0  # type: ignore[index]
    assert str(Op.FORWARD) == "FORWARD"
