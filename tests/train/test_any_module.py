"""Any class of transformers by `path`: the trainer's model has the weights that save_pretrained of the class wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from interlace.data import ByteTokenizer
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.config import load as configs
from interlace.train.models.build import build, build_layout, initialize, stored_weights
from tests.train.any_module import SIZES, TEXT, config_with
from tests.train.weights import OfOneRank

PICTURES = SIZES | {"image_size": 32, "patch_size": 8}
TOKENS = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos")}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HEARING = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 50, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16,
    "vocab_size": 60, "decoder_start_token_id": 1, **TOKENS,
}  # fmt: skip
WITH_TEXT = {"vocab_size": 50, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}


def dual(kind: str, **vision: Any) -> Any:
    config = getattr(hf, f"{kind}Config")(text_config=SIZES | WITH_TEXT, vision_config=SIZES | vision)
    return getattr(hf, f"{kind}Model")(config)


def text(kind: str, **more: Any) -> Any:
    return getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**TEXT | more))


def llava() -> Any:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**PICTURES), text_config=hf.MistralConfig(**TEXT, sliding_window=None)
    )
    return hf.LlavaForConditionalGeneration(config)


def internvl() -> Any:
    eyes = hf.InternVLVisionConfig(**SIZES, image_size=[32, 32], patch_size=[8, 8])
    return hf.InternVLForConditionalGeneration(
        hf.InternVLConfig(text_config=hf.Qwen2Config(**TEXT), vision_config=eyes)
    )


def voice_of(whole: Any) -> Any:
    """The language model of a whole model: its layers and its head, which are separate there."""
    return torch.nn.ModuleDict({"model": whole.model.language_model, "lm_head": whole.lm_head})


# name -> (model that HuggingFace saves, class that a config finds in it, the library's own way to read only that class)
Own = Callable[[Path], Any]
FOLDERS: dict[str, tuple[Callable[[], Any], str, Own]] = {
    "siglip 2": (
        lambda: dual("Siglip2", num_patches=16, patch_size=8),
        "Siglip2VisionModel",
        lambda folder: hf.Siglip2Model.from_pretrained(folder).vision_model,
    ),
    "clip": (
        lambda: dual("CLIP", image_size=32, patch_size=8),
        "CLIPVisionModel",
        lambda folder: hf.CLIPModel.from_pretrained(folder).vision_model,
    ),
    "dinov2": (
        lambda: hf.Dinov2Model(hf.Dinov2Config(**PICTURES)),
        "Dinov2Model",
        hf.Dinov2Model.from_pretrained,
    ),
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**PICTURES)), "ViTModel", hf.ViTModel.from_pretrained),
    "whisper": (
        lambda: hf.WhisperModel(hf.WhisperConfig(**HEARING)),
        "WhisperEncoder",
        lambda folder: hf.WhisperModel.from_pretrained(folder).encoder,
    ),
    "llava's eyes": (
        llava,
        "CLIPVisionModel",
        lambda folder: hf.LlavaForConditionalGeneration.from_pretrained(folder).model.vision_tower,
    ),
    "internvl's voice": (
        internvl,
        "Qwen2ForCausalLM",
        lambda folder: voice_of(hf.InternVLForConditionalGeneration.from_pretrained(folder)),
    ),
    "qwen2": (lambda: text("Qwen2"), "Qwen2ForCausalLM", hf.Qwen2ForCausalLM.from_pretrained),
    "qwen3": (lambda: text("Qwen3", head_dim=8), "Qwen3ForCausalLM", hf.Qwen3ForCausalLM.from_pretrained),
    "gemma3": (
        lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=16)),
        "Gemma3ForCausalLM",
        hf.Gemma3ForCausalLM.from_pretrained,
    ),
    "mistral": (
        lambda: text("Mistral", sliding_window=None),
        "MistralForCausalLM",
        hf.MistralForCausalLM.from_pretrained,
    ),
    "phi3": (lambda: text("Phi3", **TOKENS), "Phi3ForCausalLM", hf.Phi3ForCausalLM.from_pretrained),
    "olmo2": (lambda: text("Olmo2", **TOKENS), "Olmo2ForCausalLM", hf.Olmo2ForCausalLM.from_pretrained),
    "qwen3 with experts": (
        lambda: text("Qwen3Moe", head_dim=8, **EXPERTS),
        "Qwen3MoeForCausalLM",
        hf.Qwen3MoeForCausalLM.from_pretrained,
    ),
}
FAST = ("siglip 2", "vit", "whisper", "mistral", "qwen3 with experts")


def saved(folder: Path, make: Callable[[], Any]) -> Path:
    """A folder of distinct random weights, norms and biases included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = make()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in FOLDERS])
