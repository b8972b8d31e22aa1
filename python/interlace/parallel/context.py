"""Context parallelism of a module's layers: each rank of a group has some rows of a chunk, and attends for these.

    context = Context(ranks, "lpt")
    share = context.share(mask)                        # once per chunk, whatever its length
    mine = share.take(hidden)                          # [1, T, ...] -> this rank's rows, filled up with padding
    with use_plan(share.plan, backend=share.attend):   # attention sees the rows of all ranks
        mine = layers(mine)
    whole = share.whole(mine)                          # [1, T, ...] again, on every rank

Which rows a rank has follows from the mask alone, so all ranks deal alike without a word. Orders: "lpt" balances what
attention costs under this very mask, "zigzag" what it costs under a causal one, "ring" gives each rank neighbours.
(Cornstarch 2025-11 section 5.1.)
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


def deal(mask: BitfieldMask, ranks: int, order: str, plan: AttentionPlan | None = None) -> TokenShards:
    """Which of the tokens of `mask` [B, T] each rank has; follows from the arguments alone.

    order: of ORDERS. plan: of this mask, if there is one: of its blocks attention's work is read, where they fit.
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
    """What one rank has of a chunk of `length` tokens. backend: of attention, by name (None: the fastest)."""

    ranks: Ranks
    length: int
    built: ContextParallelPlan
    backend: str | None

    @classmethod
    def of(cls, mask: BitfieldMask, shards: TokenShards, ranks: Ranks, backend: str | None = None) -> Share:
        """That of the chunk with this mask, which was dealt so."""
        return cls(ranks, mask.length, ContextParallelPlan.build(mask, shards, ranks.rank), backend)

    @property
    def plan(self) -> AttentionPlan:
        """Of this rank's rows as queries, and of all ranks' as keys."""
        return self.built.plan

    def take(self, rows: Tensor, pad: float = 0) -> Tensor:
        """This rank's of [1, T, ...]; `pad` in rows beyond the end."""
        return shard(rows, self.built.shards, self.ranks.rank, dim=1, pad=pad)

    def whole(self, mine: Tensor) -> Tensor:
        """[1, T, ...] of every rank's rows; the gradient of a row is the sum of what all ranks find for it."""
        transport = self.ranks.transport(mine)
        return unshard(mine, self.built.shards, transport, dim=1, length=self.length)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, *, scale: float | None, softcap: float | None
    ) -> Tensor:
        """Attention of this rank's rows; see interlace.attention.hf.Backend. plan: the share's, or one made of it.

        Raises ValueError for a plan of other queries or keys: of a model that took a part of its attention mask.
        """
        if (plan.q_len, plan.k_len) != (self.plan.q_len, self.plan.k_len):
            raise ValueError(
                f"attention asks for {plan.q_len} queries and {plan.k_len} keys where this rank has {self.plan.q_len} "
                f"of {self.plan.k_len} rows: this model cuts its attention mask, so leave it at cp = 1"
            )
        built, transport = replace(self.built, plan=plan), self.ranks.transport(q)
        out = context_parallel_attention(
            q, k, v, built, built.shards, group=transport, scale=scale, softcap=softcap, backend=self.backend
        )
        assert isinstance(out, Tensor)
        return out


@dataclass(frozen=True)
class Context:
    """The context-parallel ranks of a stage, and the order in which they are dealt rows."""

    ranks: Ranks
    order: str

    def share(self, mask: BitfieldMask, plan: AttentionPlan | None = None, backend: str | None = None) -> Share:
        """What this rank has of a chunk with this mask; plan: as for `deal`."""
        return Share.of(mask, deal(mask, self.ranks.world, self.order, plan), self.ranks, backend)
