"""Helpers of test_sharding.py and of other tests."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel
from interlace.run import ParallelModel
from interlace.schedule import Op
from tests.run.context_parallel import random_layout as dealt_layout
from tests.run.parity import oracle
from tests.run.random_cases import kinds, random_checkpointing, random_samples
from tests.run.tensor_parallel import (
    LLM,
    PLACEMENTS,
    accepted,
    assert_gradient,
    compare_holders,
    norm_of,
    random_layout,
    random_model,
)

STEPS = 3


GATHERED = {Op.UNSHARD_LAYERS: "gathered by layer", Op.UNSHARD: "gathered once"}


def sharded(rng: random.Random, layout: Layout) -> Layout:
    """The same layout with state or weights of every module sharded, or not, in sets of a size that fits."""
    modules = {}
    for name, (spec, pipelines) in layout.modules.items():
        shard = rng.choice(["optimizer", "full", "full", "none"])
        holders = {sum(len(lane.ranks) for lane in layout.holders(name, s.start)) for p in pipelines for s in p.stages}
        sizes = [n for n in (2, 3, 4) if all(count // spec.tp % n == 0 for count in holders)]
        size = rng.choice([None, *sizes]) if shard != "none" else None
        modules[name] = replace(spec, shard=shard, shard_ranks=size), pipelines
    return Layout(modules, layout.world, layout.placement)


def adamw(named: Any) -> torch.optim.AdamW:
    """Vectors have no weight decay, as in the trainer: slices have the dimensions of their weights."""
    named = [p for _, p in named if p.requires_grad]
    groups = [{"params": [p for p in named if (p.dim() > 1) == more], "weight_decay": 0.1 * more} for more in (0, 1)]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


def check_training(
    parallel: ParallelModel, alone: MultimodalModel, samples: list[Any], where: str, **step: Any
) -> None:
    """Checks steps of AdamW against one process: the loss, gradients and norm of each step, then the weights.

    The first gradient must match the oracle to 1e-5. Later gradients are of weights that differ by rounding.
    """
    ours = adamw(parallel.named_parameters()) if list(parallel.named_parameters()) else None
    theirs = adamw(alone.named_parameters())
    groups = samples if isinstance(samples[0], list) else [samples]
    for number in range(STEPS):
        loss, gradients = oracle(alone, groups)
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
    weights = dict(alone.named_parameters(remove_duplicate=False))
    here = parallel._ranks[parallel.ranks[0]]
    for name, parameter in parallel.named_parameters():
        cut = None if parallel.channel is None else here.cut.get(name)
        due = weights[name] if cut is None else cut.piece(weights[name])
        assert torch.allclose(parameter, due, atol=1e-5), f"{where}{name} is {float((parameter - due).abs().max())} off"
    loss, _ = oracle(alone, groups)
    assert parallel.evaluate(samples).loss == pytest.approx(loss, rel=1e-5), where


def check_case(seed: int, transport: str = "local", worlds: range = range(2, 13)) -> set[str]:
    """One layout, one model, steps of training; returns the kinds that this case covers."""
    rng = random.Random(seed)
    placement = PLACEMENTS[seed % (len(PLACEMENTS) - 1)]  # "custom" placements have one replica
    mllm, what = random_model(rng, [("vision", "audio"), ("vision",)])
    alone = copy.deepcopy(mllm)
    samples = random_samples(rng, mllm, rng.randint(2, 6))
    options = {"checkpointing": random_checkpointing(rng), "schedule": rng.choice(["1f1b", "1f1b", "gpipe"])}
    parallel = accepted(
        lambda: sharded(rng, rng.choice([random_layout, dealt_layout])(rng, mllm, placement)),
        lambda layout: layout.world in worlds and bool(layout.shard_groups()),
        mllm, transport, options,
    )  # fmt: skip
    layout = parallel.layout
    specs = {name: (spec.shard, spec.shard_ranks) for name, (spec, _) in layout.modules.items()}
    where = f"seed {seed}: {placement}, {specs}, {what}, {options}\n{layout.describe()}\n"
    if transport == "local":
        compare_holders(parallel)
    check_training(parallel, alone, samples, where, microbatches=rng.choice([1, 2, 3]))
    rows = [action for actions in parallel.schedule(parallel.table(samples)).actions for action in actions]
    full = [action.op for action in rows if action.op in GATHERED and parallel.graph.shards[action.other].full]
    result = {placement, *what, *(f"{name}={value}" for name, value in options.items()), *(GATHERED[op] for op in full)}
    return result | kinds(layout)


def two_replicas(mllm: MultimodalModel, shard: str, **more: Any) -> Layout:
    specs = {name: ParallelSpec(dp=2, shard=shard, **more) for name in mllm.modules_order()}
    return Layout.from_specs(mllm, specs, placement="shared")


def shared(vision: ParallelSpec, language: ParallelSpec) -> dict[str, ParallelSpec]:
    return {"vision": vision, LLM: language}
