"""Helpers of test_context_parallel.py and of other tests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.model import MultimodalModel
from interlace.parallel.context import ORDERS
from interlace.run import ParallelModel
from tests.run.parity import oracle
from tests.run.random_cases import _compare_views, kinds, random_checkpointing, random_samples
from tests.run.tensor_parallel import (
    LLM,
    PLACEMENTS,
    accepted,
    assert_gradient,
    compare_holders,
    norm_of,
    random_model,
)

WAYS = [(1, 2), (1, 2), (1, 3), (2, 2)]  # tp, cp


def random_specs(rng: random.Random, placement: str, names: list[str], layers: int) -> dict[str, ParallelSpec]:
    def spec(ways: list[tuple[int, int]]) -> ParallelSpec:
        tp, cp = rng.choice(ways)
        return ParallelSpec(tp=tp, cp=cp, pp=rng.randint(1, layers), dp=rng.choice([1, 1, 2]))

    any_way = [*WAYS, (1, 1), (2, 1), (3, 1)]
    if placement == "shared":
        world = rng.choice([2, 4, 6])
        ways = [
            ParallelSpec(tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp))
            for tp in (1, 2, 3)
            for cp in (1, 2, 3)
            for pp in range(1, layers + 1)
            if world % (tp * cp * pp) == 0
        ]
        specs = {name: rng.choice(ways) for name in names}
        specs[LLM] = rng.choice([way for way in ways if way.cp > 1])
        return specs
    if placement == "colocated":
        merged = spec(any_way)
        return {**dict.fromkeys(names[:-1], merged), LLM: spec(WAYS)}
    return {name: spec(WAYS if name == LLM else any_way) for name in names}


def custom_layout(rng: random.Random, mllm: MultimodalModel, copied: bool) -> Layout:
    """Lanes that share ranks in any way, with groups per module; or encoders on all lanes of the stages.

    On one lane a module may be tensor parallel while another is context parallel.
    """
    modules: dict[str, Any] = {}
    ways = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(1, 3), (3, 1)], 4: [(2, 2), (1, 4)]}
    size, pp = rng.choice([2, 2, 3, 4]), rng.randint(1, 2)
    lanes = [Lane(tuple(range(i * size, (i + 1) * size))) for i in range(pp)]
    for name in mllm.modules_order():
        layers = len(mllm.layer_list(name))
        tp, cp = rng.choice(ways[size][:1] if name == LLM else ways[size])
        cuts = [0, 1, layers] if pp == 2 else [0, layers]
        if name == LLM or not copied:
            at = lanes
            if not copied:
                size, pp = rng.choice([1, 2, 3, 4]) if name != LLM else rng.choice([2, 3, 4]), rng.randint(1, 2)
                tp, cp = rng.choice(ways[size][:1] if name == LLM else ways[size])
                cuts = [0, 1, layers] if pp == 2 else [0, layers]
                at = [Lane(tuple(sorted(rng.sample(range(4), size)))) for _ in range(pp)]
            stages = tuple(Stage(name, i, cuts[i], cuts[i + 1], lane) for i, lane in enumerate(at))
        else:
            stages = (Stage(name, 0, 0, layers, lanes[0], tuple(lanes[1:])),)
        modules[name] = ParallelSpec(tp=tp, cp=cp, pp=len(stages)), (Pipeline(name, 0, stages),)
    used = sorted({r for _, ps in modules.values() for p in ps for s in p.stages for q in s.lanes for r in q.ranks})
    new = {rank: i for i, rank in enumerate(used)}

    def moved(lane: Lane) -> Lane:
        return Lane(tuple(new[rank] for rank in lane.ranks))

    def again(stage: Stage) -> Stage:
        return Stage(
            stage.module, stage.index, stage.start, stage.stop, moved(stage.lane), tuple(map(moved, stage.copies))
        )

    return Layout(
        {
            name: (spec, tuple(Pipeline(name, p.replica, tuple(map(again, p.stages))) for p in pipelines))
            for name, (spec, pipelines) in modules.items()
        },
        len(used),
    )


def random_layout(rng: random.Random, mllm: MultimodalModel, placement: str) -> Layout:
    if placement in ("replicated", "custom"):
        return custom_layout(rng, mllm, placement == "replicated")
    names = mllm.modules_order()
    specs = random_specs(rng, placement, names, len(mllm.layer_list(LLM)))
    return Layout.from_specs(mllm, specs, placement=placement)


def compare(parallel: ParallelModel, batch: Any, times: int = 1, **options: Any) -> None:
    """Asserts that a step gives the loss and the gradients of one process. Gradients are those times `times`."""
    mllm = parallel.mllm
    groups = batch if isinstance(batch[0], list) else [batch]
    kept = [p.grad for p in mllm.parameters()]
    loss, gradients = oracle(mllm, groups)
    norm = norm_of(gradients, mllm)
    for parameter, gradient in zip(mllm.parameters(), kept, strict=True):
        parameter.grad = gradient
    result = parallel.step(batch, **options)
    assert abs(result.loss - loss) <= 1e-5 * abs(loss), f"loss {result.loss}, not {loss}"
    found = parallel.full_gradients()
    for name, expected in gradients.items():
        if name in found:
            assert_gradient(name, found[name], None if expected is None else times * expected, norm)
    told = parallel.clip_grad_norm_(1e9)
    assert abs(told - times * norm) <= 1e-6 * times * norm + 1e-9, f"norm {told}, not {times * norm}"


def check_case(seed: int, transport: str = "local", worlds: range = range(1, 13)) -> set[str]:
    """One layout, one model, two steps; returns the kinds that this case covers."""
    rng = random.Random(seed)
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    mllm, what = random_model(rng, [("vision", "audio"), ("vision",), ("vision", "audio"), ()])
    samples = random_samples(rng, mllm, rng.randint(2, 6))
    options: dict[str, Any] = {
        "checkpointing": random_checkpointing(rng),
        "schedule": rng.choice(["1f1b", "1f1b", "gpipe"]),
        "context_order": rng.choice(ORDERS),
    }
    if all(not p.requires_grad for p in mllm.parameters()):
        mllm.unfreeze(LLM)
    parallel = accepted(
        lambda: random_layout(rng, mllm, placement), lambda layout: layout.world in worlds, mllm, transport, options
    )
    layout = parallel.layout
    specs = {name: layout.spec(name) for name in layout.modules}
    where = f"seed {seed}: {placement}, {what}, {options}\n{specs}\n{layout.describe()}\n"
    mllm.zero_grad()
    compare_holders(parallel)
    _compare_views(parallel)
    for times in (1, 2):
        try:
            compare(parallel, samples, times, microbatches=rng.choice([1, 2, 3]))
        except Exception as error:
            raise AssertionError(f"{where}step {times}: {type(error).__name__}: {error}") from error
    with torch.no_grad():
        loss = float(mllm(**mllm.collate(samples)).loss)
    assert parallel.evaluate(samples).loss == pytest.approx(loss, rel=1e-5)
    return {placement, *what, *(f"{name}={value}" for name, value in options.items())} | kinds(layout)
