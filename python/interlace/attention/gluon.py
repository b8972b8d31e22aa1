"""The Gluon backend, for Hopper: kernels with TMA, a producer warp and two consumer warpgroups
(`interlace.kernels.bitfield_gluon_forward`, `bitfield_gluon_backward`). Same plan and, up to rounding, same results as
the Triton backend.

On Hopper its forward is chosen for all inputs that it supports. On an H200 an earlier version was 1.3 to 1.5 times as
fast as Triton's (docs/on-a-gpu.md). The present version and the backward have not run on a GPU yet. The backward runs
only if this backend is named.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interlace.attention import triton as _triton
from interlace.attention.backend import Attention

if TYPE_CHECKING:
    from interlace.kernels.bitfield_launch import Call

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 128
BLOCK = 128

BACKWARD_IS_CHOSEN = False
"""True: backend=None selects this backward whenever it selects this forward. Stays False until a GPU run shows that it
is correct and faster than Triton's."""


def unsupported(q: Tensor, v: Tensor) -> str | None:
    """Reason why this backend cannot run tensors like `q` and `v` [B, H, T, D] on this machine; None if it can."""
    if q.dtype not in DTYPES:
        return f"the Gluon kernel takes fp16 and bf16, not {q.dtype}"
    if q.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % 8:
        return f"the Gluon kernel takes head dimensions that are multiples of 8 up to {MAX_HEAD_DIM}, not {q.shape[-1]}"
    if q.shape[-1] != v.shape[-1]:
        return (
            f'the Gluon kernel needs equal head dimensions, but q has {q.shape[-1]} and v {v.shape[-1]}: use "triton"'
        )
    if q.device.type != "cuda":
        return f"the Gluon kernel runs on Hopper GPUs, not on {q.device.type}; Triton's interpreter cannot run it"
    if (reason := _triton.unsupported(q, v)) is not None:
        return reason
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(q.device)
        return f'the GPU has compute capability {major}.{minor}; the Gluon kernel is for 9.0 (Hopper): use "triton"'
    return _missing()


def forward(job: Attention) -> tuple[Tensor, Tensor]:
    """See backend.py."""
    from interlace.kernels.bitfield_gluon_launch import gluon_forward_calls, loadable
    from interlace.kernels.bitfield_launch import on_device, positive_scale
    from interlace.kernels.prepared import launch

    q, k, v, plan, scale, softcap = job
    _check_block(plan.block)
    if min(q.shape[0], q.shape[2], k.shape[2]) == 0:  # a TMA descriptor cannot describe an empty tensor
        return _triton.forward(job)
    q, scale = positive_scale(q, scale)
    q, k, v = loadable(q), loadable(k), loadable(v)

    def calls() -> tuple[list[Call], list[Tensor]]:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        return gluon_forward_calls(q, k, v, plan, out, lse, scale, softcap), [out, lse]

    with on_device(q.device):
        out, lse = launch(plan, ("gluon", scale, softcap), (q, k, v), calls)
    return out, lse


def unsupported_backward(job: Attention) -> str | None:
    """Reason why `backward` falls back to the Triton backend for `job`; None if it does not."""
    if job.softcap is not None:
        return "Gluon's backward has no softcap"
    if job.plan.part_q_map.shape[0] == 0 or job.plan.part_k_map.shape[0] == 0:
        return "Gluon's backward needs a plan with bitmaps"
    return None


def backward(
    job: Attention, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See backend.py. Unused rows are set to zero in shared memory, without a copy."""
    q, k, v, plan, scale, _ = job
    if unsupported_backward(job) is not None or min(q.shape[0], q.shape[2], k.shape[2]) == 0:
        return _triton.backward(job, out, lse, dout, dlse, wide)
    from interlace.kernels.bitfield_gluon_backward_launch import gluon_backward_calls
    from interlace.kernels.bitfield_gluon_launch import loadable
    from interlace.kernels.bitfield_launch import on_device
    from interlace.kernels.prepared import launch

    _check_block(plan.block)
    dout, q, k, v = loadable(dout), loadable(q), loadable(k), loadable(v)
    out, lse = out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()

    def calls() -> tuple[list[Call], list[Tensor]]:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.empty(x.shape, dtype=torch.float32 if wide else x.dtype, device=x.device) for x in (k, v))
        return gluon_backward_calls(dout, dlse, q, k, v, out, lse, plan, dq, dk, dv, scale), [dq, dk, dv]

    given = [q, k, v, out, lse, dout, *([] if dlse is None else [dlse])]
    with on_device(q.device):
        dq, dk, dv = launch(plan, ("gluon backward", scale, wide, dlse is None), given, calls)
    return dq, dk, dv


def _check_block(block: int) -> None:
    if block != BLOCK:
        raise ValueError(
            f"the plan has blocks of {block} tokens; the Gluon kernel needs {BLOCK}: AttentionPlan.build(mask)"
        )


@cache
def _missing() -> str | None:
    try:
        from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma  # noqa: F401
    except ImportError as error:
        return f"this Triton has no Gluon for Hopper ({error}); it needs 3.6 or later"
    return None
