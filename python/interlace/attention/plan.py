"""AttentionPlan: which blocks of the score matrix hold anything, as lists that kernels walk.

Built once per microbatch from a BitfieldMask and used by every layer, head and pass. A block is EMPTY (no pair of it
is visible), FULL (every pair is) or PARTIAL, exactly. A block that is short because the sequence ends is never FULL:
kernels test bounds, as they test the mask, in PARTIAL blocks alone.

A query that sees nothing and a key that nobody sees belong to no document in a plan, as padding does in a mask: q_doc
and k_doc are -1 there. Who sees whom stays as it was, and kernels know by one number whose rows must not enter a
product, where 0 times what they hold (NaN, infinity) would be NaN.

Bounds per block (document, position and span ranges, OR and AND of the bits) decide most blocks, groups of them at
once, and only the rest are looked at element by element. Nothing of size T x T ever exists (dissertation 3.4.2;
Cornstarch 2025-11 section 6.1 evaluates every element instead).

For GPUs a plan holds the predicate of its PARTIAL blocks as bitmaps, once along queries (part_q_map, entry by entry
like part_q_idx) and once along keys: 2 KiB each. All heads, layers and passes read them in place of the words,
documents, spans and positions of 256 tokens. They are made where the plan is used (see `to`), and never for more than
MAPPED_BLOCKS blocks: kernels then compute the predicate.

Rows are split for load balance as in Cornstarch 2025-11 section 5.2, but by the work that a row really has and not by a
fixed number of keys. Row r = b * q_blocks + i owns the blocks

    full_q_idx[full_q_ptr[r] : full_q_ptr[r + 1]]  followed by  part_q_idx[part_q_ptr[r] : part_q_ptr[r + 1]]

each part in ascending order. Work item w does the blocks work_start[w] : work_stop[w] of that concatenation for the row
work_row[w]. If work_slot[w] is -1 it is the row's only item and writes the row's result (also when the row is empty:
then 0 and LSE = -inf); otherwise it writes partial result number work_slot[w], and the row's partial results are those
from row_slots[r] to row_slots[r + 1], to be merged in that order. Items are sorted longest first; unused items have
work_row = -1. The same, with `_k`, for key-block rows (r = b * k_blocks + j, query blocks), which is dK and dV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interlace._mask_values import readable
from interlace.attention._blocks import NO_MAPS, block_lists, block_maps
from interlace.masks import BitfieldMask, Tokens


class PlanStats(NamedTuple):
    """What a plan holds; see AttentionPlan.stats."""

    blocks: int  # all blocks of the score matrix, over the batch
    full: int
    partial: int
    density: float  # share of blocks that are visited
    rows: int
    split_rows: int
    work_items: int
    longest_item: int  # blocks in the longest work item
    imbalance: float  # longest row over mean row, before splitting


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The block lists of one mask; see the module docstring for their layout. Make one with AttentionPlan.build.

    Every field but `block` and `sinks` is a tensor (all int32 but q_bits and k_bits, int64) on one device, so that a
    plan passes through torch.compile and torch.export; sizes are read off the tensors' shapes. Lists are padded to at
    least two entries with -1: read their length from the ptr arrays (work lists: entries with row -1 are unused).
    Plans compare by identity: comparing what they hold would wait for the device.
    """

    block: int
    sinks: int
    full_q_ptr: Tensor  # [B * q_blocks + 1]
    full_q_idx: Tensor  # key blocks
    part_q_ptr: Tensor
    part_q_idx: Tensor
    full_k_ptr: Tensor  # [B * k_blocks + 1]
    full_k_idx: Tensor  # query blocks
    part_k_ptr: Tensor
    part_k_idx: Tensor
    q_bits: Tensor  # int64 [B, Tq]
    q_doc: Tensor  # [B, Tq]; 0 where the mask has none, -1 = padding or a query that sees nothing
    q_span: Tensor  # -1 where the mask has none
    q_pos: Tensor
    q_window: Tensor  # 2**30 where the mask has none
    k_bits: Tensor  # int64 [B, Tk]
    k_doc: Tensor  # -1 = padding or a key that nobody sees
    k_span: Tensor
    k_pos: Tensor
    work_row: Tensor  # [W]
    work_start: Tensor
    work_stop: Tensor
    work_slot: Tensor
    row_slots: Tensor  # [B * q_blocks + 1]
    slot_row: Tensor  # [S]: the row of each partial result, -1 = unused; two entries: no row is split
    work_k_row: Tensor
    work_k_start: Tensor
    work_k_stop: Tensor
    work_k_slot: Tensor
    row_k_slots: Tensor  # [B * k_blocks + 1]
    slot_k_row: Tensor
    part_q_map: Tensor  # [len(part_q_idx) or 0, block + 1, block / 32]: see _blocks.block_maps
    part_k_map: Tensor  # 0 = there are no bitmaps

    @classmethod
    @torch.compiler.disable  # what it makes depends on values: compiled code breaks here once and calls it
    def build(
        cls,
        mask: BitfieldMask,
        kv_mask: BitfieldMask | None = None,
        *,
        block: int = 128,
        device: torch.device | str | None = None,
        cap: int | None = None,
        heads: int = 8,
        kv_heads: int | None = None,
    ) -> AttentionPlan:
        """Classify the blocks of `mask` (queries) against `kv_mask` (keys; default: the same mask).

        block: tokens per side of a block. device: where the plan goes (default: where the mask is; it is built there).
        cap: rows with more blocks than this are split into work items of at most `cap` blocks, in both directions;
        None = chosen from the device (one core does not profit: never on a CPU) for `heads` query heads and `kv_heads`
        key heads (default: as many): many heads keep a GPU's multiprocessors evenly busy by themselves, few need their
        long rows split. Any number of heads may use the plan.

        Under torch.func's transforms, under torch.export and of fake tensors an op makes the plan (_traced.py), in
        which `cap` and the numbers of heads play no part.

        Raises TypeError for anything but masks, ValueError for masks that do not fit each other or a bad block or cap.
        """
        for name, given in (("mask", mask), ("kv_mask", kv_mask if kv_mask is not None else mask)):
            if not isinstance(given, BitfieldMask):
                raise TypeError(f"{name} must be a BitfieldMask, got {type(given).__name__}")
        if block < 1:
            raise ValueError(f"block is {block}; it must be at least 1 (the Triton kernels want 128)")
        if min(heads, heads if kv_heads is None else kv_heads) < 1:
            raise ValueError(f"heads is {heads} and kv_heads {kv_heads}; they must be at least 1")
        if cap is not None and cap < 1:
            raise ValueError(f"cap is {cap}; it must be at least 1, or None to choose it")
        keys = mask if kv_mask is None else kv_mask
        if keys.batch != mask.batch or keys.device != mask.device:
            raise ValueError(
                f"kv_mask ({keys.batch} rows, {keys.device}) does not fit the query mask ({mask.batch} rows, "
                f"{mask.device}): they need the same batch and device"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None or not readable(mask.bits, keys.bits):
            from interlace.attention._traced import traced_plan

            plan = traced_plan(mask.tokens(), keys.tokens(), mask.sinks, block)
            return plan if device is None else plan.to(device)
        q, k = mask.tokens()(Tensor.contiguous), keys.tokens()(Tensor.contiguous)
        splitting = _Splitting(
            cap, (heads, kv_heads or heads), torch.device(device) if device is not None else mask.device
        )
        lists, sizes = block_lists(q, k, mask.sinks, block, splitting.sizes)
        plan = cls(
            block,
            mask.sinks,
            lists.full_q_ptr, _two_entries(lists.full_q_idx), lists.part_q_ptr, _two_entries(lists.part_q_idx),
            lists.full_k_ptr, _two_entries(lists.full_k_idx), lists.part_k_ptr, _two_entries(lists.part_k_idx),
            q.bits, lists.q_doc, q.span, q.pos, q.window,
            k.bits, lists.k_doc, k.span, k.pos,
            *splitting.work(lists.full_q_ptr, lists.part_q_ptr, heads, PARTIAL_COST, *sizes[:2]),
            *splitting.work(lists.full_k_ptr, lists.part_k_ptr, kv_heads or heads, KEY_PARTIAL_COST, *sizes[2:]),
            *[q.doc.new_empty(NO_MAPS)] * 2,
        )  # fmt: skip
        there = plan if device is None else plan.to(device)
        return plan.with_maps() if there is plan else there

    def with_maps(self) -> AttentionPlan:
        """The same plan with bitmaps made anew, or without where `block_maps` makes none."""
        sides = (self.queries(), self.keys(), self.sinks, self.block)
        part_q_map = block_maps(*sides, self.part_q_ptr, self.part_q_idx, True)
        part_k_map = block_maps(*sides, self.part_k_ptr, self.part_k_idx, False)
        return replace(self, part_q_map=part_q_map, part_k_map=part_k_map)

    # ------------------------------------------------------------------ sizes

    @property
    def batch(self) -> int:
        return self.q_bits.shape[0]

    @property
    def q_len(self) -> int:
        return self.q_bits.shape[1]

    @property
    def k_len(self) -> int:
        return self.k_bits.shape[1]

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_len // self.block)

    @property
    def device(self) -> torch.device:
        return self.q_bits.device

    # ------------------------------------------------------------------ views

    def row_blocks(self) -> Tensor:
        """int32 [B, q_blocks]: non-empty blocks per query block, which is what attention costs a query block."""
        return (self.full_q_ptr.diff() + self.part_q_ptr.diff()).view(self.batch, self.q_blocks)

    def stats(self) -> PlanStats:
        """Density, splits and imbalance, as Python numbers (waits for the device)."""
        rows = self.row_blocks().flatten().double()
        full, partial = int(self.full_q_ptr[-1]), int(self.part_q_ptr[-1])
        blocks = self.batch * self.q_blocks * self.k_blocks
        used = full + partial
        items = self.work_stop - self.work_start
        return PlanStats(
            blocks=blocks,
            full=full,
            partial=partial,
            density=used / blocks if blocks else 0.0,
            rows=rows.numel(),
            split_rows=int((self.row_slots.diff() > 0).sum()),
            work_items=int((self.work_row >= 0).sum()),
            longest_item=int(items.max()),
            imbalance=float(rows.max() / rows.mean()) if used else 1.0,
        )

    def queries(self) -> Tokens:
        """The query side of the rule, [B, Tq] per field (for interlace.masks.visible)."""
        return Tokens(self.q_bits, self.q_doc, self.q_span, self.q_pos, self.q_window)

    def keys(self) -> Tokens:
        """The key side of the rule, [B, Tk] per field; its window plays no part in the rule."""
        return Tokens(self.k_bits, self.k_doc, self.k_span, self.k_pos, torch.zeros_like(self.k_pos))

    def tensors(self) -> list[Tensor]:
        """Every tensor field in the order of declaration; from_tensors undoes it (a custom op's schema wants this)."""
        return [getattr(self, name) for name in TENSOR_FIELDS]

    @classmethod
    def from_tensors(cls, tensors: list[Tensor], block: int, sinks: int) -> AttentionPlan:
        return cls(block, sinks, *tensors)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> AttentionPlan:
        """The same plan on another device (itself when it is there already). Bitmaps are not moved but made there."""
        if torch.empty(0, device=device).device == self.device:  # also "cuda", the current one
            return self
        return self.moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def moved(self, move: Callable[[Tensor], Tensor]) -> AttentionPlan:
        """The plan of the tensors that `move` makes of each of these, and bitmaps made where those are."""
        tensors: dict[str, Any] = {name: move(getattr(self, name)) for name in TENSOR_FIELDS if name not in MAPS}
        return replace(self, **tensors).with_maps()

    def check(self, batch: int, q_len: int, k_len: int, device: torch.device) -> None:
        """Raise ValueError unless the plan was built for tensors of these sizes on this device."""
        if (self.batch, self.q_len, self.k_len) != (batch, q_len, k_len):
            raise ValueError(
                f"the mask or plan is for batch {self.batch}, {self.q_len} queries and {self.k_len} keys, but q and k "
                f"hold batch {batch}, {q_len} queries and {k_len} keys; build it from a mask of these tokens "
                "(queries that are part of a longer sequence: mask.select(...) with kv_mask=)"
            )
        if self.device != device:
            raise ValueError(f"the mask or plan is on {self.device} but q is on {device}; use .to({str(device)!r})")


# What a PARTIAL block costs beside a FULL one, in rows of queries (forward, dQ) and of keys (dK/dV): instructions of
# the loops on sm_90 (docs/kernel-report.md), with bitmaps. Not measured on a GPU; 1.12 on a CPU
# (bench/results/subblocks_cpu.json). It only orders the items.
PARTIAL_COST = 1.4
KEY_PARTIAL_COST = 1.35

MAPS = ("part_q_map", "part_k_map")
TENSOR_FIELDS = tuple(field.name for field in fields(AttentionPlan) if field.name not in ("block", "sinks"))
torch.export.register_dataclass(AttentionPlan, serialized_type_name="interlace.attention.plan.AttentionPlan")


class _Splitting:
    """How rows become work items, in steps that wait for no device."""

    def __init__(self, cap: int | None, heads: tuple[int, int], device: torch.device) -> None:
        self.cap, self.heads = cap, heads
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
        self.never = cap is None and not multiprocessors
        self.shares = 4 * multiprocessors

    def pieces(self, length: Tensor, blocks: Tensor, heads: int) -> Tensor:
        """Items of rows of `length` blocks, of `blocks` in all, when every item is run for `heads` heads.

        The default cap is a quarter of one multiprocessor's share of the work, but never below 8 blocks, where merging
        the pieces would cost more than they save.
        """
        if self.never:
            return torch.ones_like(length)
        cap = (blocks * heads // self.shares).clamp(min=8) if self.cap is None else self.cap
        return (-(-length // cap)).clamp(min=1)

    def sizes(self, full_q: Tensor, part_q: Tensor, full_k: Tensor, part_k: Tensor) -> Tensor:
        """int64 [4]: items and partial results of query-block rows and of key-block rows, given each list's ptr."""
        sizes = []
        for full, part, heads in zip((full_q, full_k), (part_q, part_k), self.heads):
            pieces = self.pieces((full.diff() + part.diff()).long(), (full[-1] + part[-1]).long(), heads)
            sizes += [pieces.sum(), torch.where(pieces > 1, pieces, 0).sum()]
        return torch.stack(sizes)

    def work(
        self, full_ptr: Tensor, part_ptr: Tensor, heads: int, partial_cost: float, items: int, slots: int
    ) -> tuple[Tensor, ...]:
        """Items (row, start, stop, slot) longest first, then row_slots and slot_row; see the module docstring."""
        full = full_ptr.diff().long()
        length = full + part_ptr.diff()
        row_slots = torch.zeros(length.numel() + 1, dtype=torch.int32, device=length.device)
        if slots == 0:
            row = torch.arange(items, device=length.device)
            start, stop, slot = torch.zeros_like(length), length, torch.full_like(length, -1)
            slot_row = row[:0]
        else:
            pieces = self.pieces(length, (full_ptr[-1] + part_ptr[-1]).long(), heads)
            row, piece = _repeated(pieces, items)
            start, stop = piece * length[row] // pieces[row], (piece + 1) * length[row] // pieces[row]
            in_slots = torch.where(pieces > 1, pieces, 0)
            row_slots[1:] = in_slots.cumsum(0)
            slot = torch.where(pieces[row] > 1, row_slots[row] + piece, -1)
            slot_row = _padded(_repeated(in_slots, slots)[0], 3)  # two entries mean that no row is split
            full = full[row]
        full_here = torch.minimum(stop, full) - torch.minimum(start, full)  # full blocks come first in a row
        cost = full_here + partial_cost * (stop - start - full_here)
        order = torch.argsort(cost, descending=True, stable=True)
        row, start, stop, slot = (_two_entries(field[order]) for field in (row, start, stop, slot))
        return row, start, stop, slot, row_slots, _two_entries(slot_row)


def _repeated(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Row r `counts[r]` times, and which of its times it is; `total` is their sum, which a device need not be asked."""
    row = torch.repeat_interleave(counts, output_size=total)
    return row, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[row]


def _two_entries(values: Tensor) -> Tensor:
    """int32, padded with -1 to two entries: torch.compile specialises on lengths 0 and 1 and would compile again."""
    return _padded(values.to(torch.int32), 2)


def _padded(values: Tensor, entries: int) -> Tensor:
    """With -1 behind, up to that many entries."""
    return torch.nn.functional.pad(values, (0, max(0, entries - values.numel())), value=-1)
