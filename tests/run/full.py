"""Helpers of test_full.py and of other tests."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from interlace.layout import Layout, ParallelSpec
from interlace.run import parallelize
from interlace.schedule import Op
from tests.run.sharding import check_training, shared
from tests.run.tensor_parallel import model
from tests.tiny import random_microbatches


@dataclass
class Case:
    """vision, language: their degrees, on the same four ranks. layers: number of modules that gather layer by layer.

    groups: samples per chunk, dealt to replicas in turn; None: as a step deals them.
    """

    vision: ParallelSpec
    language: ParallelSpec
    layers: int
    tied: bool = False
    freeze: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    groups: tuple[int, ...] | None = None


def full(**degrees: Any) -> ParallelSpec:
    return ParallelSpec(shard="full", **degrees)


CASES = {
    "dp 4": Case(full(dp=4), full(dp=4), 2, step={"microbatches": 2}),
    "dp 2 x tp 2": Case(full(tp=2, dp=2), full(tp=2, dp=2), 2),
    "dp 2 x tp 2, whole rows": Case(
        full(tp=2, dp=2), full(tp=2, dp=2), 2, options={"sequence_parallel": False, "checkpointing": "full"}
    ),
    "dp 2 x cp 2": Case(full(cp=2, dp=2), full(cp=2, dp=2), 2),
    "tp 2 x cp 2": Case(full(tp=2, cp=2), full(tp=2, cp=2), 2, options={"checkpointing": "selective"}),
    "stages, tied": Case(full(pp=2, dp=2), full(pp=2, dp=2), 2, tied=True),
    "one stage, tied": Case(full(dp=4), full(dp=4), 2, tied=True, options={"checkpointing": "selective"}),
    "frozen language model": Case(full(dp=4), full(dp=4), 2, freeze=("language_model",)),
    "frozen encoder": Case(full(dp=4), full(dp=4), 2, freeze=("vision",)),
    "frozen encoder, stages": Case(full(dp=4), full(dp=2, pp=2), 0, freeze=("vision",), step={"chunks": {"vision": 2}}),
    "unequal degrees": Case(full(dp=4), full(tp=2, dp=2), 2, step={"microbatches": 2, "chunks": {"vision": 1}}),
    "sets of 2": Case(full(dp=4, shard_ranks=2), full(dp=4, shard_ranks=2), 2, tied=True),
    "sets of 2, one gathers once": Case(
        full(dp=4, shard_ranks=2), full(dp=4, shard_ranks=2), 1, groups=(1, 1, 1, 2, 1, 1, 1)
    ),
    "replicas that run unequal numbers of chunks": Case(
        full(dp=4), full(dp=4), 1, groups=(2, 1, 1, 1, 1, 2), options={"checkpointing": "full"}
    ),
    "fewer samples than replicas": Case(full(dp=4), full(dp=2, pp=2), 0, groups=(1,)),
    "beside one that is not sharded": Case(ParallelSpec(tp=2, dp=2), full(dp=4), 1, tied=True),
}


def train(rank: int, name: str) -> int:
    """Returns the number of modules that all ranks gather layer by layer."""
    case = CASES[name]
    mllm = model(tied=case.tied, encoders=("vision",))
    for path in case.freeze:
        mllm.freeze(path)
    mllm.train()
    alone = copy.deepcopy(mllm)
    layout = Layout.from_specs(mllm, shared(case.vision, case.language), placement="shared")
    parallel = parallelize(mllm, layout, transport="distributed", timeout=30, **case.options)
    samples: list[Any] = [sample for group in random_microbatches(mllm, "all") for sample in group]
    samples = (samples * 4)[:8]
    if case.groups is not None:
        dealt = iter(samples)
        samples = [[next(dealt) for _ in range(count)] for count in case.groups]
    check_training(parallel, alone, samples, f"{name}\n", **case.step)
    rows = [action for actions in parallel.schedule(parallel.table(samples, **case.step)).actions for action in actions]
    result = {op: {action.module for action in rows if action.op is op} for op in (Op.UNSHARD, Op.UNSHARD_LAYERS)}
    return len(result[Op.UNSHARD_LAYERS] - result[Op.UNSHARD])
