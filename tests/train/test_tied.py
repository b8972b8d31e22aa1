"""Tied weights with different values in their file: untied as in HuggingFace, or refused, on every path."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from interlace.cli import main
from interlace.data import ByteTokenizer
from interlace.model import Media, MultimodalModel, Sample
from interlace.train.config import load as configs
from interlace.train.config.load import ConfigError
from interlace.train.models.build import build, build_layout, initialize, stored_weights
from tests.digits import DATA, write_processor

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SIZES, "num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 128}
HEAD, EMBEDDING = "lm_head.weight", "language_model.model.embed_tokens.weight"
TABLE: dict[str, Any] = {
    "run": {"name": "tied"},
    "data": dict(DATA),
    "train": {"steps": 2, "batch_size": 8, "warmup_steps": 1, "validate_every": 2, "validation_samples": 8},
    "parallel": {"ranks": 1, "threads": 1},
    "checkpoint": {"every": 1},
    "log": {"every": 1, "samples": 0, "accuracy_samples": 4, "max_new_tokens": 2, "trackers": []},
}


def with_head(folder: Path, key: str = HEAD, rows: int = 1, **config: Any) -> Path:
    """`folder` with a head beside its embedding; they differ in the last `rows`. Also adds keys to its config."""
    weights = load_file(folder / "model.safetensors")
    [embedding] = [value for name, value in weights.items() if "embed_tokens" in name]
    head = embedding.clone()
    head[len(head) - rows :] += torch.randn(rows, head.shape[1], generator=torch.Generator().manual_seed(1))
    save_file(weights | {key: head}, folder / "model.safetensors", metadata={"format": "pt"})
    output = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(output))
    return folder


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """Tied, with the placeholder of the byte tokenizer."""
    torch.manual_seed(3)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZES, image_size=8, patch_size=4),
        text_config=LlamaConfig(**TEXT),
        image_token_id=ByteTokenizer.IMAGE,
        tie_word_embeddings=True,
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "llava")
    assert HEAD not in load_file(tmp_path / "llava" / "model.safetensors")
    return tmp_path / "llava"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(4)
    LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=True)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def configured(model: dict[str, Any], **parallel: Any) -> configs.Config:
    return configs.from_table(copy.deepcopy(TABLE) | {"model": model, "parallel": parallel or TABLE["parallel"]})


def sample(items: int) -> Sample:
    ids = torch.tensor([7, 8, *[ByteTokenizer.IMAGE] * 4 * items, 299, 298, 9])
    labels = torch.tensor([*ids[1:].tolist(), 2])
    labels[labels == ByteTokenizer.IMAGE] = -100
    pixels = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(2))
    return Sample(ids, labels, {"vision": [Media((3, 8, 8), 4, pixels)] * items} if items else {})


def trainers_loss(config: configs.Config, batch: list[Sample]) -> float:
    """Loss of the first step of `interlace train`, over the ranks of the config's layout."""
    from interlace.run import parallelize

    model = build(config, ByteTokenizer())
    parallel = parallelize(model, build_layout(config, model), transport="local")
    initialize(parallel, seed=0, stored=stored_weights(config, model))
    return float(parallel.step(batch, microbatches=1).loss)


def huggingfaces_loss(folder: Path, kind: Any, one: Sample) -> float:
    whole = kind.from_pretrained(folder, attn_implementation="eager").eval()
    pixels = [item.data for item in one.media.get("vision", [])]
    given = {"pixel_values": torch.stack(pixels)} if pixels else {}
    with torch.no_grad():
        logits = whole(input_ids=one.input_ids[None], **given).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, one.labels, ignore_index=-100))


@pytest.mark.parametrize(
    ("rows", "stages"), [(1, 2), (0, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 1), (0, 2)))]
)
def test_a_whole_model_is_untied_where_its_values_differ(llava: Path, rows: int, stages: int) -> None:
    """They differ in one row of 300: a comparison of parts would miss it. With equal values it stays tied."""
    config = configured({"path": str(with_head(llava, rows=rows))}, placement="parallel", language_model={"pp": stages})
    wanted = huggingfaces_loss(llava, LlavaForConditionalGeneration, sample(1))
    assert trainers_loss(config, [sample(1)]) == pytest.approx(wanted, rel=1e-5)
    names = dict(build(config, ByteTokenizer()).named_parameters())
    assert (f"language_model.{HEAD}" in names) == bool(rows)


