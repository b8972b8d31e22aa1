"""Calls of mask functions in every supported version of transformers, and dense masks to compare."""

from __future__ import annotations

import inspect

import torch
from transformers import masking_utils
from transformers.masking_utils import (
    sdpa_mask,
)

from interlace.attention import hf
from interlace.masks import BitfieldMask

BATCH = 2


def blocks(ids):
    """transformers' blockwise_overlay, which early versions lack."""
    if hasattr(masking_utils, "blockwise_overlay"):
        return masking_utils.blockwise_overlay(ids)

    def blockwise_overlay(block_sequence_ids):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            q_group, kv_group = block_sequence_ids[batch_idx, q_idx], block_sequence_ids[batch_idx, kv_idx]
            return (q_group == kv_group) & (q_group >= 0)

        inner_mask.__qualname__ = "blockwise_overlay.<locals>.inner_mask"
        return inner_mask

    return blockwise_overlay(ids)


def ask(function, q_length, kv_length, *, offset=0, attention_mask=None, ask=hf.make_mask, **kwargs):
    """Calls a mask interface with the arguments of the installed version of transformers."""
    queries = {"q_length": q_length, "q_offset": offset, "device": "cpu"}
    if "cache_position" in inspect.signature(sdpa_mask).parameters:
        queries = {"cache_position": torch.arange(q_length) + offset}
    return ask(
        batch_size=BATCH,
        kv_length=kv_length,
        mask_function=function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **queries,
        **kwargs,
    )


def dense(mask):
    """bool [B, Q, K] of a carrier or a dense mask."""
    if not hasattr(mask, "interlace_plan"):
        return mask[:, 0]
    plan = mask.interlace_plan[0]
    q = BitfieldMask(plan.q_bits, doc=plan.q_doc, span=plan.q_span, pos=plan.q_pos, window=plan.q_window)
    return q.to_dense(BitfieldMask(plan.k_bits, doc=plan.k_doc, span=plan.k_span, pos=plan.k_pos))
