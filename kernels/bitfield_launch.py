"""Kernel launches from tensors and a plan: arguments, grids, tiles and work buffers.

Each function returns the launches of one pass as `Call`s, in order. The attention backend runs them; `ahead_of_time`
compiles the very same objects (made of meta tensors) for a named architecture without a GPU, so what the static gate
checks is what runs.

A work item is a program of its own, in the plan's longest-first order, heads varying fastest. That is list scheduling
by decreasing length done by the hardware, which starts the next program wherever one ends. A persistent kernel would
either stride over the list, which fixes beforehand what each SM gets and loses that balance, or take items from an
atomic counter, which does what the hardware does at the cost of a counter to reset in every launch, and of registers
that live across items. What it could gain is the overlap of one item's end with the next one's first loads.

``plan`` is anything with the tensors of ``interlace.attention.AttentionPlan``.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bitfield_aggregate import merge_kernel, sum_kernel
from .bitfield_backward import delta_kernel, key_gradient_kernel, query_gradient_kernel
from .bitfield_common import INTERPRETED
from .bitfield_forward import forward_kernel
from .bitfield_tiles import FORWARD, FUSED_GRADIENT, KEY_GRADIENT, QUERY_GRADIENT, choose, has_fused, keys_apart

AGGREGATE_ROWS = 16
AGGREGATE_WARPS = 8  # with 4, Triton 3.6 spills at padded head dimensions
DELTA_ROWS = 32
DELTA_WARPS = 8  # the same, at head dimension 256


@dataclass(frozen=True)
class Call:
    """One kernel launch. `arguments` has every parameter by name: tensors, numbers and constexprs."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """Name of the kernel and of its variant: fused, of keys, of values."""
        if not self.arguments.get("OF_VALUES", True):
            return self.kernel.__name__ + " of keys"
        if not self.arguments.get("OF_KEYS", True):
            return self.kernel.__name__ + " of values"
        return self.kernel.__name__ + (" fused" if self.arguments.get("FUSED") else "")

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options. Fused multiply-add is asked for: Triton 3.10 will no longer have it by default."""
        return dict(num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=True)

    def run(self) -> Any:
        """Launches, if there is anything to do; returns the compiled kernel, None where Triton interprets."""
        return self.kernel[(self.programs,)](**self.arguments, **self.options) if self.programs else self


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context: Triton launches on the current device, which need not be the tensors' own."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


def architecture_of(device: torch.device) -> int:
    """10 * the major compute capability of a CUDA device; 0 in the interpreter."""
    if INTERPRETED.value:
        return 0
    return 10 * torch.cuda.get_device_capability(device)[0]


def block_d(head_dim: int, architecture: int) -> int:
    """The head dimension rounded up to what kernels use: a power of two, on GPUs at least 64.

    (Tiles narrower than a warpgroup's 64 faulted on Hopper with 4 or more warps.)
    """
    return max(1 << (head_dim - 1).bit_length(), 64 if architecture else 16)


def _dims(q: Tensor, v: Tensor, architecture: int) -> dict[str, int]:
    """The head dimensions of q and k, and of v and out, as constexprs; both padded."""
    head_dim, value_dim = q.shape[3], v.shape[3]
    return dict(
        HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim, architecture),
        VALUE_DIM=value_dim, BLOCK_V=block_d(value_dim, architecture),
    )  # fmt: skip


def _padded(dims: dict[str, Any]) -> bool:
    return dims["HEAD_DIM"] != dims["BLOCK_D"] or dims["VALUE_DIM"] != dims["BLOCK_V"]


def can_fuse(q: Tensor, v: Tensor, architecture: int) -> bool:
    """Whether backward_calls(fused=True) is there for tensors like q and v."""
    padded = (block_d(x.shape[3], architecture) for x in (q, v))
    return has_fused(architecture, *padded, float32=q.dtype == torch.float32)


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """(q, scale) with the same products and a scale above 0, so that the largest score is that of the largest product.
    Forward kernels then need one fused multiply-add per score."""
    if scale > 0:
        return q, scale
    return (q * (0.0 if scale == 0 else -1.0), -scale or 1.0)


