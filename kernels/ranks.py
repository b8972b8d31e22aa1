"""Kernels of the collectives: the sum over ranks in their order, and a copy that keeps to a given number of SMs.

Copy engines move bytes but cannot add, so what is reduced arrives as one tensor per rank and is added here: each is
read once and the sum is kept in registers, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .bitfield_launch import Call

BLOCK = 2048
MAX_PARTS = 8
WARPS = 8


@triton.jit
def reduce_ranks_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, out, length, WORLD: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """out = p0 + p1 + ..., the first WORLD of them, in that order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    total = tl.load(p0 + at, mask=inside, other=0.0).to(tl.float32)
    if WORLD > 1:
        total += tl.load(p1 + at, mask=inside, other=0.0).to(tl.float32)
    if WORLD > 2:
        total += tl.load(p2 + at, mask=inside, other=0.0).to(tl.float32)
    if WORLD > 3:
        total += tl.load(p3 + at, mask=inside, other=0.0).to(tl.float32)
    if WORLD > 4:
        total += tl.load(p4 + at, mask=inside, other=0.0).to(tl.float32)
    if WORLD > 5:
        total += tl.load(p5 + at, mask=inside, other=0.0).to(tl.float32)
    if WORLD > 6:
        total += tl.load(p6 + at, mask=inside, other=0.0).to(tl.float32)
    if WORLD > 7:
        total += tl.load(p7 + at, mask=inside, other=0.0).to(tl.float32)
    if MEAN:
        total = tl.div_rn(total, tl.full([BLOCK], WORLD, tl.float32))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def copy_kernel(to, source, length, BLOCK: tl.constexpr):
    """to = source. Each program strides over the blocks, so the grid is the number of SMs taken."""
    for block in range(tl.program_id(0), tl.cdiv(length, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < length), mask=at < length)


def reduce_ranks_call(parts: Sequence[Tensor], out: Tensor, *, mean: bool = False) -> Call:
    """parts, at most MAX_PARTS, and out: contiguous, of one length, floating-point but not float64."""
    pointers = {f"p{r}": parts[min(r, len(parts) - 1)] for r in range(MAX_PARTS)}
    arguments = dict(**pointers, out=out, length=out.numel(), WORLD=len(parts), MEAN=mean, BLOCK=BLOCK)
    return Call(reduce_ranks_kernel, triton.cdiv(out.numel(), BLOCK), arguments, WARPS, 1)


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
