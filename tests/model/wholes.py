"""Tiny whole checkpoints of HuggingFace's own classes. Oracle: their own forward with eager attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    CLIPVisionConfig,
    Cohere2Config,
    DeepseekOcr2Config,
    DeepseekOcr2ForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Granite4VisionConfig,
    Granite4VisionForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    VideoLlavaConfig,
    VideoLlavaForConditionalGeneration,
)

from interlace.model import Media, MultimodalModel, Sample
from interlace.model.inputs.placeholders import token_ids

VOCAB, TOKEN, VIDEO = 48, 46, 45
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
VISION = {**LAYERS, "hidden_size": 16, "image_size": 16, "patch_size": 4}
TEXT = {**LAYERS, "hidden_size": 24, "vocab_size": VOCAB, "num_key_value_heads": 1, "max_position_embeddings": 256}


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def llava() -> nn.Module:
    vision, text = CLIPVisionConfig(**VISION), LlamaConfig(**TEXT)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=TOKEN))


def llava_full() -> nn.Module:
    """All tokens of two layers, including the class token."""
    vision, text = CLIPVisionConfig(**VISION), LlamaConfig(**TEXT)
    options = {"vision_feature_select_strategy": "full", "vision_feature_layer": [-2, -1], "image_token_id": TOKEN}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **options))


def gemma3() -> nn.Module:
    text = Gemma3TextConfig(**TEXT, head_dim=12, sliding_window=6, layer_types=KINDS)
    vision = SiglipVisionConfig(**VISION, vision_use_head=False)
    tokens = {"image_token_id": TOKEN, "boi_token_id": 43, "eoi_token_id": 44}
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


PATCHES = {"depth": 3, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 2, "intermediate_size": 24}
IDS = {"image_token_id": TOKEN, "video_token_id": VIDEO, "vision_start_token_id": 43, "vision_end_token_id": 44}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}}


def qwen2_vl() -> nn.Module:
    vision = {**PATCHES, "embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, text_config={**TEXT, **ROPE}, **IDS))


def qwen2_5_vl() -> nn.Module:
    windows = {"window_size": 8, "fullatt_block_indexes": [1]}
    vision = {**PATCHES, "hidden_size": 16, "out_hidden_size": 24, **windows}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, **ROPE}, **IDS)
    return Qwen2_5_VLForConditionalGeneration(config)


QWEN3 = {"hidden_size": 16, "out_hidden_size": 24, "num_position_embeddings": 16}
WHOLE_ROPE = {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 1.0}}


def qwen3_vl() -> nn.Module:
    vision, text = {**PATCHES, **QWEN3, "deepstack_visual_indexes": [0, 1]}, {**TEXT, **ROPE, "head_dim": 12}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, text_config=text, **IDS))


def qwen3_vl_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    text = {**TEXT, **ROPE, "head_dim": 12, **experts}
    vision = {**PATCHES, **QWEN3, "deepstack_visual_indexes": [0, 1]}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(vision_config=vision, text_config=text, **IDS))


def qwen3_5() -> nn.Module:
    """Linear-attention layers with a state, beside attention layers."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 12}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    text = {**TEXT, **heads, **sizes, **WHOLE_ROPE, "layer_types": kinds}
    config = Qwen3_5Config(vision_config={**PATCHES, **QWEN3}, text_config=text, **IDS)
    return Qwen3_5ForConditionalGeneration(config)


def glm4v() -> nn.Module:
    vision = {**PATCHES, "hidden_size": 16, "out_hidden_size": 24, "image_size": 16}
    tokens = {"image_start_token_id": 43, "image_end_token_id": 44}
    tokens |= {"video_start_token_id": 41, "video_end_token_id": 42}
    text = {**TEXT, **WHOLE_ROPE, "head_dim": 12}
    ids = {"image_token_id": TOKEN, "video_token_id": VIDEO}
    return Glm4vForConditionalGeneration(Glm4vConfig(vision_config=vision, text_config=text, **tokens, **ids))


