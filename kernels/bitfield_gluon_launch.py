"""Launches of the Gluon forward, as `Call`s like those of `bitfield_launch`.

Apart from it because importing Gluon takes a Triton that has it, which the other kernels do not need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .bitfield_aggregate import merge_kernel
from .bitfield_gluon_forward import CONSUMER_REGISTERS, PRODUCER_REGISTERS, gluon_forward_kernel
from .bitfield_gluon_producer import BLOCK, HALF
from .bitfield_launch import Call, aggregate_call, block_count, query_lists, size_arguments, slot_count, token_arguments

STAGES = {64: 4, 80: 4, 96: 3, 128: 2}  # K and V tiles in flight, by padded head dimension: at most 160 KiB beside Q
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def gluon_forward_calls(
    q: Tensor, k: Tensor, v: Tensor, plan: Any, out: Tensor, lse: Tensor, scale: float, softcap: float | None
) -> list[Call]:
    """As forward_calls, on sm_90: 16-bit tensors that `loadable` passes, one head_dim up to 128, blocks of 128."""
    heads, head_dim = q.shape[1], q.shape[3]
    padded = next(columns for columns in STAGES if head_dim <= columns)
    main = 128 if padded == 128 else 64  # boxes have 2^n columns: 80 are 64 and 16
    sides = ((q, HALF.value), (k, BLOCK.value), (v, BLOCK.value))
    q_desc, k_desc, v_desc = (descriptor(x, rows, main) for x, rows in sides)
    q_rest, k_rest, v_rest = (descriptor(x, rows, padded - main) if padded > main else None for x, rows in sides)
    slots = slot_count(plan.slot_row)
    slot_out = q.new_empty((slots, heads, plan.block, head_dim), dtype=torch.float32)
    slot_lse = q.new_empty((slots, heads, plan.block), dtype=torch.float32)
    calls = [
        Call(
            gluon_forward_kernel,
            plan.work_row.numel() * heads,
            dict(
                q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, q_rest=q_rest, k_rest=k_rest, v_rest=v_rest,
                out=out, lse=lse, slot_out=slot_out, slot_lse=slot_lse,
                **query_lists(plan), **token_arguments(plan), **size_arguments(q, k, plan),
                q_blocks=block_count(plan.q_bits, plan.block), scale=scale, softcap=softcap or 0.0,
                HEAD_DIM=head_dim, BLOCK_D=main, REST=padded - main, STAGES=STAGES[padded],
                SOFTCAP=softcap is not None,
                PRODUCER_REGISTERS=PRODUCER_REGISTERS, CONSUMER_REGISTERS=CONSUMER_REGISTERS,
            ),
            4,
            1,
        )
    ]  # fmt: skip
    if slots:
        calls.append(
            aggregate_call(
                merge_kernel, plan.row_slots, plan.slot_row, plan, out, 90,
                slot_out=slot_out, slot_lse=slot_lse, out=out, lse=lse,
            )
        )  # fmt: skip
    return calls


def loadable(x: Tensor) -> Tensor:
    """x [B, H, T, D], copied if TMA cannot load it in place: it wants unit columns, every other stride a multiple of 16
    bytes, none of them 0, and a base at a multiple of 16 bytes."""
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape) if size > 1]
    fits = x.stride(3) == 1 and all(stride > 0 and stride % 8 == 0 for stride in strides) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int, columns: int) -> Any:
    box = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[x.dtype])
    strides = [stride if size > 1 else x.shape[3] for stride, size in zip(x.stride()[:3], x.shape)]  # any will do
    return TensorDescriptor(x, list(x.shape), [*strides, 1], box, layout)
