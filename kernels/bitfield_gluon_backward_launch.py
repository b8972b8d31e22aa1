"""Launches of the Gluon backward, as `Call`s like those of `bitfield_launch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .bitfield_aggregate import sum_kernel
from .bitfield_gluon_backward import gluon_key_gradient_kernel
from .bitfield_gluon_launch import descriptor
from .bitfield_gluon_producer import HALF
from .bitfield_gluon_query_gradient import gluon_query_gradient_kernel
from .bitfield_launch import Call, aggregate_call, block_count, delta_call, key_lists, query_lists, slot_count

# Pairs of streamed tiles in flight: 128 KiB at head dimension 128, beside 64 that are held. At least 3: dQ waits for
# the tile after next before it hands one back.
STAGES = 4


def gluon_backward_calls(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Any,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: float,
) -> list[Call]:  # fmt: skip
    """As backward_calls, on sm_90: 16-bit tensors that `loadable` passes (dout, q, k, v), one head_dim up to 128, a
    plan of blocks of 128 with bitmaps."""
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[3]
    padded = 64 if head_dim <= 64 else 128
    delta, lse2, first = delta_call(dout, dlse, q, v, out, lse, plan, 90)
    names = ("q_desc", "k_desc", "v_desc", "do_desc")
    shared = dict(
        {name: descriptor(x, HALF.value, padded) for name, x in zip(names, (q, k, v, dout))},
        padded=delta.shape[2], group=heads // kv_heads, scale=scale,
        HEAD_DIM=head_dim, BLOCK_D=padded, STAGES=STAGES,
    )  # fmt: skip
    slot_dq = q.new_empty((slot_count(plan.slot_row), heads, plan.block, head_dim), dtype=torch.float32)
    slots = (slot_count(plan.slot_k_row), kv_heads, plan.block, head_dim)
    slot_dk, slot_dv = (k.new_empty(slots, dtype=torch.float32) for _ in range(2))
    calls = [
        first,
        Call(
            gluon_query_gradient_kernel,
            plan.work_row.numel() * heads,
            dict(
                shared, lse2=lse2, delta=delta, dq=dq, slot_dq=slot_dq, **_without_mapped(query_lists(plan)),
                q_doc=plan.q_doc, heads=heads, q_length=q.shape[2], q_blocks=block_count(plan.q_bits, plan.block),
                PRODUCER_REGISTERS=40, CONSUMER_REGISTERS=232,
            ),
            4,
            1,
        ),
        Call(
            gluon_key_gradient_kernel,
            plan.work_k_row.numel() * kv_heads,
            dict(
                shared, lse2_desc=_row_descriptor(lse2), delta_desc=_row_descriptor(delta),
                dk=dk, dv=dv, slot_dk=slot_dk, slot_dv=slot_dv, **_without_mapped(key_lists(plan)),
                k_doc=plan.k_doc, heads=kv_heads, k_length=k.shape[2], k_blocks=block_count(plan.k_bits, plan.block),
                PRODUCER_REGISTERS=24, CONSUMER_REGISTERS=240,
            ),
            4,
            1,
        ),
    ]  # fmt: skip
    for slot, grad, lists in ((slot_dq, dq, "row"), (slot_dk, dk, "k_row"), (slot_dv, dv, "k_row")):
        if slot.shape[0]:
            rows = plan.row_slots if lists == "row" else plan.row_k_slots
            calls.append(
                aggregate_call(
                    sum_kernel, rows, getattr(plan, f"slot_{lists}"), plan, grad, 90, slot_grad=slot, grad=grad
                )
            )
    return calls


def _without_mapped(lists: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in lists.items() if name != "MAPPED"}


def _row_descriptor(x: Tensor) -> Any:
    """Of all elements of x, fp32 and contiguous, in boxes of 64."""
    box = [HALF.value]
    return TensorDescriptor(x, [x.numel()], [1], box, gl.NVMMASharedLayout.get_default_for(box, gl.float32))