def aya_vision() -> nn.Module:
    vision = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    text = Cohere2Config(**TEXT, head_dim=12, layer_types=KINDS, sliding_window=6)
    config = AyaVisionConfig(vision_config=vision, text_config=text, image_token_index=TOKEN, downsample_factor=2)
    return AyaVisionForConditionalGeneration(config)


PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48]]


def llava_next() -> nn.Module:
    vision, text = CLIPVisionConfig(**VISION), LlamaConfig(**TEXT)
    config = LlavaNextConfig(
        vision_config=vision, text_config=text, image_grid_pinpoints=PINPOINTS, image_token_id=TOKEN
    )
    return LlavaNextForConditionalGeneration(config)


def llava_next_video() -> nn.Module:
    vision, text = CLIPVisionConfig(**VISION), LlamaConfig(**TEXT)
    tokens = {"image_token_id": TOKEN, "video_token_id": VIDEO}
    config = LlavaNextVideoConfig(vision_config=vision, text_config=text, image_grid_pinpoints=PINPOINTS, **tokens)
    return LlavaNextVideoForConditionalGeneration(config)


def llava_onevision() -> nn.Module:
    vision = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config={**TEXT, "model_type": "qwen2"},
        image_grid_pinpoints=PINPOINTS,
        image_token_id=TOKEN,
        video_token_id=VIDEO,
    )
    return LlavaOnevisionForConditionalGeneration(config)


def video_llava() -> nn.Module:
    """With one tower for images and another for videos."""
    vision, text = CLIPVisionConfig(**VISION), LlamaConfig(**TEXT)
    tokens = {"image_token_index": TOKEN, "video_token_index": VIDEO}
    return VideoLlavaForConditionalGeneration(VideoLlavaConfig(vision_config=vision, text_config=text, **tokens))


def granite4_vision() -> nn.Module:
    """With features for several layers of the language model; placeholders get no features."""
    vision = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False, "hidden_size": 64}
    sizes = {"num_hidden_layers": 1, "intermediate_size": 24, "vocab_size": 8, "max_position_embeddings": 8}
    config = Granite4VisionConfig(
        vision_config=vision,
        text_config=TEXT,
        qformer_config={"model_type": "blip_2_qformer", "use_qformer_text_input": False, **sizes},
        image_grid_pinpoints=PINPOINTS,
        image_token_index=TOKEN,
        downsample_rate="1/2",
        deepstack_layer_map=[[1, 0], [2, 1]],
        spatial_target_layers=[0, 1, 1, 2],
        vision_feature_select_strategy="full",
    )
    return Granite4VisionForConditionalGeneration(config)


def deepseek_ocr2() -> nn.Module:
    """With two towers in sequence."""
    first = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 64, "window_size": 4}
    first |= {"output_channels": 8, "downsample_channels": [8, 16], "global_attn_indexes": [1], "mlp_dim": 24}
    second = {**LAYERS, "hidden_size": 16, "num_key_value_heads": 1, "vocab_size": 8}
    text = {**TEXT, "num_key_value_heads": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    text |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8}
    text |= {"n_group": 1, "topk_group": 1}
    vision = {"sam_config": first, "encoder_config": second}
    config = DeepseekOcr2Config(vision_config=vision, text_config=text, image_token_id=TOKEN)
    return DeepseekOcr2ForConditionalGeneration(config)


class Shown(NamedTuple):
    """An item of a sample: shape and about of its Media."""

    shape: tuple[int, ...]
    about: dict[str, tuple[float, ...]] = {}
    video: bool = False
    touches: bool = False
    """Begins where the item before it ends."""


def patches(*grid: int, video: bool = False, seconds: float = 0.0) -> Shown:
    """An item of a grid of patches, 24 numbers each. seconds: time between frames."""
    about: dict[str, tuple[float, ...]] = {"second_per_grid_ts": (seconds,)} if seconds else {}
    return Shown((math.prod(grid), 24), {"grid_thw": grid} | about, video)


