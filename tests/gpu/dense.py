"""References of the GPU tests: dense attention in fp64, and by torch's operators in the tested dtype.

tests/judge.py defines the tolerance of 16-bit kernels, from the error of their dtype. In fp32 the error may be twice
torch's, plus 1e-5.

Only torch and pytest are imported, not hypothesis: these tests run on bare machines.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.attention import AttentionPlan, bitfield_attention
from interlace.masks import BitfieldMask
from tests import rehearsal
from tests.attention import cases
from tests.judge import judge

WHY_SKIPPED = "no CUDA device (INTERLACE_GPU_TESTS_ON=cpu rehearses these tests on the CPU backend)"


def find_device() -> torch.device | None:
    """The CUDA device, the one named by INTERLACE_GPU_TESTS_ON ("cpu", "rehearsal"), or None."""
    named = os.environ.get("INTERLACE_GPU_TESTS_ON")
    if named == rehearsal.NAME:
        rehearsal.start()
    if named:
        return torch.device(named)
    return torch.device("cuda", 0) if torch.cuda.is_available() else None


DEVICE = find_device()
ON_GPU = DEVICE is not None and DEVICE.type == "cuda"
LENGTH = 1000 if ON_GPU else 150  # no multiple of a block; short in rehearsals
# The compiler treats all strides that are multiples of 128 equally: at this head dimension all shapes share a
# compilation.
DIM = 128 if ON_GPU else 32


class Inputs(NamedTuple):
    """q [B, Hq, Tq, D]; k [B, Hkv, Tk, D]; v [B, Hkv, Tk, Dv]; dout [B, Hq, Tq, Dv]; dlse fp32 [B, Hq, Tq]; q, k and v
    require gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def inputs(
    mask: BitfieldMask, keys: BitfieldMask | None, dtype: torch.dtype, dim: int, heads: int = 4, kv_heads: int = 2,
    value_dim: int | None = None,
) -> Inputs:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    length = mask.length if keys is None else keys.length

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    q = tensor(mask.batch, heads, mask.length, dim)
    k, v = (tensor(mask.batch, kv_heads, length, columns) for columns in (dim, value_dim or dim))
    dout, dlse = tensor(*q.shape[:3], v.shape[3]), tensor(*q.shape[:3]).float()
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, dlse)


def ours(x: Inputs, plan: AttentionPlan, *, with_lse: bool = False, **options) -> Results:
    """Runs the op, with the gradient of the output alone or of both results."""
    poison(x)
    out, lse = bitfield_attention(x.q, x.k, x.v, plan, return_lse=True, **options)
    if with_lse:
        grads = torch.autograd.grad((out, lse), (x.q, x.k, x.v), (x.dout, x.dlse))
    else:
        grads = torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)
    return Results(out.detach(), lse.detach(), *grads)


def poison(x: Inputs) -> None:
    """Fills memory with NaN before results are allocated from it, so that an unwritten element is detected."""
    junk = [torch.full_like(tensor, torch.nan) for tensor in (x.q, x.k, x.v, x.dout, x.dlse) for _ in range(2)]
    del junk


def exact(x: Inputs, dense: Tensor, *, softcap: float | None = None, with_lse: bool = False) -> Results:
    """Dense attention in fp64. Rows without visible keys: 0, LSE -inf."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (x.q, x.k, x.v))
    out, lse = cases.oracle(q, k, v, dense, x.q.shape[3] ** -0.5, softcap)
    loss = (out * x.dout.double()).sum()
    if with_lse:
        seen = lse > -torch.inf
        loss = loss + (lse[seen] * x.dlse.double()[seen]).sum()
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v)))


def error(got: Tensor, wanted: Tensor) -> float:
    """||got - wanted|| / ||wanted|| over finite entries; infinities must be equal, and NaN gives NaN.

    If all wanted values are zero (dq of a query that sees one key), the result is the mean square instead of the
    quotient.
    """
    assert torch.equal(got.isinf(), wanted.isinf())
    got, wanted = (tensor.detach().double().masked_fill(tensor.isinf(), 0) for tensor in (got, wanted))
    if not wanted.numel():
        return 0.0
    root = wanted.numel() ** 0.5
    size = wanted.norm()
    return float((got - wanted).norm() / (size if size > 1e-6 * root else root))


def check(
    mask: BitfieldMask,
    keys: BitfieldMask | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    dim: int = DIM,
    value_dim: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    softcap: float | None = None,
    cap: int | None = None,
    with_lse: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
) -> None:
    """Checks output, LSE and gradients of one mask: shapes, dtypes, errors, and zeros in rows without visible keys."""
    mask, keys = mask.to(DEVICE), None if keys is None else keys.to(DEVICE)
    x = inputs(mask, keys, dtype, dim, heads, kv_heads, value_dim)
    dense = mask.to_dense(keys)
    plan = AttentionPlan.build(mask, keys, cap=cap)
    got = ours(x, plan, softcap=softcap, with_lse=with_lse, deterministic=deterministic, backend=backend)
    wanted = exact(x, dense, softcap=softcap, with_lse=with_lse)
    q, k, v = (tensor.detach() for tensor in (x.q, x.k, x.v))
    dlse = x.dlse if with_lse else torch.zeros_like(x.dlse)
    torchs = Results(*cases.in_its_dtype(q, k, v, dense, dim**-0.5, softcap, x.dout, dlse))
    for name, tensor, like in zip(Results._fields, got, (x.dout, x.dlse, x.q, x.k, x.v)):
        assert tensor.shape == like.shape and tensor.dtype == like.dtype, name
    assert error(got.lse, wanted.lse) <= (1e-5 if dtype == torch.float32 else 2e-3), "lse"
    for name in ("out", "dq", "dk", "dv"):
        one, other, right = (getattr(results, name) for results in (got, torchs, wanted))
        if dtype != torch.float32:
            judge(name, one, other, right)
        else:
            result, bound = error(one, right), 2 * error(other, right) + 1e-5
            assert result <= bound, f"{name} is off by {result:.2e}, allowed {bound:.2e}"
    blind = ~dense.any(-1)[:, None].expand(got.lse.shape)
    assert not got.out[blind].any() and not got.dq[blind].any() and (got.lse[blind] == -torch.inf).all()
