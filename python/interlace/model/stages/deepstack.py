"""DeepStack (Qwen3-VL): image features are also added to their tokens after each of the first layers.

An encoder's features are then [n, (1 + k) D]: the replacement of a placeholder, and the parts added after layers 0, 1,
... k - 1. They are split where they are merged, on the first stage, which passes them to the decoder's own forward. The
forward takes them as arguments that the surrounding model would fill. A stage that starts before layer k would not have
them, so it is refused (`check_deepstack`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from interlace.model.inputs.placeholders import is_placeholder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASK, FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
"""Arguments of a decoder's forward: bool [B, T], and a list of k tensors [n, D]."""
INDEXES = "deepstack_visual_indexes"
"""Key in a tower's config for its k layers whose features are added."""


class Deepstack(NamedTuple):
    """Features that are added after the first layers.

    mask: bool [B, T], the tokens that get features.
    rows: [n, k D], in the order of these tokens.
    """

    mask: Tensor
    rows: Tensor

    def of(self, row: int, start: int, stop: int) -> Deepstack:
        """Part for the tokens [start, stop) of a row."""
        mask = self.mask[row : row + 1, start:stop]
        before = int(self.mask[:row].sum()) + int(self.mask[row, :start].sum())
        return Deepstack(mask, self.rows[before : before + int(mask.sum())])


def split_features(
    layers: int, features: Mapping[str, Tensor], inputs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Deepstack | None]:
    """Split features into replacements of placeholders, [n, D] per encoder, and parts added after `layers` layers.

    layers: number of these layers; 0: nothing is split.
    inputs: input_ids [B, T] and placeholders.
    Raises ValueError for features of several encoders: the rows would have to follow their order in the text.
    """
    if not layers or not features:
        return dict(features), None
    if len(features) > 1:
        raise ValueError(f"a model with DeepStack must have one encoder, not {', '.join(features)}")
    [(name, given)] = features.items()
    width = given.shape[1] // (1 + layers)
    mask = is_placeholder(inputs["input_ids"], inputs["placeholders"][name])
    return {name: given[:, :width]}, Deepstack(mask, given[:, width:])


def handing(module: PreTrainedModel, deep: Deepstack | None) -> AbstractContextManager[object]:
    """Inside, the decoder of `module` gets `deep` as additional arguments."""
    if deep is None:
        return nullcontext()
    decoder: PreTrainedModel = module.get_decoder()
    features = list(deep.rows.split(int(decoder.config.hidden_size), dim=1))

    def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, MASK: deep.mask, FEATURES: features}

    handle: RemovableHandle = decoder.register_forward_pre_hook(add, with_kwargs=True)
    return handle


def check_deepstack(name: str, layers: int, start: int, stop: int, total: int) -> None:
    """Raise ValueError for a stage [start, stop) that begins or ends between layers that add features."""
    for cut in sorted({start, stop} - {0, total}):
        if cut < layers:
            raise ValueError(
                f"{name} cannot be cut before layer {cut}: media features are added behind each of its first "
                f"{layers} layers (DeepStack), and only the first stage has them. Cut it before layer {layers} or later"
            )


def layers_of(tower: PreTrainedModel, decoder: PreTrainedModel) -> int:
    """Number of layers of `decoder` that add features of `tower`, from the tower's config.

    Raises ValueError if the tower has such features and the decoder does not take them.
    """
    count = len(getattr(tower.config, INDEXES, None) or ())
    if count and FEATURES not in inspect.signature(decoder.forward).parameters:
        raise ValueError(f"{type(decoder).__name__} does not take features for several layers, which its tower makes")
    return count
