"""Sweep over architectures: its table matches its results, none is wrong, and a sample is reproduced."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from bench.architectures import ENCODER, LANGUAGE, OUTCOMES, build, examine_variant, population, variants
from bench.architectures_check import prompts, samples_of, spread_encoder
from bench.architectures_table import table
from interlace.attention import hf
from interlace.model import ModalityModule, MultimodalModel, multimodal, set_checkpointing
from interlace.model.probe.separation import Packing
from tests.bench.sweep import REPORT, ROWS, cases

ROOT = Path(__file__).parents[2]
NAMED = [
    (LANGUAGE, "lfm2", "conv"),
    (LANGUAGE, "llama4_text", "default"),
    (LANGUAGE, "nemotron_h", "default"),
    (LANGUAGE, "phimoe", "sliding_window"),
    (LANGUAGE, "qwen3_next", "default"),
    (ENCODER, "qwen2_audio_encoder", "default"),
    (ENCODER, "video_llama_3_vision", "default"),
    (ENCODER, "wav2vec2-bert", "default"),
]
RIGHT = {  # typical training cases, with every way of sharing a batch
    LANGUAGE: (
        "llama qwen2 qwen3 gemma2 gemma3_text mistral phi3 olmo2 smollm3 mixtral qwen3_moe gpt_neox granite glm4"
    ),
    ENCODER: (
        "siglip_vision_model siglip2_vision_model clip_vision_model dinov2 dinov2_with_registers dinov3_vit vit deit "
        "internvl_vision pixtral aimv2_vision_model Idefics3VisionTransformer video_llama_3_vision Glm4vVisionModel "
        "Qwen2VisionTransformerPretrainedModel Qwen2_5_VisionTransformerPretrainedModel Qwen3VLVisionModel "
        "WhisperEncoder qwen2_audio_encoder voxtral_encoder wav2vec2 hubert wavlm data2vec-audio wav2vec2-bert "
        "parakeet_encoder audio-spectrogram-transformer"
    ),
}
MORE = [
    (LANGUAGE, "bamba", "attn_layer_indices"),
    (LANGUAGE, "falcon_h1", "default"),
    (LANGUAGE, "granitemoehybrid", "full_attention"),
    (LANGUAGE, "qwen3_5_text", "default"),
]


def drawn(kind, outcome, count, *, seconds, seed=0):
    """Random cases of an outcome, of architectures whose sweep took at most this long."""
    fitting = [
        case
        for case in cases(outcome)
        if case[0] == kind and ROWS[case[:2]]["seconds"] <= seconds and case not in (*NAMED, *MORE)
    ]
    return random.Random(seed).sample(fitting, min(count, len(fitting)))


def find_again(kind, name, variant, *, thorough):
    """Runs a case of the table; its outcome must be unchanged."""
    said = ROWS[kind, name]["variants"][variant]
    settings = variants(name)[variant] if kind == LANGUAGE else {}
    result = examine_variant(kind, name, settings, thorough=thorough)
    checked = result.keys() & said.keys() - {"note"}
    assert {key: result[key] for key in checked} == {key: said[key] for key in checked}, result.get("note")
    assert {"outcome"} <= checked


def test_nothing_is_wrong_and_the_page_is_that_of_the_report():
    assert [row["model_type"] for row in REPORT["rows"] if row["outcome"] == "WRONG"] == []
    assert "WRONG" not in json.dumps(REPORT["rows"])
    assert (ROOT / "docs" / "architectures.md").read_text() == table(REPORT), "python -m bench.architectures writes it"
    counts = {kind: sum(result.values()) for kind, result in REPORT["counts"].items()}
    assert sum(counts.values()) == len(ROWS) and set(REPORT["counts"][LANGUAGE]) == set(OUTCOMES)


def test_what_people_train_with_is_right():
    for kind, names in RIGHT.items():
        result = {name: ROWS[kind, name]["variants"]["default"]["outcome"] for name in names.split()}
        assert set(result.values()) == {"right"}, result


@pytest.mark.slow
def test_every_architecture_is_in_the_table():
    of, here = REPORT["versions"]["transformers"], transformers.__version__
    if here != of:
        pytest.skip(f"the table is of transformers {of}, this is {here}")
    assert set(population()) == ROWS.keys()


@pytest.mark.parametrize(
    "case",
    [*NAMED, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda case: f"{case[1]}, {case[2]}",
)
def test_named_architectures(case):
    assert ROWS[case[:2]]["variants"][case[2]]["outcome"] == "right"
    find_again(*case, thorough=False)


@pytest.mark.parametrize("outcome", ["right", "refused"])
@pytest.mark.parametrize("kind", [LANGUAGE, ENCODER])
def test_a_sample_of_the_table(kind, outcome):
    for case in drawn(kind, outcome, 1, seconds=4):
        find_again(*case, thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("outcome", ["right", "refused"])
@pytest.mark.parametrize("kind", [LANGUAGE, ENCODER])
def test_a_larger_sample_of_the_table(kind, outcome, part):
    for case in drawn(kind, outcome, 20, seconds=30, seed=1)[part::4]:
        find_again(*case, thorough=outcome == "right")


def gradients_of(kind, name, variant):
    """mode of activation checkpointing -> gradients of a case of the table, text or items alone."""
    model = build(kind, name, variants(name)[variant] if kind == LANGUAGE else None)
    if kind == LANGUAGE:
        owner = MultimodalModel({}, model).eval()
        batch, layers = owner.collate(samples_of(prompts(model))), owner.layer_list("language_model")
    else:
        items = spread_encoder(model, ModalityModule(copy.deepcopy(model), projector=nn.Identity()))
        owner = ModalityModule(model, projector=nn.Identity()).eval()
        owner.connect(owner.feature_size)
        batch, layers = owner.collate(items), owner.layers

    def gradients(mode):
        set_checkpointing(layers, mode)
        owner.zero_grad()
        output = owner(**batch)
        (output.loss if kind == LANGUAGE else output.square().sum()).backward()
        return {key: parameter.grad for key, parameter in owner.named_parameters()}

    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", [LANGUAGE, ENCODER])
def test_checkpointing_keeps_gradients_of_sampled_architectures(kind, part):
    for case in drawn(kind, "right", 24, seconds=8, seed=2)[part::4]:
        gradients = gradients_of(*case)
        wanted = gradients("none")
        for mode in ("full", "selective"):
            result = gradients(mode)
            for key, expected in wanted.items():
                assert (result[key] is None) == (expected is None), (case, mode, key)
                assert expected is None or torch.allclose(result[key], expected, atol=1e-6, equal_nan=True), (case, key)


def test_a_leak_is_found_to_be_wrong(monkeypatch):
    """Sensitivity of the sweep: a packed model that mixes neighbours, and windows that do not narrow a plan, are
    found."""
    with monkeypatch.context() as patch:
        patch.setattr(multimodal, "language_packing", lambda *_: Packing("packed"))
        result = examine_variant(LANGUAGE, "lfm2", variants("lfm2")["conv"], thorough=False)
        assert result["outcome"] == "WRONG" and "logits" in result["note"]
    with monkeypatch.context() as patch:
        patch.setattr(multimodal, "language_packing", lambda *_: Packing("packed"))
        patch.setattr(hf, "narrowed", lambda plan, limits: plan)
        result = examine_variant(LANGUAGE, "phimoe", {"sliding_window": 4}, thorough=False)
        assert result["outcome"] == "WRONG" and "logits" in result["note"]
