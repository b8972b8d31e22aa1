"""Layouts that a config can name, on up to eight processes: loss, gradients and norm equal those of one process.

Random layouts are in test_tensor_parallel, test_sequence_parallel, test_context_parallel and test_sharding.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from interlace.layout import Layout, ParallelSpec
from interlace.run import parallelize
from tests.distributed.workers import run_ranks
from tests.run.context_parallel import LLM, compare
from tests.run.sharding import check_training
from tests.run.tensor_parallel import model
from tests.tiny import random_microbatches

# World -> name -> (placement, degrees of the vision encoder, degrees of the language model).
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    8: {
        "vision dp4 -> tp2 cp2": ("parallel", {"dp": 4}, {"tp": 2, "cp": 2}),
        "vision cp2 dp2 -> tp2 pp2": ("parallel", {"cp": 2, "dp": 2}, {"tp": 2, "pp": 2}),
        "vision tp2 dp2 -> cp2 dp2, full": ("parallel", {"tp": 2, "dp": 2, "shard": "full"},
                                            {"cp": 2, "dp": 2, "shard": "full", "shard_ranks": 2}),
        "shared: vision cp2 pp2 dp2 on tp2 cp2 pp2": ("shared", {"cp": 2, "pp": 2, "dp": 2},
                                                      {"tp": 2, "cp": 2, "pp": 2}),
    },
    6: {
        "vision tp2 -> cp2 pp2": ("parallel", {"tp": 2}, {"cp": 2, "pp": 2}),
        "vision pp2 -> tp2 cp2": ("colocated", {"pp": 2}, {"tp": 2, "cp": 2}),
        "shared: vision tp2 dp3 on cp3 pp2": ("shared", {"tp": 2, "dp": 3}, {"cp": 3, "pp": 2}),
    },
    4: {
        "shared: vision dp4 on tp4": ("shared", {"dp": 4}, {"tp": 4}),
        "shared: vision cp4 on tp2 pp2": ("shared", {"cp": 4}, {"tp": 2, "pp": 2}),
        "shared: vision dp4 on cp4, optimizer": ("shared", {"dp": 4, "shard": "full"}, {"cp": 4, "shard": "optimizer"}),
        "vision -> cp3": ("parallel", {}, {"cp": 3}),
        "full dp2 tp2": ("shared", {"dp": 4, "shard": "full"}, {"tp": 2, "dp": 2, "shard": "full"}),
    },
}  # fmt: skip


def every(rank: int, world: int) -> int:
    for number, (name, (placement, vision, language)) in enumerate(LAYOUTS[world].items()):
        mllm = model(tied=number % 2 == 0, encoders=("vision",), hidden=48, heads=12, kv_heads=12)
        if number % 3 == 2:
            mllm.freeze("vision")
        alone = copy.deepcopy(mllm)
        specs = {"vision": ParallelSpec(**vision), LLM: ParallelSpec(**language)}
        layout = Layout.from_specs(mllm, specs, placement=placement)
        parallel = parallelize(mllm, layout, transport="distributed", timeout=60)
        batch = random_microbatches(mllm, "all", count=3)
        if "shard" in {**vision, **language}:
            check_training(parallel, alone, [sample for group in batch for sample in group], f"{name}: ")
            continue
        compare(parallel, batch)
        parallel.zero_grad()
        compare(parallel, random_microbatches(mllm, "text", count=2))  # no consumer of the encoder
    return len(LAYOUTS[world])


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_processes_equal_one(world: int) -> None:
    assert run_ranks(world, every, world, timeout=360) == [("returned", len(LAYOUTS[world]))] * world
