"""Context parallelism inside the lanes of a pipeline: loss, gradients and norm equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from interlace.comm.channels.base import Tag
from interlace.comm.channels.local import LocalChannel
from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel
from interlace.parallel.context import ORDERS
from interlace.run import ParallelModel, PipelineError, parallelize
from tests.distributed.workers import run_ranks
from tests.model import zoo
from tests.model.encoders import pixtral, yolos
from tests.model.packing import lfm2
from tests.run.context_parallel import check_case, compare
from tests.run.parity import oracle
from tests.run.random_cases import sweep
from tests.run.tensor_parallel import (
    DRAWN,
    LLM,
    model,
    no_memory,
)
from tests.tiny import random_microbatches, random_sample

SEEDS = 4
DUE = DRAWN | {"copies", "overlapping lanes", *(f"context_order={order}" for order in ORDERS)}
DUE |= {f"{side} {degree}" for side in ("encoder", "language") for degree in ("tp2", "cp2", "cp3", "pp2", "dp2")}


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
def test_few_tokens_and_ranks_without_targets_or_placeholders(order: str) -> None:
    """2 tokens on 4 ranks, an image of one patch on 3; targets only at the end, or on neighbouring ranks."""
    mllm = model(encoders=("vision",))
    mllm.freeze(LLM)  # a rank without a placeholder still receives gradients
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
    """Layers that narrow the plan, and callbacks that get whole chunks on every rank."""

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


def test_unsupported_cp_is_refused_with_alternatives() -> None:
    def parallel(mllm: MultimodalModel, **specs: dict[str, int]) -> ParallelModel:
        return parallelize(mllm, of_specs(mllm, **specs))

    for mllm, name in (
        (zoo.build(audio=None, vision=pixtral), "vision"),
        (zoo.build(audio=None, vision=yolos), "vision"),
        (zoo.build(audio=None, language=lfm2), LLM),
    ):
        with pytest.raises(
            ValueError, match=rf"{name} does not support cp = 2: a probe shows that its layers mix rows.*tp"
        ):
            parallel(mllm, **{name: {"cp": 2}})
    mllm = model(encoders=("vision",))
    mllm.language_settings.postprocess = lambda inputs, output: output
    with pytest.raises(ValueError, match=r"support cp = 2: its callbacks \(preprocess, postprocess\) need whole"):
        parallel(mllm, language_model={"cp": 2})
    with pytest.raises(ValueError, match="unknown context_order 'zag': use one of 'lpt', 'zigzag', 'ring'"):
        parallelize(mllm, of_specs(mllm), context_order="zag")
    mllm = model(encoders=("vision",))
    mllm.language_settings.limit = 8
    with pytest.raises(ValueError, match=r"sample \d+ has \d+ tokens: beyond 8 .* use cp = 1 for language_model"):
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
    """Some of LAYOUTS with each order in turn; orders that differ between ranks."""
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
