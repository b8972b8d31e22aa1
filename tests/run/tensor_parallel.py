"""Helpers of test_tensor_parallel.py and of other tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.model import Checkpointing, MultimodalModel
from interlace.run import ParallelModel, parallelize
from tests.run.parity import FREEZING, assert_same_gradient, oracle
from tests.run.random_cases import kinds, random_checkpointing, random_samples
from tests.tiny import random_microbatches, tiny_mllm

LLM = "language_model"


PLACEMENTS = ("parallel", "colocated", "shared", "replicated", "custom")


DRAWN = {  # kinds of cases that every sweep must cover; see `random_cases.sweep`
    *PLACEMENTS,
    *(f"{freezing} frozen" for freezing in FREEZING),
    *(f"checkpointing={checkpointing}" for checkpointing in get_args(Checkpointing)),
    *("tied=True", "tied=False", "schedule=1f1b", "schedule=gpipe"),
    *("equal lanes", "lanes that divide", "lanes that do not divide"),
}


DUE = DRAWN | {"copies", "crossing lanes"}


def model(**options: Any) -> MultimodalModel:
    """A model whose heads and features are divisible by 2 and by 3."""
    return tiny_mllm(**{"hidden": 24, "heads": 6, "kv_heads": 6, **options})


def random_specs(rng: random.Random, placement: str, names: list[str], layers: int) -> dict[str, ParallelSpec]:
    def spec(**fixed: int) -> ParallelSpec:
        drawn = {"tp": rng.choice([1, 2, 2, 3]), "pp": rng.randint(1, layers), "dp": rng.choice([1, 1, 2])}
        return ParallelSpec(**{**drawn, **fixed})

    if placement == "shared":  # all modules on the same ranks
        world = rng.choice([2, 4, 6])
        ways = [
            ParallelSpec(tp=tp, pp=pp, dp=world // tp // pp)
            for tp in (1, 2, 3)
            for pp in range(1, layers + 1)
            if world % (tp * pp) == 0
        ]
        specs = {name: rng.choice(ways) for name in names}
        specs[LLM] = rng.choice([way for way in ways if way.tp > 1])
        return specs
    if placement == "colocated":
        merged = spec()
        return {**dict.fromkeys(names[:-1], merged), LLM: spec(tp=rng.choice([2, 3]))}
    return {name: spec(tp=rng.choice([2, 3])) if name == names[-1] else spec() for name in names}


def copied(rng: random.Random, mllm: MultimodalModel) -> Layout:
    """Encoders once per stage of the language model, on its lanes ("replicated", which has no constructor for tp)."""
    tp, pp = rng.choice([2, 3]), rng.randint(1, 2)
    lanes = [Lane(tuple(range(i * tp, (i + 1) * tp))) for i in range(pp)]
    modules = {}
    for name in mllm.modules_order():
        layers = len(mllm.layer_list(name))
        if name == LLM:
            cuts = [0, 1, layers] if pp == 2 else [0, layers]
            stages = tuple(Stage(name, i, cuts[i], cuts[i + 1], lane) for i, lane in enumerate(lanes))
        else:
            stages = (Stage(name, 0, 0, layers, lanes[0], tuple(lanes[1:])),)
        modules[name] = ParallelSpec(tp=tp, pp=len(stages)), (Pipeline(name, 0, stages),)
    return Layout(modules, tp * pp)


def crossing(rng: random.Random, mllm: MultimodalModel) -> Layout:
    """Lanes of different sizes that share ranks in any way: an encoder's stages overlap the language model's."""
    world, modules = 4, {}
    for name in mllm.modules_order():
        layers = len(mllm.layer_list(name))
        tp, pp = rng.choice([1, 2, 3]), rng.randint(1, 2)
        cuts = [0, 1, layers] if pp == 2 else [0, layers]
        lanes = [Lane(tuple(sorted(rng.sample(range(world), tp)))) for _ in range(pp)]
        stages = tuple(Stage(name, i, cuts[i], cuts[i + 1], lane) for i, lane in enumerate(lanes))
        modules[name] = ParallelSpec(tp=tp, pp=pp), (Pipeline(name, 0, stages),)
    used = sorted({r for _, ps in modules.values() for p in ps for s in p.stages for r in s.lane.ranks})
    new = {rank: i for i, rank in enumerate(used)}
    modules = {
        name: (
            spec,
            tuple(
                Pipeline(
                    name,
                    p.replica,
                    tuple(
                        Stage(name, s.index, s.start, s.stop, Lane(tuple(new[r] for r in s.lane.ranks)))
                        for s in p.stages
                    ),
                )
                for p in ps
            ),
        )
        for name, (spec, ps) in modules.items()
    }
    return Layout(modules, len(used))


def random_layout(rng: random.Random, mllm: MultimodalModel, placement: str) -> Layout:
    if placement == "replicated":
        return copied(rng, mllm)
    if placement == "custom":
        return crossing(rng, mllm)
    names = mllm.modules_order()
    specs = random_specs(rng, placement, names, len(mllm.layer_list(LLM)))
    return Layout.from_specs(mllm, specs, placement=placement)


def norm_of(gradients: dict[str, torch.Tensor | None], mllm: MultimodalModel) -> float:
    """Norm over the model's parameters, each counted once."""
    result = [gradients[name] for name, _ in mllm.named_parameters()]
    return sum(float(g.double().square().sum()) for g in result if g is not None) ** 0.5


