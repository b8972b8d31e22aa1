"""Encoders and language models by `path`: the trainer's model of a folder equals HuggingFace's class.

Each is compared with the library's own class with eager attention. The items and texts of a batch are computed
together. (bench/architectures.py does the same for every class, from configs; test_any_module tests what each rank
reads.)
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import architectures
from bench.architectures_check import by_sample, eager_features, eager_logits, prompts, samples_of, spread_encoder
from interlace.data import ByteTokenizer
from interlace.model import ModalityModule
from interlace.train.models.build import build, materialize, stored_weights
from tests.train.any_module import SIZES, config_with

pytestmark = pytest.mark.slow
ENCODERS = (
    *("siglip_vision_model", "siglip2_vision_model", "clip_vision_model", "dinov2", "dinov2_with_registers"),
    *("dinov3_vit", "vit", "vit_msn", "deit", "ijepa", "beit", "internvl_vision", "pixtral", "aimv2_vision_model"),
    *("Qwen2VisionTransformerPretrainedModel", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen3VLVisionModel"),
    *(
        "Idefics3VisionTransformer",
        "WhisperEncoder",
        "qwen2_audio_encoder",
        "wav2vec2",
        "audio-spectrogram-transformer",
    ),
)
LANGUAGE_MODELS = (
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi", "phi3", "olmo", "olmo2"),
    *("qwen3_moe", "mixtral", "smollm3"),
)


def in_the_trainer(folder: Path, name: str) -> Any:
    """The trainer's model with the weights of `folder`."""
    modules: dict[str, Any] = {name: {"path": str(folder)}}
    if name == "language_model":
        eyes = {"architecture": "SiglipVisionModel", "config": SIZES | {"image_size": 16, "patch_size": 8}}
        modules["it"] = eyes
    config = config_with(**modules)
    model = build(config, ByteTokenizer(config.model.encoders()))
    stored = stored_weights(config, model)
    assert len(stored) > 10
    materialize(model, seed=0)
    for key, source in stored.items():
        model.get_parameter(key).data.copy_(source.read())
    return model.eval()


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_of_a_folder(kind: str, tmp_path: Path) -> None:
    made: Any = architectures.build(architectures.ENCODER, kind)
    geometry = ModalityModule(copy.deepcopy(made), projector=nn.Identity()).eval()
    geometry.connect(geometry.feature_size)
    media = spread_encoder(made, geometry)
    made.save_pretrained(tmp_path)
    theirs = type(made).from_pretrained(tmp_path, attn_implementation="eager").eval()
    encoder = in_the_trainer(tmp_path, "it").encoders["it"]
    assert type(encoder.module) is type(made)
    with torch.no_grad():
        alone = [eager_features(theirs, geometry, item) for item in media]
        alone = [x[geometry.prefix :] if len(x) > item.tokens else x for x, item in zip(alone, media, strict=True)]
        wanted = torch.cat(alone) if encoder.projector is None else encoder.projector(torch.cat(alone))
        result = encoder(**encoder.collate(media))
    assert len(media) > 2 and float(wanted.std()) > 1e-4
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_language_model_of_a_folder(kind: str, tmp_path: Path) -> None:
    made: Any = architectures.build(architectures.LANGUAGE, kind, {"vocab_size": 300})
    made.save_pretrained(tmp_path)
    theirs = type(made).from_pretrained(tmp_path, attn_implementation="eager").eval()
    mllm = in_the_trainer(tmp_path, "language_model")
    assert type(mllm.language_model) is type(made)
    ids = prompts(theirs)
    with torch.no_grad():
        inputs = mllm.collate(samples_of(ids))
        result = by_sample(mllm(**inputs).logits, inputs)
        for piece, row in zip(result, ids, strict=True):
            torch.testing.assert_close(piece, eager_logits(theirs, row), rtol=1e-5, atol=1e-5)
