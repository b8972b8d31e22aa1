"""Collation for the language model: ids, labels, positions and the bitfield mask.

    [ text image image text ][ text audio text ] ...      packed: one document per sample, positions restart

    [ text image image text ]                             in rows, if a language model mixes neighbours outside
    [ text audio text  -  - ]                             attention (see interlace.model.rows); - is padding

Text is stream 0. Encoders are streams 1, 2, ... in the model's order. Every token is causal and attends every stream.
In models with bidirectional media, the tokens of one item form a span and also attend to each other in both directions
(the rule of Gemma-3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask, word
from interlace.model.inputs.placeholders import Ids, blank_id, in_words, is_placeholder
from interlace.model.modality import ModalityModule
from interlace.model.naming import did_you_mean
from interlace.model.rows import padded
from interlace.model.sample import IGNORE, Sample, refuse_copies

JOINED = "joined"


def check_bidirectional(value: object) -> bool | str:
    """Return `value` if it is a valid setting of `bidirectional`. Raises ValueError otherwise."""
    if type(value) is bool or (isinstance(value, str) and value == JOINED):
        return value
    raise ValueError(f"bidirectional is {value!r}: it must be True, False or {JOINED!r} (adjacent items attend, too)")


def collate_language(
    samples: Sequence[Sample],
    encoders: Mapping[str, ModalityModule],
    placeholders: Mapping[str, Ids],
    max_length: int | None = None,
    vocab_size: int | None = None,
    *,
    rows: bool = False,
    bidirectional: bool | str = True,
    positions_of: Callable[[Sample], torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Pack `samples` into one row. With `rows`, give each sample its own row, padded on the right.

    Returns input_ids, labels, position_ids int64 [B, T] (B = 1 when packed), mask (BitfieldMask [B, T]) and plan (its
    AttentionPlan).
    bidirectional: True = the tokens of a media item attend to each other in both directions. JOINED: also across
    adjacent items.
    positions_of: sample -> int64 [L, k], for models with k positions per token; position_ids are then [B, T, k].
    Padding is document -1, has no target, and its id is not a placeholder. Raises ValueError with the name of the
    sample; see check_sample. Unshifted labels are refused as in Sample.
    """
    if not samples:
        raise ValueError("collate needs at least one sample")
    # One-token answers are too short for a check per sample, so the whole batch is checked.
    refuse_copies("the batch", [(sample.input_ids, sample.labels) for sample in samples])
    spans: list[torch.Tensor] = []
    streams: list[torch.Tensor] = []
    used = 0
    for sample in samples:
        check_sample(sample, encoders, placeholders, max_length, vocab_size)
        span = torch.full(sample.input_ids.shape, -1, dtype=torch.int32)
        stream = torch.zeros_like(sample.input_ids)
        for number, name in enumerate(encoders, start=1):
            items = sample.media.get(name, [])
            if not items:
                continue
            places = is_placeholder(sample.input_ids, placeholders[name]).nonzero().squeeze(1)
            counts = torch.tensor([item.tokens for item in items])
            which = torch.repeat_interleave(torch.arange(len(items)), counts, output_size=len(places))
            if bidirectional == JOINED:
                which = (places.diff(prepend=places[:1]) > 1).cumsum(0)
            span[places] = (used + which).to(torch.int32)
            stream[places] = number
            used += len(items)
        spans.append(span)
        streams.append(stream)
    words = torch.tensor([word(number, causal=True) for number in range(len(encoders) + 1)], dtype=torch.int64)
    lengths = torch.tensor([len(sample) for sample in samples])
    blank = blank_id(placeholders)
    document = torch.zeros(len(samples), dtype=torch.int32) if rows else torch.arange(len(samples), dtype=torch.int32)

    def lay_out(flat: torch.Tensor, fill: int) -> torch.Tensor:
        return padded(flat, lengths, fill) if rows else flat.unsqueeze(0)

    if rows:
        positions = torch.arange(int(lengths.max())).repeat(len(samples), 1)
    else:
        positions = torch.cat([torch.arange(len(sample)) for sample in samples]).unsqueeze(0)
    mask = BitfieldMask(
        lay_out(words[torch.cat(streams)], word(0, causal=True)),
        doc=lay_out(torch.repeat_interleave(document, lengths), -1),
        span=lay_out(torch.cat(spans), -1) if used and bidirectional else None,
        pos=positions.to(torch.int32),
    )
    if positions_of is not None:
        every = torch.cat([positions_of(sample) for sample in samples])
        positions = torch.stack([lay_out(column, 0) for column in every.unbind(1)], dim=-1)
    return {
        "input_ids": lay_out(torch.cat([sample.input_ids for sample in samples]), blank),
        "labels": lay_out(torch.cat([sample.labels for sample in samples]), IGNORE),
        "position_ids": positions,
        "mask": mask,
        "plan": AttentionPlan.build(mask),
    }


