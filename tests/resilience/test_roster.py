"""Generations follow from plan.instantiate, plan.reconfigure and plan.admit for any events, and are sent as JSON."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import plan
from interlace.resilience.coordinator.roster import Roster, Templates
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Event, Generation, Node
from interlace.resilience.settings import Settings


def event(kind: str, node: str) -> Event:
    return Event(kind, node, 1.0)  # type: ignore[arg-type]


def started(nodes: int, faults: int, least: int, templates: Templates | None = None) -> Roster:
    roster = Roster(Settings(nodes=nodes, faults=faults, min_nodes=least, gather=60.0))
    roster.templates = templates
    for number in range(nodes):
        come(roster, f"n{number}")
        if number < nodes - 1:
            assert roster.next(1.0) is None
    assert roster.next(1.0) is not None
    return roster


def come(roster: Roster, node: str) -> None:
    roster.join(Node(node, 2, "host"))
    roster.is_ready(node, 1.0)


@settings(max_examples=50)
@given(st.data())
def test_generations_follow_the_plan(data: st.DataObject) -> None:
    faults, least = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    nodes = data.draw(st.integers((faults + 1) * least, (faults + 1) * least + 6))
    roster = started(nodes, faults, least)
    generation, templates = roster.generation, Templates.assumed(roster.settings)
    assert generation is not None and generation.cause[0].kind == "start" and len(generation.cause) == nodes + 1
    counts = plan.instantiate(
        templates.sizes, templates.times, nodes, faults=faults, microbatches=templates.microbatches
    ).counts
    assert sorted(map(len, generation.pipelines)) == [s for s, n in zip(templates.sizes, counts) for _ in range(n)]
    fresh = nodes
    for _ in range(data.draw(st.integers(1, 8))):
        before = generation
        waiting = roster.waiting()
        do = data.draw(st.sampled_from(["death", "leave", "join"]))
        if do == "join":
            for _ in range(data.draw(st.integers(1, 4))):
                come(roster, f"n{fresh}")
                waiting.append(f"n{fresh}")
                fresh += 1
            if not roster.wants_boundary():
                assert [
                    p.change
                    for p in plan.admit(
                        before.pipelines, waiting, templates.sizes, max_pipelines=templates.microbatches
                    )
                ] == ["kept"] * len(before.pipelines)
                continue
            gone: set[str] = set()
        else:
            gone = data.draw(st.sets(st.sampled_from(before.order()), min_size=1, max_size=3))
            for node in sorted(gone):
                if do == "death":
                    assert roster.lost(event("death", node))
                else:
                    roster.leaves(event("leave", node))
                    assert roster.wants_boundary()
        after = roster.next(0.0)
        enough = (faults + 1) * least
        if len(before.order()) - len(gone) + len(waiting) < enough:
            alive = [n for n in before.order() if do == "leave" or n not in gone]
            assert after is None if not alive else after is not None and after.kind == "save"
            assert after is None or list(after.order()) == alive
            return
        assert after is not None and after.kind == "train" and after.number == before.number + 1
        start = before.pipelines
        if len(before.order()) - len(gone) < enough:
            spare = list(waiting)
            start = tuple(tuple(spare.pop(0) if n in gone and spare else n for n in p) for p in start)
        repaired = plan.reconfigure(start, gone, templates.sizes, faults=faults)
        cut = [p.nodes[: templates.sizes[-1]] for p in repaired]
        inside = {node for pipeline in cut for node in pipeline}
        rest = [n for n in roster.ready if n not in inside and n not in gone]
        expected = plan.admit(cut, rest, templates.sizes, max_pipelines=templates.microbatches)
        assert after.pipelines == tuple(p.nodes for p in expected)
        assert after.leaving == (tuple(n for n in before.order() if n in gone) if do == "leave" else ())
        assert {e.node for e in after.cause if e.kind == do} >= gone
        assert Generation.from_json(after.to_json()) == after
        ranks = [rank for node in (*after.order(), *after.leaving) for rank in after.ranks_of(node)]
        assert ranks == list(range(after.sources)) and after.world == 2 * len(after.order())
        for node in after.leaving:
            roster.forget(node)
        generation = after


def test_after_a_while_fewer_are_enough() -> None:
    roster = Roster(Settings(nodes=4, faults=1, min_nodes=1, gather=30.0))
    come(roster, "a")
    assert roster.next(31.0) is None  # two pipelines need two nodes
    come(roster, "b")
    assert roster.next(29.0) is None
    generation = roster.next(31.0)
    assert generation is not None and sorted(map(len, generation.pipelines)) == [1, 1]


def test_what_ranks_propose_decides() -> None:
    deep = Templates(1, (9.0, 4.0, 1.0), 8)  # three nodes are nine times as fast as one
    roster = started(6, 1, 1, deep)
    assert roster.generation is not None and [len(p) for p in roster.generation.pipelines] == [3, 3]
    assert Templates.from_json(deep.to_json()) == deep
    with pytest.raises(ResilienceError, match=r"2 nodes cannot hold 2 pipelines of 3 nodes.*resilience\.nodes to 6"):
        started(2, 1, 1, Templates(3, (1.0,), 8))


def test_a_rank_that_gave_up_changes_no_pipeline() -> None:
    roster = started(4, 1, 1)
    before = roster.generation
    assert before is not None and roster.lost(event("failure", ""))
    after = roster.next(0.0)
    assert after is not None and after.pipelines == before.pipelines and after.number == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "invalid generation"),
        ("{", "Expecting"),
        ('{"number": 1}', "invalid generation"),
    ],
)
def test_what_is_no_generation_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Generation.from_json(text)
    roster = started(2, 1, 1)
    assert roster.generation is not None
    fields = dataclasses.replace(roster.generation, pipelines=(("nobody",),)).to_json()
    with pytest.raises(ValueError, match="does not describe: \\['nobody'\\]"):
        Generation.from_json(fields)
    with pytest.raises(ValueError, match="expected one of train, save"):
        Generation.from_json(roster.generation.to_json().replace('"train"', '"rest"'))


@pytest.mark.parametrize(
    "table", [{}, {"nodes": "2"}, {"nodes": 0}, {"nodes": 2, "heartbeat": 0.0}, {"nodes": 2, "x": 1}]
)
def test_settings_of_strangers_are_checked(table: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Settings.from_table(table)
    good = Settings(nodes=3, faults=2)
    assert Settings.from_table(good.to_table()) == good
