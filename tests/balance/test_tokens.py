"""balance.distribute_tokens: a permutation with equal tokens per rank and nearly equal work."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import balance
from interlace.attention.plan import AttentionPlan
from interlace.masks import BitfieldMask


@given(st.data())
def test_shards_are_a_permutation_with_equal_counts(data):
    check_shards(data)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_many_shards_are_permutations_with_equal_counts(data):
    check_shards(data)


def check_shards(data):
    batch, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    ranks, block = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    rows = np.array(data.draw(st.lists(st.integers(0, 9), min_size=batch * n, max_size=batch * n))).reshape(batch, n)
    lengths = np.array(data.draw(st.lists(st.integers(0, n * block), min_size=batch, max_size=batch)))
    linear = data.draw(st.sampled_from([0.0, 0.5]))
    method = data.draw(st.sampled_from([m for m in balance.METHODS if m != "exact"]))
    shards = balance.distribute_tokens(rows, ranks, block=block, linear=linear, lengths=lengths, method=method)
    padded = math.ceil(n / ranks) * ranks * block
    assert shards.padded_length == padded and shards.tokens_per_rank * ranks == padded
    assert (np.sort(shards.order, axis=1) == np.arange(padded)).all()
    assert (np.take_along_axis(shards.order, shards.inverse, axis=1) == np.arange(padded)).all()
    x = np.random.default_rng(0).random((batch, padded))
    y = np.concatenate([np.take_along_axis(x, shards.tokens(r), axis=1) for r in range(ranks)], axis=1)
    assert (np.take_along_axis(y, shards.inverse, axis=1) == x).all()
    loads = np.zeros(ranks)
    for r in range(ranks):
        tokens = shards.tokens(r)
        assert tokens.shape == (batch, padded // ranks) and (np.diff(tokens, axis=1) > 0).all()
        for b in range(batch):
            real = tokens[b][tokens[b] < lengths[b]]
            assert shards.counts[b, r] == len(real)
            blocks = np.unique(tokens[b] // block)
            loads[r] += rows[b][blocks[blocks < n]].sum() + linear * len(real)
    assert shards.loads == pytest.approx(loads)
    assert shards.bound <= shards.loads.max() * (1 + 1e-12)
    assert shards.gap >= -1e-12


def test_work_balances_over_the_batch():
    """Two rows that no rank can balance alone: the heavy block of each goes to a different rank."""
    rows = [[9, 1, 1, 1], [9, 1, 1, 1]]
    for method in ("lpt", "lpt_greedy"):
        shards = balance.distribute_tokens(rows, 2, block=1, method=method)
        assert shards.loads.tolist() == [12, 12] and shards.gap == 0
        assert (shards.counts == 2).all()


@pytest.mark.parametrize("ranks", [8, 16])
def test_masks_at_full_length(ranks):
    rng = np.random.default_rng(0)
    n = 8192
    causal = np.arange(1, n + 1)
    packed = np.concatenate([np.arange(1, length + 1) for length in rng.integers(20, 600, 100)])[:n]
    embedded = np.where(rng.random(n) < 0.3, rng.integers(1, n, n), causal)
    for rows in (causal, packed, embedded):
        shards = balance.distribute_tokens(rows.astype(np.int32), ranks, linear=0.01)
        assert shards.gap <= 1e-3
        assert (shards.counts == n // ranks * 128).all()
        assert balance.distribute_tokens(rows, ranks, method="zigzag").gap >= shards.gap
    batch = np.stack([causal, embedded, np.resize(packed, n)])
    assert balance.distribute_tokens(batch, ranks).gap <= 1e-3


def test_takes_what_the_attention_plan_gives():
    plan = AttentionPlan.build(BitfieldMask.causal(2, 1000), block=128)
    shards = balance.distribute_tokens(plan.row_blocks(), 4, lengths=1000)
    assert shards.padded_length == 1024 and (shards.loads == 18).all()
    assert shards.counts.sum(axis=1).tolist() == [1000, 1000]
    x = torch.randn(2, 1000, 3)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 24))
    order, inverse = torch.from_numpy(shards.order), torch.from_numpy(shards.inverse)
    for b in range(2):
        assert torch.equal(padded[b, order[b]][inverse[b]][:1000], x[b])
    same = balance.distribute_tokens(plan.row_blocks().numpy(), 4, lengths=[1000, 1000])
    assert (same.order == shards.order).all()
    one = balance.distribute_tokens(plan.row_blocks()[0], 4)
    assert one.order.shape == (1, 1024)


def test_a_balancer_of_ones_own():
    seen = []

    def backwards(work, ranks, each):
        seen.append((work.tolist(), ranks, each))
        return ranks - 1 - np.arange(len(work)) % ranks

    shards = balance.distribute_tokens([[5, 1, 1], [2, 2, 2]], 2, block=4, method=backwards)
    assert seen == [([5.0, 1.0, 1.0, 0.0], 2, 2), ([2.0, 2.0, 2.0, 0.0], 2, 2)]
    assert shards.rank_of_block.tolist() == [[1, 0, 1, 0]] * 2 and shards.rank_of_block.dtype == np.int32
    assert shards.loads.tolist() == [3, 10] and shards.tokens(0).tolist() == [[4, 5, 6, 7, 12, 13, 14, 15]] * 2
    for answer, message in [
        ([0, 0, 1], "must return 4 whole numbers"),
        ([0.0, 0.0, 1.0, 1.0], "must return 4 whole numbers, got float64"),
        ([0, 0, 0, 1], "each of 2 ranks 2 of 4 blocks"),
        ([0, 1, 2, 1], "each of 2 ranks 2 of 4 blocks"),
        ([0, 0, -1, 1], "each of 2 ranks 2 of 4 blocks"),
    ]:
        with pytest.raises(ValueError, match=message):
            balance.distribute_tokens([1, 1, 1, 1], 2, method=lambda *_, answer=answer: answer)


@pytest.mark.parametrize(
    ("rows", "ranks", "options", "message"),
    [
        ([1.0], 1, {}, "whole numbers, got dtype float64"),
        ([], 1, {}, "whole numbers|at least one block"),
        ([[[1]]], 1, {}, r"shape \[B, n\]"),
        ([[1, 2], [3, -4]], 1, {}, r"row_blocks\[1, 1\] is -4"),
        ([1], 0, {}, "ranks must lie"),
        ([1], 2**40, {}, "ranks must lie"),
        ([1], 1, {"block": 0}, "block must lie"),
        ([1], 1, {"linear": math.nan}, "linear must be finite"),
        ([1], 1, {"linear": -1}, "linear must be finite"),
        ([1], 1, {"linear": 1e308}, "overflows"),
        ([1], 1, {"method": "greedy"}, "unknown method"),
        ([1], 1, {"lengths": 129}, r"lengths\[0\] is 129"),
        ([[1], [1]], 1, {"lengths": [1, -1]}, r"lengths\[1\] is -1"),
        ([[1], [1]], 1, {"lengths": [1]}, "one whole number or 2"),
        ([1], 1, {"lengths": 1.5}, "one whole number or 1"),
    ],
)
def test_bad_input_is_named(rows, ranks, options, message):
    with pytest.raises(ValueError, match=message):
        balance.distribute_tokens(rows, ranks, **options)
    with pytest.raises(ValueError, match="rank must lie between 0 and 1"):
        balance.distribute_tokens([1, 2], 2).tokens(2)
