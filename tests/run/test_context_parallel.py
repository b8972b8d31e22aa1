"""Context parallelism inside the lanes of a pipeline: loss, gradients and norm are those of one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from interlace.comm.channel import Tag
from interlace.comm.channel_local import LocalChannel
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.model import MultimodalModel
from interlace.parallel.context import ORDERS
from interlace.run import ParallelModel, PipelineError, parallelize
from tests.distributed.workers import run_ranks
from tests.model import zoo
from tests.model.test_encoders import pixtral, yolos
from tests.model.test_packing import lfm2
from tests.run.random_cases import _compare_views, kinds, random_checkpointing, random_samples, sweep
from tests.run.test_parity import oracle
from tests.run.test_tensor_parallel import (
    DRAWN,
    LLM,
    PLACEMENTS,
    accepted,
    assert_gradient,
    compare_holders,
    model,
    no_memory,
    norm_of,
    random_model,
)
from tests.tiny import random_microbatches, random_sample

SEEDS = 4
WAYS = [(1, 2), (1, 2), (1, 3), (2, 2)]  # tp, cp
DUE = DRAWN | {"copies", "overlapping lanes", *(f"context_order={order}" for order in ORDERS)}
DUE |= {f"{side} {degree}" for side in ("encoder", "language") for degree in ("tp2", "cp2", "cp3", "pp2", "dp2")}


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
    """Lanes that share ranks in any way, each module's with groups of its own; or encoders on all of the stages' lanes.

    On one lane a module may be tensor parallel where another is context parallel.
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
    """A step gives the loss and the gradients of one process, `times` steps' worth of them."""
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
    """One layout, one model, two steps; returns of what kinds they are."""
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


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_layouts_equal_one_process(seed: int) -> None:
    check_case(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_layouts_equal_one_process() -> None:
    sweep(check_case, range(SEEDS, SEEDS + 36), DUE)


def of_specs(mllm: MultimodalModel, **specs: dict[str, int]) -> Layout:
    return Layout.from_specs(mllm, {name: ParallelSpec(**specs.get(name, {})) for name in mllm.modules_order()})


@pytest.mark.parametrize("order", ORDERS)
def test_fewer_tokens_than_ranks_and_ranks_without_targets_or_placeholders(order: str) -> None:
    """Of 2 tokens among 4 ranks, of an image of one patch among 3; targets at the end alone, of neighbours' ranks."""
    mllm = model(encoders=("vision",))
    mllm.freeze(LLM)  # a rank without a placeholder takes gradients back all the same
    mllm.train()
    generator = torch.Generator().manual_seed(0)
    batch = [[random_sample(mllm, generator, images=images, text=text)] for images, text in ((1, 2), (0, 1), (2, 3))]
    layout = of_specs(mllm, vision={"cp": 3}, language_model={"cp": 4, "pp": 2})
    compare(parallelize(mllm, layout, context_order=order, timeout=30), batch)


def test_a_batch_of_text_leaves_the_encoders_untouched() -> None:
    mllm = model()
    layout = of_specs(mllm, vision={"cp": 2}, audio={"tp": 2}, language_model={"tp": 2, "cp": 2})
    compare(parallelize(mllm, layout, timeout=30), random_microbatches(mllm, "text"))
    assert all(p.grad is None for name, p in mllm.named_parameters() if not name.startswith(LLM))


def test_windows_and_callbacks_of_encoders() -> None:
    """Layers that narrow the plan, and callbacks that are given whole chunks on every rank."""

    def mistral(**changes: Any) -> MistralForCausalLM:
        sizes = {"hidden_size": 16, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}
        return MistralForCausalLM(MistralConfig(**{**zoo.COMMON, **sizes, "vocab_size": zoo.VOCAB, **changes}))

    mllm = zoo.build(vision=zoo.clip, audio=None, language=mistral)
    encoder = mllm.encoders["vision"]
    encoder.preprocess = lambda inputs: {"pixel_values": [2 * image for image in inputs["pixel_values"]]}
    encoder.postprocess = lambda inputs, features: features - features.mean(0)
    generator = torch.Generator().manual_seed(0)
    batch = [zoo.sample(mllm, generator, 3, ("vision", 8, 12), 9), zoo.sample(mllm, generator, 16)]
    layout = of_specs(mllm, vision={"cp": 2, "pp": 3}, language_model={"cp": 3, "pp": 2})
    compare(parallelize(mllm, layout, timeout=30), batch, microbatches=1)


def test_autocast_and_checkpointing() -> None:
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    layout = of_specs(mllm, vision={"cp": 2}, language_model={"tp": 2, "cp": 2})
    parallel = parallelize(mllm, layout, autocast=torch.bfloat16, checkpointing="full", timeout=30)
    result = parallel.step(batch)
    assert result != loss and abs(result - loss) <= 2e-2 * loss  # bf16 has 8 bits of mantissa
    for name, parameter in mllm.named_parameters():
        if gradients[name].norm() > 1e-3:
            assert parameter.grad.dtype is torch.float32
            assert (parameter.grad - gradients[name]).norm() <= 0.15 * gradients[name].norm(), name


def test_a_failed_step_leaves_the_next_one_whole() -> None:
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    layout = of_specs(mllm, vision={"cp": 2}, language_model={"tp": 2, "cp": 2})
    parallel = parallelize(mllm, layout, timeout=30)
    broken = parallel.stages[4][LLM, 0].register_forward_pre_hook(no_memory)
    with pytest.raises(PipelineError, match=r"rank 4, FORWARD language_model\[0\] chunk \d+: OSError: no memory"):
        parallel.step(batch)
    broken.remove()
    parallel.zero_grad()
    compare(parallel, batch)


def test_each_rank_is_sent_the_rows_of_its_own_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    sent: dict[tuple[int, int], int] = {}
    send = LocalChannel.send

    def count(self: LocalChannel, tensor: torch.Tensor, peer: int, tag: Tag, rows: int = 0) -> None:
        sent[self.rank, peer] = sent.get((self.rank, peer), 0) + tensor.shape[0]
        send(self, tensor, peer, tag, rows)

    monkeypatch.setattr(LocalChannel, "send", count)
    compare(parallelize(mllm, of_specs(mllm, vision={"tp": 2}, language_model={"cp": 2}), timeout=30), batch)
    rows = sum(item.tokens for group in batch for sample in group for item in sample.media["vision"])
    assert sum(count for (sender, _), count in sent.items() if sender < 2) == rows
    assert all(count < rows for count in sent.values())
    assert sum(count for (sender, _), count in sent.items() if sender >= 2) == rows  # their gradients


def test_what_cannot_be_dealt_is_refused_and_says_what_to_choose() -> None:
    def parallel(mllm: MultimodalModel, **specs: dict[str, int]) -> ParallelModel:
        return parallelize(mllm, of_specs(mllm, **specs))

    for mllm, name in (
        (zoo.build(audio=None, vision=pixtral), "vision"),
        (zoo.build(audio=None, vision=yolos), "vision"),
        (zoo.build(audio=None, language=lfm2), LLM),
    ):
        with pytest.raises(ValueError, match=rf"{name} cannot be dealt among cp = 2 ranks: its layers mix rows.*tp"):
            parallel(mllm, **{name: {"cp": 2}})
    mllm = model(encoders=("vision",))
    mllm.language_settings.postprocess = lambda inputs, output: output
    with pytest.raises(ValueError, match=r"cp = 2 ranks: its callbacks \(preprocess, postprocess\) expect whole"):
        parallel(mllm, language_model={"cp": 2})
    with pytest.raises(ValueError, match="unknown context_order 'zag': use one of 'lpt', 'zigzag', 'ring'"):
        parallelize(mllm, of_specs(mllm), context_order="zag")
    mllm = model(encoders=("vision",))
    mllm.language_settings.limit = 8
    with pytest.raises(ValueError, match=r"sample \d+ has \d+ tokens: beyond 8 .* leave language_model at cp = 1"):
        parallel(mllm, language_model={"cp": 2}).step(random_microbatches(mllm, "all"))


# ---------------------------------------------------------------------- between processes

LAYOUTS = [
    {"vision": {"tp": 2}, LLM: {"cp": 2}},
    {"vision": {"cp": 2}, LLM: {"pp": 2}},
    {LLM: {"tp": 2, "cp": 2}},
    {LLM: {"cp": 2, "pp": 2}},
    {LLM: {"cp": 2, "dp": 2}},
]


def fixed(rank: int, numbers: list[int]) -> int:
    """Some of LAYOUTS with each order in turn; ranks that were told different ones."""
    for number in numbers:
        specs = LAYOUTS[number]
        mllm = model(tied=number % 2 == 0, encoders=("vision",) if "vision" in specs else ())
        layout = of_specs(mllm, **specs)
        options: Any = {"transport": "distributed", "timeout": 30, "context_order": ORDERS[number % 3]}
        compare(parallelize(mllm, layout, **options), random_microbatches(mllm, "all", count=2))
    different = parallelize(mllm, layout, transport="distributed", context_order=ORDERS[rank > 0], timeout=30)
    with pytest.raises(ValueError, match="order"):
        different.step(random_microbatches(mllm, "all", count=2))
    return len(numbers)


FEW = [0, 2]


@pytest.mark.parametrize(
    "numbers", [FEW, pytest.param([n for n in range(len(LAYOUTS)) if n not in FEW], marks=pytest.mark.slow)], ids=str
)
def test_four_processes_equal_one(numbers: list[int]) -> None:
    assert run_ranks(4, fixed, numbers) == [("returned", len(numbers))] * 4


def distributed(rank: int, seeds: list[int]) -> int:
    return sum(bool(check_case(seed, "distributed", range(4, 5))) for seed in seeds)


@pytest.mark.slow
def test_random_layouts_of_four_processes_equal_one() -> None:
    seeds = list(range(200, 208))
    assert run_ranks(4, distributed, seeds) == [("returned", len(seeds))] * 4