def compare_holders(parallel: ParallelModel) -> None:
    """From now on a step fails if ranks have different bits of a shared gradient: their weights would drift apart."""
    pieces, names = parallel._process.pieces, {id(p): name for name, p in parallel.mllm.named_parameters()}
    collect = pieces.collect

    def compare() -> None:
        first: dict[tuple[int, int], torch.Tensor | None] = {}
        for own, place, parameter, cut in pieces._held:
            other = first.setdefault((id(own), -1 if cut is None else place), parameter.grad)
            same = other is parameter.grad or (
                other is not None and parameter.grad is not None and torch.equal(other, parameter.grad)
            )
            assert same, f"the ranks have different gradients of {names[id(own)]}"
        collect()

    pieces.collect = compare  # type: ignore[method-assign]


def random_model(rng: random.Random, encoders: Sequence[tuple[str, ...]]) -> tuple[MultimodalModel, list[str]]:
    """A model with one of `encoders`, partly frozen; and the kinds that it covers."""
    names = rng.choice(encoders)
    tied = rng.random() < 0.5
    mllm = model(tied=tied, encoders=names)
    freezing = rng.choice(["nothing", "nothing", *FREEZING])
    for path in FREEZING[freezing]:
        if path.split(".")[0] in (*names, LLM):
            mllm.freeze(path)
    mllm.train()
    return mllm, [f"tied={tied}", f"{freezing} frozen"]


def accepted(
    draw: Callable[[], Layout], fits: Callable[[Layout], bool], mllm: MultimodalModel, transport: str, options: Any
) -> ParallelModel:
    """`mllm` in the first drawn layout that is valid for it."""
    while True:
        layout = draw()
        if not fits(layout):
            continue
        try:
            return parallelize(mllm, layout, transport=transport, timeout=30, **options)
        except ValueError as error:  # a tied weight on overlapping lanes
            if "share some of their ranks" not in str(error):
                raise


def check_case(
    seed: int, transport: str = "local", worlds: range = range(1, 13), *, sequence_parallel: bool = False
) -> set[str]:
    """One layout, one model, two steps; returns the kinds that this case covers."""
    rng = random.Random(seed)
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    mllm, what = random_model(rng, [("vision", "audio"), ("vision",), ("vision", "audio")])
    samples = random_samples(rng, mllm, rng.randint(2, 6))
    options = {"checkpointing": random_checkpointing(rng), "schedule": rng.choice(["1f1b", "1f1b", "gpipe"])}
    options["sequence_parallel"] = sequence_parallel
    parallel = accepted(
        lambda: random_layout(rng, mllm, placement), lambda layout: layout.world in worlds, mllm, transport, options
    )
    layout = parallel.layout
    where = f"seed {seed}: {placement}, {what}, {options}\n{layout.describe()}\n"
    loss, gradients = oracle(mllm, [samples])
    norm = norm_of(gradients, mllm)
    mllm.zero_grad()
    compare_holders(parallel)
    for times in (1, 2):
        result = parallel.step(samples, microbatches=rng.choice([1, 2, 3]))
        assert abs(result.loss - loss) <= 1e-5 * abs(loss), f"{where}loss {result.loss}, not {loss}"
        found = parallel.full_gradients()
        for name, expected in gradients.items():
            if name in found:
                try:
                    assert_gradient(name, found[name], None if expected is None else times * expected, norm)
                except AssertionError as error:
                    raise AssertionError(f"{where}step {times}: {error}") from None
        told = parallel.clip_grad_norm_(1e9)
        assert abs(told - times * norm) <= 1e-6 * times * norm + 1e-9, f"{where}norm {told}, not {times * norm}"
    assert parallel.evaluate(samples).loss == pytest.approx(loss, rel=1e-5)
    return {placement, *what, *(f"{name}={value}" for name, value in options.items())} | kinds(layout)


def assert_gradient(name: str, found: torch.Tensor | None, expected: torch.Tensor | None, norm: float) -> None:
    """Compares a gradient. One that is only rounding noise (a bias before a softmax) is compared relative to the whole
    norm.
    """
    if found is not None and expected is not None and float((found - expected).norm()) <= 1e-7 * norm:
        return
    assert_same_gradient(name, found, expected)


def encoder_and_model(mllm: MultimodalModel, encoder: int, language: int, **more: int) -> Layout:
    """A layout with lanes of this many ranks for vision and for the language model."""
    specs = {"vision": ParallelSpec(tp=encoder), LLM: ParallelSpec(tp=language, **more)}
    return Layout.from_specs(mllm, specs)


def pieces(rank: int) -> list[tuple[str, list[int]]]:
    mllm = model(encoders=("vision",))
    whole = {name: parameter.detach().clone() for name, parameter in mllm.named_parameters()}
    parallel = parallelize(mllm, encoder_and_model(mllm, 2, 2), transport="distributed", timeout=30)
    batch = random_microbatches(mllm, "all")
    before = parallel.step(batch).loss
    with torch.no_grad():
        for _, parameter in parallel.named_parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    assert parallel.evaluate(batch).loss < before
    held = dict(parallel.named_parameters())
    for name, parameter in mllm.named_parameters():
        if name in held and held[name].shape != parameter.shape:  # copied from the original model
            assert torch.equal(parameter, whole[name]), name
        elif name in held:
            assert held[name] is parameter, name
    layout = Layout.from_specs(text := model(encoders=()), {LLM: ParallelSpec(tp=2, dp=2, shard="full")})
    sharded = parallelize(text, layout, transport="distributed", timeout=30, sequence_parallel=False)
    sharded.step(random_microbatches(text, "text"))
    norm = text.language_model.model.norm.weight  # replicated in the lane
    assert norm.numel() > 1 and norm.untyped_storage().nbytes() == norm.element_size()
    return [(name, list(parameter.shape)) for name, parameter in parallel.named_parameters()]


def no_memory(*_: Any) -> None:
    raise OSError("no memory")