def forward_calls(
    q: Tensor, k: Tensor, v: Tensor, plan: Any, out: Tensor, lse: Tensor, scale: float, softcap: float | None,
    architecture: int,
) -> list[Call]:  # fmt: skip
    """out [B, Hq, Tq, D] contiguous, lse fp32 [B, Hq, Tq] contiguous: attention, then the merge of split rows.

    scale is above 0 (see positive_scale).
    """
    heads, value_dim = q.shape[1], v.shape[3]
    dims = _dims(q, v, architecture)
    padded = (dims["BLOCK_D"], dims["BLOCK_V"])
    tile = choose(
        FORWARD, architecture, *padded, plan.block,
        float32=q.dtype == torch.float32, capped=softcap is not None, bounded=_padded(dims),
    )  # fmt: skip
    slots = slot_count(plan.slot_row)
    slot_out = q.new_empty((slots, heads, plan.block, value_dim), dtype=torch.float32)
    slot_lse = q.new_empty((slots, heads, plan.block), dtype=torch.float32)
    strides, align = _strides(q=q, k=k, v=v)
    calls = [
        Call(
            forward_kernel,
            plan.work_row.numel() * (plan.block // tile.m) * heads,
            dict(
                q=q, k=k, v=v, out=out, lse=lse, slot_out=slot_out, slot_lse=slot_lse,
                **query_lists(plan), **token_arguments(plan), **strides, **size_arguments(q, k, plan),
                q_blocks=block_count(plan.q_bits, plan.block),
                scale=scale, softcap=softcap or 0.0, **dims, BLOCK=plan.block,
                BLOCK_M=tile.m, BLOCK_N=tile.n, ALIGN=align,
                SOFTCAP=softcap is not None, **_arithmetic(q),
            ),
            tile.warps,
            tile.stages,
        )
    ]  # fmt: skip
    if slots:
        calls.append(
            aggregate_call(
                merge_kernel, plan.row_slots, plan.slot_row, plan, out, architecture,
                slot_out=slot_out, slot_lse=slot_lse, out=out, lse=lse,
            )
        )  # fmt: skip
    return calls


def backward_calls(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Any,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: float, softcap: float | None, architecture: int,
    *, fused: bool = False,
) -> list[Call]:  # fmt: skip
    """dq, dk, dv (contiguous, shapes of q, k, v): delta, dQ and its sums, dK/dV and their sums.

    fused (if can_fuse): one kernel for the three gradients, which adds to dq by atomics; dq must be fp32 and zero.
    """
    dims = _dims(q, v, architecture)
    delta, lse2, first = delta_call(dout, dlse, q, v, out, lse, plan, architecture)
    strides, align = _strides(q=q, k=k, v=v, dout=dout)
    shared = dict(
        q=q, k=k, v=v, dout=dout, lse2=lse2, delta=delta, **token_arguments(plan), **strides,
        **size_arguments(q, k, plan), scale=scale, softcap=softcap or 0.0, **dims, BLOCK=plan.block, ALIGN=align,
        SOFTCAP=softcap is not None, **_arithmetic(q),
    )  # fmt: skip
    calls = [first]
    if not fused:
        calls += _query_gradient_calls(q, plan, dq, shared, architecture)
    return calls + _key_gradient_calls(q, k, v, plan, dq, dk, dv, shared, architecture, fused)


def delta_call(
    dout: Tensor, dlse: Tensor | None, q: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Any, architecture: int
) -> tuple[Tensor, Tensor, Call]:
    """(delta, lse2, the launch that fills them): [B, Hq, padded], the number of queries rounded up to whole blocks."""
    padded = block_count(plan.q_bits, plan.block) * plan.block
    delta, lse2 = (lse.new_empty((*lse.shape[:2], padded)) for _ in range(2))
    dims = _dims(q, v, architecture)
    strides, align = _strides(dout=dout)
    arguments = dict(
        out=out, dout=dout, lse=lse, dlse=lse if dlse is None else dlse, q_doc=plan.q_doc, delta=delta, lse2=lse2,
        **strides, heads=q.shape[1], length=q.shape[2], padded=padded,
        VALUE_DIM=dims["VALUE_DIM"], BLOCK_V=dims["BLOCK_V"], BLOCK_M=DELTA_ROWS, ALIGN=align,
        HAS_DLSE=dlse is not None,
    )  # fmt: skip
    programs = q.shape[0] * q.shape[1] * -(-padded // DELTA_ROWS)
    return delta, lse2, Call(delta_kernel, programs, arguments, DELTA_WARPS, 1)


def _query_gradient_calls(q: Tensor, plan: Any, dq: Tensor, shared: dict[str, Any], architecture: int) -> list[Call]:
    heads = q.shape[1]
    tile = choose(
        QUERY_GRADIENT, architecture, shared["BLOCK_D"], shared["BLOCK_V"], plan.block,
        float32=q.dtype == torch.float32, capped=shared["SOFTCAP"], bounded=_padded(shared),
    )  # fmt: skip
    slots = slot_count(plan.slot_row)
    slot_dq = q.new_empty((slots, heads, plan.block, q.shape[3]), dtype=torch.float32)
    calls = [
        Call(
            query_gradient_kernel,
            plan.work_row.numel() * (plan.block // tile.m) * heads,
            dict(
                shared, dq=dq, slot_dq=slot_dq, **query_lists(plan), q_blocks=block_count(plan.q_bits, plan.block),
                BLOCK_M=tile.m, BLOCK_N=tile.n,
            ),
            tile.warps,
            tile.stages,
        )
    ]  # fmt: skip
    if slots:
        calls.append(
            aggregate_call(
                sum_kernel, plan.row_slots, plan.slot_row, plan, dq, architecture, slot_grad=slot_dq, grad=dq
            )
        )
    return calls


def _key_gradient_calls(
    q: Tensor, k: Tensor, v: Tensor, plan: Any, dq: Tensor, dk: Tensor, dv: Tensor, shared: dict[str, Any],
    architecture: int, fused: bool,
) -> list[Call]:  # fmt: skip
    kv_heads = k.shape[1]
    kernel = FUSED_GRADIENT if fused else KEY_GRADIENT
    float32, capped = q.dtype == torch.float32, shared["SOFTCAP"]
    tile = choose(
        kernel, architecture, shared["BLOCK_D"], shared["BLOCK_V"], plan.block,
        float32=float32, capped=capped, bounded=_padded(shared),
    )  # fmt: skip
    slots = slot_count(plan.slot_k_row)
    slot_dk, slot_dv = (x.new_empty((slots, kv_heads, plan.block, x.shape[3]), dtype=torch.float32) for x in (k, v))
    arguments = dict(
        shared, dq=dq, dk=dk, dv=dv, slot_dk=slot_dk, slot_dv=slot_dv, **key_lists(plan), heads=kv_heads,
        k_blocks=block_count(plan.k_bits, plan.block), BLOCK_M=tile.m, BLOCK_N=tile.n, FUSED=fused,
    )  # fmt: skip
    programs = plan.work_k_row.numel() * (plan.block // tile.n) * kv_heads
    apart = keys_apart(architecture, shared["BLOCK_D"], shared["BLOCK_V"], float32=float32)
    parts = [dict(OF_KEYS=True, OF_VALUES=False), dict(OF_KEYS=False, OF_VALUES=True)]
    calls = [
        Call(key_gradient_kernel, programs, arguments | part, tile.warps, tile.stages)
        for part in (parts if apart and not fused else [dict(OF_KEYS=True, OF_VALUES=True)])
    ]
    if slots:
        for slot, grad in ((slot_dk, dk), (slot_dv, dv)):
            calls.append(
                aggregate_call(
                    sum_kernel, plan.row_k_slots, plan.slot_k_row, plan, grad, architecture, slot_grad=slot, grad=grad
                )
            )
    return calls


def aggregate_call(
    kernel: Any, row_slots: Tensor, slot_row: Tensor, plan: Any, result: Tensor, architecture: int, **tensors: Tensor
) -> Call:
    """result: [B, heads, length, columns], which the partial results of split rows are for."""
    rows = min(AGGREGATE_ROWS, plan.block)
    return Call(
        kernel,
        slot_row.numel() * (plan.block // rows) * result.shape[1],
        dict(
            **tensors, row_slots=row_slots, slot_row=slot_row,
            heads=result.shape[1], length=result.shape[2], blocks=-(-result.shape[2] // plan.block),
            HEAD_DIM=result.shape[3], BLOCK_D=block_d(result.shape[3], architecture), BLOCK=plan.block, BLOCK_M=rows,
        ),
        AGGREGATE_WARPS,
        1,
    )  # fmt: skip


def slot_count(slot_row: Tensor) -> int:
    """Room for partial results of split rows; 0 where no row is split, for then the list is two entries of padding."""
    return slot_row.numel() if slot_row.numel() > 2 else 0


def query_lists(plan: Any) -> dict[str, Any]:
    return dict(
        full_ptr=plan.full_q_ptr, full_idx=plan.full_q_idx, part_ptr=plan.part_q_ptr, part_idx=plan.part_q_idx,
        part_map=plan.part_q_map, MAPPED=plan.part_q_map.shape[0] > 0,
        work_row=plan.work_row, work_start=plan.work_start, work_stop=plan.work_stop, work_slot=plan.work_slot,
    )  # fmt: skip


def key_lists(plan: Any) -> dict[str, Any]:
    return dict(
        full_ptr=plan.full_k_ptr, full_idx=plan.full_k_idx, part_ptr=plan.part_k_ptr, part_idx=plan.part_k_idx,
        part_map=plan.part_k_map, MAPPED=plan.part_k_map.shape[0] > 0,
        work_row=plan.work_k_row, work_start=plan.work_k_start, work_stop=plan.work_k_stop, work_slot=plan.work_k_slot,
    )  # fmt: skip


def token_arguments(plan: Any) -> dict[str, Tensor]:
    names = ("q_bits", "q_doc", "q_span", "q_pos", "q_window", "k_bits", "k_doc", "k_span", "k_pos")
    return {name: getattr(plan, name) for name in names}


def size_arguments(q: Tensor, k: Tensor, plan: Any) -> dict[str, int]:
    return dict(
        heads=q.shape[1], group=q.shape[1] // k.shape[1], q_length=q.shape[2], k_length=k.shape[2], sinks=plan.sinks
    )


def block_count(bits: Tensor, block: int) -> int:
    return -(-bits.shape[1] // block)


def precision(dtype: torch.dtype) -> str:
    """fp32 inputs get exact products unless torch was told that TF32 will do (as in scaled_dot_product_attention).

    fp32_precision follows the older allow_tf32, which raises once somebody has set the newer one.
    """
    exact = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return "ieee" if exact else "tf32"


def _arithmetic(q: Tensor) -> dict[str, Any]:
    return dict(PRECISION=precision(q.dtype), UPCAST=INTERPRETED.value and q.dtype == torch.bfloat16)


def _strides(**tensors: Tensor) -> tuple[dict[str, int], int]:
    """{name}_stride_{b,h,t} of each tensor, divided by `align` elements, which divide them all.

    Triton sees only whether an argument is a multiple of 16; with the factor outside, head dimensions such as 72 still
    load 16 bytes at a time.
    """
    strides = {
        f"{name}_stride_{axis}": stride if size > 1 else 0
        for name, tensor in tensors.items()
        for axis, stride, size in zip("bht", tensor.stride(), tensor.shape)
    }
    align = 8 if math.gcd(*strides.values()) % 8 == 0 else 1
    return {name: stride // align for name, stride in strides.items()}, align