@pytest.mark.parametrize("rows", [300, 0])
def test_a_module_is_untied_where_its_values_differ(llama: Path, rows: int) -> None:
    folder = with_head(llama, rows=rows)
    model = build(configured({"language_model": {"path": str(folder)}}), ByteTokenizer())
    assert ("language_model.lm_head.weight" in dict(model.named_parameters())) == bool(rows)
    wanted = huggingfaces_loss(folder, AutoModelForCausalLM, sample(0))
    config = configured({"language_model": {"path": str(folder)}})
    assert trainers_loss(config, [sample(0)]) == pytest.approx(wanted, rel=1e-5)
    assert model.language_model.config.tie_word_embeddings == (not rows)


def test_a_model_is_planned_by_its_config_and_index(llama: Path, llava: Path) -> None:
    """As after a download of only the JSON files; training reports the missing ones."""
    for folder, spec in ((llama, {"language_model": {"path": str(llama)}}), (llava, {"path": str(llava)})):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"lm_head.weight": "model-1.safetensors"}}'
        )
        model = build(configured(spec), ByteTokenizer())
        with pytest.raises(ConfigError, match=r"names 'model-1.safetensors', which is missing"):
            stored_weights(configured(spec), model)


def test_a_head_in_place_of_the_embedding_is_read(llama: Path) -> None:
    """HuggingFace ties the missing one to the existing one."""
    weights = load_file(llama / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    wanted = huggingfaces_loss(llama, AutoModelForCausalLM, sample(0))
    config = configured({"language_model": {"path": str(llama)}})
    assert trainers_loss(config, [sample(0)]) == pytest.approx(wanted, rel=1e-5)


def test_a_weight_under_two_names_must_be_one(llava: Path) -> None:
    """Under the name of older files, which transformers writes for this model, and under the model's own name."""
    weights, own = load_file(llava / "model.safetensors"), "model.language_model.norm.weight"
    config = configured({"path": str(llava)})
    for more, message in (
        (0, None),
        (1, rf"'{own}' twice, with different values: the other one is 'language_model\.mod"),
    ):
        twice = weights | {own: weights["language_model.model.norm.weight"] + more}
        save_file(twice, llava / "model.safetensors", metadata={"format": "pt"})
        if message is None:
            assert stored_weights(config, build(config, ByteTokenizer()))
        else:
            with pytest.raises(ConfigError, match=message):
                build(config, ByteTokenizer())


def test_from_pretrained_unties_and_says_so_when_it_saves(llava: Path, tmp_path: Path) -> None:
    model = MultimodalModel.from_pretrained(with_head(llava))
    model.save_pretrained(tmp_path / "out")
    before, after = load_file(llava / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    output = json.loads((tmp_path / "out" / "config.json").read_text())
    assert output["tie_word_embeddings"] is False and output["text_config"]["tie_word_embeddings"] is False


def test_a_run_trains_resumes_and_exports_both(llava: Path, tmp_path: Path) -> None:
    write_processor(llava)
    table = copy.deepcopy(TABLE) | {"model": {"path": str(with_head(llava))}}
    table["run"]["folder"] = str(tmp_path / "runs")
    file = tmp_path / "config.toml"
    file.write_text(configs.dumps(configs.from_table(table)))
    assert main(["train", str(file)]) == 0
    run = tmp_path / "runs" / "tied" / "latest"
    assert main(["train", "--resume", str(run), "--set", "train.steps=3"]) == 0
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "3"]) == 0
    before, after = load_file(llava / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[key], after[key]) for key in (HEAD, EMBEDDING))
    read = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert (
        torch.equal(read.lm_head.weight, after[HEAD]) and read.lm_head.weight is not read.get_input_embeddings().weight
    )
