"""Faulty ranks among stalled ones, against a plain search over all paths of waits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from interlace.resilience.supervisor.faults import CIRCLE, WAITS, culprits
from interlace.resilience.supervisor.watch import Stall

HEARTBEAT = 5.0


def stall(state: str, ranks: tuple[int, ...] = (), seconds: float = 6.0, stopped: bool = False) -> Stall:
    return Stall(0, 1, state, ranks, stopped, seconds, "")  # type: ignore[arg-type]


def test_who_waits_for_a_rank_that_hangs_is_not_at_fault() -> None:
    chain = {0: stall("waiting", (1,)), 1: stall("waiting", (2,)), 2: stall("computing")}
    assert culprits(chain, HEARTBEAT) == {2}
    collective = {rank: stall("waiting", (0, 1, 2, 3), 60.0) for rank in (0, 1, 3)} | {2: stall("idle")}
    assert culprits(collective, HEARTBEAT) == {2}


def test_who_waits_for_a_rank_that_moves_is_late() -> None:
    assert culprits({0: stall("waiting", (1,), 600.0), 2: stall("waiting", (0,), 600.0)}, HEARTBEAT) == set()


def test_a_stopped_process_is_at_fault_wherever_it_waits() -> None:
    circle = {0: stall("waiting", (1,), 9.0), 1: stall("waiting", (0,), 8.0, stopped=True)}
    assert culprits(circle, HEARTBEAT) == {1}


def test_wait_cycle_is_blamed_on_its_first_rank_after_patience() -> None:
    patience = CIRCLE * HEARTBEAT
    circle = {
        0: stall("waiting", (1,), patience + 1),
        1: stall("waiting", (2,), patience + 3),
        2: stall("waiting", (0,), patience - 1),
    }
    assert culprits(circle, HEARTBEAT) == set()
    circle[2] = stall("waiting", (0,), patience)
    circle[3] = stall("waiting", (0,), patience + 9)  # it waits for the circle, but is not part of it
    assert culprits(circle, HEARTBEAT) == {1}


def test_a_lane_whose_other_rank_waits_is_not_at_fault() -> None:
    """Rank 1 is in a collective of its lane with rank 0, which still waits for the stopped rank 2."""
    lane = {0: stall("waiting", (2,)), 1: stall("computing in a lane", (0, 1))}
    assert culprits({**lane, 2: stall("waiting", (0,), stopped=True)}, HEARTBEAT) == {2}
    assert culprits(lane, HEARTBEAT) == set()  # rank 2 makes progress


def test_of_a_lane_the_rank_that_uses_a_core_is_at_fault() -> None:
    long = CIRCLE * HEARTBEAT
    lane = {0: stall("computing in a lane", (0, 1), 3 * long), 1: stall("computing in a lane", (0, 1), 2 * long)}
    assert culprits(lane, HEARTBEAT) == {0}
    assert culprits(lane | {1: replace(lane[1], at_work=True)}, HEARTBEAT) == {1}
    assert culprits(lane | {1: replace(lane[1], seconds=long - 1)}, HEARTBEAT) == set()


STALLS = st.builds(
    stall,
    st.sampled_from([*WAITS, *WAITS, "computing", "idle"]),
    st.lists(st.integers(0, 6), max_size=3, unique=True).map(tuple),
    st.sampled_from([6.0, 31.0, 40.0]),
    st.sampled_from([False, False, False, False, True]),
)


@given(st.dictionaries(st.integers(0, 6), STALLS))
def test_against_a_search(stalled: dict[int, Stall]) -> None:
    waits = {
        rank: set() if each.state not in WAITS or each.stopped else set(each.ranks) - {rank}
        for rank, each in stalled.items()
    }
    ends = {rank for rank in stalled if not waits[rank]}
    result = culprits(stalled, HEARTBEAT)
    if ends:
        assert result == ends
        return

    def walk(rank: int) -> set[int]:
        """All ranks reachable by waits, in as many steps as there are ranks."""
        here = {rank}
        for _ in range(8):
            here = here.union(*(waits.get(each, set()) for each in here))
        return here

    expected = set()
    for rank in stalled:
        reached = walk(rank)
        if reached <= set(stalled) and all(walk(other) == reached for other in reached):
            if min(stalled[other].seconds for other in reached) >= CIRCLE * HEARTBEAT:
                expected.add(max(sorted(reached), key=lambda other: stalled[other].seconds))
    assert result == expected
