"""Tensors and masks of a microbatch, dealt to context-parallel ranks by one TokenShards and put together again.

    mine = shard(hidden, shards, rank)            # [B, T, ...] -> [B, tokens_per_rank, ...]
    rows = shard_mask(mask, shards, rank)         # the same tokens of a BitfieldMask, with the positions they have
    whole = unshard(mine, shards, group)          # [B, T, ...] again, on every rank

Whatever T is: what a rank's share has beyond it is padding, which these functions add and take away. What is defined by
neighbours has to be made before: shift labels first, then shard them, with RoPE positions beside them.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from interlace.balance import TokenShards
from interlace.comm.collectives import all_gather_into_tensor
from interlace.comm.group import Group, resolve
from interlace.comm.transports.base import Transport
from interlace.masks import NO_WINDOW, BitfieldMask


def shard(x: Tensor, shards: TokenShards, rank: int, *, dim: int = 1, pad: float = 0) -> Tensor:
    """The tokens of `rank`, in rising order of position within each sequence; differentiable.

    Args:
        x: [B, T, ...], with the tokens in dimension `dim` instead if given (2 for [B, heads, T, D]); T is the number
            of tokens that `shards` was made for, or anything up to its padded length that needs as many blocks. A
            batch of 1 stands for B equal sequences (position ids).
        rank: of the context-parallel group, 0 .. shards.ranks - 1.
        pad: what tokens beyond T are: 0, -100 for labels that the loss is to ignore.

    Returns:
        [B, tokens_per_rank, ...], tokens in dimension `dim`.

    Raises:
        ValueError: a shape that does not fit shards, a rank or dimension out of range.
    """
    rows = _tokens_second("x", x, dim)
    batch, length = len(shards.block_order), rows.shape[1]
    check_length("x", shards, length)
    if rows.shape[0] not in (1, batch):
        raise ValueError(f"x has shape {list(x.shape)}: a batch of {rows.shape[0]}, but shards has {batch} sequences")
    each = shards.tokens_per_rank
    first = check_rank(shards, rank) * each
    if length == 0:
        return rows.new_full((batch, each, *rows.shape[2:]), pad).movedim(1, dim)
    index = _on_device(shards, "order", x.device)[:, first : first + each]
    row = torch.arange(batch, device=x.device)[:, None] if rows.shape[0] == batch else 0
    taken = rows[row, index.clamp(max=length - 1)]
    if length < shards.padded_length:
        beyond = (index >= length).view(batch, each, *(1,) * (taken.dim() - 2))
        taken = taken.masked_fill(beyond, pad)
    return taken.movedim(1, dim)


def unshard(
    local: Tensor, shards: TokenShards, group: Group = None, *, dim: int = 1, length: int | None = None
) -> Tensor:
    """All tokens in their order, on every rank, from each rank's share; what `shard` took apart. Collective.

    Args:
        local: [B, tokens_per_rank, ...] (tokens in dimension `dim`), the same shape and dtype on every rank. Its
            gradient is the sum of all ranks' gradients of these tokens.
        group: a Transport, ProcessGroup, DeviceMesh or None (see `interlace.comm.group`).
        length: tokens T of the result; default: the longest of shards.lengths.

    Returns:
        [B, T, ...], tokens in dimension `dim`.

    Raises:
        ValueError: a shape, group or length that does not fit shards. CommError: see `all_gather_into_tensor`.
    """
    rows = _tokens_second("local", local, dim).contiguous()
    transport = resolve(group, local.device)
    check_ranks(shards, transport)
    batch, each = len(shards.block_order), shards.tokens_per_rank
    if rows.shape[:2] != (batch, each):
        raise ValueError(
            f"local has shape {list(local.shape)}: {rows.shape[0]} sequences of {rows.shape[1]} tokens, but every rank "
            f"of shards holds {batch} of {each}"
        )
    length = int(shards.lengths.max()) if length is None else operator.index(length)
    if not 0 <= length <= shards.padded_length:
        raise ValueError(f"length must lie between 0 and {shards.padded_length}, got {length}")
    gathered = rows.new_empty(shards.ranks, *rows.shape)
    all_gather_into_tensor(gathered, rows, transport)
    place = _on_device(shards, "inverse", local.device)[:, :length]
    row = torch.arange(batch, device=local.device)[:, None]
    return gathered[place // each, row, place % each].movedim(1, dim)


def shard_mask(mask: BitfieldMask, shards: TokenShards, rank: int | None = None) -> BitfieldMask:
    """The tokens of `rank`, [B, tokens_per_rank]; None: of all ranks in turn, [B, padded_length], as keys are gathered.

    Tokens keep their positions; padding belongs to no document. Raises ValueError for a mask that does not fit shards.
    """
    batch, each = len(shards.block_order), shards.tokens_per_rank
    if mask.batch != batch:
        raise ValueError(f"the mask has {mask.batch} rows, but shards has {batch} sequences")
    check_length("the mask", shards, mask.length)
    index = _on_device(shards, "order", mask.device)
    if rank is not None:
        first = check_rank(shards, rank) * each
        index = index[:, first : first + each]
    return _padded(mask, shards.padded_length).select(index)


def check_ranks(shards: TokenShards, transport: Transport) -> None:
    """Raises ValueError unless the group has as many ranks as `shards`."""
    if transport.world != shards.ranks:
        raise ValueError(f"shards was made for {shards.ranks} ranks, but the group has {transport.world}")


def check_rank(shards: TokenShards, rank: int) -> int:
    rank = operator.index(rank)
    if not 0 <= rank < shards.ranks:
        raise ValueError(f"rank must lie between 0 and {shards.ranks - 1}, got {rank}")
    return rank


def check_length(name: str, shards: TokenShards, length: int) -> None:
    """Raises ValueError unless `length` tokens need exactly the blocks that `shards` dealt."""
    blocks = -(-length // shards.block)
    if -(-max(blocks, 1) // shards.ranks) * shards.ranks * shards.block != shards.padded_length:
        raise ValueError(
            f"{name} has {length} tokens, but shards holds {shards.padded_length} in blocks of {shards.block} for "
            f"{shards.ranks} ranks: distribute_tokens has to be given the row_blocks of these tokens"
        )


def _tokens_second(name: str, x: Tensor, dim: int) -> Tensor:
    """[B, T, ...] of a tensor with its tokens in dimension `dim`."""
    if x.dim() < 2 or not 1 <= dim < x.dim():
        raise ValueError(
            f"{name} has shape {list(x.shape)} and dim is {dim}: dimension 0 is the batch and a later one the tokens"
        )
    return x.movedim(dim, 1)


def _padded(mask: BitfieldMask, length: int) -> BitfieldMask:
    extra = length - mask.length
    if extra == 0:
        return mask

    def extended(field: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(field, (0, extra), value=value)

    doc = torch.zeros_like(mask.pos) if mask.doc is None else mask.doc
    return BitfieldMask(
        extended(mask.bits, 0),
        doc=extended(doc, -1),
        span=None if mask.span is None else extended(mask.span, -1),
        pos=extended(mask.pos, 0),
        window=extended(mask.window, NO_WINDOW) if isinstance(mask.window, Tensor) else mask.window,
        sinks=mask.sinks,
    )


def _on_device(shards: TokenShards, name: str, device: torch.device) -> Tensor:
    """shards.order or shards.inverse, int64 [B, padded_length], copied once to each device that asks."""
    made: dict[tuple[str, torch.device], Tensor] = shards.__dict__.setdefault("_on_device", {})
    if (name, device) not in made:
        made[name, device] = torch.from_numpy(getattr(shards, name)).to(device)
    return made[name, device]
