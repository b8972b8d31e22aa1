"""Whole checkpoints on own chats: the same loss as HuggingFace's own model on its own processor's inputs."""

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

from interlace.cli import main
from interlace.model import MultimodalModel
from interlace.model.whole import whole_class
from interlace.train.config import from_table
from interlace.train.feed import datasets
from interlace.train.texts import tokenizer_of
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


def qwen2_audio(tokenizer: Any, token: int) -> nn.Module:
    heads = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16}
    audio = transformers.Qwen2AudioEncoderConfig(num_mel_bins=8, max_source_positions=100, **heads)
    text = transformers.Qwen2Config(**_text(tokenizer))
    config = transformers.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_id=token)
    return transformers.Qwen2AudioForConditionalGeneration(config)


MODELS: dict[str, Callable[[Any, int], nn.Module]] = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "qwen2_vl": qwen2_vl,
    "gemma3": gemma3,
    "idefics3": idefics3,
    "internvl": internvl,
    "smolvlm": smolvlm,
    "qwen2_audio": qwen2_audio,
}
SEEING = {name: MODELS[name] for name in ("qwen2_vl", "internvl", "smolvlm")}
SEEING |= {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}
"""Those that see videos."""


def _prepare(name: str, folder: Path, kind: str = "image", count: int = 6) -> tuple[Any, list[Any], dict[str, Any]]:
    """The processor, records with media of this kind, and a config for a tiny checkpoint of a family with random
    weights."""
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
    family = getattr(chat_families, name)(folder / "model")
    torch.manual_seed(0)
    (MODELS | SEEING)[name](family.processor.tokenizer, family.placeholder).save_pretrained(folder / "model")
    rng = random.Random(name)
    make = {"image": chat_families.pictures, "audio": chat_families.clips, "video": chat_families.videos}[kind]
    # SmolVLM's processor fills the videos of a chat up to one length, and does not say which frames are real.
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


def _expected(model: nn.Module, family: Any, records: list[Any], samples: list[Any]) -> float:
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


def _kind(name: str) -> str:
    return "audio" if "audio" in name else "image"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(pytest.param(name, _kind(name), marks=() if name == "qwen2_vl" else pytest.mark.slow) for name in MODELS),
        *(pytest.param(name, "video", marks=[pytest.mark.slow, chat_families.needs_torchvision]) for name in SEEING),
    ],
)
def test_the_loss_is_huggingfaces(name: str, kind: str, tmp_path: Path) -> None:
    family, records, table = _prepare(name, tmp_path, kind)
    config = from_table(table)
    mllm = MultimodalModel.from_pretrained(tmp_path / "model").eval()
    train, _ = datasets(config, mllm, tokenizer_of(config))
    assert len(train) == len(records), train.report()
    samples = [train.sample(i) for i in range(len(records))]
    assert any(sample.media for sample in samples)
    expected_model = whole_class(tmp_path / "model")[0].from_pretrained(tmp_path / "model", attn_implementation="eager")
    with torch.no_grad():
        loss = mllm(**mllm.collate(samples)).loss
        expected = _expected(expected_model.eval(), family, records, samples)
    assert float(loss) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "qwen2_audio"])
def test_a_whole_checkpoint_trains_answers_and_is_exported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from interlace.train.commands.reloaded import ask, check
    from interlace.train.config import dumps, load

    monkeypatch.delenv("INTERLACE_LAUNCHER", raising=False)
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    _, _, table = _prepare(name, tmp_path, _kind(name))
    (tmp_path / "whole.toml").write_text(dumps(from_table(table)))
    assert main(["train", str(tmp_path / "whole.toml")]) == 0
    [run] = [path for path in (tmp_path / "runs" / "whole").iterdir() if path.name != "latest"]
    given = ["--speech", "0.wav"] if _kind(name) == "audio" else ["--image", "0.png"]
    given[1] = str(tmp_path / "media" / given[1])
    assert main(["generate", str(run), *given, "--prompt", "What?", "--max-new-tokens", "3"]) == 0
    assert main(["export", str(run), str(tmp_path / "out"), "--check", "4"]) == 0
    assert "4 held-out questions answered by HuggingFace's own classes" in capsys.readouterr().out
    assert (tmp_path / "out" / "tokenizer.json").exists()
    # A folder that asks otherwise is noticed.
    template = tmp_path / "out" / "chat_template.jinja"
    template.write_text(template.read_text().replace("{% if add_generation_prompt %}", "{% if false %}"))
    config = load(str(run / "config.toml"))
    model = MultimodalModel.from_pretrained(tmp_path / "out").eval()
    checked = check(ask(model, config, 2, "config"), tmp_path / "out")
    assert checked.other_prompts == 2 and not checked.good
