"""Weights from folders that HuggingFace wrote: each rank reads its parts, and mismatches are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SiglipConfig,
    SiglipModel,
    SiglipVisionModel,
    WhisperConfig,
    WhisperModel,
)  # fmt: skip

from interlace.data import ByteTokenizer
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.config import load as configs
from interlace.train.config.load import ConfigError
from interlace.train.models.build import build, build_layout, initialize, stored_weights
from tests.train.build import AUDIO, TABLE
from tests.train.pretrained import all_weights
from tests.train.weights import OfOneRank

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = VISION | {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
LLM = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 4, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """All of SigLIP, its vision half alone, all of Whisper, and Llamas: in several files, in bf16, and tied."""
    root = tmp_path_factory.mktemp("models")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        siglip = SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION | {"image_size": 32, "patch_size": 8}))
        siglip.save_pretrained(root / "siglip")
        SiglipVisionModel(siglip.config.vision_config).save_pretrained(root / "vision")
        sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 60}
        tokens = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "decoder_start")}
        WhisperModel(WhisperConfig(**AUDIO, **sizes, **tokens)).save_pretrained(root / "whisper")
        LlamaForCausalLM(LlamaConfig(**LLM)).save_pretrained(root / "llama", max_shard_size="30KB")
        tied = LlamaForCausalLM(LlamaConfig(**LLM, tie_word_embeddings=True))
        tied.to(torch.bfloat16).save_pretrained(root / "tied")
    yield {path.name: path for path in root.iterdir()}


def config_with(**modules: dict[str, Any]) -> configs.Config:
    parallel = {"placement": "shared", "timeout": 60.0, "language_model": {"tp": 2, "pp": 2}}
    encoders = {name: {"dp": 4} for name in modules if name != "language_model"}
    table = TABLE | {"model": modules, "parallel": parallel | encoders}
    return configs.from_table(json.loads(json.dumps(table)), source="mine.toml")


@pytest.mark.parametrize(
    ("llama", "vision"),
    [
        ("llama", "siglip"),
        ("tied", "vision"),
        pytest.param("llama", "vision", marks=pytest.mark.slow),
        pytest.param("tied", "siglip", marks=pytest.mark.slow),
    ],
)
def test_every_rank_holds_its_part_of_what_the_folders_have(folders: dict[str, Path], vision: str, llama: str) -> None:
    paths = {"vision": vision, "audio": "whisper", "language_model": llama}
    config = config_with(**{name: {"path": str(folders[folder])} for name, folder in paths.items()})
    assert config.model.language_model.config["hidden_size"] == 32
    assert config.model.encoders()["audio"].architecture == "WhisperEncoder"
    assert configs.loads(configs.dumps(config)) == config  # the folder is no longer needed
    theirs = {name: all_weights(folders[folder]) for name, folder in paths.items()}
    prefixes = {"encoders.vision.module.": ("vision", "vision_model." if vision == "siglip" else "")}
    prefixes |= {"encoders.audio.module.": ("audio", "encoder."), "language_model.": ("language_model", "")}
    seen: set[str] = set()
    for rank in range(4):
        model = build(config, ByteTokenizer())
        stored, first = stored_weights(config, model), canonical_names(model)
        parallel = OfOneRank(model, build_layout(config, model), rank)
        initialize(parallel, seed=0, stored=stored)
        for name, parameter in parallel.named_parameters():
            for prefix, (module, there) in prefixes.items():
                if name.startswith(prefix):
                    whole = theirs[module][there + first[name].removeprefix(prefix)].float()
                    region = parallel.regions().get(name)
                    assert torch.equal(parameter, whole if region is None else region.piece(whole)), name
                    seen.add(first[name])
            assert not parameter.isnan().any(), name  # the projectors' are random
        for stages in parallel.stages.values():
            for stage in stages.values():
                assert not any((b == torch.iinfo(b.dtype).max).any() for b in stage.buffers() if b.dtype == torch.int64)
                assert not any(b.isnan().any() for b in stage.buffers() if b.is_floating_point())
    assert seen == set(stored)


def damaged(folders: dict[str, Path], tmp_path: Path, name: str, change: Any) -> Path:
    """A copy of a folder of one file, with changed weights and config.json."""
    folder = tmp_path / name
    folder.mkdir()
    weights, table = all_weights(folders[name]), json.loads((folders[name] / "config.json").read_text())
    change(weights, table)
    if weights:
        save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(table))
    return folder


WRONG: list[tuple[Any, str]] = [
    (lambda w, t: w.pop("model.layers.1.mlp.up_proj.weight"), "has no weight 'model.layers.1.mlp.up_proj.weight'"),
    (lambda w, t: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "but LlamaForCausalLM with"),
    (lambda w, t: w.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(8)}), "q_norm.weight', but Llama"),
    (lambda w, t: t.update(num_hidden_layers=1), "has 'model.layers.1.input_layernorm.weight', but LlamaForCausalLM"),
    (
        lambda w, t: w.update({"model.norm.weight": torch.zeros(7)}),
        r"model.norm.weight has shape \[7\], but \[\d+\] follows",
    ),
    (lambda w, t: w.clear(), "has no model.safetensors"),
    (lambda w, t: t.update(num_hidden_layers=3), "has no weight 'model.layers.2"),
    (lambda w, t: t.update(model_type="mamba"), "has no weight 'backbone.emb.* and 21 more, which MambaF"),
    (lambda w, t: t.update(model_type="t5"), "model_type = 't5', of which no class is a causal language model"),
    (lambda w, t: t.update(model_type="lama"), "model_type = 'lama', which transformers 5.* does not know"),
    (lambda w, t: t.update(num_attention_heads="many"), "num_attention_heads"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_folder_that_does_not_fit_is_refused(
    folders: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    folder = damaged(folders, tmp_path, "tied", change)
    with pytest.raises(ConfigError, match=message) as error:
        config = config_with(language_model={"path": str(folder)})
        stored_weights(config, build(config, ByteTokenizer()))
    assert str(error.value).startswith("mine.toml: [model.language_model] path: ") or "config: [model" in str(
        error.value
    )


def test_settings_beside_a_path_are_those_of_the_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(folders, tmp_path, "tied", lambda w, t: t.update(rms_norm_eps=1e-5))
    sizes = LLM | {"tie_word_embeddings": True}
    with pytest.raises(ConfigError, match=r"saved with rms_norm_eps = 1e-05, but \[model"):
        named = config_with(language_model={"architecture": "LlamaForCausalLM", "path": str(folder), "config": sizes})
        stored_weights(named, build(named, ByteTokenizer()))
    named = config_with(
        language_model={
            "architecture": "LlamaForCausalLM",
            "path": str(folder),
            "config": sizes | {"rms_norm_eps": 1e-5},
        }
    )
    assert stored_weights(named, build(named, ByteTokenizer()))


def test_what_is_no_folder_of_weights_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; models are read from local folders"):
        config_with(language_model={"path": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="of which no class takes images or sound"):
        config_with(vision={"path": str(folders["llama"])}, language_model={"path": str(folders["llama"])})
    with pytest.raises(ConfigError, match="is not a config of Qwen2ForCausalLM: its model_type is llama"):
        config_with(language_model={"path": str(folders["llama"]), "architecture": "Qwen2ForCausalLM"})
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "config.json").write_text((folders["llama"] / "config.json").read_text())
    (folder / "model.safetensors.index.json").write_text(
        (folders["llama"] / "model.safetensors.index.json").read_text()
    )
    config = config_with(language_model={"path": str(folder)})
    with pytest.raises(ConfigError, match=r"names 'model-0.*', which is missing"):
        stored_weights(config, build(config, ByteTokenizer()))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="is damaged"):
        stored_weights(config, build(config, ByteTokenizer()))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only the pickle pytorch_model.bin"):
        stored_weights(config, build(config, ByteTokenizer()))


def test_a_folder_that_keeps_state_in_a_buffer_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """For example the bias that selects GLM's experts: it would be zeros."""
    key = "model.layers.1.mlp.correction_bias"
    folder = damaged(folders, tmp_path, "tied", lambda w, t: w.update({key: torch.ones(4)}))
    config = config_with(language_model={"path": str(folder)})
    model: Any = build(config, ByteTokenizer())
    mlp = model.language_model.model.layers[1].mlp
    mlp.register_buffer("correction_bias", torch.zeros(4, device="meta"))
    with pytest.raises(ConfigError, match=f"has '{key}' in a buffer, which is not loaded yet"):
        stored_weights(config, model)
    mlp.register_buffer("correction_bias", torch.zeros(4, device="meta"), persistent=False)
    with pytest.raises(ConfigError, match=f"has '{key}', but LlamaForCausalLM with this config does not"):
        stored_weights(config, model)
