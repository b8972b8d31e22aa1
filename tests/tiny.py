"""Tiny multimodal models and random samples shared by the tests."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from interlace.model import Media, ModalityModule, MultimodalModel, Sample

VOCAB = 48
PLACEHOLDERS = {"vision": 46, "audio": 47}
PATCH = 4
MELS = 8
FRAMES = 32  # the audio encoder's fixed length


def tiny_mllm(
    *,
    tied: bool = False,
    layers: int = 2,
    encoders: tuple[str, ...] = ("vision", "audio"),
    seed: int = 0,
    hidden: int = 16,
    heads: int = 2,
    kv_heads: int = 1,
):
    """SigLIP + Whisper + Llama with random weights; kv_heads: of Llama."""
    torch.manual_seed(seed)
    made = {}
    if "vision" in encoders:
        config = SiglipVisionConfig(
            hidden_size=hidden,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            image_size=16,
            patch_size=PATCH,
            vision_use_head=False,
            attn_implementation="interlace",
        )
        made["vision"] = ModalityModule(SiglipVisionModel(config), projector="mlp")
    if "audio" in encoders:
        config = WhisperConfig(
            d_model=hidden,
            encoder_layers=layers,
            encoder_attention_heads=heads,
            encoder_ffn_dim=24,
            num_mel_bins=MELS,
            max_source_positions=FRAMES // 2,
            attn_implementation="interlace",
        )
        made["audio"] = ModalityModule(WhisperEncoder(config), projector="linear", downsample=2)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        attn_implementation="interlace",
    )
    return MultimodalModel(
        encoders=made,
        language_model=LlamaForCausalLM(config),
        placeholders={name: PLACEHOLDERS[name] for name in made},
    )


def random_sample(mllm, generator: torch.Generator, *, images: int = 0, clips: int = 0, text: int = 6) -> Sample:
    """Text with ``images`` images of random size and ``clips`` clips of random length in between."""

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    ids: list[int] = [1]
    media: dict[str, list[Media]] = {}
    for name, count in (("vision", images), ("audio", clips)):
        for _ in range(count):
            if name == "vision":
                shape = (3, PATCH * randint(1, 3), PATCH * randint(1, 3))
            else:
                shape = (MELS, randint(4, FRAMES))
            tokens = mllm.encoders[name].tokens(shape)
            media.setdefault(name, []).append(Media(shape, tokens, torch.randn(shape, generator=generator)))
            ids += [PLACEHOLDERS[name]] * tokens + [randint(2, 40)]
    ids += [randint(2, 40) for _ in range(text)]
    labels = torch.tensor(ids[1:] + [-100])
    labels[labels >= 46] = -100
    labels[: max(len(ids) - text - 1, 0)] = -100
    return Sample(input_ids=torch.tensor(ids), labels=labels, media=media, name="random")


def random_microbatches(mllm, kind: str, *, seed: int = 0, count: int = 4) -> list[list[Sample]]:
    """``kind``: "all" (every modality in each microbatch), "no_image" (one microbatch without), "text" (text only)."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for m in range(count):
        images = 0 if kind == "text" or (kind == "no_image" and m == 1) or "vision" not in mllm.encoders else 1
        clips = 0 if kind == "text" or "audio" not in mllm.encoders else 1
        batches.append(
            [
                random_sample(mllm, generator, images=images, clips=clips, text=5 + m),
                random_sample(mllm, generator, images=2 * images, text=4),
            ]
        )
    return batches
