"""Tiny whole checkpoints of many families as users have them: random weights, tokenizer, processor and chats."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.data import chat_families

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VISION = {**LAYERS, "hidden_size": 16, "image_size": 28, "patch_size": 7}


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 24, "vocab_size": len(tokenizer), "num_key_value_heads": 1, "max_position_embeddings": 2048}
    return {**LAYERS, **sizes, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **more}


def llava(tokenizer: Any, token: int) -> nn.Module:
    vision = transformers.CLIPVisionConfig(**VISION)
    text = transformers.LlamaConfig(**_text(tokenizer))
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=token)
    return transformers.LlavaForConditionalGeneration(config)


def llava_next(tokenizer: Any, token: int) -> nn.Module:
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**_text(tokenizer)),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        image_token_id=token,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def llava_next_video(tokenizer: Any, token: int) -> nn.Module:
    config = transformers.LlavaNextVideoConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**_text(tokenizer)),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        image_token_id=token,
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
    )
    return transformers.LlavaNextVideoForConditionalGeneration(config)


def llava_onevision(tokenizer: Any, token: int) -> nn.Module:
    config = transformers.LlavaOnevisionConfig(
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        text_config={**_text(tokenizer), "model_type": "qwen2"},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
        image_token_id=token,
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def gemma3(tokenizer: Any, token: int) -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    text = transformers.Gemma3TextConfig(**_text(tokenizer), head_dim=12, sliding_window=16, layer_types=kinds)
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**VISION, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_id=token,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def idefics3(tokenizer: Any, token: int) -> nn.Module:
    config = transformers.Idefics3Config(
        image_token_id=token,
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        text_config=transformers.LlamaConfig(**_text(tokenizer)),
        scale_factor=2,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def internvl(tokenizer: Any, token: int) -> nn.Module:
    vision = {**VISION, "image_size": [28, 28], "patch_size": [7, 7]}
    text = transformers.Qwen2Config(**_text(tokenizer))
    config = transformers.InternVLConfig(vision_config=vision, text_config=text, image_token_id=token)
    return transformers.InternVLForConditionalGeneration(config)


def smolvlm(tokenizer: Any, token: int) -> nn.Module:
    vision = {**VISION, "image_size": 32, "patch_size": 8}
    text = transformers.LlamaConfig(**_text(tokenizer))
    config = transformers.SmolVLMConfig(image_token_id=token, vision_config=vision, text_config=text, scale_factor=2)
    return transformers.SmolVLMForConditionalGeneration(config)


QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 14, "intermediate_size": 24}


def _qwen(name: str, tokenizer: Any, token: int, vision: dict[str, Any], **more: Any) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
    ids = tokenizer.convert_tokens_to_ids
    config = getattr(transformers, f"{name}Config")(
        vision_config={**QWEN_VISION, **vision},
        text_config=_text(tokenizer, rope_parameters=rope, **more),
        image_token_id=token,
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def qwen2_vl(tokenizer: Any, token: int) -> nn.Module:
    return _qwen("Qwen2VL", tokenizer, token, {"embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2})


def qwen2_5_vl(tokenizer: Any, token: int) -> nn.Module:
    vision = {"hidden_size": 16, "out_hidden_size": 24, "window_size": 56, "fullatt_block_indexes": [1]}
    return _qwen("Qwen2_5_VL", tokenizer, token, vision)


def qwen3_vl(tokenizer: Any, token: int) -> nn.Module:
    vision = {"hidden_size": 16, "out_hidden_size": 24, "num_position_embeddings": 16, "patch_size": 16}
    return _qwen("Qwen3VL", tokenizer, token, {**vision, "deepstack_visual_indexes": [0, 1]}, head_dim=12)


def qwen3_vl_moe(tokenizer: Any, token: int) -> nn.Module:
    vision = {"hidden_size": 16, "out_hidden_size": 24, "num_position_embeddings": 16, "patch_size": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    return _qwen("Qwen3VLMoe", tokenizer, token, {**vision, "deepstack_visual_indexes": [0]}, head_dim=12, **experts)


def qwen2_audio(tokenizer: Any, token: int) -> nn.Module:
    heads = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16}
    audio = transformers.Qwen2AudioEncoderConfig(num_mel_bins=8, max_source_positions=100, **heads)
    text = transformers.Qwen2Config(**_text(tokenizer))
    config = transformers.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_id=token)
    return transformers.Qwen2AudioForConditionalGeneration(config)


MODELS: dict[str, Callable[[Any, int], nn.Module]] = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_next_video": llava_next_video,
    "llava_onevision": llava_onevision,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "gemma3": gemma3,
    "idefics3": idefics3,
    "internvl": internvl,
    "smolvlm": smolvlm,
    "qwen2_audio": qwen2_audio,
}
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm")
"""Those that see videos."""


def prepare(name: str, folder: Path, kind: str = "image", count: int = 6) -> tuple[Any, list[Any], dict[str, Any]]:
    """The processor, records with media of this kind, and a config for a tiny checkpoint of a family with random
    weights.
    """
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
    family = getattr(chat_families, name)(folder / "model")
    torch.manual_seed(0)
    MODELS[name](family.processor.tokenizer, family.placeholder).save_pretrained(folder / "model")
    rng = random.Random(name)
    make = {"image": chat_families.pictures, "audio": chat_families.clips, "video": chat_families.videos}[kind]
    # SmolVLM's processor pads the videos of a chat to one length, and does not mark the real frames.
    paths = make(folder / "media", 1 if kind == "video" and name == "smolvlm" else 8)
    records = [chat_families.chat(rng, paths, kind) for _ in range(count)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    table = {
        "run": {"name": "whole", "folder": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "data": {
            "dataset": "chats",
            "train": [str(folder / "a.jsonl")],
            "validation": [str(folder / "a.jsonl")],
            "cache": str(folder / "cache"),
            "max_tokens": 2048,
        },
        "train": {"steps": 2, "batch_size": 2, "warmup_steps": 1, "validation_samples": 2},
        "parallel": {"ranks": 1},
        "log": {"every": 1, "trackers": [], "trace_step": 0, "samples": 2, "max_new_tokens": 3},
    }
    return family, records, table


def huggingface_loss(model: nn.Module, family: Any, records: list[Any], samples: list[Any]) -> float:
    """Mean loss of HuggingFace's model, chat by chat, on the answers."""
    total, count = 0.0, 0
    for record, sample in zip(records, samples, strict=True):
        out = chat_families.own(family.processor, record)
        labels = sample.labels.unsqueeze(0)
        logits = model(**out).logits[0].float()
        valid = int((labels != -100).sum())
        total += float(nn.functional.cross_entropy(logits, labels[0], ignore_index=-100)) * valid
        count += valid
    return total / count


def kind_of(name: str) -> str:
    return "audio" if "audio" in name else "image"
