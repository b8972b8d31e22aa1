"""Dealing of tensors and masks to ranks by TokenShards, and reassembly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.comm import run_local, shard, shard_mask, unshard
from interlace.masks import BitfieldMask
from tests.comm.context_parallel import METHODS, dealt
from tests.mask_strategies import masks, rule
from tests.sampling import given_by_tier


@given(masks(longest=40), st.integers(1, 4), st.sampled_from([1, 3, 8]), st.sampled_from(sorted(METHODS)))
def test_what_is_dealt_can_be_put_together(mask, ranks, block, method):
    shards = dealt(mask, ranks, METHODS[method], block)
    tokens = torch.arange(mask.batch * mask.length).reshape(mask.batch, mask.length)

    def rank(group):
        mine = shard(tokens, shards, group.rank, pad=-100)
        heads = shard(tokens[:, None, :, None].double(), shards, group.rank, dim=2, pad=-100)
        flags = shard(tokens % 2 == 0, shards, group.rank)
        # Independent of the tensor code: numpy, row by row.
        for b, row in enumerate(shards.tokens(group.rank)):
            wanted = [int(tokens[b, t]) if t < mask.length else -100 for t in row]
            assert mine[b].tolist() == heads[b, 0, :, 0].tolist() == wanted
        assert flags.dtype == torch.bool
        return unshard(mine, shards, length=mask.length), unshard(heads, shards, dim=2)

    for whole, heads in run_local(ranks, rank):
        assert torch.equal(whole, tokens) and torch.equal(heads[:, 0, :, 0], tokens.double())


@given_by_tier(25, 100, masks(longest=30), st.integers(1, 3), st.sampled_from([1, 3, 8]))
def test_masks_keep_their_rule(mask, ranks, block):
    """A rank's tokens see the same among the gathered keys as in the whole sequence."""
    shards = dealt(mask, ranks, block=block)
    whole = rule(mask, mask)
    keys = shard_mask(mask, shards)
    assert keys.length == shards.padded_length
    for rank in range(ranks):
        seen = shard_mask(mask, shards, rank).to_dense(keys)
        for b in range(mask.batch):
            tokens, order = (torch.from_numpy(x[b]) for x in (shards.tokens(rank), shards.order))
            wanted = torch.zeros(len(tokens), len(order), dtype=torch.bool)
            for i, t in enumerate(tokens):
                for j, u in enumerate(order):
                    wanted[i, j] = t < mask.length and u < mask.length and whole[b, t, u]
            assert torch.equal(seen[b], wanted)


