"""Token blocks to context-parallel ranks (dissertation 3.3.2.1, cornstarch-2025-11 section 5.1, Algorithm 2).

The papers' algorithm gives every rank about the same attention work, with no limit on the number of tokens. Here every
rank also gets the same number of tokens of every sequence. So shards stack into tensors of one shape, all-gathers are
regular, and the work that is linear in tokens is balanced by construction.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core
from interlace.balance.assignment import METHODS, as_numpy, assign, lower_bound, require

BLOCK = 128
"""Maximum tokens of a block: the block size of the attention kernels."""
PER_RANK = 4
"""Minimum blocks of a rank, as long as blocks can get smaller: few blocks cannot be balanced."""


def block_for(length: int, ranks: int) -> int:
    """Tokens of a block for a sequence of `length` tokens on `ranks` ranks."""
    block = BLOCK
    while block > 1 and block * ranks * PER_RANK > length:
        block //= 2
    return block


def rows_per_rank(length: int, ranks: int) -> int:
    """Rows of each rank with the block of `block_for`: `TokenShards.tokens_per_rank`, including padding of blocks."""
    block = block_for(length, ranks)
    return -(-length // (block * ranks)) * block


@dataclass(frozen=True, eq=False)
class TokenShards:
    """Assignment of the tokens of a batch of B sequences to ranks. Made once per microbatch.

    The n query blocks of every sequence are extended by padding blocks to a multiple of `ranks`. So every rank holds
    `tokens_per_rank` tokens of every sequence, in rising order of position. Pad `x` of shape [B, T, ...] to
    `padded_length` tokens (for a mask: doc = -1). Then rank r holds ``x[b, order[b]]`` at r * tokens_per_rank ..
    (r + 1) * tokens_per_rank. ``y[b, inverse[b]]`` restores the order of the rank-major gather ``y`` of all shards; the
    first T tokens of it are those of `x`.
    """

    ranks: int
    block: int  # tokens per block
    lengths: NDArray[np.int64]  # [B], tokens of each sequence that are not padding
    rank_of_block: NDArray[np.int32]  # [B, blocks], blocks = n rounded up to a multiple of ranks
    block_order: NDArray[np.int64]  # [B, blocks], a permutation per row: blocks of rank 0, of rank 1, ...
    counts: NDArray[np.int64]  # [B, ranks], tokens that are not padding
    loads: NDArray[np.float64]  # [ranks], work in the unit of row_blocks
    bound: float  # lower bound on the heaviest load with equal token counts

    @property
    def padded_length(self) -> int:
        """Tokens of a sequence with its padding: ranks * tokens_per_rank."""
        return int(self.block_order.shape[1]) * self.block

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each sequence that every rank holds, padding included."""
        return self.padded_length // self.ranks

    @property
    def gap(self) -> float:
        """Relative distance of the heaviest rank from the bound: 0.001 is 0.1 %."""
        return float(self.loads.max() / self.bound - 1) if self.bound > 0 else 0.0

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """[B, padded_length]: the token at each position of the rank-major layout; padding >= the sequence length."""
        tokens = self.block_order[:, :, None] * self.block + np.arange(self.block)
        return tokens.reshape(len(self.block_order), -1)

    @cached_property
    def inverse(self) -> NDArray[np.int64]:
        """[B, padded_length]: the position of each token in the rank-major layout."""
        blocks = np.argsort(self.block_order, axis=1)
        places = blocks[:, :, None] * self.block + np.arange(self.block)
        return places.reshape(len(self.block_order), -1)

    def tokens(self, rank: int) -> NDArray[np.int64]:
        """[B, tokens_per_rank]: the tokens of one rank, rising; those >= the sequence length are padding."""
        rank = operator.index(rank)
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must lie between 0 and {self.ranks - 1}, got {rank}")
        return self.order[:, rank * self.tokens_per_rank : (rank + 1) * self.tokens_per_rank]


