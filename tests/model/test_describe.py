"""FLOPs used to plan layouts, against the FLOPs that MFU counts and those that torch counts. Torch counts HuggingFace's
own eager modules, for the architectures of the sweep (bench/architectures.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.architectures import ENCODER, LANGUAGE, build, variants
from bench.architectures_check import eager_features, eager_logits, prompts
from interlace import Layout, ParallelSpec
from interlace.model import Media, ModalityModule, MultimodalModel
from interlace.model.counting.flops import Encoder, Uncountable, count_language
from interlace.model.counting.layers import counted
from interlace.model.lora import add_lora
from tests.bench.sweep import ROWS, cases
from tests.model import wholes
from tests.model.zoo import PLACEHOLDERS, llama
from tests.tiny import tiny_mllm

LLM = "language_model"
RIGHT = cases("right")
NOT_COUNTED = {
    "jetmoe": "DataDependentOutputException",  # these select experts by values; the meta device has no values
    "longcat_flash": "DynamicOutputShapeException",
    "step3p7": "DynamicOutputShapeException",
    "molmo2": "is required as a model input when training",
}
FEW = [
    (LANGUAGE, "gemma3_text", "default"),
    (LANGUAGE, "mixtral", "default"),
    (ENCODER, "dinov2", "default"),
]
KNOWN = [
    (LANGUAGE, "gpt2", "default"),
    (ENCODER, "Qwen2_5_VisionTransformerPretrainedModel", "default"),
]


def of_torch(run: Callable[[], Any]) -> int:
    # For its own fused attention on a CPU, torch counts only matrix products.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def planned(mllm: MultimodalModel, name: str) -> tuple[float, float]:
    """FLOPs of a forward per token, and per pair of a query and a key."""
    seeing = [sum(layer.forward_flops for layer in mllm.layers(name, context=keys)) for keys in (0.0, 1.0)]
    return seeing[0], seeing[1] - seeing[0]


def check_language(model: nn.Module, kind: str) -> None:
    eager = copy.deepcopy(model)
    if hasattr(eager, "set_experts_implementation"):
        eager.set_experts_implementation("eager")  # torch does not count grouped products
    mllm = MultimodalModel({}, model)
    result = counted(mllm, LLM)
    per_token, per_pair = planned(mllm, LLM)
    if kind in NOT_COUNTED:
        assert NOT_COUNTED[kind] in result.why and per_token > 0
        return
    assert not result.why
    ids = prompts(eager)[0].repeat(1 + result.length)[: result.length]
    square = per_pair * result.length**2  # eager attention computes the whole square
    assert of_torch(lambda: eager_logits(eager, ids)) == pytest.approx(per_token * result.length + square, rel=1e-9)
    try:
        mfu = count_language(mllm, {})
    except Uncountable as error:
        assert "used outside the layers" in str(error) or "not linear" in str(error)
        return
    # MFU counts convolutions at the ends of a sample as whole operations per token.
    assert per_token == pytest.approx(mfu.token.forward + mfu.target.forward, rel=1e-5)
    assert per_pair == pytest.approx(sum(kind.forward(1) for kind in mfu.attention), rel=1e-9)


def check_encoder(model: nn.Module) -> None:
    eager = copy.deepcopy(model)
    encoder = ModalityModule(model, projector="linear")
    mllm = MultimodalModel({"seen": encoder}, llama(), placeholders={"seen": PLACEHOLDERS["vision"]})
    assert not counted(mllm, "seen").why
    (per_token, per_pair), tokens, shown = planned(mllm, "seen"), encoder.nominal_length, encoder.default
    item = Media(shown.shape, encoder.tokens(*shown), torch.zeros(shown.shape), about=shown.about)
    pairs = tokens**2 * per_pair
    try:
        mfu = Encoder(mllm, "seen").of(item)
    except Uncountable as error:
        assert "used outside the layers" in str(error)
    else:
        assert per_token * tokens == pytest.approx(mfu.products.forward, rel=1e-9)
        assert per_pair == pytest.approx(sum(kind.forward(1) for kind, _ in mfu.attention), rel=1e-9)
        # Windows, frames and tiles: planned as if every token sees its whole item.
        pairs = sum(kind.forward(sum(length**2 for length in lengths)) for kind, lengths in mfu.attention)
    [projector] = [part for part in mllm.layers("seen")[-1].parts if part.name == "encoders.seen.projector"]
    alone = ModalityModule(copy.deepcopy(eager), projector=nn.Identity())
    own = (per_token - projector.forward_flops) * tokens
    assert of_torch(lambda: eager_features(eager, alone, item)) == pytest.approx(own + pairs, rel=1e-9)


def name_of(case: tuple[str, str, str]) -> str:
    return f"{case[1]}, {case[2]}"


@pytest.mark.parametrize(
    "case",
    [*FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in RIGHT if case not in FEW + KNOWN)],
    ids=name_of,
)
def test_planned_flops_are_counted_flops(case: tuple[str, str, str]) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", KNOWN, ids=name_of)
def test_planned_flops_of_well_known_models(case: tuple[str, str, str]) -> None:
    check_case(case)


def check_case(case: tuple[str, str, str]) -> None:
    kind, name, variant = case
    assert ROWS[kind, name]["variants"][variant]["outcome"] == "right"
    model = build(kind, name, variants(name)[variant] if kind == LANGUAGE else {})
    if kind == LANGUAGE:
        check_language(model, name)
    else:
        check_encoder(model)


@pytest.mark.parametrize(
    "name", ["llava", *(pytest.param(name, marks=pytest.mark.slow) for name in wholes.CASES if name != "llava")]
)
def test_planned_flops_of_whole_checkpoints(name: str) -> None:
    torch.manual_seed(0)
    mllm = MultimodalModel.of_whole(wholes.CASES[name].make())
    [tower] = mllm.encoders
    encoder, shown = mllm.encoders[tower], mllm.encoders[tower].default
    mfu, (per_token, per_pair) = count_language(mllm, {}), planned(mllm, LLM)
    assert per_token == mfu.token.forward + mfu.target.forward
    assert per_pair == sum(kind.forward(1) for kind in mfu.attention)
    assert not counted(mllm, tower).why
    if name == "qwen3_vl":  # its mergers count as layers and are also used beside them: no count of the backward
        return
    item = Media(shown.shape, encoder.tokens(*shown), torch.zeros(shown.shape), about=shown.about)
    result, (per_token, per_pair) = Encoder(mllm, tower).of(item), planned(mllm, tower)
    assert per_token * encoder.nominal_length == pytest.approx(result.products.forward, rel=1e-9)
    assert per_pair == sum(kind.forward(1) for kind, _ in result.attention)


# ---------------------------------------------------------------------- cuts


def qwen3_30b_a3b() -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, max_position_embeddings=40960,
        attn_implementation="interlace",
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def llama_70b() -> nn.Module:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, attn_implementation="interlace",
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "cuts"), [(qwen3_30b_a3b, [0, 13, 26, 40, 48]), (llama_70b, [0, 20, 40, 61, 80])], ids=["moe", "dense"]
)
def test_cuts_of_large_models(make: Callable[[], nn.Module], cuts: list[int]) -> None:
    with torch.device("meta"):
        model = make()
    mllm = MultimodalModel({}, model)
    layout = Layout.from_specs(mllm, {LLM: ParallelSpec(pp=4)})
    assert [0, *(stage.stop for stage in layout.stages())] == cuts
    assert all(parameter.is_meta for parameter in mllm.parameters())
    assert sum(layer.parameters for layer in mllm.layers(LLM)) == sum(p.numel() for p in model.parameters())


def test_experts_cost_what_a_token_computes_with_them() -> None:
    """Layer by layer, by hand: 2 of 4 experts, a router, and attention wider than the hidden state."""
    config = Qwen3MoeConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=10, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[0], attn_implementation="interlace",
    )  # fmt: skip
    mllm = MultimodalModel({}, Qwen3MoeForCausalLM(config))
    dense, sparse = mllm.layers(LLM, context=7.0)
    attention = 2 * 16 * 10 * (2 + 1 + 1 + 2) + 2 * 7 * 2 * (10 + 10)
    assert dense.forward_flops == attention + 2 * 3 * 16 * 24
    assert sparse.forward_flops == attention + 2 * 16 * 4 + 2 * (2 * 3 * 16 * 12) + 2 * 16 * 48  # and the head
    assert sparse.parameters - dense.parameters == 16 * 4 + 4 * 3 * 16 * 12 - 3 * 16 * 24 + 16  # and the last norm


# ---------------------------------------------------------------------- structure


def test_another_structure_is_counted_anew() -> None:
    mllm = tiny_mllm(encoders=())
    before = planned(mllm, LLM)
    assert planned(mllm, LLM) == before
    add_lora(mllm, rank=3, targets=["up_proj"])
    assert planned(mllm, LLM)[0] - before[0] == 2 * 2 * 3 * (16 + 24)  # of both layers, down and up


def test_settings_of_the_caller_do_not_count() -> None:
    mllm = tiny_mllm(seed=3, hidden=24)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        inside = {name: counted(mllm, name) for name in mllm.modules_order()}
    mllm = tiny_mllm(seed=3, hidden=24)
    assert inside == {name: counted(mllm, name) for name in mllm.modules_order()}
    assert not any(result.why for result in inside.values())


def test_module_that_cannot_be_counted_is_estimated_with_reason() -> None:
    known, unknown = tiny_mllm(encoders=()), tiny_mllm(encoders=())

    def refuses(*_: Any) -> None:
        raise ValueError("no shapes,\nplease")

    unknown.language_model.model.register_forward_pre_hook(refuses)  # type: ignore[union-attr, operator]
    assert (counted(known, LLM).why, counted(unknown, LLM).why) == ("", "ValueError: no shapes, please")
    assert planned(unknown, LLM) == planned(known, LLM)  # its layers are linear, and its heads as wide as all else
