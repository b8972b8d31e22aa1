"""[model] path: a whole HuggingFace checkpoint is read slice by slice, trained, and exported with the same keys."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from interlace.cli import main
from interlace.data import ByteTokenizer
from interlace.model import MultimodalModel
from interlace.model.whole.model import build_whole
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.config import load as configs
from interlace.train.models.build import build, build_layout, initialize, stored_weights
from tests.digits import DATA, write_processor
from tests.model.older import folder_of
from tests.train.pretrained import all_weights
from tests.train.weights import OfOneRank

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TABLE: dict[str, Any] = {
    "run": {"name": "whole"},
    "data": dict(DATA),
    "train": {"steps": 2, "batch_size": 8, "warmup_steps": 1, "validate_every": 2, "validation_samples": 8},
    "parallel": {"ranks": 1, "threads": 1},
    "checkpoint": {"every": 1},
    "log": {"every": 1, "samples": 0, "accuracy_samples": 4, "max_new_tokens": 2, "trackers": []},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA with the placeholder of the byte tokenizer, in several files, with files of a tokenizer."""
    path = tmp_path_factory.mktemp("llava")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        vision = CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)
        text = LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=300, max_position_embeddings=128)
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=ByteTokenizer.IMAGE)
        LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="30KB")
    write_processor(path)
    return path


def written(tmp_path: Path, folder: Path, **model: Any) -> Path:
    table = copy.deepcopy(TABLE) | {"model": {"path": str(folder), **model}}
    table["run"]["folder"] = str(tmp_path / "runs")
    path = tmp_path / "config.toml"
    path.write_text(configs.dumps(configs.from_table(table, source="mine.toml")))
    return path


def test_every_rank_holds_its_part_of_the_folder(folder: Path) -> None:
    parallel = {"placement": "parallel", "language_model": {"pp": 2}}
    table = copy.deepcopy(TABLE) | {"model": {"path": str(folder)}, "parallel": parallel}
    config = configs.from_table(table, source="mine.toml")
    assert configs.loads(configs.dumps(config)) == config
    whole = LlavaForConditionalGeneration.from_pretrained(folder).state_dict()
    seen: set[str] = set()
    for rank in range(3):
        model = build(config, ByteTokenizer())
        stored, first = stored_weights(config, model), canonical_names(model)
        held = OfOneRank(model, build_layout(config, model), rank)
        initialize(held, seed=0, stored=stored)
        for name, parameter in held.named_parameters():
            assert torch.equal(parameter, whole[model.name_in_whole(name)].float()), name
            seen.add(first[name])
        for stage in held.stages[rank].values():
            assert not any(b.isnan().any() for b in stage.buffers() if b.is_floating_point())
    assert seen == set(stored)


def test_experts_of_older_folders_are_read_transposed(tmp_path: Path) -> None:
    folder = folder_of("qwen3_vl_moe", tmp_path / "older")
    config = configs.from_table(copy.deepcopy(TABLE) | {"model": {"path": str(folder)}}, source="mine.toml")
    stored = stored_weights(config, MultimodalModel.of_whole(build_whole(folder)))
    expected = dict(MultimodalModel.from_pretrained(folder).named_parameters())
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].read(), value) for name, value in expected.items())


