"""Replicas of unequal speed: each has its given number of microbatches, and the step equals that of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.run import parallelize
from interlace.run.tables.table import Lengths, step_table
from tests.tiny import random_sample, tiny_mllm


def chains(cuts: dict[str, list[list[int]]]) -> Layout:
    """Pipelines with different cuts, every stage on its own rank. cuts: module -> boundaries by replica."""
    modules, first = {}, 0
    homes: dict[tuple[str, int], int] = {}
    for replica in range(len(next(iter(cuts.values())))):
        for name, of in cuts.items():
            homes[name, replica] = first
            first += len(of[replica]) - 1
    for name, of in cuts.items():
        pipelines = tuple(
            Pipeline(
                name,
                replica,
                tuple(
                    Stage(name, i, bounds[i], bounds[i + 1], Lane((homes[name, replica] + i,)))
                    for i in range(len(bounds) - 1)
                ),
            )
            for replica, bounds in enumerate(of)
        )
        modules[name] = ParallelSpec(pp=max(len(b) - 1 for b in of), dp=len(of)), pipelines
    return Layout(modules, first)


LAYOUT = chains({"vision": [[0, 2], [0, 1, 2]], "language_model": [[0, 1, 2], [0, 2]]})


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=12),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_replicas_get_their_shares_and_each_sample_one_chunk(samples, shares) -> None:
    tokens = np.array([length + rows for length, rows in samples], np.int64)
    rows = np.array([rows for _, rows in samples], np.int64)
    table = step_table(LAYOUT, Lengths(tokens, tokens, {"vision": rows}), microbatches=shares)
    chunks = [chunk for chunk in table.chunks if chunk.module == "language_model"]
    assert sorted(i for chunk in chunks for i in chunk.samples) == list(range(len(samples)))
    for replica, share in enumerate(shares):
        mine = [chunk for chunk in chunks if chunk.replica == replica]
        if len(samples) >= sum(shares):
            assert len(mine) == share
        assert [chunk.index for chunk in mine] == list(range(len(mine)))
    home = {int(i): chunk.replica for chunk in chunks for i in chunk.samples}
    encoded = [(int(i), chunk.replica) for chunk in table.chunks if chunk.module == "vision" for i in chunk.samples]
    assert sorted(encoded) == [(i, home[i]) for i in range(len(samples)) if rows[i]]  # in the reading pipeline


def test_step_with_unequal_shares_and_cuts_equals_one_process() -> None:
    whole = tiny_mllm(encoders=("vision",))
    generator = torch.Generator().manual_seed(3)
    samples = [random_sample(whole, generator, images=i % 3) for i in range(7)]
    loss = whole(**whole.collate(samples)).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
    rows = [samples[:3], samples[3:4], samples[4:6], samples[6:]]
    # rows: packed, one per microbatch. The last batch of an epoch may have fewer than there are microbatches or
    # replicas
    for given_samples in (samples, rows, [samples[:4], samples[4:]], [samples]):
        mllm = tiny_mllm(encoders=("vision",))
        parallel = parallelize(mllm, LAYOUT, transport="local", timeout=30)
        result = parallel.step(given_samples, [3, 1])
        torch.testing.assert_close(float(result), float(loss), rtol=1e-5, atol=1e-6)
        found = parallel.full_gradients()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_shares_that_do_not_fit_are_refused() -> None:
    lengths = Lengths(np.full(4, 3), np.full(4, 3), {"vision": np.zeros(4, np.int64)})
    with pytest.raises(ValueError, match="3 numbers for 2 replicas"):
        step_table(LAYOUT, lengths, microbatches=[1, 1, 1])
    with pytest.raises(ValueError, match="at least 1"):
        step_table(LAYOUT, lengths, microbatches=[1, 0])
    with pytest.raises(ValueError, match="4 groups of samples exceed the 3 microbatches"):
        step_table(LAYOUT, lengths, microbatches=[2, 1], groups=[[0], [1], [2], [3]])
