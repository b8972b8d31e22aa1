"""Kernels of the collectives: the sum over ranks in their order, and a copy that keeps to a given number of SMs.

Copy engines move bytes but cannot add, so what is reduced arrives as one row per rank and is added here: every row is
read once and the sum is kept in registers, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .bitfield_launch import Call

BLOCK = 2048
WARPS = 8


@triton.jit
def reduce_ranks_kernel(rows, own, out, length, rank, WORLD: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """out = rows[0] + rows[1] + ..., in that order; `own` stands for rows[rank], which nobody filled."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    total = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(WORLD):
        row = rows + r * length.to(tl.int64)
        if r == rank:
            row = own
        total += tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    if MEAN:
        total = tl.div_rn(total, tl.full([BLOCK], WORLD, tl.float32))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def copy_kernel(to, source, length, BLOCK: tl.constexpr):
    """to = source. Each program strides over the blocks, so the grid is the number of SMs taken."""
    for block in range(tl.program_id(0), tl.cdiv(length, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < length), mask=at < length)


def reduce_ranks_call(rows: Tensor, own: Tensor, rank: int, out: Tensor, *, mean: bool = False) -> Call:
    """rows [world, n], own [n], out [n]; contiguous, of one floating-point type other than float64."""
    world, length = rows.shape
    arguments = dict(
        rows=rows, own=own, out=out, length=length, rank=rank, WORLD=world, MEAN=mean, BLOCK=BLOCK
    )  # fmt: skip
    return Call(reduce_ranks_kernel, triton.cdiv(length, BLOCK), arguments, WARPS, 1)


def copy_call(to: Tensor, source: Tensor, programs: int) -> Call:
    """Contiguous tensors of n int32 each."""
    return Call(copy_kernel, programs, dict(to=to, source=source, length=to.numel(), BLOCK=BLOCK), WARPS, 1)


@triton.jit
def busy_kernel(out, steps, BLOCK: tl.constexpr):
    """Occupies thread slots for a while: `steps` dependent multiply-adds per thread, one element each."""
    x = tl.arange(0, BLOCK).to(tl.float32)
    for _ in range(steps):
        x = x * 0.999 + 1.0
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), x)


def busy_call(out: Tensor, steps: int) -> Call:
    """out: float32 [programs, 1024]; two programs fill the 2,048 thread slots of an SM."""
    return Call(busy_kernel, out.shape[0], dict(out=out, steps=steps, BLOCK=1024), 32, 1)
