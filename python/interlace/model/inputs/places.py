"""Positions of media and targets in a batch, found on the host: reading them from a GPU would synchronize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interlace.model.inputs.placeholders import Ids, is_placeholder
from interlace.model.sample import IGNORE
from interlace.parallel.sending import to_device

KEY = "places"
"""Key of the places in the inputs."""


class Places(NamedTuple):
    """Positions of media and targets in a batch.

    ids, labels: the tensors that the places belong to. The places do not apply to tensors that a callback substituted.
    media: encoder -> int64 [n], positions of its features in the flattened ids.
    targets: int64 [n], positions with a target, in a batch of one row; None in other batches.
    """

    ids: Tensor
    labels: Tensor
    media: dict[str, Tensor]
    targets: Tensor | None


def with_places(inputs: dict[str, Any], placeholders: Mapping[str, Ids], device: torch.device) -> Places:
    """Places of collated inputs, copied to `device`. `Places.ids` and `labels` remain the host's tensors."""
    ids, labels = inputs["input_ids"], inputs["labels"]
    flat = ids.reshape(-1)
    media = {
        name: to_device(is_placeholder(flat, token).nonzero().squeeze(1), device)
        for name, token in placeholders.items()
    }
    targets = to_device((labels[0] != IGNORE).nonzero().squeeze(1), device) if len(labels) == 1 else None
    return Places(ids, labels, media, targets)


def media_in(inputs: Mapping[str, Any], name: str, token: Ids) -> Tensor:
    """int64 [n]: positions of an encoder's placeholders in the flattened input_ids."""
    known: Places | None = inputs.get(KEY)
    if known is not None and known.ids is inputs["input_ids"] and name in known.media:
        return known.media[name]
    return is_placeholder(inputs["input_ids"].reshape(-1), token).nonzero().squeeze(1)


def targets_in(inputs: Mapping[str, Any]) -> Tensor | None:
    """int64 [n]: columns with a target, in a one-row batch with known places; otherwise None."""
    known: Places | None = inputs.get(KEY)
    return known.targets if known is not None and known.labels is inputs["labels"] else None
