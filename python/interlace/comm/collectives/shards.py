"""Shards of a microbatch's tensors and masks for context-parallel ranks, split and joined by one TokenShards.

    mine = shard(hidden, shards, rank)            # [B, T, ...] -> [B, tokens_per_rank, ...]
    rows = shard_mask(mask, shards, rank)         # the same tokens of a BitfieldMask, with their positions
    whole = unshard(mine, shards, group)          # [B, T, ...] again, on every rank

T is arbitrary: these functions pad a rank's share, and remove the padding. Data that depends on neighbouring tokens
must be computed before: shift labels first, then shard them together with RoPE positions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor

from interlace.balance import TokenShards
from interlace.comm.collectives.rows import gather_rows
from interlace.comm.process.agreement import fingerprint_of_shards
from interlace.comm.process.groups import Group
from interlace.comm.transports.base import Transport
from interlace.comm.transports.choose import resolve
from interlace.masks import BitfieldMask


def shard(x: Tensor, shards: TokenShards, rank: int, *, dim: int | None = None, pad: float = 0) -> Tensor:
    """The tokens of `rank`, in ascending order of position within each sequence; differentiable.

    Args:
        x: [B, T, ...]; T is the number of tokens that `shards` was made for, or any number up to its padded length that
            needs as many blocks. A batch of 1 stands for B equal sequences (position ids).
        rank: of the context-parallel group, 0 .. shards.ranks - 1.
        dim: dimension of the tokens: 2 for the queries, keys and values of attention, [B, heads, T, D]; 1 by default.
            Must be given if dimension 2 of four or more could be the tokens as well.
        pad: value of tokens beyond T: 0, or -100 for labels that the loss must ignore.

    Returns:
        [B, tokens_per_rank, ...], tokens in dimension `dim`.

    Raises:
        ValueError: a shape that does not fit shards, a rank or dimension out of range.
    """
    dim = _dimension("x", x, dim, lambda length: _fits(shards, length))
    rows = x.movedim(dim, 1)
    batch, length = len(shards.block_order), rows.shape[1]
    check_length("x", shards, length)
    if rows.shape[0] not in (1, batch):
        raise ValueError(f"x has shape {list(x.shape)}: a batch of {rows.shape[0]}, but shards has {batch} sequences")
    per_rank = shards.tokens_per_rank
    first = check_rank(shards, rank) * per_rank
    if length == 0:
        return rows.new_full((batch, per_rank, *rows.shape[2:]), pad).movedim(1, dim)
    index = _on_device(shards, "order", x.device)[:, first : first + per_rank]
    row = torch.arange(batch, device=x.device)[:, None] if rows.shape[0] == batch else 0
    local = rows[row, index.clamp(max=length - 1)]
    if length < shards.padded_length:
        beyond = (index >= length).view(batch, per_rank, *(1,) * (local.dim() - 2))
        local = local.masked_fill(beyond, pad)
    return local.movedim(1, dim)


def unshard(
    local: Tensor, shards: TokenShards, group: Group = None, *, dim: int | None = None, length: int | None = None
) -> Tensor:
    """All tokens in order, on every rank, from each rank's share; the inverse of `shard`. Collective.

    Args:
        local: [B, tokens_per_rank, ...], the same shape and dtype on every rank. Its gradient is the sum of all ranks'
            gradients of these tokens.
        group: a Transport, ProcessGroup, DeviceMesh or None (see `interlace.comm.process.groups`).
        dim: as for `shard`.
        length: tokens T of the result; default: the longest of shards.lengths.

    Returns:
        [B, T, ...], tokens in dimension `dim`.

    Raises:
        ValueError: a shape, group or length that does not fit shards. CommError: see `all_gather_into_tensor`.
    """
    dim = _dimension("local", local, dim, lambda length: length == shards.tokens_per_rank)
    rows = local.movedim(dim, 1).contiguous()
    transport = resolve(group, local.device)
    check_ranks(shards, transport)
    batch, per_rank = len(shards.block_order), shards.tokens_per_rank
    if rows.shape[:2] != (batch, per_rank):
        raise ValueError(
            f"local has shape {list(local.shape)}: {rows.shape[0]} sequences of {rows.shape[1]} tokens, expected "
            f"{batch} of {per_rank}"
        )
    length = int(shards.lengths.max()) if length is None else operator.index(length)
    if not 0 <= length <= shards.padded_length:
        raise ValueError(f"length must lie between 0 and {shards.padded_length}, got {length}")
    gathered = rows.new_empty(shards.ranks, *rows.shape)
    gather_rows("unshard", transport, gathered, rows, shards=fingerprint_of_shards(shards))
    index = _on_device(shards, "inverse", local.device)[:, :length]
    row = torch.arange(batch, device=local.device)[:, None]
    return gathered[index // per_rank, row, index % per_rank].movedim(1, dim)


def shard_mask(mask: BitfieldMask, shards: TokenShards, rank: int | None = None) -> BitfieldMask:
    """The mask of the tokens of `rank`, [B, tokens_per_rank]; None: of all ranks in gathered order, [B, padded_length].

    Tokens keep their positions; padding belongs to no document. Raises ValueError for a mask that does not fit shards.
    """
    batch, per_rank = len(shards.block_order), shards.tokens_per_rank
    if mask.batch != batch:
        raise ValueError(f"the mask has {mask.batch} rows, but shards has {batch} sequences")
    check_length("the mask", shards, mask.length)
    index = _on_device(shards, "order", mask.device)
    if rank is not None:
        first = check_rank(shards, rank) * per_rank
        index = index[:, first : first + per_rank]
    return mask.padded(shards.padded_length).select(index)


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
    """Raises ValueError unless `length` tokens need exactly the blocks that `shards` assigned."""
    if not _fits(shards, length):
        raise ValueError(
            f"{name} has {length} tokens, but shards holds {shards.padded_length} in blocks of {shards.block} for "
            f"{shards.ranks} ranks: pass the row_blocks of these tokens to distribute_tokens"
        )


def _fits(shards: TokenShards, length: int) -> bool:
    blocks = -(-length // shards.block)
    return -(-max(blocks, 1) // shards.ranks) * shards.ranks * shards.block == shards.padded_length


def _dimension(name: str, x: Tensor, dim: int | None, may_be_tokens: Callable[[int], bool]) -> int:
    """The dimension of the tokens; dimension 0 is the batch."""
    if x.dim() < 2 or not (dim is None or 1 <= dim < x.dim()):
        advice = f": pass {name}[None] for a batch of one" if x.dim() == 1 else ""
        raise ValueError(
            f"{name} has shape {list(x.shape)} and dim is {dim}: dimension 0 must be the batch, and a later one "
            f"the tokens{advice}"
        )
    if dim is None and x.dim() > 3 and may_be_tokens(x.shape[2]):
        raise ValueError(
            f"{name} has shape {list(x.shape)}, in which dimension 2 could be the tokens: pass dim=2 if it is "
            "[B, heads, T, D], or dim=1"
        )
    return 1 if dim is None else dim


def _on_device(shards: TokenShards, name: str, device: torch.device) -> Tensor:
    """shards.order or shards.inverse, int64 [B, padded_length], copied once to each device that needs it."""
    cache: dict[tuple[str, torch.device], Tensor] = shards.__dict__.setdefault("_on_device", {})
    if (name, device) not in cache:
        cache[name, device] = torch.from_numpy(getattr(shards, name)).to(device)
    return cache[name, device]
