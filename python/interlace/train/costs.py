"""What a config's layers cost: FLOPs for a microbatch of its mixture of samples, known before any data is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from interlace.train.schema import Config


@dataclass(frozen=True)
class Load:
    """What passes through a module: tokens per microbatch, and keys that each of them sees on average."""

    tokens: float
    keys: float


def budget_loads(config: Config, model: Any) -> dict[str, Load]:
    """What passes through every module for a microbatch (of the language model) of the config's mixture of samples.

    Images, clips and captions fill the budgets that the config gives them: all ranks must cut alike before they have
    the data. Of the digits, sizes are known: their pictures are all alike and their captions words.
    """
    samples = config.train.batch_size / config.parallel.replicas("language_model") / config.train.microbatches
    items: dict[str, list[tuple[float, float]]] = {name: [] for name in model.modules_order()}  # share, tokens
    for share, own in _kinds(config, model):
        for name, lengths in own.items():
            items[name] += [(share, length) for length in lengths]
    found = {}
    for name, each in items.items():
        tokens = sum(share * length for share, length in each)
        pairs = sum(share * length * length for share, length in each)  # of a query and a key of one item
        if name == "language_model":  # a query sees the keys up to its own
            pairs = (pairs + tokens) / 2
        found[name] = Load(samples * tokens, pairs / tokens if tokens else 0.0)
    return found


def flop_costs(config: Config, model: Any) -> Mapping[str, Any]:
    """FLOPs of every layer for that microbatch: what the trainer's own cuts go by."""
    from interlace.plan import analytic_costs

    lengths = budget_loads(config, model)
    return analytic_costs(
        model,
        tokens={name: each.tokens for name, each in lengths.items()},
        context={name: each.keys for name, each in lengths.items()},
    )


def _kinds(config: Config, model: Any) -> Iterator[tuple[float, dict[str, list[float]]]]:
    """The kinds of samples: share of all, and the lengths of their items per module (of the language model: one)."""
    from interlace.data.digits import WORDS
    from interlace.data.stamps import KINDS

    image = clip = image_features = clip_features = 0.0
    vision, audio = config.model.vision, config.model.audio
    digits = config.data.dataset == "digits"
    if vision is not None:
        image = config.data.max_image_tokens
        if digits:
            patch = model.encoders["vision"].module.config.patch_size
            side = -(-(config.data.digit_size or 8) // patch)
            image = min(image, side * side)
        image_features = -(-image // vision.downsample)
    if audio is not None:
        frames = round(config.data.max_audio_seconds * 100)
        clip = frames / 2
        clip_features = model.encoders["audio"].tokens((model.encoders["audio"].module.config.num_mel_bins, frames))

    def sample(images: int, clips: int, texts: int, text: float) -> dict[str, list[float]]:
        row = images * image_features + clips * clip_features + texts * text
        return {
            **({"vision": [image] * images} if vision is not None else {}),
            **({"audio": [clip] * clips} if audio is not None else {}),
            "language_model": [row],
        }

    if digits:
        yield 1.0, sample(1, 0, 1, max(map(len, WORDS)))
        return
    weights = {
        kind: getattr(config.data.mixture, kind.replace("+", "_"))
        for kind, needed in KINDS.items()
        if set(needed) <= set(config.model.encoders())
    }
    total = sum(weights.values()) or 1.0
    caption = config.data.max_caption_bytes
    most = config.data.max_images
    for kind, weight in weights.items():
        if kind == "images":  # 2 .. max_images of them, each with its caption
            for count in range(2, most + 1):
                yield weight / total / (most - 1), sample(count, 0, count, caption)
        else:
            texts = 2 if kind == "text" else 1  # a caption is translated
            yield weight / total, sample("vision" in KINDS[kind], "audio" in KINDS[kind], texts, caption)
