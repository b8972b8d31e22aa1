"""Where media and targets stand in a batch, found on the host: a GPU that is asked for it has to be waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interlace.model.placeholders import Ids, is_placeholder
from interlace.model.sample import IGNORE
from interlace.parallel.sending import sent

KEY = "places"
"""Key of the inputs that has them."""


class Places(NamedTuple):
    """ids, labels: the tensors that they are of; of others, which a callback may have put there, they say nothing.
    media: encoder -> int64 [n], places of its features in the flattened ids. targets: int64 [n], places of what has a
    target, in a batch of one row; None in others."""

    ids: Tensor
    labels: Tensor
    media: dict[str, Tensor]
    targets: Tensor | None


def with_places(inputs: dict[str, Any], placeholders: Mapping[str, Ids], device: torch.device) -> Places:
    """Those of collated inputs on the host, on `device`; `Places.ids` and `labels` are still the host's."""
    ids, labels = inputs["input_ids"], inputs["labels"]
    flat = ids.reshape(-1)
    media = {
        name: sent(is_placeholder(flat, token).nonzero().squeeze(1), device) for name, token in placeholders.items()
    }
    targets = sent((labels[0] != IGNORE).nonzero().squeeze(1), device) if len(labels) == 1 else None
    return Places(ids, labels, media, targets)


def media_in(inputs: Mapping[str, Any], name: str, token: Ids) -> Tensor:
    """int64 [n]: where the placeholders of an encoder stand in the flattened input_ids."""
    known: Places | None = inputs.get(KEY)
    if known is not None and known.ids is inputs["input_ids"] and name in known.media:
        return known.media[name]
    return is_placeholder(inputs["input_ids"].reshape(-1), token).nonzero().squeeze(1)


def targets_in(inputs: Mapping[str, Any]) -> Tensor | None:
    """int64 [n]: which columns have a target, in a batch of one row whose places are known; else None."""
    known: Places | None = inputs.get(KEY)
    return known.targets if known is not None and known.labels is inputs["labels"] else None
