"""`train.balance` between processes: each computes the dispatch of a step alone; the numbers are those of one
process."""

from __future__ import annotations

import pytest

from interlace.layout import Layout, ParallelSpec
from interlace.run import parallelize
from tests.distributed.workers import run_ranks
from tests.run.dispatch import NAMES, batch_of
from tests.run.parity import assert_same_gradient, oracle
from tests.tiny import tiny_mllm


def balanced(rank: int) -> tuple[int, int, list[dict[str, int]]]:
    """(digest of the step's table, rows that changed ranks, samples of each replica of each module)."""
    mllm = tiny_mllm(layers=1)
    samples = batch_of(mllm, "uneven")
    loss, gradients = oracle(mllm, [samples])
    mllm.zero_grad()
    layout = Layout.from_specs(mllm, {name: ParallelSpec(dp=2) for name in NAMES}, placement="shared")
    parallel = parallelize(mllm, layout, balance="per_module", transport="distributed", timeout=60)
    result = parallel.step(samples, 1)
    assert abs(result.loss - loss) <= 1e-5 * abs(loss)
    for name, parameter in parallel.named_parameters():
        assert_same_gradient(f"rank {rank} {name}", parameter.grad, gradients[name])
    assert parallel.dispatcher is not None
    counts = [{name: 0 for name in NAMES} for _ in range(2)]
    for chunk in result.table.chunks:
        counts[chunk.replica][chunk.module] += len(chunk.samples)
    return result.table.digest, parallel.dispatcher.crossing(result.table)[0], counts


@pytest.mark.slow
def test_per_module_balance_on_two_processes_equals_one_process() -> None:
    result = run_ranks(2, balanced)
    assert [kind for kind, _ in result] == ["returned"] * 2, result
    (_, first), (_, second) = result
    assert first == second
    _, moved, counts = first
    assert moved > 0  # rows of features that moved; "none" leaves them in place
    assert all(count > 0 for own in counts for count in own.values())