def test_projectors_of_whole_checkpoints_match_the_pattern(folder: Path) -> None:
    table = copy.deepcopy(TABLE) | {"model": {"path": str(folder)}}
    table["train"] |= {"freeze": ["*"], "train": ["*.projector"]}
    model = build(configs.from_table(table, source="mine.toml"), ByteTokenizer())
    trained = {model.name_in_whole(name) for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all("multi_modal_projector" in name for name in trained)


def test_pixel_settings_missing_in_config_come_from_the_folder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    model = {"path": str(tmp_path / "model"), "vision": {"std": [1.0, 1.0, 1.0]}}
    vision = configs.from_table(copy.deepcopy(TABLE) | {"model": model}, source="mine.toml").model.encoders()["vision"]
    assert (vision.mean, vision.std) == ([0.1, 0.2, 0.3], [1.0, 1.0, 1.0])


def test_a_folder_that_keeps_state_in_a_buffer_is_refused(folder: Path, tmp_path: Path) -> None:
    """The buffer is not read: a run would train with zeros in its place."""
    key = "model.language_model.layers.1.mlp.scores"
    shutil.copytree(folder, tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"][key] = "buffer.safetensors"
    save_file({key: torch.ones(4)}, tmp_path / "model" / "buffer.safetensors")
    index.write_text(json.dumps(table))
    config = configs.from_table(copy.deepcopy(TABLE) | {"model": {"path": str(tmp_path / "model")}}, source="mine.toml")
    model: Any = build(config, ByteTokenizer())
    model.whole().model.language_model.layers[1].mlp.register_buffer("scores", torch.zeros(4, device="meta"))
    with pytest.raises(configs.ConfigError, match=f"path: .* has '{key}' in a buffer, which is not loaded yet"):
        stored_weights(config, model)


@pytest.mark.slow
def test_a_run_is_exported_key_for_key(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path, folder, vision={"freeze": True}, language_model={"lr": 1e-2})
    assert main(["train", str(config)]) == 0
    [run] = (tmp_path / "runs" / "whole").glob("2*")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    before, after = all_weights(folder), all_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    same = {key for key in before if torch.equal(before[key], after[key])}
    assert same == {key for key in before if "vision_tower" in key}
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    assert f"{tmp_path / 'out' / 'config.json'}: load it with transformers 5;" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").read_text() == (folder / "config.json").read_text()
    LlavaForConditionalGeneration.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "by huggingface")
    wanted = json.loads((tmp_path / "by huggingface" / "generation_config.json").read_text())
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == wanted
    assert main(["export", str(run), str(tmp_path / "first"), "--step", "1"]) == 0
    first = all_weights(tmp_path / "first")
    assert any(not torch.equal(first[key], after[key]) for key in after)
    capsys.readouterr()
    for arguments, line in (
        ([str(run), str(tmp_path / "out")], "exists and is not empty"),
        ([str(run), str(tmp_path / "new"), "--step", "7"], "has no checkpoint of that step; it has 1, 2"),
        ([str(tmp_path / "nothing"), str(tmp_path / "new")], "no such run folder"),
        ([str(tmp_path), str(tmp_path / "new")], "checkpoint"),
    ):
        assert main(["export", *arguments]) == 2
        output = capsys.readouterr().err
        assert line in output and len(output.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_what_a_whole_model_does_not_say_is_refused(folder: Path, tmp_path: Path) -> None:
    for model, line in (
        ({"vision": {"projector": "linear"}}, r"\[model.vision\] says projector, but \[model\] path is a whole model"),
        ({"audio": {"freeze": True}}, r"\[model.audio\] is no module of .*, whose are vision, language_model"),
        ({"language_model": {"path": "x"}}, r"\[model.language_model\] says path"),
        ({"path": str(tmp_path)}, r"\[model\] path: .* has no config.json"),
    ):
        with pytest.raises(configs.ConfigError, match=line):
            configs.from_table(copy.deepcopy(TABLE) | {"model": {"path": str(folder), **model}}, source="mine.toml")


@pytest.mark.slow
def test_modules_are_exported_as_folders(tmp_path: Path) -> None:
    vision = {"architecture": "SiglipVisionModel", "config": SIZES | {"image_size": 8, "patch_size": 4}}
    sizes = SIZES | {"num_key_value_heads": 1, "max_position_embeddings": 128}
    table = copy.deepcopy(TABLE) | {
        "model": {"vision": vision, "language_model": {"architecture": "LlamaForCausalLM", "config": sizes}}
    }
    table["run"]["folder"] = str(tmp_path / "runs")
    (tmp_path / "config.toml").write_text(configs.dumps(configs.from_table(table, source="mine.toml")))
    assert main(["train", str(tmp_path / "config.toml")]) == 0
    [run] = (tmp_path / "runs" / "whole").glob("2*")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    again = MultimodalModel.from_pretrained(tmp_path / "out")
    again.save_pretrained(tmp_path / "twice")
    for part in (".", "vision", "language_model"):
        before, after = (all_weights(tmp_path / name / part) for name in ("out", "twice"))
        assert before and before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
