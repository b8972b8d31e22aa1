"""What a config's layers cost: FLOPs for a microbatch of its mixture of samples, known before any data is there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from interlace.train.feed import MODALITY, kinds
from interlace.train.schema import Config


@dataclass(frozen=True)
class Load:
    """What passes through a module: tokens per microbatch, and keys that each of them sees on average."""

    tokens: float
    keys: float


def budget_loads(config: Config, model: Any) -> dict[str, Load]:
    """What passes through every module for a microbatch (of the language model) of the config's mixture of samples.

    Images, clips and captions fill the budgets that the config gives them: all ranks must cut alike before they have
    the data. Of the digits, sizes are known: their pictures are all alike and their captions words. Chats fill
    data.max_tokens, with an item of each encoder.
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
    if config.data.dataset == "chats":  # nobody has looked into the files yet: an item each, and a full row
        row = config.data.max_tokens or model.max_length or 1024
        items = {name: [float(encoder.nominal_length)] for name, encoder in model.encoders.items()}
        yield 1.0, {**items, "language_model": [float(row)]}
        return
    from interlace.data.digits import WORDS
    from interlace.data.stamps import ANSWER_BYTES, KINDS, QUESTIONS
    from interlace.model.audio import AudioInputs

    digits = config.data.dataset == "digits"
    media: dict[str, tuple[float, float]] = {}  # tokens of an item in each encoder, and for the language model
    for name, spec in config.model.encoders().items():
        encoder = model.encoders[name]
        if encoder.kind == "audio":
            shape = encoder.default_shape
            if isinstance(encoder.feed, AudioInputs):  # frames of 10 ms
                shape = shape[0], min(shape[1], round(config.data.max_audio_seconds * 100))
            media[name] = encoder.encoder_length(shape), encoder.tokens(shape)
            continue
        image = config.data.image_tokens(0)
        if digits and encoder.images is not None:
            side = -(-(config.data.digit_size or 8) // encoder.images.patch[0])
            image = min(image, side * side)
        media[name] = image, _projected(encoder, -(-image // spec.downsample))
    heard = {MODALITY[kind] for kind in kinds(model).values()}

    def sample(images: int, clips: int, texts: int, text: float) -> dict[str, list[float]]:
        counts = {name: images if kind == "image" else clips for name, kind in kinds(model).items()}
        row = sum(count * media[name][1] for name, count in counts.items()) + texts * text
        return {**{name: [media[name][0]] * count for name, count in counts.items()}, "language_model": [row]}

    if digits:
        yield 1.0, sample(1, 0, 1, max(map(len, WORDS)))
        return
    weights = {
        kind: getattr(config.data.mixture, kind.replace("+", "_"))
        for kind, needed in KINDS.items()
        if set(needed) <= heard
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
            text = len(QUESTIONS[kind]) + ANSWER_BYTES if kind in QUESTIONS else caption
            yield weight / total, sample("vision" in KINDS[kind], "audio" in KINDS[kind], texts, text)


def _projected(encoder: Any, features: int) -> int:
    """Tokens that the projector makes of an image of so many features, about as high as wide."""
    from interlace.model import ItemProjector

    projector = encoder.projector
    if not isinstance(projector, ItemProjector):
        return features
    side = max(1, math.isqrt(features) // projector.unit) * projector.unit
    return projector.tokens(side * side, (side, side))
