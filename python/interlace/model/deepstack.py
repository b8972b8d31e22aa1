"""DeepStack (Qwen3-VL): features of an image are added to its tokens behind each of the first layers, too.

An encoder's features then travel as [n, (1 + k) D]: what replaces a placeholder, and what is added behind the layers
0, 1, ... k - 1. They are split where they are merged, on the first stage, which hands them to the decoder's own
forward. That takes what is added as arguments that the model around it would fill; a stage that began before layer k
would not have them, so it is refused (`check_deepstack`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from interlace.model.placeholders import is_placeholder

MASK, FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
"""Arguments of a decoder's forward: bool [B, T], and a list of k tensors [n, D]."""
INDEXES = "deepstack_visual_indexes"
"""What a tower's config calls the k layers of its own whose features are added."""


class Deepstack(NamedTuple):
    """mask: bool [B, T], the tokens that features are added to; rows: [n, k D], in their order."""

    mask: Tensor
    rows: Tensor

    def of(self, row: int, start: int, stop: int) -> Deepstack:
        """That of the tokens [start, stop) of a row alone."""
        mask = self.mask[row : row + 1, start:stop]
        before = int(self.mask[:row].sum()) + int(self.mask[row, :start].sum())
        return Deepstack(mask, self.rows[before : before + int(mask.sum())])


def split_features(
    layers: int, features: Mapping[str, Tensor], inputs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Deepstack | None]:
    """What replaces placeholders, [n, D] of each encoder, and what is added behind `layers` layers, if any.

    inputs: input_ids [B, T] and placeholders. Raises ValueError for features of several encoders, whose order in the
    text the rows would have to follow.
    """
    if not layers or not features:
        return dict(features), None
    if len(features) > 1:
        raise ValueError(f"a model with DeepStack has one encoder, not {', '.join(features)}")
    [(name, given)] = features.items()
    width = given.shape[1] // (1 + layers)
    mask = is_placeholder(inputs["input_ids"], inputs["placeholders"][name])
    return {name: given[:, :width]}, Deepstack(mask, given[:, width:])


@contextmanager
def handing(module: Any, deep: Deepstack | None) -> Iterator[None]:
    """Inside, the decoder of `module` is called with `deep` beside what it is called with."""
    if deep is None:
        yield
        return
    decoder: nn.Module = module.get_decoder()
    width = decoder.config.hidden_size  # type: ignore[union-attr]
    features = list(deep.rows.split(int(width), dim=1))  # type: ignore[arg-type]

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, MASK: deep.mask, FEATURES: features}

    hook = decoder.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def check_deepstack(name: str, layers: int, start: int, stop: int, total: int) -> None:
    """Raise ValueError for a stage [start, stop) that begins or ends between layers that features are added behind."""
    for cut in sorted({start, stop} - {0, total}):
        if cut < layers:
            raise ValueError(
                f"{name} cannot be cut before layer {cut}: features of media are added behind each of its first "
                f"{layers} layers (DeepStack), and only the first stage has them. Cut it before layer {layers} or later"
            )


def layers_of(tower: Any, decoder: Any) -> int:
    """How many layers of `decoder` add features of `tower`, as the tower's config says.

    Raises ValueError where the tower has such features and the decoder takes none.
    """
    count = len(getattr(tower.config, INDEXES, None) or ())
    if count and FEATURES not in inspect.signature(decoder.forward).parameters:
        raise ValueError(f"{type(decoder).__name__} does not take the features of several layers that its tower gives")
    return count
