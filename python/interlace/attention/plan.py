"""AttentionPlan: the non-empty blocks of the score matrix, as lists that kernels iterate over.

A plan is built once per microbatch from a BitfieldMask. Every layer, head and pass uses it. The classes of blocks are
exact: EMPTY (no pair of the block is visible), FULL (every pair is) or PARTIAL. A block that is cut short by the end of
the sequence is never FULL: kernels test bounds, like the mask, only in PARTIAL blocks.

In a plan, q_doc is -1 for a query that sees nothing, and k_doc is -1 for a key that no query sees, as for padding in a
mask. This does not change which pairs are visible. It lets kernels exclude such rows from products by one number:
0 times their values (NaN, infinity) would be NaN.

Bounds per block (document, position and span ranges, OR and AND of the bits) decide most blocks, groups of them at
once. Only the rest are tested element by element. No array of size T x T is created (dissertation 3.4.2; Cornstarch
2025-11 section 6.1 evaluates every element instead).

For GPUs a plan stores the predicate of its PARTIAL blocks as bitmaps, once along queries (part_q_map, entry by entry
like part_q_idx) and once along keys: 2 KiB each. All heads, layers and passes read them in place of the words,
documents, spans and positions of 256 tokens. Bitmaps are made on the device that uses the plan (see `to`), and only for
up to MAPPED_BLOCKS blocks. Beyond that, kernels compute the predicate.

Rows are split for load balance as in Cornstarch 2025-11 section 5.2, but by the actual work of a row instead of a fixed
number of keys. Row r = b * q_blocks + i owns the blocks

    full_q_idx[full_q_ptr[r] : full_q_ptr[r + 1]]  followed by  part_q_idx[part_q_ptr[r] : part_q_ptr[r + 1]]

each part in ascending order. Work item w computes the blocks work_start[w] : work_stop[w] of that concatenation for the
row work_row[w]. If work_slot[w] is -1, it is the row's only item and writes the row's result (for an empty row: 0 and
LSE = -inf). Otherwise it writes partial result number work_slot[w]. The partial results of row r are numbers
row_slots[r] to row_slots[r + 1], to be merged in that order. Items are sorted longest first; unused items have
work_row = -1. The fields with `_k` are the same for key-block rows (r = b * k_blocks + j, query blocks), for dK and dV.

Inside compiled code sizes must not depend on a mask's values. There an op makes the plan (`traced_plan`). Its lists
have room for every block of the score matrix (16 bytes per block), so all shapes follow from the numbers of tokens: no
graph break, no recompilation. On a GPU bitmaps take 4 KiB more per block; above MAPPED_BLOCKS there are no bitmaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interlace.attention._blocks import NO_MAPS, block_lists, block_maps, fits_maps, map_shape, reads_maps
from interlace.attention._transforms import row_by_row
from interlace.masks import KEY_FIELDS, QUERY_FIELDS, BitfieldMask, Tokens, filled, word
from interlace.masks.values import readable


class PlanStats(NamedTuple):
    """Statistics of a plan; see AttentionPlan.stats."""

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

    Every field except `block` and `sinks` is a tensor (q_bits and k_bits int64, all others int32), all on one device.
    So a plan can pass through torch.compile and torch.export. Sizes are derived from the tensors' shapes. Lists are
    padded to at least two entries with -1: take their length from the ptr arrays (work lists: entries with row -1 are
    unused). Plans compare by identity, since comparing contents would wait for the device.
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
    k_doc: Tensor  # -1 = padding or a key that no query sees
    k_span: Tensor
    k_pos: Tensor
    work_row: Tensor  # [W]
    work_start: Tensor
    work_stop: Tensor
    work_slot: Tensor
    row_slots: Tensor  # [B * q_blocks + 1]
    slot_row: Tensor  # [S]: the row of each partial result, -1 = unused; length 2 if no row is split
    work_k_row: Tensor
    work_k_start: Tensor
    work_k_stop: Tensor
    work_k_slot: Tensor
    row_k_slots: Tensor  # [B * k_blocks + 1]
    slot_k_row: Tensor
    part_q_map: Tensor  # [len(part_q_idx) or 0, block + 1, block / 32]: see _blocks.block_maps
    part_k_map: Tensor  # length 0 = no bitmaps

    @classmethod
    @torch.compiler.disable  # sizes of the result depend on values: compiled code breaks the graph here once
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

        block: tokens per side of a block. device: device of the result (default: that of the mask, where it is built).
        cap: rows with more blocks than this are split into work items of at most `cap` blocks, in both directions;
        None = chosen from the device for `heads` query heads and `kv_heads` key heads (default: the same number): with
        many heads a GPU's multiprocessors are evenly busy anyway, with few heads long rows must be split. On a CPU None
        never splits, since one core does not profit. Any number of heads may use the plan.

        Under torch.func's transforms, under torch.export and for fake tensors an op makes the plan (`traced_plan`). It
        ignores `cap` and the numbers of heads.

        Raises TypeError for anything but masks, ValueError for masks that do not fit each other or a bad block or cap.
        """
        for name, value in (("mask", mask), ("kv_mask", kv_mask if kv_mask is not None else mask)):
            if not isinstance(value, BitfieldMask):
                raise TypeError(f"{name} must be a BitfieldMask, got {type(value).__name__}")
        if block < 1:
            raise ValueError(f"block is {block}; it must be at least 1 (the Triton kernels want 128)")
        if min(heads, heads if kv_heads is None else kv_heads) < 1:
            raise ValueError(f"heads is {heads} and kv_heads {kv_heads}; they must be at least 1")
        if cap is not None and cap < 1:
            raise ValueError(f"cap is {cap}; it must be at least 1, or None to choose it")
        keys = mask if kv_mask is None else kv_mask
        if keys.batch != mask.batch or keys.device != mask.device:
            raise ValueError(
                f"kv_mask ({keys.batch} rows, {keys.device}) does not match the query mask ({mask.batch} rows, "
                f"{mask.device}): they need the same batch and device"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None or not readable(mask.bits, keys.bits):
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
            *q._replace(doc=lists.q_doc).of_queries(), *k._replace(doc=lists.k_doc).of_keys(),
            *splitting.work(lists.full_q_ptr, lists.part_q_ptr, heads, PARTIAL_COST, *sizes[:2]),
            *splitting.work(lists.full_k_ptr, lists.part_k_ptr, kv_heads or heads, KEY_PARTIAL_COST, *sizes[2:]),
            *[q.doc.new_empty(NO_MAPS)] * 2,
        )  # fmt: skip
        there = plan if device is None else plan.to(device)
        return plan.with_maps() if there is plan else there

    def with_maps(self) -> AttentionPlan:
        """The same plan with new bitmaps, or without bitmaps if `block_maps` makes none."""
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
        """int32 [B, q_blocks]: non-empty blocks per query block, the attention cost of that query block."""
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
        return self._side("q", QUERY_FIELDS)

    def keys(self) -> Tokens:
        """The key side of the rule, [B, Tk] per field. Fields that the rule does not read of keys are neutral."""
        return self._side("k", KEY_FIELDS)

    def _side(self, side: str, stored: tuple[str, ...]) -> Tokens:
        return filled(**{name: getattr(self, f"{side}_{name}") for name in stored})

    def tensors(self) -> list[Tensor]:
        """All tensor fields in order of declaration, as a custom op's schema needs them. Inverse: from_tensors."""
        return [getattr(self, name) for name in TENSOR_FIELDS]

    @classmethod
    def from_tensors(cls, tensors: list[Tensor], block: int, sinks: int) -> AttentionPlan:
        return cls(block, sinks, *tensors)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> AttentionPlan:
        """The same plan on another device (itself if already there). Bitmaps are not copied but made on that device."""
        if torch.empty(0, device=device).device == self.device:  # resolves "cuda" to the current device
            return self
        return self.moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def moved(self, move: Callable[[Tensor], Tensor]) -> AttentionPlan:
        """The plan with `move` applied to every tensor. Bitmaps are made on the new device."""
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


