"""Misuse that would give wrong numbers is refused: two threads on one transport, and memory passed twice."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from interlace.comm import (
    CommError,
    EmulatedTransport,
    Transport,
    all_gather_into_tensor,
    all_gather_matmul,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
    resolve,
    run_local,
)
from interlace.comm.transports.base import Forwarding
from tests.comm.jobs import TIMEOUT, on_ranks

# ---------------------------------------------------------------------- threads


class Held(Forwarding):
    """A transport whose n-th batch stays in flight until it is released."""

    def __init__(self, inner: Transport, batch: int) -> None:
        super().__init__(inner)
        self.batch = batch
        self.reached, self.go = threading.Event(), threading.Event()

    def copy_batch(self, *arguments: Any) -> Any:
        if self.batch == 0:
            self.reached.set()
            assert self.go.wait(TIMEOUT)
        self.batch -= 1
        return self.inner.copy_batch(*arguments)


def both(group: Transport, first: Callable[[Transport], object], second: Callable[[Transport], object]) -> list[str]:
    """Errors of two threads; the second one calls while the first is in the middle of its operation."""
    held, said = Held(group, batch=0), ["", ""]

    def run(number: int, operation: Callable[[Transport], object]) -> None:
        try:
            operation(held)
        except CommError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=run, args=each, name=f"user {each[0]}") for each in enumerate((first, second))]
    threads[0].start()
    assert held.reached.wait(TIMEOUT)
    threads[1].start()
    threads[1].join()
    held.go.set()
    threads[0].join()
    return said


def product(group: Transport) -> None:
    all_gather_matmul(torch.ones(4, 3), [torch.ones(2, 3)], group=group, num_chunks=2)


def reduction(group: Transport) -> None:
    all_reduce(torch.ones(4), group=group)


def pair(group: Transport) -> list[str]:
    return both(group, product, reduction)


@pytest.mark.parametrize("kind", ["local", "shm", "gloo"])
def test_a_second_thread_is_refused_and_all_ranks_are_told(pool: Any, kind: str) -> None:
    for rank, (first, second) in enumerate(on_ranks(pool, kind, 2, pair)):
        assert re.match(
            rf"rank {rank}, all_reduce: thread user 1 uses the {kind} transport while thread user 0 is in all_gather_"
            r"matmul: .*\(comm.connect\)$",
            second,
        ), second
        assert f"the {kind} transport is closed" in first or f"the {kind} transport failed before" in first, first


def test_a_thread_of_autograd_is_refused_too() -> None:
    """Python has no name for it: the error has its number."""

    def rank(group: Transport) -> str:
        group._user, group._use = threading.Lock(), (12345, "backward of all_reduce")  # type: ignore[attr-defined]
        entered = threading.Event()
        left = threading.Event()

        def other() -> None:
            with group._user:  # type: ignore[attr-defined]
                entered.set()
                left.wait(TIMEOUT)

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(TIMEOUT)
        with pytest.raises(CommError, match="while thread number 12345 is in backward of all_reduce") as error:
            all_reduce(torch.ones(4), group=group)
        left.set()
        thread.join()
        return str(error.value)

    run_local(2, rank)


def one_after_the_other(group: Transport) -> list[float]:
    """The forward pass here, the backward pass in another thread, the next step in a third; async work that
    overlaps."""
    result: list[float] = []

    def do(function: Callable[[], object]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    for step in range(3):
        x = torch.full((4,), float(group.rank + step), requires_grad=True)
        output = torch.empty(4 * group.world)
        work = all_gather_into_tensor(output, x, group, async_op=True)  # not waited for yet

        def ahead(output: Tensor = output, work: Any = work) -> None:
            y = torch.ones(2)
            all_reduce(y, group=group)
            work.wait()
            (output * torch.arange(output.numel())).sum().backward()
            result.extend(y.tolist())

        do(ahead)
        result.extend(x.grad.tolist())
        do(group.barrier)
    return result


@pytest.mark.parametrize("kind", ["local", "shm", "gloo"])
def test_threads_may_use_a_transport_one_after_the_other(pool: Any, kind: str) -> None:
    for rank, result in enumerate(on_ranks(pool, kind, 2, one_after_the_other)):
        assert result == [2.0, 2.0, *(2.0 * (4 * rank + n) for n in range(4))] * 3


def test_alone_any_threads_may() -> None:
    """A single rank has no order to keep and no waiting peers."""
    group, results = resolve(None), []

    def work() -> None:
        for _ in range(50):
            x = torch.ones(3)
            all_reduce(x, group=group)
            results.append(x.sum().item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [3.0] * 200


def first_use_by_threads(rank: int) -> list[float]:
    """Two threads with a simultaneous first call on one process group: it connects once."""
    transports: list[Transport] = []
    threads = [threading.Thread(target=lambda: transports.append(resolve(None))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert transports[0] is transports[1]
    x = torch.ones(2)
    all_reduce(x, group=dist.group.WORLD)
    return x.tolist()


def test_a_group_is_connected_once_whichever_thread_comes_first(pool: Any) -> None:
    assert pool.returned(2, first_use_by_threads) == [[2.0, 2.0]] * 2


# ---------------------------------------------------------------------- memory


def overlaps(group: Transport, emulated: bool = False) -> int:
    """All ways in which output and input may share memory: valid ones work, the others are refused."""
    if emulated:
        group = EmulatedTransport(group, bandwidth=1e9)
    rank, world, n = group.rank, group.world, 6
    everyone = [torch.arange(float(n * world)) + 100 * r for r in range(world)]
    refused = "output and input share memory, so input would be overwritten before it is read"
    tried = 0

    def check(call: Callable[[], object], found: Tensor, wanted: Tensor | None) -> None:
        nonlocal tried
        tried += 1
        if wanted is None:
            before = found.clone()
            with pytest.raises(ValueError, match=refused):
                call()
            assert torch.equal(found, before)
        else:
            call()
            assert torch.equal(found, wanted), (found, wanted)

    gathered = torch.cat([whole[r * n : (r + 1) * n] for r, whole in enumerate(everyone)])
    beside, another = rank * n + (1 if rank + 1 < world else -1), (rank + 1) % world * n
    for start, wanted in ((rank * n, gathered), (beside, None), (another, None)):
        whole = everyone[rank].clone()
        check(lambda w=whole, m=whole[start : start + n]: all_gather_into_tensor(w, m, group), whole, wanted)

    total = sum(everyone)[rank * n : (rank + 1) * n]
    whole = everyone[rank].clone()
    mine = whole[rank * n : (rank + 1) * n]
    check(lambda: reduce_scatter_tensor(mine, whole, group=group), mine, total)
    for start in (beside, another):
        whole = everyone[rank].clone()
        check(lambda w=whole, m=whole[start : start + n]: reduce_scatter_tensor(m, w, group=group), whole, None)

    exchanged = torch.cat([whole.view(world, n)[rank] for whole in everyone])
    whole = everyone[rank].clone()
    check(lambda: all_to_all_single(whole, whole, group=group), whole, None)
    check(lambda: all_to_all_single(whole, whole.view(world, n).flatten(), group=group), whole, None)
    longer = torch.cat([everyone[rank], torch.zeros(3)])
    check(lambda: all_to_all_single(longer[3:], longer[:-3], group=group), longer, None)
    check(lambda: all_to_all_single(whole, whole.clone(), group=group), whole, exchanged)

    # Neighbours in one storage share no memory, and strided tensors are copied.
    double = torch.cat([everyone[rank], torch.zeros(n * world)])
    halves = double.view(2, -1)
    check(lambda: all_to_all_single(halves[1], halves[0], group=group), halves[1], exchanged)
    woven = torch.stack([everyone[rank], torch.zeros(n * world)], 1)
    check(lambda: all_to_all_single(woven[:, 1], woven[:, 0], group=group), woven[:, 1], exchanged)
    # Tensors saved for a backward pass may not be written, even in place.
    whole = everyone[rank].clone().requires_grad_() * 1.0
    mine = whole.detach()[rank * n : (rank + 1) * n].requires_grad_()
    check(lambda: all_gather_into_tensor(whole.detach(), mine, group), whole.detach(), None)
    group.barrier()
    return tried


@pytest.mark.parametrize("kind", ["local", "shm", "gloo"])
def test_overlapping_output_and_input_are_refused_if_unsafe(pool: Any, kind: str) -> None:
    assert len(set(on_ranks(pool, kind, 3, overlaps))) == 1


def test_memory_given_twice_over_an_emulated_link_and_alone() -> None:
    run_local(2, overlaps, True)
    alone = resolve(None)
    x = torch.arange(4.0)
    all_gather_into_tensor(x, x, alone)
    reduce_scatter_tensor(x, x, group=alone)
    assert x.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="share memory"):  # as with more ranks
        all_to_all_single(x, x, group=alone)


def test_a_transport_is_not_left_in_use_by_what_fails() -> None:
    def rank(group: Transport) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="has no gradient"):
                all_reduce(torch.ones(2, requires_grad=True) * 1, dist.ReduceOp.MAX, group)
        thread = threading.Thread(target=group.barrier)
        thread.start()
        thread.join()

    run_local(2, rank)
