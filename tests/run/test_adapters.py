"""LoRA in layers that ranks share: loss, gradients, norm and training equal those of one process, in any layout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel
from interlace.model.lora import add_lora
from tests.model import zoo
from tests.run import context_parallel, sharding, tensor_parallel
from tests.run.adapters import with_adapters
from tests.run.random_cases import sweep
from tests.run.sequence_parallel import check_step
from tests.run.tensor_parallel import LLM, model
from tests.tiny import random_microbatches

pytest.importorskip("peft")

TARGETS = (
    ["all-linear"],
    ["all-linear", "vision"],
    ["o_proj", "down_proj"],
    ["q_proj", "up_proj"],
    ["language_model.*.layers.1.*", "vision*layers.0.self_attn*", "vision*.fc2"],
)
DUE = {f"{side} {kind}" for side in ("encoder", "language") for kind in ("tp2", "cp2", "pp2", "optimizer", "full")}


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds adapters to the models of `sharding.check_case`."""
    plain = tensor_parallel.random_model

    def random_model(rng: random.Random, encoders: Sequence[tuple[str, ...]]) -> tuple[MultimodalModel, list[str]]:
        mllm, what = plain(rng, encoders)
        targets = rng.choice(TARGETS)
        return with_adapters(mllm, targets, rng.randint(1, 3)), [*what, str(targets)]

    monkeypatch.setattr(sharding, "random_model", random_model)
    monkeypatch.setattr(context_parallel, "random_model", random_model)


@pytest.mark.parametrize("seed", [pytest.param(5, marks=pytest.mark.slow), 7])
def test_random_layouts_train_adapters_as_one_process_does(seed: int, adapted: None) -> None:
    """Adapters alone, and projectors: a rank trains the part that shard = "optimizer" or "full" leaves there."""
    sharding.check_case(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_layouts_train_adapters_as_one_process_does(adapted: None) -> None:
    sweep(sharding.check_case, range(8, 22), DUE)


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layers_that_are_cut_and_dealt(sequence_parallel: bool) -> None:
    """Loss, gradients and norm to 1e-5; frozen weights have no gradient on any rank."""
    mllm = with_adapters(model(encoders=("vision",)), ["all-linear", "vision"])
    specs = {"vision": ParallelSpec(tp=2), LLM: ParallelSpec(tp=2, cp=2)}
    layout = Layout.from_specs(mllm, specs)
    batch = random_microbatches(mllm, "all", count=2)
    parallel = check_step(mllm, batch, layout, checkpointing="full", sequence_parallel=sequence_parallel)
    for stages in parallel.stages.values():
        frozen = [p for stage in stages.values() for name, p in stage.named_parameters() if ".base_layer." in name]
        assert frozen and not any(p.requires_grad or p.grad is not None for p in frozen)


def test_norms_within_heads_and_adapters_share_a_sum() -> None:
    """Qwen3's norms, trained beside adapters: both are summed over the ranks of a lane."""

    def qwen3(**changes: Any) -> Qwen3ForCausalLM:
        sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
        return Qwen3ForCausalLM(Qwen3Config(**{**zoo.COMMON, **sizes, "vocab_size": zoo.VOCAB, **changes}))

    mllm = zoo.build(vision=zoo.clip, audio=None, language=qwen3)
    add_lora(mllm, rank=2, alpha=2, modules_to_save=["q_norm", "input_layernorm"])
    generator = torch.Generator().manual_seed(0)
    batch = [[zoo.sample(mllm, generator, 3, ("vision", 8, 12), 4), zoo.sample(mllm, generator, 6)]]
    layout = Layout.from_specs(mllm, {"vision": ParallelSpec(), LLM: ParallelSpec(tp=2, pp=2)})
    parallel = check_step(mllm, batch, layout)
    in_part = parallel._ranks[1]._in_part
    assert any(name.endswith("q_norm.weight") for name in in_part)
    assert any("o_proj.lora_B" in name for name in in_part) and not any("q_proj.lora" in name for name in in_part)
