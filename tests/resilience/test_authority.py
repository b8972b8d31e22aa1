"""The coordinator's decisions, with a store in this process and a clock set by the test."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from interlace.resilience.coordinator.authority import LATE, SEARCH, TOGETHER, Authority
from interlace.resilience.coordinator.hangs import Removal
from interlace.resilience.generation import Node
from interlace.resilience.member import ABORTED, ENTERED, READY, WHY, cast, decided, prefix_of
from interlace.resilience.settings import Settings


def started(names: str) -> tuple[Authority, dist.HashStore]:
    """An authority with all nodes ready, one per pipeline."""
    store = dist.HashStore()
    settings = Settings(nodes=len(names), faults=0, min_nodes=1, heartbeat=5.0, gather=60.0)
    authority = Authority(settings, store, lambda what, **values: None, 0.0)
    come(authority, store, names)
    assert all(authority.has(name) for name in names)
    return authority, store


def come(authority: Authority, store: dist.HashStore, names: str) -> None:
    for name in names:
        authority.join(Node(name, 1, "here"))
        store.add(f"{READY}/{name}", 1)
    authority.decide({}, 0.0, 0.0)


def count_a_step(authority: Authority, store: dist.HashStore, votes: int = 99) -> str | None:
    """All ranks of the generation vote, or some; returns the decision."""
    generation = authority.generation
    assert generation is not None
    for _ in range(min(votes, generation.world)):
        cast(store, generation, 7)
    authority.decide({}, 0.0, 0.0)
    return decided(store, generation, 7)


def fail(authority: Authority, node: str, now: float) -> None:
    authority.lose(Removal(node, "death", "it has an error", failed=True), now)
    authority.decide({}, now + 2 * TOGETHER, 0.0)


def test_step_commits_after_all_votes_and_never_once_aborted() -> None:
    authority, store = started("abc")
    generation = authority.generation
    assert generation is not None
    assert count_a_step(authority, store, votes=2) is None
    authority.lose(Removal("a", "death", "it is gone"), 0.0)
    assert decided(store, generation, 7) == "abort"
    cast(store, generation, 7)  # the third one comes too late
    authority.count_votes(0.0)
    assert decided(store, generation, 7) == "abort"
    authority.decide({}, 2 * TOGETHER, 0.0)
    assert authority.generation is not generation and count_a_step(authority, store) == "commit"


def test_vote_from_an_old_generation_is_aborted() -> None:
    authority, store = started("abcdef")
    first = authority.generation
    assert first is not None
    for at, node in enumerate("abc"):
        authority.lose(Removal(node, "death", "it is gone"), float(at))
        authority.decide({}, at + 2 * TOGETHER, 0.0)
    assert authority.generation is not None and authority.generation.number == 4
    cast(store, first, 7)
    assert decided(store, first, 7) == "abort"


@pytest.mark.parametrize(("votes", "ends"), [(99, False), (1, True), (0, True)])
def test_two_errors_without_a_committed_step_end_the_run(votes: int, ends: bool) -> None:
    authority, store = started("abcd")
    assert count_a_step(authority, store) == "commit"
    fail(authority, "a", 1.0)
    assert not authority.over
    count_a_step(authority, store, votes)
    fail(authority, "b", 2.0)
    assert authority.over == ends and ("a, it has an error" in authority.ended) == ends


def test_second_error_before_the_first_generation_ends_the_run() -> None:
    """Failures of any kind: the replacement may fail in the same way, or one node alone may be faulty."""
    store = dist.HashStore()
    authority = Authority(Settings(nodes=4, faults=0, gather=60.0), store, lambda what, **values: None, 0.0)
    come(authority, store, "ab")
    authority.join(Node("c", 1, "here"))
    fail(authority, "a", 1.0)
    authority.lose(Removal("b", "death", "its supervisor is gone"), 2.0)
    assert not authority.over
    fail(authority, "c", 3.0)
    assert authority.over and "a, it has an error" in authority.ended


def test_nodes_that_join_with_an_error_of_their_own_end_nothing() -> None:
    authority, store = started("ab")
    assert count_a_step(authority, store) == "commit"
    come(authority, store, "cd")
    assert authority.generation is not None
    for _ in "ab":
        cast(store, authority.generation, 8)
    authority.decide({}, 1.0, 0.0)
    assert authority.has("c") and authority.has("d")
    fail(authority, "c", 2.0)
    fail(authority, "d", 3.0)
    assert not authority.over and authority.has("a") and authority.has("b")


@pytest.mark.parametrize("first", ["ends", "is lost"])
def test_a_node_lost_as_others_end_ends_the_run(first: str) -> None:
    """In either order: a rank that has trained to the end cannot join a later generation."""
    authority, _ = started("abc")
    steps = [lambda: authority.finish("a"), lambda: authority.lose(Removal("b", "death", "it is gone"), 1.0)]
    for step in steps if first == "ends" else reversed(steps):
        step()
    authority.decide({}, 1.0 + 2 * TOGETHER, 0.0)
    assert authority.over and "lost after other nodes had finished" in authority.ended


def test_node_that_misses_the_rendezvous_is_lost_as_hung() -> None:
    """For any cause of the delay: a library without a timeout, or a page that allows a long wait."""
    authority, store = started("abc")
    assert authority.generation is not None
    prefix = prefix_of(authority.generation)
    for node in "ab":
        store.add(f"{prefix}/{ENTERED}/{node}", 1)
    store.set(f"{prefix}/{WHY}", "rank 0: rank 2 says nothing")
    assert authority.decide({}, 0.0, 0.0) == []
    store.add(f"{prefix}/{ABORTED}", 1)
    assert authority.decide({}, LATE, 0.0) == []
    (removal,) = authority.decide({}, LATE + 5.1 + SEARCH, 0.0)
    assert (removal.node, removal.kind) == ("c", "hang") and "not all of its ranks entered generation" in removal.why
    authority.lose(removal, 70.0)
    assert authority.decide({}, 70.0 + 2 * TOGETHER, 0.0) == []
    assert authority.generation is not None and set(authority.generation.nodes) == {"a", "b"}
