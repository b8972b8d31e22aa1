"""Helpers of test_assign.py and of other tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from interlace.layout import Layout, ParallelSpec
from interlace.run.tables.assign import Assigner, Method
from interlace.run.tables.table import Lengths, step_table
from interlace.run.tables.work import Work
from tests.tiny import random_sample, tiny_mllm

LLM = "language_model"


NAMES = ("vision", "audio", LLM)


def model_of(name: str) -> Any:
    """The model that runs in layout `name`."""
    mllm = tiny_mllm()
    if name == "unequal":
        mllm.freeze("vision")
    return mllm.train()


def layouts(mllm: Any) -> dict[str, Layout]:
    def specs(**given: ParallelSpec) -> dict[str, ParallelSpec]:
        return {name: given.get(name, ParallelSpec()) for name in mllm.modules_order()}

    return {
        "stages": Layout.from_specs(mllm, specs(language_model=ParallelSpec(pp=2))),
        "replicas": Layout.from_specs(mllm, {name: ParallelSpec(dp=2) for name in NAMES}),
        "unequal": Layout.from_specs(mllm, specs(vision=ParallelSpec(dp=2), language_model=ParallelSpec(pp=2))),
        "colocated": Layout.from_specs(mllm, {name: ParallelSpec(pp=2) for name in NAMES}, placement="colocated"),
    }


@cache
def batch_of(method: Method, name: str) -> list[Any]:
    """Ten samples of the first seed with which the method defers an image."""
    mllm = model_of(name)
    assigner = Assigner(method, layouts(mllm)[name], Work.of(mllm))
    for seed in range(100):
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        samples = [
            random_sample(mllm, generator, images=int(i), clips=int(c), text=int(t))
            for i, c, t in zip(rng.integers(0, 4, 10), rng.integers(0, 2, 10), rng.integers(2, 40, 10), strict=True)
        ]
        table = step_table(assigner.layout, lengths := Lengths.of(samples, NAMES[:2]), assignment=assigner(lengths, 3))
        if lengths.rows["vision"][table.deferred].any() or method in ("tokens", "stratified"):
            return samples
    raise AssertionError(f"{method} defers nothing in {name}")
