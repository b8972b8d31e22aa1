"""Placeholders: token ids that mark an encoder's features, one per encoder or several (image and video)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from torch import Tensor

from interlace.modalities import named, names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Ids = int | tuple[int, ...]
"""Placeholder id or ids of an encoder."""


def token_ids(given: Ids) -> tuple[int, ...]:
    """The ids as a tuple, also for a single id."""
    return (given,) if isinstance(given, int) else tuple(given)


def every_id(placeholders: Mapping[str, Ids]) -> set[int]:
    """The ids of all encoders."""
    return {token for given in placeholders.values() for token in token_ids(given)}


def is_placeholder(ids: Tensor, given: Ids) -> Tensor:
    """Mask of placeholders: bool in the shape of `ids`, True for the encoder whose placeholders are `given`."""
    first, *others = token_ids(given)
    matches = ids == first
    for token in others:
        matches = matches | (ids == token)
    return matches


def item_starts(ids: Tensor, given: Ids, tokens: Sequence[int]) -> list[int]:
    """Start of each item in `ids` (int64 [L]), for the encoder with placeholders `given`.

    tokens: number of tokens of each item, in order.
    Raises ValueError if the number of placeholders differs.
    """
    places = is_placeholder(ids, given).nonzero().squeeze(1).tolist()
    if len(places) != sum(tokens):
        raise ValueError(f"{len(places)} placeholders ({in_words(given)}) for items of {sum(tokens)} tokens")
    return [places[before] for before in accumulate(tokens[:-1], initial=0)] if tokens else []


def in_words(given: Ids) -> str:
    """Text for messages."""
    ids = token_ids(given)
    return f"id {ids[0]}" if len(ids) == 1 else f"ids {', '.join(map(str, ids))}"


def blank_id(placeholders: Mapping[str, Ids]) -> int:
    """The token id of padding: the first id that is not a placeholder."""
    taken = every_id(placeholders)
    return next(token for token in range(len(taken) + 1) if token not in taken)


def configured(kind: str, *configs: PretrainedConfig) -> int | None:
    """The placeholder id in a language model's config for items of this kind, the name of a modality."""
    if kind not in names():
        return None
    given = (getattr(config, name, None) for config in configs for name in named(kind).token_names)
    return next((int(token) for token in given if token is not None), None)


def check_placeholders(encoders: Mapping[str, Any], placeholders: Mapping[str, Ids], vocab_size: int) -> None:
    """Raise ValueError unless every encoder has its own ids, inside the vocabulary."""
    missing = [name for name in encoders if name not in placeholders or not token_ids(placeholders[name])]
    if missing:
        raise ValueError(
            f"no placeholder for encoder {missing[0]!r}: pass placeholders={{{missing[0]!r}: token id}}, the token in "
            "input_ids that its features replace (the language model's config has no image_token_id or "
            "audio_token_id)"
        )
    unknown = [name for name in placeholders if name not in encoders]
    if unknown:
        raise ValueError(f"placeholder for {unknown[0]!r}, but the encoders are {', '.join(encoders) or 'none'}")
    for name, given in placeholders.items():
        for token in token_ids(given):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"placeholder id {token} of {name!r} is outside the language model's vocabulary of {vocab_size}: "
                    f"use an unused id below {vocab_size}, or enlarge vocab_size to at least {token + 1}"
                )
    if len(every_id(placeholders)) < sum(len(token_ids(given)) for given in placeholders.values()):
        raise ValueError(f"two encoders share a placeholder id ({dict(placeholders)}): each needs its own")