def check_sample(
    sample: Sample,
    encoders: Mapping[str, ModalityModule],
    placeholders: Mapping[str, Ids],
    max_length: int | None = None,
    vocab_size: int | None = None,
) -> None:
    """Raise ValueError, with the sample's name, unless its text and media fit each other and the model.

    Refused are: ids or labels outside the vocabulary of `vocab_size`, more than `max_length` tokens, media of an
    unknown encoder, an item that its encoder does not support, an item with a wrong `tokens`, a number of placeholders
    that does not match the media, and an item whose placeholders are not consecutive.
    """
    where = f"sample {sample.name!r}"
    if vocab_size is not None:
        _check_ids(sample, where, vocab_size)
    for name, items in sample.media.items():
        if name not in encoders and items:
            known = ", ".join(map(repr, encoders)) or "none"
            hint = did_you_mean(name, encoders)
            raise ValueError(f"{where} has {name!r} media but the model's encoders are {known}{hint}")
    if max_length is not None and len(sample) > max_length:
        raise ValueError(
            f"{where} has {len(sample)} tokens but the language model has positions for {max_length}: shorten the "
            "sample (smaller media give fewer tokens) or raise max_position_embeddings"
        )
    for name, encoder in encoders.items():
        items = sample.media.get(name, [])
        for i, item in enumerate(items):
            try:
                tokens = encoder.tokens(item.shape, item.about)
            except ValueError as error:
                raise ValueError(f"{where}, {name} item {i}: {error}") from None
            if tokens != item.tokens:
                raise ValueError(
                    f"{where}, {name} item {i} of shape {item.shape} has tokens = {item.tokens}, but the encoder makes "
                    f"{tokens}: compute Media.tokens with mllm.encoders[{name!r}].tokens(shape, about)"
                )
        places = is_placeholder(sample.input_ids, placeholders[name]).nonzero().squeeze(1)
        count = len(places)
        expected = sum(item.tokens for item in items)
        if count != expected:
            raise ValueError(
                f"{where}: input_ids hold {count} placeholders ({in_words(placeholders[name])}) for {name!r}, but its "
                f"{len(items)} media item{'s' * (len(items) != 1)} become{'s' * (len(items) == 1)} {expected} tokens: "
                "write each item as that many consecutive placeholders, and check that the tokenizer's placeholder id "
                "is the model's and that text was not truncated inside an item"
            )
        for i, piece in enumerate(places.split([item.tokens for item in items]) if items else ()):
            first, last = int(piece[0]), int(piece[-1])
            if last - first + 1 != len(piece):
                raise ValueError(
                    f"{where}, {name} item {i}: its {len(piece)} placeholders ({in_words(placeholders[name])}) between "
                    f"positions {first} and {last} of input_ids are not consecutive: write each item as consecutive "
                    "placeholders, in the order of its media"
                )


def _check_ids(sample: Sample, where: str, vocab_size: int) -> None:
    for what, ids, allowed in (
        ("input_ids", sample.input_ids, ""),
        ("labels", sample.labels, f", or {IGNORE} for no target"),
    ):
        wrong = (ids < 0) | (ids >= vocab_size)
        if allowed:
            wrong &= ids != IGNORE
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"{where}: {what}[{at}] is {int(ids[at])}, but the language model's ids are 0 to {vocab_size - 1}"
                f"{allowed}: use the tokenizer that belongs to the model, or enlarge its vocab_size"
            )
