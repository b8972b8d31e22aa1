"""Chunks distributed among context-parallel ranks, and attention of a layer on their shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.attention import AttentionPlan, bitfield_attention
from interlace.balance import rows_per_rank
from interlace.balance.tokens import BLOCK, PER_RANK
from interlace.comm import Transport, run_local
from interlace.masks import BitfieldMask, Segment
from interlace.parallel.context import ORDERS, Context, assign_tokens
from interlace.parallel.mappings import Ranks


def documents(lengths: list[int]) -> BitfieldMask:
    masks = [BitfieldMask.from_segments([[Segment("image", n // 3), Segment("text", n - n // 3)]]) for n in lengths]
    return BitfieldMask.pack(masks)


@settings(deadline=None)
@given(st.lists(st.integers(3, 90), min_size=1, max_size=4), st.integers(1, 5), st.sampled_from(ORDERS))
def test_every_token_is_one_rank_s_whatever_the_length(lengths: list[int], ranks: int, order: str) -> None:
    mask = documents(lengths)
    shards = assign_tokens(mask, ranks, order)
    result = sorted(token for rank in range(ranks) for token in shards.tokens(rank)[0].tolist())
    assert result == list(range(shards.padded_length)) and shards.padded_length >= mask.length
    again = assign_tokens(
        mask, ranks, order, AttentionPlan.build(mask)
    )  # a plan with other block sizes changes nothing
    assert (shards.order == again.order).all()
    assert shards.tokens_per_rank == rows_per_rank(mask.length, ranks)
    assert shards.block <= BLOCK and (shards.block == 1 or shards.block * ranks * PER_RANK <= mask.length)
    if order == "ring":
        assert (shards.order == range(shards.padded_length)).all()


def test_lpt_balances_what_the_mask_asks_for() -> None:
    mask = documents([700, 30, 30, 264])
    loads = {}
    for order in ORDERS:
        shards = assign_tokens(mask, 4, order)
        work = AttentionPlan.build(mask, block=shards.block).row_blocks()[0].numpy()
        loads[order] = max(work[shards.rank_of_block[0, : len(work)] == rank].sum() for rank in range(4))
    assert loads["lpt"] < min(loads["zigzag"], loads["ring"])


@pytest.mark.parametrize("order", ORDERS)
def test_attention_of_shares_is_attention(order: str) -> None:
    mask = documents([11, 20, 6])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, mask.length, 8, generator=generator) for _ in range(3))
    expected = bitfield_attention(q, k, v, mask)

    def rank(group: Transport) -> torch.Tensor:
        share = Context(Ranks(group), order).share(mask)
        mine = [share.shard(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
        out = share.attend(*mine, share.plan, scale=None, softcap=None)
        with pytest.raises(
            ValueError, match=r"attention got \d+ queries and \d+ keys, but .* slices its attention mask, use cp = 1"
        ):
            share.attend(*mine, AttentionPlan.build(mask), scale=None, softcap=None)
        return share.unshard(out.transpose(1, 2)).transpose(1, 2)

    for result in run_local(3, rank):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
