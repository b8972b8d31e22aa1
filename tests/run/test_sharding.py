"""Sharded optimizer state and weights: loss, gradients, norm and training are those of one process."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel
from interlace.run import ParallelModel, parallelize
from tests.distributed.workers import run_ranks
from tests.run.random_cases import random_samples
from tests.run.test_parity import FREEZING, oracle
from tests.run.test_tensor_parallel import (
    LLM,
    PLACEMENTS,
    assert_gradient,
    compare_holders,
    model,
    norm_of,
    random_layout,
)
from tests.tiny import random_microbatches

SEEDS = 20
STEPS = 3


def sharded(rng: random.Random, layout: Layout) -> Layout:
    """The same with state or weights of every module sharded, or not, in sets of a size that fits."""
    modules = {}
    for name, (spec, pipelines) in layout.modules.items():
        shard = rng.choice(["optimizer", "full", "full", "none"])
        holders = {sum(len(lane.ranks) for lane in layout.holders(name, s.start)) for p in pipelines for s in p.stages}
        sizes = [n for n in (2, 3, 4) if all(count // spec.tp % n == 0 for count in holders)]
        size = rng.choice([None, *sizes]) if shard != "none" else None
        modules[name] = replace(spec, shard=shard, shard_ranks=size), pipelines
    return Layout(modules, layout.world, layout.placement)


def adamw(named: Any) -> torch.optim.AdamW:
    """Vectors are not decayed, as by the trainer: slices have the dimensions of their weights."""
    named = [p for _, p in named if p.requires_grad]
    groups = [{"params": [p for p in named if (p.dim() > 1) == more], "weight_decay": 0.1 * more} for more in (0, 1)]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


def check_training(
    parallel: ParallelModel, alone: MultimodalModel, samples: list[Any], where: str, **step: Any
) -> None:
    """Steps of AdamW, against one process: the loss, gradients and norm of each, then the weights.

    The first gradient is held against the oracle's to 1e-5; later ones of weights that have drifted by rounding.
    """
    ours = adamw(parallel.named_parameters()) if list(parallel.named_parameters()) else None
    theirs = adamw(alone.named_parameters())
    for number in range(STEPS):
        loss, gradients = oracle(alone, [samples])
        norm = norm_of(gradients, alone)
        result = parallel.step(samples, **step)
        assert abs(result.loss - loss) <= 1e-5 * abs(loss), f"{where}step {number}: loss {result.loss}, not {loss}"
        found = parallel.full_gradients()
        for name, expected in gradients.items():
            if name in found and number == 0:
                try:
                    assert_gradient(name, found[name], expected, norm)
                except AssertionError as error:
                    raise AssertionError(f"{where}step {number}: {error}") from None
            elif name in found:
                assert (found[name] is None) == (expected is None), f"{where}step {number}: {name}"
        told = parallel.clip_grad_norm_(1e9)
        bound = 1e-6 if number == 0 else 1e-4
        assert abs(told - norm) <= bound * norm + 1e-9, f"{where}step {number}: norm {told}, not {norm}"
        if ours is not None:
            ours.step()
        theirs.step()
        parallel.zero_grad()
    weights = dict(alone.named_parameters())
    here = parallel._ranks[parallel.ranks[0]]
    for name, parameter in parallel.named_parameters():
        cut = None if parallel.channel is None else here.cut.get(name)
        due = weights[name] if cut is None else cut.piece(weights[name])
        assert torch.allclose(parameter, due, atol=1e-5), f"{where}{name} is {float((parameter - due).abs().max())} off"
    loss, _ = oracle(alone, [samples])
    assert parallel.evaluate(samples).loss == pytest.approx(loss, rel=1e-5), where


def check_case(seed: int, transport: str = "local", worlds: range = range(2, 13)) -> int:
    """One layout, one model, steps of training; returns the number of ranks."""
    rng = random.Random(seed)
    placement = PLACEMENTS[seed % (len(PLACEMENTS) - 1)]  # "custom" ones have one replica
    encoders = rng.choice([("vision", "audio"), ("vision",)])
    tied = rng.random() < 0.5
    mllm = model(tied=tied, encoders=encoders)
    freezing = rng.choice(["nothing", "nothing", *FREEZING])
    for path in FREEZING[freezing]:
        if path.split(".")[0] in (*encoders, LLM):
            mllm.freeze(path)
    mllm.train()
    alone = copy.deepcopy(mllm)
    samples = random_samples(rng, mllm, rng.randint(2, 6))
    options = {"checkpointing": rng.random() < 0.3, "schedule": rng.choice(["1f1b", "1f1b", "gpipe"])}
    while True:
        layout = sharded(rng, random_layout(rng, mllm, placement))
        if layout.world not in worlds or not layout.shard_groups():
            continue
        try:
            parallel = parallelize(mllm, layout, transport=transport, timeout=30, **options)
            break
        except ValueError as error:
            if "place all alike" not in str(error) and "share some of their ranks" not in str(error):
                raise
    specs = {name: (spec.shard, spec.shard_ranks) for name, (spec, _) in layout.modules.items()}
    where = f"seed {seed}: {placement}, {specs}, tied={tied}, {freezing} frozen, {options}\n{layout.describe()}\n"
    if transport == "local":
        compare_holders(parallel)
    check_training(parallel, alone, samples, where, microbatches=rng.choice([1, 2, 3]))
    return layout.world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_layouts_train_as_one_process_does(seed: int) -> None:
    check_case(seed)
