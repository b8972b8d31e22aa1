"""Races: 200 repetitions of a call under memory load from another thread give bitwise equal results.

Results are allocated in memory filled with NaN, so that an unwritten element is detected too.
"""

from __future__ import annotations

import pytest
import torch

from interlace.attention import AttentionPlan
from interlace.attention.op import run_backward, run_forward
from interlace.masks import BitfieldMask
from tests.attention import cases
from tests.attention.backends import directions
from tests.memory_load import memory_load

REPEATS = 200


def results(inputs, plan, softcap=None):
    """[out, lse, dq, dk, dv] by the CPU backend, in memory filled with NaN before."""
    q, k, v, dout, dlse = inputs
    junk = [torch.full_like(x, torch.nan) for x in inputs for _ in range(2)]
    del junk
    out, lse = run_forward(q, k, v, plan, 0.3, softcap, "cpu")
    return [out, lse, *run_backward(dout, dlse, q, k, v, out, lse, plan, 0.3, softcap, True, "cpu")]


def race(mask, keys, dtype, *, threads, heads, dims, block, cap=None, softcap=None):
    q, k, v = (x.detach() for x in cases.tensors(mask, keys, *heads, dims[0], dtype, dims[1]))
    dout = torch.empty((*q.shape[:3], dims[1]), dtype=dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(dtype, torch.float32))
    inputs = (q, k, v, *directions(dout, lse))
    plan = AttentionPlan.build(mask, keys, block=block, cap=cap)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wanted = results(inputs, plan, softcap)
        with memory_load():
            for turn in range(REPEATS):
                for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), results(inputs, plan, softcap), wanted):
                    assert torch.equal(one, other), (name, turn)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [3, 5])
def test_the_same_bits_every_time(threads, dtype):
    """More threads than key heads, so that key gradients are sums of pieces, and widths that fill no vector.

    2 threads are not tested: on 2 cores OpenMP spins while it waits, which takes tens of seconds under load.
    """
    mask, keys = cases.masks()["packed"]
    race(mask, keys, dtype, threads=threads, heads=(4, 2), dims=(20, 12), block=16, cap=2)


def test_plans_are_the_same_every_time():
    mask, keys = cases.masks()["multimodal"]
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        wanted = AttentionPlan.build(mask, keys, block=16, cap=2).tensors()
        with memory_load():
            for _ in range(REPEATS):
                for one, other in zip(AttentionPlan.build(mask, keys, block=16, cap=2).tensors(), wanted):
                    assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("threads", "heads"), [(2, (2, 1)), (3, (6, 3)), (8, (4, 2))])
def test_the_same_bits_every_time_at_the_size_of_real_blocks(threads, heads, dtype):
    mask = BitfieldMask.pack([BitfieldMask.causal(1, 300), BitfieldMask.causal(1, 150, window=70, sinks=3)])
    for dims in ((64, 64), (96, 64)):
        race(mask, None, dtype, threads=threads, heads=heads, dims=dims, block=128, softcap=5.0)
