"""The Gluon backend: the forward of `interlace.kernels.bitfield_gluon_forward` (TMA, a producer warp, two consumer
warpgroups) on Hopper, the Triton backend's backward. Same plan, same results up to rounding.

Chosen on Hopper for what it takes: on an H200 its forward was 1.3 to 1.5 times as fast as Triton's (docs/on-a-gpu.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from interlace.attention import triton as _triton
from interlace.attention.backend import Attention

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 128
BLOCK = 128

backward = _triton.backward
atomic_backward = _triton.atomic_backward


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Why this backend cannot run tensors like `q` and `v` [B, H, T, D] on this machine; None when it can."""
    if q.dtype not in DTYPES:
        return f"the Gluon kernel takes fp16 and bf16, not {q.dtype}"
    if q.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % 8:
        return f"the Gluon kernel takes head dimensions that are multiples of 8 up to {MAX_HEAD_DIM}, not {q.shape[-1]}"
    if q.shape[-1] != v.shape[-1]:
        return (
            f"the Gluon kernel takes one head dimension, not {q.shape[-1]} for q and k and {v.shape[-1]} for v: "
            'use "triton"'
        )
    if q.device.type != "cuda":
        return f"the Gluon kernel runs on Hopper GPUs, not on {q.device.type}; Triton's interpreter cannot run it"
    if (reason := _triton.why_not(q, v)) is not None:
        return reason
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(q.device)
        return f'the GPU has compute capability {major}.{minor}; the Gluon kernel is for 9.0 (Hopper): use "triton"'
    return _missing()


def forward(job: Attention) -> tuple[Tensor, Tensor]:
    """As backend.py says."""
    from interlace.kernels.bitfield_gluon_launch import gluon_forward_calls, loadable
    from interlace.kernels.bitfield_launch import on_device, positive_scale
    from interlace.kernels.prepared import launch

    q, k, v, plan, scale, softcap = job
    if plan.block != BLOCK:
        raise ValueError(
            f"the plan has blocks of {plan.block} tokens; the Gluon kernel needs {BLOCK}: AttentionPlan.build(mask)"
        )
    if min(q.shape[0], q.shape[2], k.shape[2]) == 0:  # a TMA descriptor cannot describe an empty tensor
        return _triton.forward(job)
    q, scale = positive_scale(q, scale)
    q, k, v = loadable(q), loadable(k), loadable(v)

    def calls() -> Any:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        return gluon_forward_calls(q, k, v, plan, out, lse, scale, softcap), [out, lse]

    with on_device(q.device):
        out, lse = launch(plan, ("gluon", scale, softcap), (q, k, v), calls)
    return out, lse


@cache
def _missing() -> str | None:
    try:
        from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma  # noqa: F401
    except ImportError as error:
        return f"this Triton has no Gluon for Hopper ({error}); it needs 3.6 or later"
    return None
