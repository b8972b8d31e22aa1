"""The channel between threads: values against plain sums, bounded waits, and wake-up of waiters when a rank leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.comm.channels.base import Tag
from interlace.comm.channels.local import LocalChannel, LocalNetwork
from interlace.comm.process.errors import CommError
from tests.comm.channel_local import ARRIVED, DUE, out_of_order


def play(world: int, function: Callable[[LocalChannel], Any], timeout: float = 10.0) -> list[Any]:
    """function(channel) of every rank, each in a thread; returns the result or the exception of each."""
    network = LocalNetwork(world, timeout)
    results: list[Any] = ["did not end"] * world

    def main(rank: int) -> None:
        here = LocalChannel(rank, network)
        try:
            results[rank] = function(here)
        except CommError as error:
            results[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 10.0)
    return results


def test_the_words_for_a_tag() -> None:
    assert str(DUE) == "a[0] chunk 3"
    assert str(Tag("vision", 0, 3, 5, True)) == "gradient of vision[0] chunk 3 for chunk 5"


@settings(max_examples=25)
@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=6), st.integers(0, 10**6))
def test_a_step_gives_what_plain_code_gives(world: int, sums: list[tuple[bool, int]], seed: int) -> None:
    """Every rank sends to every other, with sums over all ranks and over the even ranks in flight."""
    generator = torch.Generator().manual_seed(seed)
    data = [[torch.randn(size, generator=generator) for _, size in sums] for _ in range(world)]
    groups = [list(range(0, world, 2)) if even else list(range(world)) for even, _ in sums]

    def step(here: LocalChannel) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, list[Any], int]:
        here.begin(seed)
        mine = [tensor.clone() for tensor in data[here.rank]]
        others = [peer for peer in range(world) if peer != here.rank]
        for peer in others:
            for k in range(2):
                here.send(torch.full((k, here.rank), 1.0), peer, Tag("a", 0, k, peer, False))
        pending = [
            here.start_all_reduce(tensor, group, f"sum {i}")
            for i, (tensor, group) in enumerate(zip(mine, groups, strict=True))
            if here.rank in group
        ]
        numbers = here.start_all_gather(torch.tensor([here.rank, 0.5], dtype=torch.float64), "numbers")
        came = [here.receive(peer, Tag("a", 0, k, here.rank, False)) for peer in others for k in range(2)]
        for peer in others:
            here.send(torch.zeros(0, peer), peer, Tag("a", 0, 0, here.rank, True))
        for peer in others:
            here.receive(peer, Tag("a", 0, 0, peer, True))
        for work in reversed(pending):
            work.wait()
            work.wait()
        here.finish()
        return mine, came, numbers.wait(), here.exchange([here.rank, "x"], "values"), here.collectives

    for rank, result in enumerate(play(world, step)):
        mine, came, numbers, values, collectives = result
        for i, group in enumerate(groups):
            total = data[group[0]][i].clone()
            for other in group[1:]:
                total += data[other][i]
            assert torch.equal(mine[i], total if rank in group else data[rank][i])
        assert [list(t.shape) for t in came] == [[k, peer] for peer in range(world) if peer != rank for k in range(2)]
        assert numbers.tolist() == [[other, 0.5] for other in range(world)] and numbers.dtype is torch.float64
        assert values == [[other, "x"] for other in range(world)] and collectives == 2


def test_reduce_scatter_and_gather_follow_rank_order() -> None:
    def step(here: LocalChannel) -> Any:
        if here.rank == 1:
            return None
        rows = torch.arange(4.0).view(2, 2) + here.rank
        mine = torch.tensor([float(here.rank)])
        scattered, brought = here.start_reduce_scatter(rows, [0, 2], "a"), here.start_gather(mine, [0, 2], "b")
        mine.zero_()  # the receiver has a copy
        result = scattered.wait().tolist(), brought.wait().tolist()
        scattered.wait().zero_()  # owned by this rank alone
        return result

    assert play(3, step) == [([2.0, 4.0], [[0.0], [2.0]]), None, ([6.0, 8.0], [[0.0], [2.0]])]


def test_what_is_sent_is_a_copy() -> None:
    def step(here: LocalChannel) -> Any:
        if here.rank == 0:
            tensor = torch.ones(2, requires_grad=True)
            here.send(tensor, 1, DUE)
            with torch.no_grad():
                tensor.zero_()
            return here.finish()
        return here.receive(0, DUE)

    came = play(2, step)[1]
    assert came.tolist() == [1.0, 1.0] and not came.requires_grad


def test_what_comes_before_it_is_due_is_kept() -> None:
    assert play(2, out_of_order)[1] == ARRIVED


def other_table(here: LocalChannel) -> Any:
    here.begin(here.rank)
    return here.send(torch.ones(1), 1, DUE) if here.rank == 0 else here.receive(0, DUE)


def other_table_in_a_gather(here: LocalChannel) -> Any:
    here.begin(here.rank)
    return here.start_all_gather(torch.ones(1, dtype=torch.float64), "the loss").wait()


def other_tag(here: LocalChannel) -> Any:
    if here.rank == 0:
        return here.send(torch.ones(1), 1, Tag("a", 0, 3, 4, True))
    return here.receive(0, DUE)


def other_gradient(here: LocalChannel) -> Any:
    if here.rank == 1:
        here.send(torch.ones(2), 0, DUE)
        return here.receive(0, DUE._replace(grad=True))
    here.receive(1, DUE)
    return here.send(torch.ones(3), 1, DUE._replace(grad=True))


def other_sum(here: LocalChannel) -> Any:
    return here.start_all_reduce(torch.ones(2), [0, 1], "ab"[here.rank]).wait()


def other_size(here: LocalChannel) -> Any:
    return here.start_all_reduce(torch.ones(2 + here.rank), [0, 1], "a").wait()


def other_occasion(here: LocalChannel) -> Any:
    return here.exchange(1, f"occasion {here.rank}")


def other_form(here: LocalChannel) -> Any:
    return here.exchange("x" if here.rank else 1, "the loss")


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (
            other_table,
            "rank 1, RECV a[0] chunk 3: rank 0 has another step table (000000000000, here 000000000001)",
        ),
        (other_table_in_a_gather, "rank 1, the loss: rank 0 has another step table"),
        (other_tag, "rank 1 expected a[0] chunk 3 from rank 0 but received gradient of a[0] chunk 3 for chunk 4"),
        (
            other_gradient,
            "rank 1: gradient of a[0] chunk 3 from rank 0 is torch.float32 [3], but torch.float32 [2] was",
        ),
        (other_sum, "rank 1 is in b, [2] float32, but rank 0 is in a, [2] float32: their lists differ"),
        (other_size, "rank 1 is in a, [3] float32, but rank 0 is in a, [2] float32"),
        (other_occasion, "rank 1 is in occasion 1, but rank 0 is in occasion 0"),
        (other_form, "rank 1, the loss: rank 0 sent a message of another form"),
    ],
)
def test_ranks_that_differ_are_told_what_differs(step: Callable[[LocalChannel], Any], says: str) -> None:
    error = play(2, step)[1]
    assert isinstance(error, CommError) and str(error).startswith(says), error


CALLS: dict[str, tuple[Callable[[LocalChannel], Any], str]] = {
    "receive": (lambda here: here.receive(1, DUE), "rank 0, RECV a[0] chunk 3: lost rank 1 ("),
    "sum": (
        lambda here: here.start_all_reduce(torch.ones(1), [0, 1], "x").wait(),
        "rank 0, REDUCE x: lost rank 1 (",
    ),
    "gather": (
        lambda here: here.start_all_gather(torch.ones(1, dtype=torch.float64), "the loss").wait(),
        "rank 0, the loss: lost rank 1 (",
    ),
    "exchange": (lambda here: here.exchange(1, "the loss"), "rank 0, the loss: lost rank 1 ("),
    "finish": (
        lambda here: (here.send(torch.ones(1), 1, DUE), here.finish()),
        "rank 0, SEND a[0] chunk 3: lost rank 1 (",
    ),
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("leaves", [False, True])
def test_every_wait_ends(name: str, leaves: bool) -> None:
    """After the timeout if the other rank never comes; at once if it reports that it aborts."""
    call, says = CALLS[name]

    def step(here: LocalChannel) -> Any:
        if here.rank == 0:
            return call(here)
        if leaves:
            time.sleep(0.05)
            here.leave("it had enough")
        return None

    error = play(2, step, timeout=60.0 if leaves else 0.2)[0]  # the message shows which of the two ended the wait
    reason = (
        "it aborted: it had enough)" if leaves else "no answer within 0.2 s: it hangs, or is slower than the timeout)"
    )
    assert str(error) == says + reason


def test_what_a_rank_sent_before_it_left_is_still_read() -> None:
    def step(here: LocalChannel) -> Any:
        if here.rank == 0:
            here.send(torch.ones(2), 1, DUE)
            return here.leave("done")
        time.sleep(0.05)
        return here.receive(0, DUE).tolist()

    assert play(2, step)[1] == [1.0, 1.0]


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="world must be at least 1"):
        LocalNetwork(0, 1.0)
    with pytest.raises(ValueError, match="rank must be 0 to 1, got 2"):
        LocalChannel(2, LocalNetwork(2, 1.0))
    with pytest.raises(ValueError, match=r"this rank is not one of \[1, 2\]"):
        LocalChannel(0, LocalNetwork(3, 1.0)).start_all_reduce(torch.ones(1), [1, 2], "x")
