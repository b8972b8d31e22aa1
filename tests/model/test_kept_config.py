"""Exports of transformers 4.57.1 models keep its format: config.json, names and layout of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, SiglipVisionModel

from interlace.model import MultimodalModel
from interlace.model.checkpoints.config_file import copy_config, for_transformers_5
from tests.model import zoo
from tests.model.older import FAMILIES, folder_of

WHOLE = ("llava", "gemma3", "qwen2_vl")


@pytest.mark.parametrize("name", WHOLE)
def test_an_older_folder_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    source = folder_of(name, tmp_path / "source")
    MultimodalModel.from_pretrained(source).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == FAMILIES[name]["config"]
    before, after = (load_file(at / "model.safetensors") for at in (source, tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(after[key], value) for key, value in before.items())
    assert "rope_parameters" not in FAMILIES[name]["config"] and for_transformers_5(tmp_path / "out") == []


@pytest.mark.parametrize(("name", "kind"), [("llama", LlamaForCausalLM), ("siglip", SiglipVisionModel)])
def test_a_module_keeps_the_config_of_its_folder(name: str, kind: Any, tmp_path: Path) -> None:
    source = folder_of(name, tmp_path / "source")
    kind.from_pretrained(source).save_pretrained(tmp_path / "out")
    assert bool(for_transformers_5(tmp_path)) == (name == "llama")
    assert copy_config(tmp_path / "out", source)
    assert (tmp_path / "out" / "config.json").read_text() == FAMILIES[name]["config"]
    assert for_transformers_5(tmp_path) == []


def test_what_was_changed_is_said_in_the_old_words(tmp_path: Path) -> None:
    source = folder_of("gemma3", tmp_path / "source")
    whole = MultimodalModel.from_pretrained(source)
    whole.to(torch.bfloat16)
    whole.whole().config.text_config.sliding_window = 3
    whole.save_pretrained(tmp_path / "out")
    old, new = (json.loads((at / "config.json").read_text()) for at in (source, tmp_path / "out"))
    assert new["text_config"].pop("sliding_window") == 3 != old["text_config"].pop("sliding_window")
    assert new.pop("dtype") == "bfloat16" and old.pop("dtype") == "float32"
    assert new == old


@pytest.mark.parametrize(
    "change", [None, "{}", '{"model_type": "llama"}', '{"model_type": "siglip"}', "[]", "not json"]
)
def test_a_config_of_something_else_is_not_kept(change: str | None, tmp_path: Path) -> None:
    zoo.llama(num_attention_heads=3, hidden_size=24).save_pretrained(tmp_path / "out")
    before = (tmp_path / "out" / "config.json").read_text()
    (tmp_path / "source").mkdir()
    if change is not None:
        (tmp_path / "source" / "config.json").write_text(change)
    kept = copy_config(tmp_path / "out", tmp_path / "source")
    assert kept == (change == '{"model_type": "llama"}')
    if not kept:
        assert (tmp_path / "out" / "config.json").read_text() == before
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").config.num_attention_heads == 3
