"""The Triton backend: allocates results and runs the kernels of `interlace.kernels.bitfield_*`.

Runs on NVIDIA GPUs of compute capability 8.0 and later. Also runs on CPU tensors in Triton's interpreter
(TRITON_INTERPRET=1 in the environment before triton is imported), to test its arithmetic without a GPU. `forward` and
`backward` are deterministic: the same inputs give the same bits. The op uses `atomic_backward` under
deterministic=False. It adds dQ by atomics in the dK/dV kernel: 5 matrix products instead of 7, dQ summed in any order.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interlace.attention.backend import Attention

if TYPE_CHECKING:
    from interlace.kernels.bitfield_launch import Call

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


def unsupported(q: Tensor, v: Tensor) -> str | None:
    """Reason why this backend cannot run tensors like `q` and `v` [B, H, T, D] on this machine; None if it can."""
    if (reason := _missing()) is not None:
        return reason
    if q.dtype not in DTYPES:
        return f"the Triton kernels take fp16, bf16 and fp32, not {q.dtype}"
    if (widest := max(q.shape[-1], v.shape[-1])) > MAX_HEAD_DIM:
        return f"the Triton kernels take head dimensions up to {MAX_HEAD_DIM}, not {widest}"
    interpreted = _interpreted()
    if q.device.type == "cpu":
        if not interpreted:
            return "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
    elif q.device.type != "cuda":
        return f"the Triton kernels run on CUDA devices, not on {q.device.type}"
    elif torch.version.hip is not None:
        return "the Triton kernels are tuned for NVIDIA GPUs and untested on ROCm"
    elif not interpreted and torch.cuda.get_device_capability(q.device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(q.device)
        return f"the GPU has compute capability {major}.{minor}; the Triton kernels need 8.0"
    return None


def forward(job: Attention) -> tuple[Tensor, Tensor]:
    """See backend.py."""
    from interlace.kernels.bitfield_launch import architecture_of, forward_calls, on_device, positive_scale, precision
    from interlace.kernels.prepared import launch

    q, k, v, plan, scale, softcap = job
    _check_block(plan.block)
    q, scale = positive_scale(q, scale)
    q, k, v = _rows(q), _rows(k), _rows(v)

    def calls() -> tuple[list[Call], list[Tensor]]:
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        made = forward_calls(q, k, v, plan, out, lse, scale, softcap, architecture_of(q.device))
        return made, [out, lse]

    with on_device(q.device):
        out, lse = launch(plan, ("forward", scale, softcap, precision(q.dtype)), (q, k, v), calls)
    return out, lse


def backward(
    job: Attention, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wide: bool, *, fused: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See backend.py. fused: see `atomic_backward`."""
    from interlace.kernels.bitfield_launch import architecture_of, backward_calls, can_fuse, on_device, precision
    from interlace.kernels.prepared import launch

    q, k, v, plan, scale, softcap = job
    _check_block(plan.block)
    dout, q, k, v = _rows(dout), _rows(q), _rows(k), _rows(v)
    out, lse = out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    fused = fused and can_fuse(q, v, architecture_of(q.device))
    inputs = [q, k, v, out, lse, dout, *([] if dlse is None else [dlse])]
    if fused:  # kernels accumulate dq into it
        inputs.append(torch.zeros(q.shape, dtype=torch.float32, device=q.device))

    def calls() -> tuple[list[Call], list[Tensor]]:
        dq = inputs[-1] if fused else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.empty(x.shape, dtype=torch.float32 if wide else x.dtype, device=x.device) for x in (k, v))
        launches = backward_calls(
            dout, dlse, q, k, v, out, lse, plan, dq, dk, dv, scale, softcap, architecture_of(q.device), fused=fused
        )
        return launches, [dk, dv, *([] if fused else [dq])]

    options = ("backward", scale, softcap, precision(q.dtype), wide, fused, dlse is None)
    with on_device(q.device):
        dk, dv, *rest = launch(plan, options, inputs, calls)
    return rest[0] if rest else inputs[-1].to(q.dtype), dk, dv


atomic_backward = partial(backward, fused=True)
"""Like backward, but the last bits of dq change from run to run. Needs 4 bytes more per element of q.

For fp32, for head dimensions above 128 and before Hopper this is `backward` (see bitfield_tiles.has_fused).
"""


def _rows(x: Tensor) -> Tensor:
    """Make the last dimension contiguous. Kernels accept any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_block(block: int) -> None:
    if block < 16 or block & (block - 1):
        raise ValueError(
            f"the plan has blocks of {block} tokens; the Triton kernels need a power of two from 16 on: "
            "AttentionPlan.build(mask, block=128)"
        )


@cache
def _missing() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error}); install triton, or a GPU build of torch that brings it"
    return None


@cache
def _interpreted() -> bool:
    from interlace.kernels.bitfield_common import INTERPRETED

    return INTERPRETED.value
