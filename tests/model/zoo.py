"""Tiny models of every family, and an oracle made of plain HuggingFace modules with eager attention.

The oracle runs each sample alone. Each image goes through the encoder's own forward; each clip goes through the
encoder's own submodules, cut to its valid part; the text uses a dense additive mask. The oracle shares no code with
interlace.model except the projectors' weights.
"""

from __future__ import annotations

import copy
from inspect import signature

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from interlace.model import Media, ModalityModule, MultimodalModel, Sample

VOCAB, PATCH, MELS, FRAMES, LAYERS = 48, 4, 8, 32, 3
PLACEHOLDERS = {"vision": 46, "audio": 47}
COMMON = {"intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2}


def siglip(**changes):
    config = {**COMMON, "hidden_size": 16, "image_size": 16, "patch_size": PATCH, "vision_use_head": False, **changes}
    return SiglipVisionModel(SiglipVisionConfig(**config))


def clip(**changes):
    return CLIPVisionModel(
        CLIPVisionConfig(**{**COMMON, "hidden_size": 16, "image_size": 16, "patch_size": PATCH, **changes})
    )


def whisper(**changes):
    config = {
        "d_model": 16,
        "encoder_layers": LAYERS,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "num_mel_bins": MELS,
        "max_source_positions": FRAMES // 2,
        **changes,
    }
    return WhisperEncoder(WhisperConfig(**config))


def llama(**changes):
    return LlamaForCausalLM(
        LlamaConfig(**{**COMMON, "hidden_size": 24, "vocab_size": VOCAB, "num_key_value_heads": 1, **changes})
    )


def qwen2(**changes):
    return Qwen2ForCausalLM(
        Qwen2Config(**{**COMMON, "hidden_size": 24, "vocab_size": VOCAB, "num_key_value_heads": 2, **changes})
    )


VISION = {"siglip": siglip, "clip": clip}
LANGUAGE = {"llama": llama, "qwen2": qwen2}


def build(vision=siglip, audio=whisper, language=llama, *, seed=0, backend="reference", downsample=(1, 2), **changes):
    """A model with random weights, biases and norms, so that every parameter affects the output."""
    torch.manual_seed(seed)
    encoders = {}
    if vision is not None:
        encoders["vision"] = ModalityModule(vision(), projector="mlp", downsample=downsample[0])
    if audio is not None:
        encoders["audio"] = ModalityModule(audio(), projector="linear", downsample=downsample[1])
    mllm = MultimodalModel(
        encoders=encoders,
        language_model=language(**changes),
        placeholders={name: PLACEHOLDERS[name] for name in encoders},
        backend=backend,
    )
    with torch.no_grad():
        for parameter in mllm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return mllm


def sample(mllm, generator, *parts, name="sample"):
    """Parts: a number of text tokens, ("vision", height, width) in pixels or ("audio", frames)."""
    ids, media = [1], {}
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(2, 45, (part,), generator=generator).tolist()
            continue
        kind, *size = part
        shape = (3, *size) if kind == "vision" else (MELS, *size)
        tokens = mllm.encoders[kind].tokens(shape)
        media.setdefault(kind, []).append(Media(shape, tokens, torch.randn(shape, generator=generator)))
        ids += [PLACEHOLDERS[kind]] * tokens
    labels = torch.tensor([*ids[1:], 2])
    labels[labels >= 45] = -100
    labels[torch.rand(len(labels), generator=generator) < 0.3] = -100
    return Sample(torch.tensor(ids), labels, media, name)


def samples(mllm, seed=0):
    """Three samples: two mix images of several sizes and clips of several lengths with text; one is text only."""
    g = torch.Generator().manual_seed(seed)
    return [
        sample(mllm, g, 3, ("vision", 8, 12), 2, ("audio", 7), 4, name="a"),
        sample(mllm, g, 6, name="b"),
        sample(mllm, g, ("audio", 32), ("vision", 16, 16), ("vision", 12, 8), 1, ("vision", 4, 4), 5, name="c"),
    ]


# ---------------------------------------------------------------------- oracle


def plain(mllm):
    """A copy whose HuggingFace modules use eager attention; also the copy that holds the oracle's gradients."""
    copied = copy.deepcopy(mllm)
    for module in [*(encoder.module for encoder in copied.encoders.values()), copied.language_model]:
        module.set_attn_implementation("eager")
    return copied


def encode_plain(encoder: ModalityModule, item: Media, downsample: int) -> torch.Tensor:
    """One item alone: [tokens, D_llm]."""
    module = encoder.module
    if isinstance(module, WhisperEncoder):
        valid = -(-item.shape[1] // 2)
        padded = nn.functional.pad(item.data, (0, FRAMES - item.shape[1]))[None]
        hidden = nn.functional.gelu(module.conv2(nn.functional.gelu(module.conv1(padded)))).permute(0, 2, 1)
        hidden = (hidden + module.embed_positions.weight)[:, :valid]
        for layer in module.layers:
            # transformers 4.57 also requires head masks and returns a tuple
            heads = {"layer_head_mask": None} if "layer_head_mask" in signature(layer.forward).parameters else {}
            out = layer(hidden, None, **heads)
            hidden = out[0] if isinstance(out, tuple) else out
        hidden = module.layer_norm(hidden)[0]
    else:
        hidden = module(pixel_values=item.data[None], interpolate_pos_encoding=True).last_hidden_state[0]
        if isinstance(module, CLIPVisionModel):
            hidden = hidden[1:]
    rows = []
    for start in range(0, len(hidden), downsample):
        group = hidden[start : start + downsample].reshape(-1)
        rows.append(nn.functional.pad(group, (0, downsample * hidden.shape[1] - len(group))))
    return encoder.projector(torch.stack(rows))


def dense_mask(one: Sample) -> torch.Tensor:
    """bool [T, T]: causal, and bidirectional within each media item."""
    length = len(one.input_ids)
    seen = torch.ones(length, length).tril().bool()
    for name, items in one.media.items():
        places = (one.input_ids == PLACEHOLDERS[name]).nonzero().squeeze(1).tolist()
        for item in items:
            block, places = places[: item.tokens], places[item.tokens :]
            for row in block:
                seen[row, block] = True
    return seen


def logits_plain(oracle, one: Sample, window: int | None = None) -> torch.Tensor:
    """Logits [T, V] of a sample alone."""
    embeds = oracle.language_model.get_input_embeddings()(one.input_ids)
    rows = list(embeds)
    for name, items in one.media.items():
        encoder = oracle.encoders[name]
        features = torch.cat([encode_plain(encoder, item, encoder.downsample) for item in items])
        for place, feature in zip((one.input_ids == PLACEHOLDERS[name]).nonzero().squeeze(1), features, strict=True):
            rows[int(place)] = feature
    seen = dense_mask(one)
    if window is not None:
        index = torch.arange(len(seen))
        seen &= index[None] > index[:, None] - window
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    return oracle.language_model(
        inputs_embeds=torch.stack(rows)[None], attention_mask=additive, use_cache=False
    ).logits[0]


def loss_plain(oracle, batch, window: int | None = None) -> torch.Tensor:
    """Mean cross entropy over the valid targets of all samples."""
    total, count = torch.zeros(()), 0
    for one in batch:
        logits = logits_plain(oracle, one, window)
        total = total + nn.functional.cross_entropy(logits, one.labels, ignore_index=-100, reduction="sum")
        count += int((one.labels != -100).sum())
    return total / count


def gradients(module):
    """FQN -> gradient, or None."""
    return {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}


def assert_same_gradients(found, expected, tolerance=1e-5, ignore=()):
    assert found.keys() >= expected.keys()
    floor = 1e-3 * max(float(want.norm()) for want in expected.values() if want is not None)
    for name, want in expected.items():
        if name in ignore:
            continue
        got = found[name]
        assert (got is None) == (want is None), f"{name}: gradient {got is not None}, expected {want is not None}"
        if want is None:
            continue
        if name.endswith("k_proj.bias"):  # without RoPE it shifts all scores of a row equally: 0 except for noise
            noise = 1e-6 * expected[name.removesuffix("bias") + "weight"].norm()
            if got.norm() <= noise and want.norm() <= noise:
                continue
        error = (got - want).norm() / want.norm().clamp_min(floor)
        assert error <= tolerance, f"{name}: relative error {error:.1e} (norm {want.norm():.1e})"
