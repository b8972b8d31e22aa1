"""Order of transfers and computation in context parallelism: which transfers overlap, and that no buffer is lost."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest
import torch

from bench.attention_masks import MASKS
from interlace.comm import CommError, context_parallel_attention, run_local, shard, traced, unshard
from interlace.comm.overlap import context_parallel
from tests.attention import cases
from tests.comm.context_parallel import dealt

WORLD, CHUNKS = 3, 5


def what(event):
    """Operation name, equal in all events of its transfers."""
    operation, _, rest = event.label.partition(", ")
    assert operation == "context_parallel_attention"
    return rest


def one_pass(before=None, dtype=torch.float32, timeout=90.0):
    """Forward and backward with five chunks on three ranks: for each rank ([out, dq, dk, dv], the two traces)."""
    mask = MASKS["packed_images"](150)
    shards = dealt(mask, WORLD)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2 * CHUNKS, CHUNKS, 8, dtype))

    def rank(group):
        mine = [shard(x, shards, group.rank, dim=2).requires_grad_() for x in (q, k, v)]
        with traced(group) as forward:
            out = context_parallel_attention(*mine, mask, shards, heads_per_chunk=1)
        with traced(group) as backward:
            grads = torch.autograd.grad(out.square().sum(), mine)
        return [unshard(x.detach(), shards, dim=2) for x in (out, *grads)], (forward, backward)

    return run_local(WORLD, rank, before=before, timeout=timeout)


def delays(seed):
    """Adds up to 3 ms to every step of every transfer."""
    draws = [random.Random(f"{seed} {rank}") for rank in range(WORLD)]
    return lambda rank, what: time.sleep(draws[rank].random() * 0.003)


@pytest.mark.parametrize("seed", range(3))
def test_next_chunk_is_prefetched_before_attention_on_this_one(seed):
    for _, traces in one_pass(delays(seed)):
        for trace, kind in zip(traces, ("attention", "backward")):
            asked = {what(event): event.start for event in trace.of("issue")}
            computed = [event for event in trace.of("compute") if event.label.startswith(kind)]
            assert [event.label for event in computed] == [f"{kind}, key heads {n}:{n + 1}" for n in range(CHUNKS)]
            for number, event in enumerate(computed[:-1]):
                assert asked[f"gather of key heads {number + 1}:{number + 2}"] < event.start
            if kind == "backward":
                for number, following in enumerate(computed[1:]):
                    assert asked[f"gradients of key heads {number}:{number + 1}"] < following.start


@pytest.mark.parametrize("seed", range(3))
def test_no_buffer_is_rewritten_before_it_was_used(seed):
    for _, traces in one_pass(delays(seed)):
        for trace in traces:
            for buffer in range(2):
                name = f"buffer {buffer}, "
                written, read = (
                    [event for event in trace.of(kind) if event.label.startswith(name)] for kind in ("write", "read")
                )
                wanted = [f"{name}key heads {n}:{n + 1}" for n in range(buffer, CHUNKS, 2)]
                assert [event.label for event in written] == [event.label for event in read] == wanted
                for filled, used in zip(written, read):
                    assert filled.finish <= used.start
                for used, filled in zip(read, written[1:]):
                    assert used.finish <= filled.start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_when_things_arrive(dtype):
    wanted = one_pass(dtype=dtype)
    for seed in range(3):
        for (got, _), (same, _) in zip(one_pass(delays(seed), dtype), wanted):
            assert all(torch.equal(a, b) for a, b in zip(got, same))


def test_the_gradients_of_two_chunks_are_in_memory_at_most():
    for _, (_, trace) in one_pass(delays(0)):
        sent = {what(event): event.finish for event in trace.of("copy")}
        computed = [event for event in trace.of("compute") if event.label.startswith("backward")]
        for number, later in enumerate(computed[2:]):
            assert sent[f"gradients of key heads {number}:{number + 1}"] <= later.start


class Held:
    """Holds back a batch of every rank until the computation that should not need it calls `release`."""

    def __init__(self, batch: int) -> None:
        self.batch, self.posts, self.free = batch, Counter(), [threading.Event() for _ in range(WORLD)]

    def __call__(self, rank, what):
        if what == "post":
            if self.posts[rank] == self.batch:
                assert self.free[rank].wait(30), f"batch {self.batch} was waited for too early"
            self.posts[rank] += 1


# Batches are the gathers 0..4, then in the backward pass gathers 0, 1, 2, gradients 0, gather 3, gradients 1, ...
@pytest.mark.parametrize(
    ("function", "call", "batch"),
    [
        ("run_forward", 0, 1),  # attention to chunk 0 does not need chunk 1
        ("run_forward", 3, 4),
        ("run_backward", 0, CHUNKS + 1),
        ("run_backward", 1, CHUNKS + 2),  # chunk 1 needs neither chunk 2 nor the sums of chunk 0
        ("run_backward", 1, CHUNKS + 3),
        ("run_backward", 2, CHUNKS + 5),
    ],
)
def test_computation_waits_for_its_own_chunk_alone(monkeypatch, function, call, batch):
    held = Held(batch)
    compute, calls = getattr(context_parallel, function), Counter()

    def counted(*args, **options):
        rank = int(threading.current_thread().name.removeprefix("rank-"))
        result = compute(*args, **options)
        if calls[rank] == call:
            held.free[rank].set()
        calls[rank] += 1
        return result

    monkeypatch.setattr(context_parallel, function, counted)
    one_pass(held)
    assert set(calls.values()) == {CHUNKS} and all(event.is_set() for event in held.free)


def test_a_single_buffer_would_be_noticed(monkeypatch):
    """Test of the order check: with one buffer nothing is prefetched."""
    monkeypatch.setattr(context_parallel._GatheredHeads, "BUFFERS", 1)
    with pytest.raises(KeyError, match="gather of key heads 1:2"):
        for _, (trace, _) in one_pass():
            event = trace.of("compute")[0]
            asked = {what(asked): asked.start for asked in trace.of("issue") if asked.start < event.start}
            assert asked["gather of key heads 1:2"]


def test_a_rank_that_fails_takes_the_others_along():
    mask = MASKS["causal"](96)
    shards = dealt(mask, 2)
    q, k, v = (x.detach() for x in cases.tensors(mask, None, 2, 2, 8, torch.float32))

    def rank(group, heads):
        mine = [shard(x, shards, group.rank, dim=2) for x in (q, k, v)]
        if group.rank == 1 and heads is None:
            raise OSError("this rank ends here")
        return context_parallel_attention(*mine, mask, shards, heads_per_chunk=heads[group.rank] if heads else 1)

    start = time.monotonic()
    with pytest.raises(OSError, match="this rank ends here"):
        run_local(2, rank, None, timeout=100)
    with pytest.raises(CommError, match="programs differ"):
        run_local(2, rank, [1, 2], timeout=100)
    assert time.monotonic() - start < 60
