"""Tiny whole checkpoints of HuggingFace's own classes, and their own forward with eager attention as the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from interlace.model import Media, MultimodalModel, Sample
from interlace.model.placeholders import token_ids

VOCAB, TOKEN = 48, 46
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
VISION = {**LAYERS, "hidden_size": 16, "image_size": 16, "patch_size": 4}
TEXT = {**LAYERS, "hidden_size": 24, "vocab_size": VOCAB, "num_key_value_heads": 1, "max_position_embeddings": 256}


def llava() -> nn.Module:
    vision, text = CLIPVisionConfig(**VISION), LlamaConfig(**TEXT)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=TOKEN))


def llava_full() -> nn.Module:
    """All tokens of two layers, the class token among them."""
    vision, text = CLIPVisionConfig(**VISION), LlamaConfig(**TEXT)
    options = {"vision_feature_select_strategy": "full", "vision_feature_layer": [-2, -1], "image_token_id": TOKEN}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **options))


def gemma3() -> nn.Module:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = Gemma3TextConfig(**TEXT, head_dim=12, sliding_window=6, layer_types=kinds)
    vision = SiglipVisionConfig(**VISION, vision_use_head=False)
    tokens = {"image_token_id": TOKEN, "boi_token_id": 44, "eoi_token_id": 45}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    return Gemma3ForConditionalGeneration(config)


def internvl() -> nn.Module:
    vision = {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    config = InternVLConfig(vision_config=vision, text_config=Qwen2Config(**TEXT), image_token_id=TOKEN)
    return InternVLForConditionalGeneration(config)


def smolvlm() -> nn.Module:
    config = SmolVLMConfig(image_token_id=TOKEN, vision_config=VISION, text_config=LlamaConfig(**TEXT), scale_factor=2)
    return SmolVLMForConditionalGeneration(config)


def idefics3() -> nn.Module:
    config = Idefics3Config(image_token_id=TOKEN, vision_config=VISION, text_config=LlamaConfig(**TEXT), scale_factor=2)
    return Idefics3ForConditionalGeneration(config)


def qwen2_audio() -> nn.Module:
    audio = Qwen2AudioEncoderConfig(
        num_mel_bins=8,
        encoder_layers=3,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        d_model=16,
        max_source_positions=16,
    )
    config = Qwen2AudioConfig(audio_config=audio, text_config=Qwen2Config(**TEXT), audio_token_id=TOKEN)
    return Qwen2AudioForConditionalGeneration(config)


@dataclass
class Case:
    """A family: how it is made, the items of three samples (shapes), and where HuggingFace wants items."""

    make: Any
    items: list[list[tuple[int, ...]]] = field(
        default_factory=lambda: [[(3, 16, 16)], [], [(3, 16, 16), (3, 16, 16)]],
    )
    per_sample: bool = False  # items of a sample in a dimension of their own


CASES = {
    "llava": Case(llava),
    "llava_full": Case(llava_full),
    "gemma3": Case(gemma3),
    "internvl": Case(internvl),
    "smolvlm": Case(smolvlm, per_sample=True),
    "idefics3": Case(idefics3, per_sample=True),
    "qwen2_audio": Case(qwen2_audio, [[(8, 32)], [], [(8, 13), (8, 21)]]),
}


def written(name: str, folder: Any, seed: int = 0) -> Any:
    """The family's model with random weights, saved to `folder`; biases and norms are random, too."""
    torch.manual_seed(seed)
    whole = CASES[name].make()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(folder)
    return whole.eval()


def samples(name: str, mllm: MultimodalModel, seed: int = 0) -> list[Sample]:
    """A sample per list of items, with text around them."""
    g = torch.Generator().manual_seed(seed)
    [(encoder, given)] = mllm.placeholders.items()
    token = token_ids(given)[0]
    found = []
    for number, shapes in enumerate(CASES[name].items):
        ids = torch.randint(3, 40, (4,), generator=g).tolist()
        media = []
        for shape in shapes:
            count = mllm.encoders[encoder].tokens(shape)
            media.append(Media(shape, count, torch.randn(shape, generator=g)))
            ids += [token] * count + torch.randint(3, 40, (3,), generator=g).tolist()
        labels = torch.tensor([*ids[1:], 2])
        labels[labels == token] = -100
        found.append(Sample(torch.tensor(ids), labels, {encoder: media} if media else {}, f"{name}{number}"))
    return found


def own_logits(name: str, whole: Any, sample: Sample) -> torch.Tensor:
    """Logits [L, V] of a sample by HuggingFace's class."""
    ids = sample.input_ids[None]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "gemma3":
        given["token_type_ids"] = (ids == TOKEN).long()
    items = [item.data for item in next(iter(sample.media.values()), [])]
    if items and name == "qwen2_audio":
        lengths = torch.tensor([item.shape[1] for item in items])
        given["input_features"] = torch.stack([nn.functional.pad(x, (0, 32 - x.shape[1])) for x in items])
        given["feature_attention_mask"] = (torch.arange(32) < lengths[:, None]).long()
    elif items:
        stacked = torch.stack(items)
        given["pixel_values"] = stacked[None] if CASES[name].per_sample else stacked
    return whole(**given).logits[0]


def own_loss(name: str, whole: Any, batch: list[Sample]) -> torch.Tensor:
    """Mean cross entropy over the valid targets of all samples, each read alone by HuggingFace's class."""
    total, count = torch.zeros(()), 0
    for sample in batch:
        logits = own_logits(name, whole, sample)
        total = total + nn.functional.cross_entropy(logits, sample.labels, ignore_index=-100, reduction="sum")
        count += int((sample.labels != -100).sum())
    return total / count
