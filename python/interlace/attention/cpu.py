"""The CPU backend: C++ kernels over the non-empty blocks only, forward and backward (csrc/attention_cpu).

Scores are computed 64 queries by 64 keys at a time and stay in cache. Nothing of T x T, nor of T x block, is made.
Full blocks get no mask arithmetic; of partial blocks, 64 x 64 parts in which nothing is visible are skipped. Forward:
one work item per row of blocks, longest first. Backward: five products per tile in one pass; an item owns the key
gradients of one key head (or of a piece of it, summed in a fixed order). Results do not depend on timing; with another
number of threads the last bits of dk and dv may differ.

fp32 and fp64 are computed as they are, fp16 in fp32. So is bf16, unless the processor has AMX tiles: these multiply
bf16 and sum in fp32, with the softmax in fp32 and its weights (backward: and the gradients of the scores) rounded to
bf16 for their products, as on GPUs. Against exact attention, outputs then err as SDPA's in bf16 do (measured: 1.0 to
1.1 times its error), gradients as SDPA's or less. The instruction set is the best of AMX, AVX-512, AVX2 and 128-bit
vectors that processor and system allow (INTERLACE_CPU_ISA=avx512, avx2 or baseline asks for less). Where v has another
head dimension than q and k, AMX stands aside for AVX-512.

Memory beyond inputs and outputs: tiles (below 1 MiB per thread up to head dimension 128 and blocks of 1,024, some more
on AMX), at most 64 MiB for the bits of partial blocks, and, where dk and dv cannot be summed in place (16-bit types,
head dimensions that are no multiple of a vector, fewer key heads than threads), 4 Tk (D + Dv) bytes of sums for each
of as many key heads as fit 64 MiB, but always for one per thread. k and v are neither packed nor copied, but for 64
keys at a time on AMX.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interlace import _core
from interlace.attention.backend import Attention, accumulate_dtype
from interlace.attention.plan import AttentionPlan


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot run on `q` and `v`; None when it can."""
    if q.device.type != "cpu":
        return f"it runs on CPU tensors and q is on {q.device}"
    return None


def forward(job: Attention) -> tuple[Tensor, Tensor]:
    """As backend.py says."""
    q, k, v, plan, scale, softcap = job
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
    _core.attention_forward(
        _rows(q),
        _rows(k),
        _rows(v),
        **_mask(plan),
        scale=scale,
        softcap=softcap or 0.0,
        out=_array(out),
        lse=lse.numpy(),
    )
    return out, lse


def backward(
    job: Attention, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As backend.py says."""
    q, k, v, plan, scale, softcap = job
    dq = torch.empty(q.shape, dtype=q.dtype)
    dk, dv = (torch.empty(x.shape, dtype=accumulate_dtype(x.dtype) if wide else x.dtype) for x in (k, v))
    _core.attention_backward(
        _rows(dout),
        None if dlse is None else dlse.detach().contiguous().numpy(),
        _rows(q),
        _rows(k),
        _rows(v),
        _rows(out),
        lse.detach().contiguous().numpy(),
        **_mask(plan),
        scale=scale,
        softcap=softcap or 0.0,
        dq=_array(dq),
        dk=_array(dk),
        dv=_array(dv),
    )
    return dq, dk, dv


def _array(x: Tensor) -> Any:
    """The tensor's memory as a numpy array, which for bf16 is int16."""
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def _rows(x: Tensor) -> Any:
    """The same of an input, whose rows must lie contiguous."""
    x = x.detach()
    return _array(x if x.stride(-1) == 1 else x.contiguous())


def _mask(plan: AttentionPlan) -> dict[str, Any]:
    tensors = (
        plan.q_bits, plan.q_doc, plan.q_span, plan.q_pos, plan.q_window,
        plan.k_bits, plan.k_doc, plan.k_span, plan.k_pos,
        plan.full_q_ptr, plan.full_q_idx, plan.part_q_ptr, plan.part_q_idx,
    )  # fmt: skip
    return dict(
        mask=[tensor.numpy() for tensor in tensors], block=plan.block, sinks=plan.sinks, threads=torch.get_num_threads()
    )
