"""Attention dropout in configs: refused before a run starts, with the key to set. Frozen modules do not drop."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from interlace.data import ByteTokenizer
from interlace.train.config.load import ConfigError, from_table
from interlace.train.config.sections import Config
from interlace.train.models.build import build
from tests.digits import DATA
from tests.model.wholes import llava

GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 512}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
EYES = {"architecture": "ViTModel", "config": {**BERT, "image_size": 32, "patch_size": 8}}


def config_of(model: dict[str, Any]) -> Config:
    return from_table({
        "run": {"name": "dropping"},
        "model": model,
        "data": dict(DATA),
        "train": {"steps": 1, "batch_size": 2, "warmup_steps": 0},
    }, source="mine.toml")  # fmt: skip


def language(architecture: str, **keys: Any) -> dict[str, Any]:
    return {"language_model": {"architecture": architecture, "config": keys}}


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (language("GPT2LMHeadModel", **GPT2), "attn_pdrop"),  # from the library's defaults
        (language("BertLMHeadModel", **BERT, is_decoder=True), "attention_probs_dropout_prob"),
        (language("Qwen2ForCausalLM", **BERT, num_key_value_heads=2, attention_dropout=0.1), "attention_dropout"),
    ],
)
def test_a_language_model_names_its_key_and_the_hint_works(model: dict[str, Any], key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"\[model\.language_model\.config\] {key} must be 0, not 0\.1: bitfield att"
    ):
        build(config_of(model), ByteTokenizer(), source="mine.toml")
    model["language_model"]["config"][key] = 0.0
    assert build(config_of(model), ByteTokenizer()).language_model.training


def test_dropout_error_names_the_key_and_frozen_encoders_pass() -> None:
    eyes = {**EYES, "config": {**EYES["config"], "attention_probs_dropout_prob": 0.2}}
    model = {"it": eyes, **language("Qwen2ForCausalLM", **BERT, num_key_value_heads=2)}
    with pytest.raises(ConfigError, match=r"\[model\.it\.config\] attention_probs_dropout_prob must be 0, not 0\.2"):
        build(config_of(model), ByteTokenizer(["it"]))
    eyes["freeze"] = True
    assert not build(config_of(model), ByteTokenizer(["it"])).encoders["it"].module.training


def test_a_folder_of_one_module(tmp_path: Path) -> None:
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, vocab_size=300)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"\[model\.language_model\.config\] attn_pdrop must be 0, not 0\.1"):
        build(config_of({"language_model": {"path": str(tmp_path)}}), ByteTokenizer())
    mended = {"language_model": {"path": str(tmp_path), "config": {"attn_pdrop": 0.0}}}
    assert build(config_of(mended), ByteTokenizer()).language_model.config.attn_pdrop == 0


def test_a_whole_checkpoint_names_the_place_in_its_file(tmp_path: Path) -> None:
    whole = llava()
    whole.config.text_config.attention_dropout = 0.1
    whole.save_pretrained(tmp_path)
    config, tokenizer = config_of({"path": str(tmp_path)}), SimpleNamespace(placeholders={}, vocab_size=40)
    with pytest.raises(
        ConfigError, match=rf"\[model\] path: text_config\.attention_dropout of {tmp_path}/config\.json must"
    ):
        build(config, tokenizer)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    stored["text_config"]["attention_dropout"] = 0.0
    file.write_text(json.dumps(stored))
    assert isinstance(build(config, tokenizer), torch.nn.Module)