def tiles(count: int, height: int, width: int) -> Shown:
    return Shown((count, 3, 16, 16), {"image_sizes": (height, width)})


@dataclass
class Case:
    """A family: its builder, the items of three samples, and whether HuggingFace needs the items of a sample
    separately.
    """

    make: Any
    items: list[list[Shown]] = field(
        default_factory=lambda: [[Shown((3, 16, 16))], [], [Shown((3, 16, 16)), Shown((3, 16, 16))]],
    )
    per_sample: bool = False


GRIDS = [[patches(1, 4, 6)], [], [patches(1, 8, 4), patches(2, 4, 4, video=True), patches(1, 4, 4)]]
# two videos of different frame rates
SECONDS = [
    [patches(1, 4, 6)],
    [],
    [patches(2, 4, 4, video=True, seconds=0.5), patches(1, 4, 4), patches(3, 4, 4, video=True, seconds=2.0)],
]
PICTURES = [[patches(1, 4, 6)], [], [patches(1, 8, 4), patches(1, 4, 4)]]
TILES = [[tiles(3, 16, 30)], [], [tiles(5, 32, 32), tiles(3, 9, 30)]]
FRAMES = [[patches(1, 4, 6)], [], [patches(1, 8, 4), *[patches(1, 4, 4, video=True)] * 2, patches(1, 4, 4)]]
CASES = {
    "llava": Case(llava),
    "llava_full": Case(llava_full),
    "gemma3": Case(gemma3, [[Shown((3, 16, 16))], [], [Shown((3, 16, 16)), Shown((3, 16, 16), touches=True)]]),
    "internvl": Case(internvl),
    "smolvlm": Case(smolvlm, per_sample=True),
    "idefics3": Case(idefics3, per_sample=True),
    "qwen2_audio": Case(qwen2_audio, [[Shown((8, 32))], [], [Shown((8, 13)), Shown((8, 32), {"frames": (21,)})]]),
    "qwen2_vl": Case(qwen2_vl, GRIDS),
    "qwen2_5_vl": Case(qwen2_5_vl, SECONDS),
    "qwen3_vl": Case(qwen3_vl, FRAMES),
    "qwen3_vl_moe": Case(qwen3_vl_moe, FRAMES),
    "glm4v": Case(glm4v, PICTURES),
    "aya_vision": Case(aya_vision),
    "llava_next": Case(llava_next, TILES),
    "llava_next_video": Case(llava_next_video, TILES),
    "llava_onevision": Case(
        llava_onevision, [[tiles(3, 16, 30)], [], [tiles(1, 16, 30), tiles(1, 9, 9)], [tiles(5, 32, 32)]]
    ),
}


def written(name: str, folder: Any, seed: int = 0) -> Any:
    """The family's model with random weights, saved to `folder`; biases and norms are also random."""
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
    result = []
    for number, items in enumerate(CASES[name].items):
        ids = torch.randint(3, 40, (4,), generator=g).tolist()
        media = []
        for shape, about, video, touches in items:
            count = mllm.encoders[encoder].tokens(shape, about)
            ids = ids[: -3 * touches or None]
            media.append(Media(shape, count, torch.randn(shape, generator=g), about=about))
            ids += [VIDEO if video else TOKEN] * count + torch.randint(3, 40, (3,), generator=g).tolist()
        labels = torch.tensor([*ids[1:], 2])
        labels[torch.isin(labels, torch.tensor(token_ids(given)))] = -100
        result.append(Sample(torch.tensor(ids), labels, {encoder: media} if media else {}, f"{name}{number}"))
    return result