# Cost of a PARTIAL block relative to a FULL one, in rows of queries (forward, dQ) and of keys (dK/dV). Counted in
# instructions of the loops on sm_90 (docs/kernel-report.md), with bitmaps. Not measured on a GPU; 1.12 on a CPU
# (bench/results/subblocks_cpu.json). Used only to order the items.
PARTIAL_COST = 1.4
KEY_PARTIAL_COST = 1.35

MAPS = ("part_q_map", "part_k_map")
TENSOR_FIELDS = tuple(field.name for field in fields(AttentionPlan) if field.name not in ("block", "sinks"))
torch.export.register_dataclass(AttentionPlan, serialized_type_name="interlace.attention.plan.AttentionPlan")


class _Splitting:
    """Splits rows into work items, in steps that do not wait for a device."""

    def __init__(self, cap: int | None, heads: tuple[int, int], device: torch.device) -> None:
        self.cap, self.heads = cap, heads
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
        self.never = cap is None and not multiprocessors
        self.shares = 4 * multiprocessors

    def pieces(self, length: Tensor, blocks: Tensor, heads: int) -> Tensor:
        """Number of items per row. length: blocks of each row. blocks: all blocks. heads: heads that run each item.

        The default cap is a quarter of one multiprocessor's share of the work, but at least 8 blocks. With fewer
        blocks, merging the pieces would cost more than it saves.
        """
        if self.never:
            return torch.ones_like(length)
        cap = (blocks * heads // self.shares).clamp(min=8) if self.cap is None else self.cap
        return (-(-length // cap)).clamp(min=1)

    def sizes(self, full_q: Tensor, part_q: Tensor, full_k: Tensor, part_k: Tensor) -> Tensor:
        """int64 [4]: items and partial results of query-block rows, then of key-block rows, given each list's ptr."""
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
            slot_row = _padded(_repeated(in_slots, slots)[0], 3)  # at least 3: length 2 means that no row is split
            full = full[row]
        full_here = torch.minimum(stop, full) - torch.minimum(start, full)  # full blocks come first in a row
        cost = full_here + partial_cost * (stop - start - full_here)
        order = torch.argsort(cost, descending=True, stable=True)
        row, start, stop, slot = (_two_entries(field[order]) for field in (row, start, stop, slot))
        return row, start, stop, slot, row_slots, _two_entries(slot_row)


def _repeated(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Row r `counts[r]` times, and the index within its repeats. total: sum of counts, given to avoid a device sync."""
    row = torch.repeat_interleave(counts, output_size=total)
    return row, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[row]


def _two_entries(values: Tensor) -> Tensor:
    """int32, padded with -1 to two entries: torch.compile specialises on lengths 0 and 1 and would recompile."""
    return _padded(values.to(torch.int32), 2)


def _padded(values: Tensor, entries: int) -> Tensor:
    """Pad with -1 at the end to at least `entries` entries."""
    return torch.nn.functional.pad(values, (0, max(0, entries - values.numel())), value=-1)


# ---------------------------------------------------------------------- plans made inside compiled code

HEADS = 8  # default of AttentionPlan.build: number of heads for which long rows are split
QUERIES = tuple(f"q_{name}" for name in QUERY_FIELDS)
KEYS = tuple(f"k_{name}" for name in KEY_FIELDS)
LISTS = tuple(name for name in TENSOR_FIELDS if name not in (*QUERIES, *KEYS))
DOCS = ("q_doc", "k_doc")  # also made by the op: -1 for queries that see nothing and for keys that no query sees


def traced_plan(q: Tokens, k: Tokens, sinks: int, block: int, gaps: Tensor | None = None) -> AttentionPlan:
    """The plan of queries [B, Tq] and keys [B, Tk], made by one op.

    gaps: bool; if any is True, the op raises ValueError, since the tokens cannot express the mask.
    """
    fields = [*q.of_queries(), *k.of_keys()]
    blocks = _max_blocks(q.bits, k.bits, block)
    # An exported program must accept all lengths. A plain comparison would restrict them.
    fits: Callable[[Any], bool] = bool
    if torch.compiler.is_exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true as fits  # loads sympy
    mapped = reads_maps(q.bits.device, block) and fits(fits_maps(blocks, block))
    lists = _plan(fields, sinks, block, mapped, q.bits.new_zeros(1, dtype=torch.bool) if gaps is None else gaps)
    tokens = dict(zip((*QUERIES, *KEYS), fields))
    return AttentionPlan(block, sinks, **{**tokens, **dict(zip((*LISTS, *DOCS), lists))})


def interval_plan(seen: Tensor, block: int = 128) -> AttentionPlan:
    """The plan of a dense mask, bool [B, 1, Q, K], in which each query sees consecutive keys.

    This holds for causal, sliding, packed, chunked and prefix masks. Other masks raise ValueError when the code runs.
    """
    seen = seen[:, 0]
    keys = seen.shape[2]
    index = torch.arange(keys, device=seen.device)
    last = torch.where(seen, index, -1).amax(-1)
    first = torch.where(seen, index, keys).amin(-1)
    some = last >= 0
    length = torch.where(some, last - first + 1, 1)
    gaps = some & (seen.sum(-1) != length)
    queries = filled(
        bits=torch.full_like(last, word(0, causal=True)),
        pos=last.clamp(min=0).to(torch.int32),
        doc=torch.where(some, 0, -1).to(torch.int32),
        window=length.to(torch.int32),
    )
    place = index.to(torch.int32).expand(seen.shape[0], -1).contiguous()
    bits = torch.full_like(place, word(0), dtype=torch.int64)
    return traced_plan(queries, filled(bits, place), 0, block, gaps)


# ---------------------------------------------------------------------- the op


# The op reads values, which is not possible in a CUDA graph (mode="reduce-overhead").
@torch.library.custom_op("interlace::attention_plan", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _plan(fields: list[Tensor], sinks: int, block: int, mapped: bool, gaps: Tensor) -> list[Tensor]:
    if bool(gaps.any()):
        raise ValueError(
            "a query of the compiled model's mask sees keys that are not consecutive, which a plan made in compiled "
            "code or under torch.func.vmap cannot express. Compile without fullgraph=True (instead of vmap, run a "
            "batch), or make the plan outside the model and pass attention_mask=interlace.attention.hf.carrier(plan)"
        )
    queries = BitfieldMask.from_tokens(filled(**dict(zip(QUERY_FIELDS, fields))), sinks)
    keys = BitfieldMask.from_tokens(filled(**dict(zip(KEY_FIELDS, fields[len(QUERIES) :]))))
    made = AttentionPlan.build(queries, keys, block=block, heads=HEADS)
    rooms = _max_shapes(queries.bits, keys.bits, block, mapped)
    lists = [_padded_to(getattr(made, name), room) for name, room in zip(LISTS, rooms)]
    return [*lists, *(getattr(made, name) for name in DOCS)]


@_plan.register_fake
def _plan_fake(fields: list[Tensor], sinks: int, block: int, mapped: bool, gaps: Tensor) -> list[Tensor]:
    q_bits, k_bits = fields[0], fields[len(QUERIES)]
    shapes = [*_max_shapes(q_bits, k_bits, block, mapped), q_bits.shape, k_bits.shape]
    return [q_bits.new_empty(shape, dtype=torch.int32) for shape in shapes]


@_plan.register_vmap
def _plan_row_by_row(info: Any, in_dims: Any, *args: Any) -> tuple[list[Tensor], list[int]]:
    lists, dims = row_by_row(_plan)(info, in_dims, *args)
    return list(lists), list(dims)


def _max_shapes(q_bits: Tensor, k_bits: Tensor, block: int, mapped: bool) -> list[tuple[int, ...]]:
    """Maximum shape of each list of LISTS."""
    batch = q_bits.shape[0]
    rows, k_rows = (batch * -(-bits.shape[1] // block) for bits in (q_bits, k_bits))
    blocks = _max_blocks(q_bits, k_bits, block)
    more = _split_items(q_bits.device)
    items, k_items = _at_least_two(rows + more), _at_least_two(k_rows + more)
    lists = [*[rows + 1, blocks] * 2, *[k_rows + 1, blocks] * 2]
    slots, k_slots = (items, k_items) if more else (2, 2)  # length 2: no row is split
    lists += [*[items] * 4, rows + 1, slots, *[k_items] * 4, k_rows + 1, k_slots]
    return [*((length,) for length in lists), *[map_shape(blocks, block) if mapped else NO_MAPS] * len(MAPS)]


def _max_blocks(q_bits: Tensor, k_bits: Tensor, block: int) -> int:
    return _at_least_two(q_bits.shape[0] * -(-q_bits.shape[1] // block) * -(-k_bits.shape[1] // block))


def _split_items(device: torch.device) -> int:
    """Maximum number of work items beyond one per row, from the splitting of long rows by _Splitting."""
    if device.type != "cuda":
        return 0
    shares = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return math.ceil(9 / 8 * shares / HEADS) + 1


def _at_least_two(length: int) -> int:
    return max(length, 2)


def _padded_to(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    if values.dim() == 1:
        return torch.nn.functional.pad(values, (0, shape[0] - values.numel()), value=-1)
    maps = values.new_empty(shape)
    if shape != NO_MAPS:
        maps[: values.shape[0]] = values
    return maps


# ---------------------------------------------------------------------- compilation mode


@torch.compiler.assume_constant_result  # runs while the code is traced; the result holds for that code
def whole_graph() -> bool:
    """True if the traced code must not have graph breaks: fullgraph=True, or torch.export."""
    if torch.compiler.is_exporting():
        return True
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer = InstructionTranslator.current_tx()
        return bool(tracer.one_graph or tracer.error_on_graph_break)
    except (ImportError, AttributeError):  # another version of torch: a graph break then reports what to do
        return False
