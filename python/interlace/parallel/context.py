"""Context parallelism of a module's layers: each rank has some rows of a chunk and computes their attention.

    context = Context(ranks, "lpt")
    share = context.share(mask)                        # once per chunk, of any length
    mine = share.shard(hidden)                         # [1, T, ...] -> this rank's rows, padded
    with use_plan(share.plan, backend=share.attend):   # attention sees the rows of all ranks
        mine = layers(mine)
    whole = share.unshard(mine)                        # [1, T, ...] again, on every rank

The assignment of rows follows from the mask alone, so ranks need no communication to agree on it. Orders: "lpt"
balances the attention cost under this mask, "zigzag" the cost under a causal mask, "ring" gives each rank consecutive
rows. (Cornstarch 2025-11 section 5.1.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from interlace.attention import AttentionPlan
from interlace.balance import TokenShards, block_for, distribute_tokens
from interlace.comm import ContextParallelPlan, context_parallel_attention, shard, unshard
from interlace.masks import BitfieldMask
from interlace.parallel.mappings import Ranks

ORDERS = ("lpt", "zigzag", "ring")


def assign_tokens(mask: BitfieldMask, ranks: int, order: str, plan: AttentionPlan | None = None) -> TokenShards:
    """Assignment of the tokens of `mask` [B, T] to ranks; depends on the arguments alone.

    order: one of ORDERS.
    plan: of this mask, if available. Attention work is read from its blocks if the block size fits.
    """
    block = block_for(mask.length, ranks)
    if order != "lpt":
        work = torch.ones(mask.batch, -(-mask.length // block), dtype=torch.int32)
    else:
        plan = plan if plan is not None and plan.block == block else AttentionPlan.build(mask, block=block)
        work = plan.row_blocks()
    return distribute_tokens(work, ranks, block=block, lengths=mask.length, method=order)


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's share of a chunk of `length` tokens. backend: of attention, by name (None: the fastest)."""

    ranks: Ranks
    length: int
    cp_plan: ContextParallelPlan
    backend: str | None

    @classmethod
    def of(cls, mask: BitfieldMask, shards: TokenShards, ranks: Ranks, backend: str | None = None) -> Share:
        """The share of the chunk with this mask and these shards."""
        return cls(ranks, mask.length, ContextParallelPlan.build(mask, shards, ranks.rank), backend)

    @property
    def plan(self) -> AttentionPlan:
        """Attention plan: queries are this rank's rows, keys are all ranks' rows."""
        return self.cp_plan.plan

    def shard(self, rows: Tensor, pad: float = 0) -> Tensor:
        """This rank's rows of [1, T, ...]. Rows beyond the end are `pad`."""
        return shard(rows, self.cp_plan.shards, self.ranks.rank, dim=1, pad=pad)

    def unshard(self, rows: Tensor) -> Tensor:
        """[1, T, ...] from every rank's rows. The gradient of a row is the sum of all ranks' gradients for it."""
        transport = self.ranks.transport(rows)
        return unshard(rows, self.cp_plan.shards, transport, dim=1, length=self.length)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, *, scale: float | None, softcap: float | None
    ) -> Tensor:
        """Attention of this rank's rows; see interlace.attention.hf.Backend. plan: the share's, or derived from it.

        Raises ValueError for a plan of other queries or keys: the model took a part of its attention mask.
        """
        if (plan.q_len, plan.k_len) != (self.plan.q_len, self.plan.k_len):
            raise ValueError(
                f"attention got {plan.q_len} queries and {plan.k_len} keys, but this rank has {self.plan.q_len} of "
                f"{self.plan.k_len} rows: this model slices its attention mask, use cp = 1"
            )
        cp_plan, transport = replace(self.cp_plan, plan=plan), self.ranks.transport(q)
        out = context_parallel_attention(
            q, k, v, cp_plan, cp_plan.shards, group=transport, scale=scale, softcap=softcap, backend=self.backend
        )
        assert isinstance(out, Tensor)
        return out


@dataclass(frozen=True)
class Context:
    """The context-parallel ranks of a stage, and the order in which rows are assigned to them."""

    ranks: Ranks
    order: str

    def share(self, mask: BitfieldMask, plan: AttentionPlan | None = None, backend: str | None = None) -> Share:
        """This rank's share of a chunk with this mask. plan: as for `assign_tokens`."""
        return Share.of(mask, assign_tokens(mask, self.ranks.world, self.order, plan), self.ranks, backend)