def distribute_tokens(
    row_blocks: ArrayLike,
    ranks: int,
    *,
    block: int = 128,
    linear: float = 0.0,
    lengths: ArrayLike | None = None,
    method: str | Callable[[NDArray[np.float64], int, int], ArrayLike] = "lpt",
) -> TokenShards:
    """Assigns the query blocks of a batch of sequences to context-parallel ranks: equal tokens, nearly equal work.

    Args:
        row_blocks: whole numbers [B, n] or [n] (one sequence), >= 0: attention work of each query block, as
            `AttentionPlan.row_blocks()` gives it; a numpy array or a torch tensor.
        ranks: context-parallel ranks. Every rank takes ceil(n / ranks) blocks of every sequence; at most ranks - 1
            blocks of padding are added, so choose a smaller block for short sequences.
        block: tokens per block.
        linear: work of one token outside attention, in the unit of row_blocks (the work of one attention block).
        lengths: tokens of each sequence that are not padding, an int or [B], 0 .. n * block (default: all). Later
            tokens are padding and have no linear work.
        method: any of `assign`. "lpt" and "lpt_greedy" balance the sum over all sequences of the batch, since a rank
            computes them together; the others assign each sequence separately. Or a custom function, called for each
            sequence as method(work [blocks], ranks, blocks // ranks); it returns the rank of each block, with
            blocks // ranks blocks for each rank.

    Returns:
        TokenShards. `TokenShards.gap` bounds the distance of the heaviest rank from the optimum.
        O(N log N) for N blocks in total, O(N ranks) if B > 1.

    Raises:
        ValueError: wrong shape or dtype, a named value is negative or out of range, an unknown method.
    """
    work = as_numpy(row_blocks)
    if work.dtype.kind not in "iu":
        raise ValueError(f"row_blocks must hold whole numbers, got dtype {work.dtype}")
    if work.ndim == 1:
        work = work[None]
    if work.ndim != 2 or work.size == 0:
        raise ValueError(f"row_blocks must have shape [B, n] with at least one block, got {list(work.shape)}")
    require("row_blocks", work, work >= 0, "it must not be negative")
    ranks, block = operator.index(ranks), operator.index(block)
    if not 1 <= ranks <= 2**20:
        raise ValueError(f"ranks must lie between 1 and 2^20, got {ranks}")
    if not 1 <= block <= 2**31 - 1:
        raise ValueError(f"block must lie between 1 and 2^31 - 1, got {block}")
    if not (np.isfinite(linear) and linear >= 0):
        raise ValueError(f"linear must be finite and not negative, got {linear}")
    if not callable(method) and method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use one of {', '.join(map(repr, METHODS))}")

    batch, n = work.shape
    blocks = -(-n // ranks) * ranks
    if batch * blocks > 2**31 - 1:
        raise ValueError(f"{batch} x {blocks} blocks exceed int32: use a larger block")
    real = _real_lengths(lengths, batch, n * block)
    tokens = np.zeros((batch, blocks), np.int64)
    tokens[:, :n] = np.clip(real[:, None] - np.arange(n) * block, 0, block)
    weights = np.zeros((batch, blocks))
    weights[:, :n] = work
    with np.errstate(over="ignore"):
        weights += linear * tokens
        total = weights.sum()
    if not np.isfinite(total):
        raise ValueError("the sum of all work overflows: use a smaller linear")

    blocks_per_rank = blocks // ranks
    if callable(method):
        bins = np.stack([_checked_bins(method(row.copy(), ranks, blocks_per_rank), blocks, ranks) for row in weights])
    elif method in ("lpt", "lpt_greedy"):
        bins = _core.assign_rows(weights.reshape(-1), batch, ranks, blocks_per_rank, method == "lpt").reshape(
            batch, blocks
        )
    else:
        bins = np.stack([assign(row, ranks, method=method, capacity=blocks_per_rank) for row in weights])
    flat = bins.reshape(-1)
    rows = np.arange(batch)[:, None] * ranks + bins
    counts = np.bincount(rows.reshape(-1), tokens.reshape(-1), batch * ranks).astype(np.int64)
    return TokenShards(
        ranks=ranks,
        block=block,
        lengths=real,
        rank_of_block=bins,
        block_order=np.argsort(bins, axis=1, kind="stable"),
        counts=counts.reshape(batch, ranks),
        loads=np.bincount(flat, weights.reshape(-1), ranks).astype(np.float64, copy=False),
        # Counts are equal per sequence; the bound for several sequences uses only equal counts overall.
        bound=lower_bound(weights.reshape(-1), ranks, capacity=batch * blocks_per_rank),
    )


def _checked_bins(returned: ArrayLike, blocks: int, ranks: int) -> NDArray[np.int32]:
    bins = as_numpy(returned)
    if bins.dtype.kind not in "iu" or bins.shape != (blocks,):
        raise ValueError(f"method must return {blocks} whole numbers, got {bins.dtype} {list(bins.shape)}")
    if bins.min() < 0 or bins.max() >= ranks or np.any(np.bincount(bins, minlength=ranks) != blocks // ranks):
        raise ValueError(f"method must give each of {ranks} ranks {blocks // ranks} of {blocks} blocks")
    return bins.astype(np.int32)


def _real_lengths(lengths: ArrayLike | None, batch: int, longest: int) -> NDArray[np.int64]:
    if lengths is None:
        return np.full(batch, longest, np.int64)
    array = as_numpy(lengths)
    if array.dtype.kind not in "iu" or array.shape not in ((), (batch,)):
        raise ValueError(f"lengths must be one whole number or {batch}, got {array.dtype} {list(array.shape)}")
    array = np.atleast_1d(array)
    rule = f"it must lie between 0 and {longest} (row_blocks times block)"
    require("lengths", array, (array >= 0) & (array <= longest), rule)
    return np.broadcast_to(array.astype(np.int64), batch).copy()