def test_ranks_load_the_same_weights_as_the_library_class(name: str, tmp_path: Path) -> None:
    make, expected, own = FOLDERS[name]
    folder = saved(tmp_path / "model", make)
    place = "language_model" if expected.endswith("ForCausalLM") else "it"
    config = config_with(**{place: {"path": str(folder)}})
    assert config.model.modules()[place].architecture == expected
    assert configs.loads(configs.dumps(config)) == config
    theirs = dict(own(folder).named_parameters())
    seen: set[str] = set()
    for rank in range(config.world_size()):
        model = build(config, ByteTokenizer(config.model.encoders()))
        stored, first = stored_weights(config, model), canonical_names(model)
        parallel = OfOneRank(model, build_layout(config, model), rank)
        initialize(parallel, seed=0, stored=stored)
        prefix = "language_model." if place == "language_model" else "encoders.it.module."
        for key, parameter in parallel.named_parameters():
            if key.startswith(prefix):
                assert torch.equal(parameter, theirs[first[key].removeprefix(prefix)]), key
                seen.add(first[key])
            assert not parameter.isnan().any(), key
    assert seen == set(stored) and len(seen) > 10


def test_a_setting_beside_a_path_takes_the_place_of_the_folders(tmp_path: Path) -> None:
    """Other settings need not be repeated: attention dropout, which some folders have, must be overridden."""
    folder = saved(tmp_path / "model", lambda: text("Mistral", attention_dropout=0.1, sliding_window=None))
    language_model = {"path": str(folder), "config": {"attention_dropout": 0.0}}
    config = config_with(language_model=language_model)
    assert config.model.language_model.unset == ["sliding_window"]
    model: Any = build(config, ByteTokenizer())
    assert model.language_model.config.sliding_window is None and model.language_model.config.attention_dropout == 0
    assert stored_weights(config, model)
    with pytest.raises(configs.ConfigError, match=r"attention_dropout must be 0, not 0\.1: bitfield attention has no"):
        build(config_with(language_model={"path": str(folder)}), ByteTokenizer())


def test_experts_are_read_one_by_one(tmp_path: Path) -> None:
    """A folder with a missing expert is refused."""
    folder = saved(tmp_path / "model", FOLDERS["qwen3 with experts"][0])
    weights = load_file(folder / "model.safetensors")
    lost = next(key for key in weights if ".experts.1." in key)
    del weights[lost]
    save_file(weights, folder / "model.safetensors")
    config = config_with(language_model={"path": str(folder)})
    with pytest.raises(configs.ConfigError, match=r"language_model\] path: .*experts"):
        stored_weights(config, build(config, ByteTokenizer()))


def test_weights_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    """Two equal towers, as in Video-LLaVA: the choice is ambiguous."""
    folder = saved(tmp_path / "model", FOLDERS["qwen2"][0])
    weights = load_file(folder / "model.safetensors")
    save_file(
        {f"{tower}.{key}": w.clone() for tower in "ab" for key, w in weights.items()}, folder / "model.safetensors"
    )
    config = config_with(language_model={"path": str(folder)})
    with pytest.raises(configs.ConfigError, match=r"has these weights twice, under 'a\.' and 'b\.': save only one"):
        stored_weights(config, build(config, ByteTokenizer()))


def test_pixels_are_scaled_as_the_folder_says(tmp_path: Path) -> None:
    from interlace.train.models.media_specs import media_specs

    folder = saved(tmp_path / "model", FOLDERS["vit"][0])

    def spec(**more: Any) -> Any:
        config = config_with(eyes={"path": str(folder), **more})
        return media_specs(config, build(config, ByteTokenizer(["eyes"])), source="mine.toml")["eyes"]

    def about(**more: Any) -> tuple[Any, Any]:
        result = spec(**more)
        return result.mean, result.std

    assert spec().mean == spec().std == (0.5, 0.5, 0.5)
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    assert (spec().mean, spec().std, spec().patch_size) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 8)
    assert about(mean=[0.0, 0.0, 0.0]) == ((0.0, 0.0, 0.0), (0.4, 0.5, 0.6))
    assert about(std=[1.0, 1.0, 1.0]) == ((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"rescale_factor": 1.0}))
    with pytest.raises(configs.ConfigError, match=r"does not scale pixels to 0\.\.1: set mean and std"):
        spec()
    (folder / "preprocessor_config.json").unlink()
    nobody = saved(tmp_path / "data2vec", lambda: hf.DeiTModel(hf.DeiTConfig(**PICTURES)))
    config = config_with(eyes={"path": str(nobody)})
    model = build(config, ByteTokenizer(["eyes"]))
    with pytest.raises(configs.ConfigError, match=r"with the mean and std of pixels .*set \[model.eyes\] mean and std"):
        media_specs(config, model)
