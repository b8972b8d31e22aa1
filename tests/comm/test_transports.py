"""Guarantees of every transport: copies, their order, signals and errors."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from interlace.comm import CommError, Transport, all_gather_into_tensor, connect, run_local
from interlace.comm.transports import Copy
from interlace.comm.transports.base import peers_of
from tests.comm.jobs import TIMEOUT, batches, data, on_ranks, on_shm_threads
from tests.sampling import given_by_tier

KINDS = ["local", "shm", "gloo"]
on_every_transport = pytest.mark.parametrize("kind", KINDS)


# ---------------------------------------------------------------------- copies


@on_every_transport
@pytest.mark.parametrize("world", [2, 3])
def test_any_copies_arrive_in_order(pool: Any, kind: str, world: int) -> None:
    on_ranks(pool, kind, world, batches, 12)


@given_by_tier(25, 100, st.data())
def test_pieces_of_any_tensors_pass_through_few_slots(draw: Any) -> None:
    """Every rank sends any of its tensors to any rank, the same ones to several peers, in any order."""
    world = draw.draw(st.integers(2, 4))
    lengths = draw.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=4))
    chosen = st.lists(st.integers(0, len(lengths) - 1), max_size=4)
    table = {(a, b): draw.draw(chosen) for a in range(world) for b in range(world) if a != b}
    sources = [[data(rank, (n,), torch.int64, seed) for seed, n in enumerate(lengths)] for rank in range(world)]

    def rank(group: Transport) -> bool:
        peers = peers_of(group.rank, world)
        outgoing = [Copy(peer, sources[group.rank][n]) for peer in peers for n in table[group.rank, peer]]
        wanted = [(peer, sources[peer][n]) for peer in peers for n in table[peer, group.rank]]
        incoming = [Copy(peer, torch.full_like(tensor, -1)) for peer, tensor in wanted]
        for _ in range(2):
            group.copy_batch(outgoing, incoming, "any").wait()
        return all(torch.equal(result, tensor) for (_, result), (_, tensor) in zip(incoming, wanted))

    assert on_shm_threads(world, rank) == [True] * world


def test_a_piece_for_several_ranks_is_copied_in_once() -> None:
    staged: list[int] = []

    def rank(group: Transport) -> None:
        group.before = lambda rank, step: staged.append(rank) if step == "stage" else None
        all_gather_into_tensor(torch.empty(3 * 5000), data(group.rank, (5000,), torch.float32), group)

    on_shm_threads(3, rank)
    assert sorted(staged) == sorted([0, 1, 2] * 5)  # 20,000 bytes in pieces of 4096


def test_what_cannot_be_sent_is_refused_before_anything_moves() -> None:
    def rank(group: Transport) -> None:
        x, peer = torch.zeros(4), 1 - group.rank
        for copy, message in [
            (Copy(group.rank, x), "is not another rank"),
            (Copy(2, x), "is not another rank"),
            (Copy(peer, x[::2]), "not contiguous"),
            (Copy(peer, torch.empty(2, device="meta")), "is on meta"),
        ]:
            with pytest.raises(ValueError, match=message):
                group.copy_batch([copy], [], "wrong")
        group.copy_batch([Copy(peer, x)], [Copy(peer, x.clone())], "right").wait()

    run_local(2, rank)


# ---------------------------------------------------------------------- barriers


def barriers(group: Transport) -> list[float]:
    """Times at which each barrier was entered and left."""
    times = []
    for late in range(group.world):
        if late == group.rank:
            time.sleep(0.05)
        times.append(time.monotonic())
        group.barrier()
        times.append(time.monotonic())
    return times


@on_every_transport
def test_nobody_leaves_a_barrier_before_all_have_come(pool: Any, kind: str) -> None:
    ranks = on_ranks(pool, kind, 3, barriers)  # one host: one clock
    for barrier in range(3):
        assert min(times[2 * barrier + 1] for times in ranks) >= max(times[2 * barrier] for times in ranks)


# ---------------------------------------------------------------------- errors


def failing(group: Transport, how: str) -> str:
    """Error of this rank when rank 1 calls something else; afterwards every operation fails."""
    odd, peers = group.rank == 1, peers_of(group.rank, group.world)
    mine, length = torch.ones(6), 5 if odd and how == "sizes" else 6
    outgoing = [Copy(peer, mine[:length]) for peer in peers]
    label = "something else" if odd and how == "label" else "the operation"

    def then() -> None:
        if odd and how == "then":
            raise ZeroDivisionError("by the callback")

    ticket = group.copy_batch(outgoing, [Copy(peer, torch.empty(6)) for peer in peers], label, then)
    with pytest.raises(CommError) as error:
        # If the callback fails, the other ranks have their data, and miss this rank only later.
        later = group.copy_batch([], [], "a later batch")
        ticket.wait()
        later.wait()
    with pytest.raises(CommError, match="failed before: connect again"):
        group.copy_batch([], [], "after that")
    group.close()
    with pytest.raises(CommError, match="is closed"):
        group.copy_batch([], [], "after closing")
    return str(error.value)


def forgets(group: Transport) -> str:
    """Rank 1 drops its transport without closing it; rank 0 then waits for it."""
    if group.rank == 1:
        return ""
    with pytest.raises(CommError) as error:
        group.barrier()
        group.barrier()
    return str(error.value)


def forgotten(rank: int, kind: str) -> str:
    return forgets(connect(transport=kind, timeout=TIMEOUT))


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_peers_of_a_transport_that_was_forgotten_are_told(pool: Any, kind: str) -> None:
    start = time.monotonic()
    said, _ = pool.returned(2, forgotten, kind)
    assert re.match(r"rank 0, (wait|signal|barrier): lost rank 1", said) and time.monotonic() - start < TIMEOUT, said


def closes(rank: int, kind: str) -> tuple[bool, float, str]:
    """Rank 0 closes while a batch waits for rank 1, which comes afterwards."""
    group, said = connect(transport=kind, timeout=TIMEOUT), ""
    if rank == 0:
        ticket = group.copy_batch([Copy(1, torch.ones(4))], [Copy(1, torch.empty(4))], "the operation")
        time.sleep(0.1)
        start = time.monotonic()
        group.close()
        with pytest.raises(CommError):
            ticket.wait()
        seconds, alive = time.monotonic() - start, group._thread.is_alive()
        dist.barrier()
        return alive, seconds, said
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(CommError) as error:
        for _ in range(2):
            group.copy_batch([Copy(0, torch.ones(4))], [Copy(0, torch.empty(4))], "the operation").wait()
    return False, time.monotonic() - start, str(error.value)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_closing_ends_what_waits_and_tells_the_peers(pool: Any, kind: str) -> None:
    (alive, patience, _), (_, seconds, said) = pool.returned(2, closes, kind)
    assert not alive and patience < TIMEOUT / 2
    assert seconds < TIMEOUT / 2 and re.match("rank 1, the operation: lost rank 0", said), (seconds, said)


def test_a_failed_batch_fails_whenever_it_is_waited_for() -> None:
    def rank(group: Transport) -> None:
        ticket = group.copy_batch([], [], f"operation {group.rank}")
        for _ in range(2):
            with pytest.raises(CommError, match=f"operation {group.rank}"):
                ticket.wait()
        assert ticket.done()

    run_local(2, rank)


@on_every_transport
@pytest.mark.parametrize("how", ["label", "sizes", "then"])
def test_a_rank_that_does_something_else_is_named_everywhere(pool: Any, kind: str, how: str) -> None:
    said = on_ranks(pool, kind, 3, failing, how)
    assert all(re.match(rf"rank {rank}\b", text) for rank, text in enumerate(said)), said
    # A closing connection may lose sent data: over gloo, at least one rank reports the cause.
    quantify = any if kind == "gloo" else all
    others = [said[0], said[2]]
    assert quantify("rank 1" in text for text in others), said
    if how == "then":
        assert "ZeroDivisionError: by the callback" in said[1], said
    if how == "label":
        assert quantify("the operation" in text and "something else" in text for text in said), said
    if how == "sizes":
        assert any("rank 1 sends 5 float32, 6 float32 expected" in text for text in said), said
