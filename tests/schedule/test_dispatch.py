"""DISPATCH: one on every rank of a step of streams, in one order with reductions and gathers; absent elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interlace.schedule import Action, Op, Schedule, ScheduleError, StageGraph, StepTable, check
from interlace.schedule.generate import KINDS, make
from tests.schedule.graphs import random_case
from tests.schedule.text import parse_lists, text_of

LLM = "language_model"
LINKS = [("vision", LLM)]


def schedule(dispatch: bool = True, name: str = "1f1b") -> Schedule:
    graph = StageGraph.build({"vision": [0], LLM: [1, 2]}, LINKS, replicas=2)
    return make(name, graph, StepTable.aligned(LINKS, [graph.modules] * 2, replicas=2), dispatch=dispatch)


def with_lists(sound: Schedule, lists: list[list[Action]], dispatch: bool = True) -> Schedule:
    return Schedule.of_actions(sound.name, sound.graph, sound.table, lists, dispatch=dispatch)


@pytest.mark.parametrize("name", KINDS)
def test_every_generator_begins_lists_with_it(name: str) -> None:
    plain, made = schedule(False, name), schedule(True, name)
    check(made)
    for mine, other in zip(made.actions, plain.actions, strict=True):
        assert [action.op for action in mine].count(Op.DISPATCH) == 1
        assert mine[0].op is Op.DISPATCH and mine[1:] == other
    assert parse_lists(text_of(made)) == made.actions


def test_a_rank_without_it_is_refused() -> None:
    sound = schedule()
    lists = [list(actions) for actions in sound.actions]
    del lists[2][0]
    with pytest.raises(ScheduleError, match=r"rank 2 lacks DISPATCH:language_model/1") as caught:
        check(with_lists(sound, lists))
    assert caught.value.rank == 2


def test_it_stands_once() -> None:
    sound = schedule()
    lists = [list(actions) for actions in sound.actions]
    lists[1].append(lists[1][0])
    with pytest.raises(ScheduleError, match=r"rank 1 has DISPATCH:language_model/0 2 times"):
        check(with_lists(sound, lists))


def test_a_step_read_at_random_has_none() -> None:
    with pytest.raises(ScheduleError, match="which only steps of streams have"):
        check(replace(schedule(), dispatch=False))
    with pytest.raises(ScheduleError, match="lacks DISPATCH"):
        check(replace(schedule(False), dispatch=True))


def test_it_is_named_after_the_first_stage_of_its_rank() -> None:
    sound = schedule()
    lists = [list(actions) for actions in sound.actions]
    lists[0][0] = lists[1][0]
    with pytest.raises(ScheduleError, match="labelled with its first stage"):
        check(with_lists(sound, lists))


def test_it_keeps_one_order_with_sums() -> None:
    """Ranks that start a common sum and the exchange in different orders could deadlock on some networks."""
    sound = schedule()
    lists = [list(actions) for actions in sound.actions]
    lists[0].append(lists[0].pop(0))  # behind its sums on this rank alone
    assert lists[0][-2].op is Op.REDUCE_GRAD
    with pytest.raises(ScheduleError, match="one common order"):
        check(with_lists(sound, lists))
    for mine in lists[1:]:
        mine.append(mine.pop(0))
    check(with_lists(sound, lists))  # at the end of all lists: late, but valid


def test_random_graphs_run_with_it() -> None:
    for seed in range(60):
        case = random_case(seed)
        made = make("1f1b", case.graph, case.table, dispatch=True)
        check(made)
        assert (made.rows[made.first[:-1], 0] == list(Op).index(Op.DISPATCH)).all()
