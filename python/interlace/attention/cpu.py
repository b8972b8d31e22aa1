"""The CPU backend: C++ kernels over the non-empty blocks only, forward and backward (csrc/attention_cpu).

Scores are computed 64 queries by 64 keys at a time and stay in cache. No array of size T x T or T x block is created.
Full blocks need no mask arithmetic. In partial blocks, 64 x 64 parts without visible pairs are skipped. Forward: one
work item per row of blocks, longest first. Backward: five products per tile in one pass. An item owns the key gradients
of one key head, or of a piece of it, summed in a fixed order. Results do not depend on timing. With another number of
threads the last bits of dk and dv may differ.

fp32 and fp64 are computed in their own precision, fp16 in fp32. bf16 is computed in fp32 too, unless the processor has
AMX tiles. AMX multiplies bf16 and sums in fp32. The softmax is in fp32; its weights (backward: and the gradients of the
scores) are rounded to bf16 for their products, as on GPUs. Compared with exact attention, the error of outputs is then
like that of SDPA in bf16 (measured: 1.0 to 1.1 times its error), the error of gradients like SDPA's or less. The
instruction set is the best of AMX, AVX-512, AVX2 and 128-bit vectors that processor and system allow
(INTERLACE_CPU_ISA=avx512, avx2 or baseline selects a lower one). If the head dimension of v differs from that of q and
k, AVX-512 is used instead of AMX.

Memory beyond inputs and outputs:
- tiles: below 1 MiB per thread up to head dimension 128 and blocks of 1,024, some more on AMX;
- bits of partial blocks: at most 64 MiB;
- sums of dk and dv, if they cannot be summed in place (16-bit types, head dimensions that are no multiple of a vector,
  fewer key heads than threads): 4 Tk (D + Dv) bytes for each of as many key heads as fit 64 MiB, at least one per
  thread.

k and v are neither packed nor copied, except for 64 keys at a time on AMX.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from interlace import _core
from interlace.attention.backend import Attention, accumulate_dtype
from interlace.attention.plan import KEYS, QUERIES


def unsupported(q: Tensor, v: Tensor) -> str | None:
    """Reason why this backend cannot run on `q` and `v`; None if it can."""
    if q.device.type != "cpu":
        return f"it runs on CPU tensors and q is on {q.device}"
    return None


def forward(job: Attention) -> tuple[Tensor, Tensor]:
    """See backend.py."""
    q, k, v = job.q, job.k, job.v
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
    _core.attention_forward(_rows(q), _rows(k), _rows(v), **_options(job), out=_array(out), lse=lse.numpy())
    return out, lse


def backward(
    job: Attention, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See backend.py."""
    q, k, v = job.q, job.k, job.v
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
        **_options(job),
        dq=_array(dq),
        dk=_array(dk),
        dv=_array(dv),
    )
    return dq, dk, dv


def _array(x: Tensor) -> NDArray[Any]:
    """The tensor's memory as a numpy array; int16 for bf16."""
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def _rows(x: Tensor) -> NDArray[Any]:
    """The memory of an input as a numpy array; its rows are made contiguous."""
    x = x.detach()
    return _array(x if x.stride(-1) == 1 else x.contiguous())


def _options(job: Attention) -> dict[str, Any]:
    """The arguments of both kernels beside the tensors."""
    plan = job.plan
    names = (*QUERIES, *KEYS, "full_q_ptr", "full_q_idx", "part_q_ptr", "part_q_idx")
    arrays = [getattr(plan, name).numpy() for name in names]
    threads, softcap = torch.get_num_threads(), job.softcap or 0.0
    return dict(mask=arrays, block=plan.block, sinks=plan.sinks, threads=threads, scale=job.scale, softcap=softcap)