def positions(sample: Sample, tokens_per_second: int = 4) -> torch.Tensor:
    """M-RoPE positions [3, L], counted as in Qwen: each part starts after the largest position of all previous parts.

    Written out for media in grids of patches, of which 2 x 2 are merged. The frames of a grid are one position apart,
    or as far as their seconds give.
    """
    made: list[list[int]] = []
    items = iter(next(iter(sample.media.values()), []))
    at = 0
    while at < len(sample):
        start = max(map(max, made)) + 1 if made else 0
        if int(sample.input_ids[at]) not in (TOKEN, VIDEO):
            made.append([start] * 3)
            at += 1
            continue
        about = next(items).about
        frames, tall, wide = (int(size) for size in about["grid_thw"])
        step = tokens_per_second * about["second_per_grid_ts"][0] if "second_per_grid_ts" in about else 1
        for t in range(frames):
            for row in range(tall // 2):
                made += [[start + int(t * step), start + row, start + column] for column in range(wide // 2)]
        at += frames * tall * wide // 4
    return torch.tensor(made).T


def own_inputs(name: str, number: int, sample: Sample) -> dict[str, Any]:
    """Inputs of HuggingFace's class for sample `number`."""
    ids = sample.input_ids[None]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "gemma3":
        given["token_type_ids"] = (ids == TOKEN).long()
    items = next(iter(sample.media.values()), [])
    shown = CASES[name].items[number]
    if items and name == "qwen2_audio":
        lengths = torch.tensor([item.about.get("frames", item.shape[1:])[0] for item in items])
        given["input_features"] = torch.stack([nn.functional.pad(x.data, (0, 32 - x.shape[1])) for x in items])
        given["feature_attention_mask"] = (torch.arange(32) < lengths[:, None]).long()
    elif items and shown[0].shape[-1] == 24:
        given["mm_token_type_ids"] = (ids == TOKEN).int() + 2 * (ids == VIDEO).int()
        names = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
        for video, (pixels, grids) in enumerate(names):
            some = [item for item, each in zip(items, shown, strict=True) if each.video == video]
            if some:
                given[pixels] = torch.cat([item.data for item in some])
                given[grids] = torch.tensor([item.about["grid_thw"] for item in some])
            if seconds := [item.about["second_per_grid_ts"][0] for item in some if "second_per_grid_ts" in item.about]:
                given["second_per_grid_ts"] = torch.tensor(seconds)
        if name in ("qwen2_vl", "qwen2_5_vl"):  # the library's own are wrong after a video: see test_positions.py
            given["position_ids"] = positions(sample)[:, None]
        if name.startswith("qwen3_vl") and "video_grid_thw" in given:  # the processor writes each frame separately
            given["video_grid_thw"] = torch.tensor([[2, 4, 4]])
    elif items and shown[0].about:
        most = max(item.shape[0] for item in items)
        padded = [torch.cat([x.data, torch.zeros(most - x.shape[0], *x.shape[1:])]) for x in items]
        given["pixel_values"] = torch.stack(padded)
        given["image_sizes"] = torch.tensor([item.about["image_sizes"] for item in items])
        given["batch_num_images"] = torch.tensor([len(items)])
    elif items:
        stacked = torch.stack([item.data for item in items])
        given["pixel_values"] = stacked[None] if CASES[name].per_sample else stacked
    return given


def own_logits(name: str, whole: Any, number: int, sample: Sample) -> torch.Tensor:
    """Logits [L, V] of sample `number` by HuggingFace's class."""
    return whole(**own_inputs(name, number, sample)).logits[0]


def own_loss(name: str, whole: Any, batch: list[Sample]) -> torch.Tensor:
    """Mean cross entropy over the valid targets of all samples, each computed alone by HuggingFace's class."""
    total, count = torch.zeros(()), 0
    for number, sample in enumerate(batch):
        logits = own_logits(name, whole, number, sample)
        total = total + nn.functional.cross_entropy(logits, sample.labels, ignore_index=-100, reduction="sum")
        count += int((sample.labels != -100).sum())
    return total / count
