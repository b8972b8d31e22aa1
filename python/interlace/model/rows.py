"""Packing kinds of a module: samples in one row, a row each, or a call each.

    "packed"  all samples concatenated in one row; the attention mask alone separates them
    "rows"    one sample per row, padded on the right: for layers that mix neighbouring tokens outside attention
              (linear attention, state spaces, convolutions). Items of an encoder: equal sizes form a batch
    "alone"   packed, with one call per sample or item: for everything else

A probe determines the packing kind of each module (probe/separation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask, Tokens, word
from interlace.parallel.sending import plan_to_device

PACKED, ROWS, ALONE = "packed", "rows", "alone"


class Document(NamedTuple):
    """Location of a document in a batch, [start, stop) of a row, and the plan of its tokens alone."""

    row: int
    start: int
    stop: int
    plan: AttentionPlan

    def of(self, tensor: Tensor | None) -> Any:
        """Its part [1, n, ...] of a tensor [B, T, ...]; None for None."""
        return None if tensor is None else tensor[self.row : self.row + 1, self.start : self.stop]


def padded(flat: Tensor, lengths: Tensor, fill: int) -> Tensor:
    """[T] of concatenated samples -> [B, longest], padded on the right."""
    valid = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    rows = flat.new_full(valid.shape, fill)
    rows[valid] = flat
    return rows


def documents(plan: AttentionPlan) -> list[Document]:
    """The documents of a batch in order; computed once per plan.

    Raises ValueError for a document whose tokens are not contiguous.
    """
    cached: list[Document] | None = plan.__dict__.get("_documents")
    if cached is None:
        cached, queries = [], plan.queries()
        for row, docs in enumerate(plan.q_doc):
            ids, counts = torch.unique_consecutive(docs, return_counts=True)
            valid = ids[ids >= 0]
            if len(valid.unique()) < len(valid):
                raise ValueError(
                    f"a document of row {row} is not contiguous, or has a token that sees nothing: put its tokens side "
                    "by side, each seeing at least itself"
                )
            for document, stop, count in zip(ids.tolist(), counts.cumsum(0).tolist(), counts.tolist()):
                if document >= 0:
                    tokens = Tokens(*(field[row : row + 1, stop - count : stop] for field in queries))
                    alone = AttentionPlan.build(BitfieldMask.from_tokens(tokens, plan.sinks), block=plan.block)
                    cached.append(Document(row, stop - count, stop, alone))
        plan.__dict__["_documents"] = cached
    return cached


def check_rows(plan: AttentionPlan) -> None:
    """Raise ValueError unless each row of a batch holds one document, padded on the right. Checked once per plan."""
    if "_has_rows" not in plan.__dict__:
        doc = plan.q_doc
        first = doc[:, :1].expand_as(doc)
        inside = torch.arange(doc.shape[1], device=doc.device) < (doc >= 0).sum(1, keepdim=True)
        if bool((torch.where(inside, doc != first, doc >= 0) | (inside & (first < 0))).any()):
            raise ValueError(
                "a row of the batch has several samples, padding on the left or a token that sees nothing, but this "
                "language model mixes neighbouring tokens outside attention: give each sample a row, padded on "
                "the right (doc = -1), as mllm.collate does"
            )
        plan.__dict__["_has_rows"] = True


def longest(plan: AttentionPlan) -> int:
    """Tokens of the longest document, derived from the positions; computed once per plan."""
    if "_longest" not in plan.__dict__:
        positions = 1 + int(torch.where(plan.q_doc >= 0, plan.q_pos, -1).max()) if plan.q_pos.numel() else 0
        plan.__dict__["_longest"] = positions
    return int(plan.__dict__["_longest"])


def packed_plan(lengths: Sequence[int]) -> AttentionPlan:
    """Plan of items concatenated in one row; each attends to all of itself and to nothing else."""
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    doc = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32, device="cpu"), counts).unsqueeze(0)
    bits = torch.full(doc.shape, word(0), dtype=torch.int64, device="cpu")
    return AttentionPlan.build(BitfieldMask(bits, doc=doc))


@lru_cache(maxsize=64)
def full_plan(batch: int, length: int, device: torch.device) -> AttentionPlan:
    """Plan of a batch of equal items; each attends to all of itself. Cached, to avoid another copy to the GPU."""
    return plan_to_device(AttentionPlan.build(BitfieldMask.full(batch, length, device="cpu")), device)
