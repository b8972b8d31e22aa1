"""Whole checkpoints on own chats: the same loss as HuggingFace's own model on its own processor's inputs."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from interlace.cli import main
from interlace.model import MultimodalModel
from interlace.train.config import from_table
from interlace.train.feed import datasets
from interlace.train.texts import tokenizer_of
from tests.data import chat_families

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VISION = {**LAYERS, "hidden_size": 16, "image_size": 28, "patch_size": 7}


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 24, "vocab_size": len(tokenizer), "num_key_value_heads": 1, "max_position_embeddings": 512}
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


def qwen2_vl(tokenizer: Any, token: int) -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, "embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2}
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen2VLConfig(
        vision_config=vision,
        text_config=_text(tokenizer, rope_parameters=rope),
        image_token_id=token,
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


MODELS: dict[str, Callable[[Any, int], nn.Module]] = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "qwen2_vl": qwen2_vl,
    "gemma3": gemma3,
    "idefics3": idefics3,
    "internvl": internvl,
}


def _prepare(name: str, folder: Path, count: int = 6) -> tuple[Any, list[Any], dict[str, Any]]:
    """The processor, records, and a config for a tiny checkpoint of a family with random weights."""
    family = chat_families.FAMILIES[name](folder / "model")
    torch.manual_seed(0)
    MODELS[name](family.processor.tokenizer, family.placeholder).save_pretrained(folder / "model")
    rng = random.Random(name)
    paths = chat_families.pictures(folder / "pictures", 8)
    records = [chat_families.chat(rng, paths) for _ in range(count)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    table = {
        "run": {"name": "whole", "folder": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "data": {
            "dataset": "chats",
            "train": [str(folder / "a.jsonl")],
            "validation": [str(folder / "a.jsonl")],
            "cache": str(folder / "cache"),
            "max_tokens": 512,
        },
        "train": {"steps": 2, "batch_size": 2, "warmup_steps": 1, "validation_samples": 2},
        "parallel": {"ranks": 1},
        "log": {"every": 1, "tensorboard": False, "trace_step": 0, "samples": 2, "max_new_tokens": 3},
    }
    return family, records, table


def _expected(model: nn.Module, processor: Any, records: list[Any], samples: list[Any]) -> float:
    """Mean loss of HuggingFace's model, chat by chat, on the answers."""
    total, count = 0.0, 0
    for record, sample in zip(records, samples, strict=True):
        out = processor.apply_chat_template(
            copy.deepcopy(record["messages"]), tokenize=True, return_dict=True, return_tensors="pt"
        )
        labels = sample.labels.unsqueeze(0)
        logits = model(**out).logits[0].float()
        valid = int((labels != -100).sum())
        total += float(nn.functional.cross_entropy(logits, labels[0], ignore_index=-100)) * valid
        count += valid
    return total / count


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen2_vl" else pytest.mark.slow) for name in MODELS]
)
def test_the_loss_is_huggingfaces(name: str, tmp_path: Path) -> None:
    family, records, table = _prepare(name, tmp_path)
    config = from_table(table)
    mllm = MultimodalModel.from_pretrained(tmp_path / "model").eval()
    train, _, _ = datasets(config, mllm, tokenizer_of(config))
    # LLaVA-OneVision's processor makes no tiles of several pictures in a chat, which its encoder here cannot tell.
    assert len(train) == len(records) or name == "llava_onevision"
    records = [records[train.store.line(i)["number"] - 1] for i in range(len(train))]
    samples = [train.sample(i) for i in range(len(records))]
    assert any(sample.media for sample in samples)
    expected_model = type(MODELS[name](family.processor.tokenizer, family.placeholder)).from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    )
    with torch.no_grad():
        loss = mllm(**mllm.collate(samples)).loss
        expected = _expected(expected_model.eval(), family.processor, records, samples)
    assert float(loss) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_a_whole_checkpoint_trains_answers_and_is_exported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from interlace.train.config import dumps

    monkeypatch.delenv("INTERLACE_LAUNCHER", raising=False)
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    _, _, table = _prepare(name, tmp_path)
    (tmp_path / "whole.toml").write_text(dumps(from_table(table)))
    assert main(["train", str(tmp_path / "whole.toml")]) == 0
    [run] = [path for path in (tmp_path / "runs" / "whole").iterdir() if path.name != "latest"]
    picture = str(tmp_path / "pictures" / "0.png")
    assert main(["generate", str(run), "--image", picture, "--prompt", "What?", "--max-new-tokens", "3"]) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
