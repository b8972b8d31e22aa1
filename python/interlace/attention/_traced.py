"""Plans that are made inside compiled code, where sizes must not depend on a mask's values.

An op makes the lists of a plan with room for every block of the score matrix (16 bytes per block), so that all shapes
follow from those of the tokens: no graph break, no recompilation. On a GPU bitmaps take 4 KiB per block more; beyond
MAPPED_BLOCKS there are none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from interlace.attention._blocks import NO_MAPS, fits_maps, map_shape, reads_maps
from interlace.attention._transforms import row_by_row
from interlace.attention.plan import MAPS, TENSOR_FIELDS, AttentionPlan
from interlace.masks import BitfieldMask, Tokens, word

HEADS = 8  # of AttentionPlan.build: what its splitting of long rows is chosen for
QUERIES = tuple(f"q_{name}" for name in Tokens._fields)
KEYS = tuple(f"k_{name}" for name in Tokens._fields[:4])  # their window plays no part
LISTS = tuple(name for name in TENSOR_FIELDS if name not in (*QUERIES, *KEYS))
DOCS = ("q_doc", "k_doc")  # made by the op too: -1 for queries that see nothing and for keys that nobody sees


def traced_plan(q: Tokens, k: Tokens, sinks: int, block: int, gaps: Tensor | None = None) -> AttentionPlan:
    """The plan of queries [B, Tq] and keys [B, Tk], by one op.

    gaps: bool; where one is True, the op raises ValueError, since the tokens do not say what is to be seen.
    """
    fields = [*q, *k[: len(KEYS)]]
    blocks = _room_of_blocks(q.bits, k.bits, block)
    # An exported program is for all lengths, which a comparison would narrow.
    fits = statically_known_true if torch.compiler.is_exporting() else bool
    mapped = reads_maps(q.bits.device, block) and fits(fits_maps(blocks, block))
    made = _plan(fields, sinks, block, mapped, q.bits.new_zeros(1, dtype=torch.bool) if gaps is None else gaps)
    given = dict(zip((*QUERIES, *KEYS), fields))
    return AttentionPlan(block, sinks, **{**given, **dict(zip((*LISTS, *DOCS), made))})


def interval_plan(seen: Tensor, block: int = 128) -> AttentionPlan:
    """The plan of a dense mask, bool [B, 1, Q, K], whose queries see consecutive keys each.

    So they do under causal, sliding, packed, chunked and prefix masks. Others raise ValueError when the code runs.
    """
    seen = seen[:, 0]
    keys = seen.shape[2]
    index = torch.arange(keys, device=seen.device)
    last = torch.where(seen, index, -1).amax(-1)
    first = torch.where(seen, index, keys).amin(-1)
    some = last >= 0
    length = torch.where(some, last - first + 1, 1)
    gaps = some & (seen.sum(-1) != length)
    nothing = torch.full_like(last, -1, dtype=torch.int32)
    queries = Tokens(
        bits=torch.full_like(last, word(0, causal=True)),
        doc=torch.where(some, 0, nothing),
        span=nothing,
        pos=last.clamp(min=0).to(torch.int32),
        window=length.to(torch.int32),
    )
    place = index.to(torch.int32).expand(seen.shape[0], -1).contiguous()
    zero = torch.zeros_like(place)
    nobody = torch.full_like(place, -1)
    bits = torch.full_like(place, word(0), dtype=torch.int64)
    return traced_plan(queries, Tokens(bits, doc=zero, span=nobody, pos=place, window=zero), 0, block, gaps)


# ---------------------------------------------------------------------- the op


# It reads values, which a CUDA graph (mode="reduce-overhead") cannot.
@torch.library.custom_op("interlace::attention_plan", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _plan(fields: list[Tensor], sinks: int, block: int, mapped: bool, gaps: Tensor) -> list[Tensor]:
    if bool(gaps.any()):
        raise ValueError(
            "a compiled model's mask lets a query see keys with others between them that it does not see, which a plan "
            "made in compiled code, or under torch.func.vmap, cannot say. Compile without fullgraph=True (instead of "
            "vmap, run a batch), or make the plan outside the model and pass "
            "attention_mask=interlace.attention.hf.carrier(plan)"
        )
    q_bits, q_doc, q_span, q_pos, q_window, k_bits, k_doc, k_span, k_pos = fields
    queries = BitfieldMask(q_bits, doc=q_doc, span=q_span, pos=q_pos, window=q_window, sinks=sinks)
    keys = BitfieldMask(k_bits, doc=k_doc, span=k_span, pos=k_pos)
    made = AttentionPlan.build(queries, keys, block=block, heads=HEADS)
    lists = [_filled(getattr(made, name), room) for name, room in zip(LISTS, _rooms(q_bits, k_bits, block, mapped))]
    return [*lists, *(getattr(made, name) for name in DOCS)]


@_plan.register_fake
def _plan_fake(fields: list[Tensor], sinks: int, block: int, mapped: bool, gaps: Tensor) -> list[Tensor]:
    q_bits, k_bits = fields[0], fields[len(QUERIES)]
    shapes = [*_rooms(q_bits, k_bits, block, mapped), q_bits.shape, k_bits.shape]
    return [q_bits.new_empty(shape, dtype=torch.int32) for shape in shapes]


@_plan.register_vmap
def _plan_row_by_row(info: Any, in_dims: Any, *args: Any) -> Any:
    lists, dims = row_by_row(_plan)(info, in_dims, *args)
    return list(lists), list(dims)


def _rooms(q_bits: Tensor, k_bits: Tensor, block: int, mapped: bool) -> list[tuple[int, ...]]:
    """The shape of each list of LISTS, at most."""
    batch = q_bits.shape[0]
    rows, k_rows = (batch * -(-bits.shape[1] // block) for bits in (q_bits, k_bits))
    blocks = _room_of_blocks(q_bits, k_bits, block)
    more = _split_items(q_bits.device)
    items, k_items = _two(rows + more), _two(k_rows + more)
    lists = [*[rows + 1, blocks] * 2, *[k_rows + 1, blocks] * 2]
    slots, k_slots = (items, k_items) if more else (2, 2)  # two: no row is split
    lists += [*[items] * 4, rows + 1, slots, *[k_items] * 4, k_rows + 1, k_slots]
    return [*((length,) for length in lists), *[map_shape(blocks, block) if mapped else NO_MAPS] * len(MAPS)]


def _room_of_blocks(q_bits: Tensor, k_bits: Tensor, block: int) -> int:
    return _two(q_bits.shape[0] * -(-q_bits.shape[1] // block) * -(-k_bits.shape[1] // block))


def _split_items(device: torch.device) -> int:
    """How many work items there are at most besides one per row: what _Splitting of plan.py makes of long rows."""
    if device.type != "cuda":
        return 0
    shares = 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return math.ceil(9 / 8 * shares / HEADS) + 1


def _two(length: int) -> int:
    return max(length, 2)


def _filled(values: Tensor, room: tuple[int, ...]) -> Tensor:
    if values.dim() == 1:
        return torch.nn.functional.pad(values, (0, room[0] - values.numel()), value=-1)
    maps = values.new_empty(room)
    if room != NO_MAPS:
        maps[: values.shape[0]] = values
    return maps


# ---------------------------------------------------------------------- how the code is being compiled


@torch.compiler.assume_constant_result  # it is run while the code is traced, and holds for that code
def whole_graph() -> bool:
    """Whether the code that is being traced may not break: fullgraph=True, or torch.export."""
    if torch.compiler.is_exporting():
        return True
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer = InstructionTranslator.current_tx()
        return bool(tracer.one_graph or tracer.error_on_graph_break)
    except (ImportError, AttributeError):  # a torch that says it otherwise: a break then says what to do
        return False
