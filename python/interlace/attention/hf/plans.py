"""Plans derived from other plans or from FlashAttention's sequence boundaries, for `hf`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from interlace.attention.hf.limits import Limits
from interlace.attention.plan import AttentionPlan, traced_plan
from interlace.masks import CAUSAL, NO_WINDOW, BitfieldMask, Tokens, filled, word
from interlace.masks.values import keepable

MOST_PLANS = 16  # plans cached on one tensor of boundaries


def narrowed(plan: AttentionPlan, limits: Limits) -> AttentionPlan:
    """`plan` restricted to `limits`, spans included. Made once per plan and limits.

    Raises ValueError for a limit ahead of queries that are causal or have spans: a bitfield cannot express that.
    """
    if not limits.narrow:
        return plan
    if not keepable(plan.q_bits):
        return changed(plan, partial(_within, limits=limits))
    cache: dict[Limits, AttentionPlan] = plan.__dict__.setdefault("_narrowed", {})
    if limits not in cache:
        cache[limits] = changed(plan, partial(_within, limits=limits))
    return cache[limits]


def _within(q: Tokens, k: Tokens, *, limits: Limits) -> tuple[Tokens, Tokens]:
    if limits.chunk:
        q, k = _in_parts(q, k, q.pos // limits.chunk, k.pos // limits.chunk)
    if limits.back != math.inf:
        q = q._replace(window=q.window.clamp(max=int(limits.back)))
    if limits.ahead not in (0, math.inf):
        if bool(((q.doc >= 0) & ((q.bits < 0) | (q.span >= 0))).any()):
            raise ValueError(
                f"a layer sees at most {limits.ahead} positions ahead, which a plan that is causal or has spans cannot "
                "express: pass a plan with documents only"
            )
        ahead = int(limits.ahead)
        q = q._replace(bits=q.bits | CAUSAL, pos=q.pos + ahead, window=(q.window + ahead).clamp(max=NO_WINDOW))
    return q, k


def _in_parts(q: Tokens, k: Tokens, q_part: Tensor, k_part: Tensor) -> tuple[Tokens, Tokens]:
    """Split documents and spans into parts (documents must not share spans). Part -1: in no document."""
    q_doc, k_doc = _numbered(
        *(torch.where(part >= 0, _pairs(tokens.doc, part), -1) for tokens, part in ((q, q_part), (k, k_part)))
    )
    q_span, k_span = _numbered(_pairs(q.span, q_part.clamp(min=0)), _pairs(k.span, k_part.clamp(min=0)))
    return q._replace(doc=q_doc, span=q_span), k._replace(doc=k_doc, span=k_span)


def _pairs(ids: Tensor, part: Tensor) -> Tensor:
    """int64: one number for each pair of an id and a part, both int32, part not negative; -1 stays -1."""
    return torch.where(ids >= 0, (ids.long() << 31) | part.long(), -1)


def _numbered(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """int32: `q` and `k` renumbered to fit, with equality and order preserved; -1 stays -1.

    A number becomes its rank among all of them. So shapes do not depend on values, as compiled code requires.
    """
    ordered = torch.cat([q.flatten(), k.flatten()]).sort().values
    q_rank, k_rank = (
        torch.where(x >= 0, torch.searchsorted(ordered, x.contiguous(), out_int32=True), -1) for x in (q, k)
    )
    return q_rank, k_rank


def cut(plan: AttentionPlan, q_ends: Tensor, k_ends: Tensor) -> AttentionPlan:
    """`plan` without pairs between different sequences. q_ends and k_ends are as in packed_plan.

    The last result is cached on the plan, so that the layers of a model share it. Only the last one: boundaries are new
    in every step, while the plan may be the same in all steps.
    """
    if plan.batch != 1:
        raise ValueError(f"cu_seq_lens_q needs one row of packed sequences, but the batch is {plan.batch}")
    if not keepable(q_ends, k_ends):
        return _build_cut(plan, q_ends, k_ends)
    key = (id(q_ends), q_ends._version, id(k_ends), k_ends._version)
    cached: tuple[object, AttentionPlan, object] | None = plan.__dict__.get("_cut")
    if cached is None or cached[0] != key:  # the cached tensors stay alive, so that their ids in the key are not reused
        cached = plan.__dict__["_cut"] = (key, _build_cut(plan, q_ends, k_ends), (q_ends, k_ends))
    return cached[1]


def _build_cut(plan: AttentionPlan, q_ends: Tensor, k_ends: Tensor) -> AttentionPlan:
    q_part, k_part = _segments(q_ends, plan.q_len), _segments(k_ends, plan.k_len)
    return changed(plan, lambda q, k: _in_parts(q, k, q_part, k_part))


def changed(plan: AttentionPlan, change: Callable[[Tokens, Tokens], tuple[Tokens, Tokens]]) -> AttentionPlan:
    """The plan for the queries and keys of `plan` after `change`, with the same sinks and block size."""
    return _plan(*change(plan.queries(), plan.keys()), plan.sinks, plan.block)


def _plan(q: Tokens, k: Tokens, sinks: int = 0, block: int = 128) -> AttentionPlan:
    if torch.compiler.is_compiling():
        return traced_plan(q, k, sinks, block)
    queries, keys = BitfieldMask.from_tokens(q, sinks), BitfieldMask.from_tokens(k)
    return AttentionPlan.build(queries, keys, block=block)


def packed_plan(q_ends: Tensor, k_ends: Tensor, q_len: int, k_len: int, *, causal: bool) -> AttentionPlan:
    """Plan of sequences packed in one row, from FlashAttention's cu_seqlens. A sequence sees only itself.

    q_ends, k_ends: int [n + 1], 0 and then the end of each sequence among the queries and keys; tokens past the last
    end are padding. causal requires both to be equal. Cached on `q_ends`, so that the layers of a tower share one plan.
    Raises ValueError for boundaries that do not fit.
    """
    if not keepable(q_ends, k_ends):
        return _build_packed(q_ends, k_ends, q_len, k_len, causal)
    cache: dict[object, tuple[AttentionPlan, Tensor]] = q_ends.__dict__.setdefault("_interlace_plans", {})
    key = (q_ends._version, id(k_ends), k_ends._version, q_len, k_len, causal)
    if key not in cache:
        if len(cache) == MOST_PLANS:
            cache.clear()  # happens if boundaries are overwritten in place for each batch
        cache[key] = (_build_packed(q_ends, k_ends, q_len, k_len, causal), k_ends)
    return cache[key][0]


def _build_packed(q_ends: Tensor, k_ends: Tensor, q_len: int, k_len: int, causal: bool) -> AttentionPlan:
    if q_ends.shape != k_ends.shape:
        raise ValueError(
            f"cu_seq_lens_q has {q_ends.numel() - 1} sequences, but cu_seq_lens_k has {k_ends.numel() - 1}"
        )
    if causal:
        _require(
            (q_ends == k_ends).all(), "causal attention between packed sequences of different lengths is not supported"
        )
    sides = []
    for name, ends, length in (("q", q_ends, q_len), ("k", k_ends, k_len)):
        _require(ends[-1] <= length, f"cu_seq_lens_{name} ends after the last of {length} tokens")
        doc = _segments(ends, length).to(torch.int32)
        pos = torch.arange(length, dtype=torch.int32, device=ends.device).unsqueeze(0)
        bits = torch.full_like(doc, word(0, causal=causal), dtype=torch.int64)
        sides.append(filled(bits, pos, doc=doc))
    return _plan(sides[0], sides[1])


def _require(condition: Tensor, message: str) -> None:
    """Raise ValueError unless `condition` holds. Compiled code raises RuntimeError when it runs instead."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def _segments(ends: Tensor, length: int) -> Tensor:
    """int64 [1, length]: index of each token's sequence, -1 past the last one."""
    index = torch.searchsorted(ends, torch.arange(length, device=ends.device, dtype=ends.dtype), right=True) - 1
    return torch.where(index < ends.numel() - 1, index, -1).unsqueeze(0)
