"""LoRA on whole checkpoints: weights come from the folder, trained weights are exported to HuggingFace and peft."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

from interlace.model import MultimodalModel
from interlace.model.lora import adapter_files, add_lora, merge_adapters
from interlace.model.patterns import is_adapter
from interlace.run import parallelize
from interlace.train.checkpoint.checkpoints import Checkpoints
from interlace.train.checkpoint.identity import identity_of
from interlace.train.checkpoint.storage import read_manifest
from interlace.train.commands.export import export
from interlace.train.config.load import dumps, from_table
from interlace.train.config.sections import Config
from interlace.train.models.build import architecture, build_layout, initialize, stored_weights
from interlace.train.models.build import freeze as freeze_as_configured
from tests.digits import DATA
from tests.model.wholes import TOKEN, llava

peft = pytest.importorskip("peft")
LORA = {"rank": 2, "alpha": 4, "targets": ["all-linear", "vision.*q_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "llava"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        llava().save_pretrained(path)
    return path


def config_of(folder: Path, **train: Any) -> Config:
    return from_table({
        "run": {"name": "whole"},
        "model": {"path": str(folder)},
        "data": dict(DATA),
        "train": {"steps": 1, "batch_size": 2, "warmup_steps": 0, "lora": LORA, **train},
        "parallel": {"placement": "parallel", "timeout": 60.0, "language_model": {"pp": 2}},
    })  # fmt: skip


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([[1, *[TOKEN] * 16, 7, 9, 11]])
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}


def shaken(model: MultimodalModel) -> MultimodalModel:
    """A model with adapters and projector changed as if trained."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def test_folder_weights_load_into_layers_under_adapters(folder: Path) -> None:
    config = config_of(folder)
    with torch.device("meta"):
        model = MultimodalModel.of_whole(llava())
    freeze_as_configured(config, model, "config")
    parallel = parallelize(model, build_layout(config, model), transport="local", timeout=60)
    initialize(parallel, seed=0, stored=stored_weights(config, model))
    oracle = LlavaForConditionalGeneration.from_pretrained(folder)
    kept = dict(oracle.named_parameters())
    result = [name for name, _ in model.named_parameters() if not is_adapter(name)]
    assert len(result) == len(kept)
    for name in result:
        key = model.name_in_whole(name).replace(".base_layer", "")
        assert torch.equal(model.get_parameter(name), kept[key]), name
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    beside = {name for name in trained if not is_adapter(name)}
    assert beside and all("multi_modal_projector" in name for name in beside)
    assert any("vision_tower" in name for name in trained) and any(
        name.startswith("language_model") for name in trained
    )


def test_huggingface_adapter_and_merged_weights_agree(folder: Path, tmp_path: Path) -> None:
    model = MultimodalModel.from_pretrained(folder)
    add_lora(model, **LORA)
    shaken(model)
    assert adapter_files(model, tmp_path / "adapter", parts=model.modules_order(), base=str(folder)) == []
    assert merge_adapters(model) == 24
    model.save_pretrained(tmp_path / "merged")
    plain = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    merged = LlavaForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    before, expected = plain(**inputs()).logits, merged(**inputs()).logits
    assert (before - expected).abs().max() > 0.01
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(**inputs()).logits, expected, rtol=1e-5, atol=1e-5)


def test_the_command_exports_what_a_run_has_trained(folder: Path, tmp_path: Path, capsys: Any) -> None:
    config, run = config_of(folder), tmp_path / "run"
    model = MultimodalModel.from_pretrained(folder)
    freeze_as_configured(config, model, "config")
    shaken(model)
    run.mkdir()
    (run / "config.toml").write_text(dumps(config))
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    identity = identity_of(model, architecture(config))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    stored = partial(stored_weights, config, model)
    store = Checkpoints(run / "checkpoints", keep=1, identity=identity, stored=stored, frozen=frozen)
    path = store.save(1, held, {}, {"step": 1})
    assert read_manifest(path).base.keys() == frozen
    for name, adapter in (("adapter", True), ("merged", False)):
        export(
            SimpleNamespace(run=run, folder=tmp_path / name, step=None, raw=False, adapter=adapter, set=[], check=None)
        )  # type: ignore[arg-type]
    merged = LlavaForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    plain = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(**inputs()).logits, merged(**inputs()).logits, rtol=1e-5, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