def test_gradients():
    """shard: the gradient of each token, and none for padding. unshard: the sum over ranks of the gradients of its
    tokens.
    """
    mask = BitfieldMask.causal(2, 21)
    shards = dealt(mask, 3, block=4)
    x = torch.randn(2, 21, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.randn(3, 2, 21, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def rank(group):
        leaf = x.clone().requires_grad_()
        mine = shard(leaf, shards, group.rank)
        (grad,) = torch.autograd.grad(unshard(mine, shards) @ torch.ones(2).double(), leaf, weight[group.rank].sum(-1))
        return grad

    held = torch.zeros(3, 2, 21, 1, dtype=torch.float64)
    for r in range(3):
        for b in range(2):
            for t in shards.tokens(r)[b]:
                if t < 21:
                    held[r, b, t] = 1
    assert (held.sum(0) == 1).all()
    for r, grad in enumerate(run_local(3, rank)):
        torch.testing.assert_close(grad, (weight.sum((0, -1)).unsqueeze(-1) * held[r]).expand(2, 21, 2))


def test_a_batch_of_one_serves_all_rows():
    mask = BitfieldMask.pack([BitfieldMask.causal(1, 9), BitfieldMask.full(1, 12)])
    both = BitfieldMask(mask.bits.expand(2, -1), doc=torch.stack([mask.doc[0], mask.doc[0].flip(0)]))
    shards = dealt(both, 2, block=4)
    assert (shards.tokens(0)[0] != shards.tokens(0)[1]).any()
    positions = torch.arange(21)[None]
    assert torch.equal(shard(positions, shards, 1), shard(positions.expand(2, -1), shards, 1))


def test_no_tokens_at_all():
    shards = dealt(BitfieldMask.causal(1, 4), 2, block=4)
    assert shard(torch.zeros(1, 0, 3), shards, 0, pad=7).tolist() == [[[7.0] * 3] * 4]
    assert shard_mask(BitfieldMask.causal(1, 0), shards, 1).doc.tolist() == [[-1] * 4]


def test_what_does_not_fit_is_named():
    mask = BitfieldMask.causal(2, 21)
    shards = dealt(mask, 2, block=4)
    x = torch.zeros(2, 21, 3)
    assert shard(x[:, :20], shards, 0).shape == shard(torch.zeros(2, 24, 3), shards, 0).shape == (2, 12, 3)
    for call, message in [
        (lambda: shard(x[:, :16], shards, 0), "x has 16 tokens, but shards holds 24 in blocks of 4 for 2 ranks"),
        (lambda: shard(torch.zeros(2, 25), shards, 0), "x has 25 tokens"),
        (lambda: shard(torch.zeros(3, 21), shards, 0), "a batch of 3, but shards has 2 sequences"),
        (lambda: shard(x, shards, 2), "rank must lie between 0 and 1, got 2"),
        (lambda: shard(x, shards, 0, dim=0), "dimension 0 must be the batch"),
        (lambda: shard(x, shards, 0, dim=3), "dimension 0 must be the batch"),
        (lambda: shard(x[0, :, 0], shards, 0), r"dim is None: .* the tokens: pass x\[None\] for a batch of one$"),
        (lambda: shard(x[0, :, 0], shards, 0, dim=0), r"pass x\[None\]"),
        (lambda: shard_mask(BitfieldMask.causal(1, 21), shards, 0), "the mask has 1 rows, but shards has 2 sequences"),
        (lambda: shard_mask(BitfieldMask.causal(2, 9), shards, 0), "the mask has 9 tokens"),
        (lambda: shard_mask(mask, shards, -1), "rank must lie between"),
        (lambda: unshard(x, shards), "shards was made for 2 ranks, but the group has 1"),
        (lambda: run_local(2, lambda g: unshard(x, shards, g)), "2 sequences of 21 tokens, expected 2 of 12"),
        (lambda: run_local(2, lambda g: unshard(x[:, :12], shards, g, length=25)), "length must lie between 0 and 24"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_heads_are_not_taken_for_tokens():
    """20 heads need as many blocks as 21 tokens: without `dim` the dimension is ambiguous."""
    mask = BitfieldMask.causal(2, 21)
    shards = dealt(mask, 2, block=4)
    q = torch.arange(2.0 * 20 * 21 * 3).view(2, 20, 21, 3)
    with pytest.raises(ValueError, match=r"x has shape \[2, 20, 21, 3\], in which dimension 2 could be the tokens"):
        shard(q, shards, 0)
    with pytest.raises(ValueError, match=r"local has shape .* dimension 2 could be the tokens: pass dim=2"):
        unshard(torch.zeros(2, 12, 12, 3), shards)
    for rank in range(2):
        mine = shard(q, shards, rank, dim=2)
        assert torch.equal(mine, shard(q.transpose(1, 2), shards, rank, dim=1).transpose(1, 2))
        assert mine.shape == (2, 20, 12, 3)
    heads_last = torch.zeros(2, 21, 2, 3)  # only dimension 1 can be the tokens
    assert shard(heads_last, shards, 0).shape == (2, 12, 2, 3)


def test_one_sequence_without_a_batch():
    """Positions and labels of a single row, [T]: as a batch of one."""
    shards = dealt(BitfieldMask.causal(1, 21), 2, block=4)
    positions = torch.arange(21)
    parts = [shard(positions[None], shards, rank, pad=-1) for rank in range(2)]
    assert sorted(torch.cat(parts, 1)[0].tolist()) == [-1] * 3 + list(range(21))
    for rank in range(2):
        with pytest.raises(ValueError, match=r"pass x\[None\] for a batch of one"):
            shard(positions, shards, rank)
