"""Encoder of a whole HuggingFace model: its tower, and the model's own code after the tower.

The inner module is the whole model without its language model. Its forward is HuggingFace's own get_image_features or
get_audio_features. That covers feature selection, pixel shuffle, pooling and projector, so the ModalityModule has
nothing to project. Parameters keep their names in the checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from interlace.modalities import AUDIO
from interlace.model.inputs.base import Item
from interlace.model.inputs.kinds import Feed
from interlace.model.modality import ModalityModule
from interlace.model.stages.deepstack import INDEXES
from interlace.model.whole.parts import Parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUNT = "batch_num_images"


class Tower(nn.Module):
    """The part of HuggingFace's whole model that makes features; see the module docstring."""

    def __init__(self, whole: PreTrainedModel, parts: Parts):
        super().__init__()
        self.parts = parts
        self.add_module(parts.base, parts.tower_side(whole))
        self.config = self.tower.config
        self.layerdrop = getattr(self.tower, "layerdrop", 0.0)
        self.config_text = whole.config.to_json_string()  # makes the whole config part of a probe's cache key
        if getattr(whole.config, "vision_feature_layer", None) is not None:
            # Hooks on all layers capture the features of a middle layer. If the library added them itself, in the first
            # forward, layers on other stages would not be counted.
            from transformers.utils import output_capturing  # not in transformers 4

            output_capturing.maybe_install_capturing_hooks(self.tower)

    @property
    def base(self) -> PreTrainedModel:
        """The whole model's base, without its language model."""
        return self._modules[self.parts.base]

    @property
    def tower(self) -> PreTrainedModel:
        """The part whose layers are cut into stages."""
        return self.base._modules[self.parts.tower]

    def set_attn_implementation(self, name: str) -> None:
        """As HuggingFace's, for the tower only: modules after it keep their own attention, if any."""
        self.tower.set_attn_implementation(name)

    def features(self, given: Tensor, **about: Tensor | list[int]) -> BaseModelOutput:
        """[items, tokens, D_llm] for a batch of items, in last_hidden_state."""
        turns = self.parts.in_turn
        if turns is not None:
            hidden = self.tower(given, **about).last_hidden_state
            projected = getattr(self.base, turns.projector)(hidden)
        else:
            output = getattr(self.base, f"get_{self.parts.modality}_features")(given, return_dict=True, **about)
            projected = output.pooler_output
            deep = getattr(output, "deepstack_features", None) or ()
            if deep:  # see deepstack.py
                projected = [torch.cat(each, dim=-1) for each in zip(projected, *deep, strict=True)]
        if isinstance(projected, (list, tuple)):
            alike = len({len(each) for each in projected}) == 1 and not about
            projected = torch.stack(list(projected)) if alike else torch.cat(list(projected)).unsqueeze(0)
        return BaseModelOutput(last_hidden_state=projected)


class ImageTower(Tower):
    """Tower of pictures."""

    def forward(self, pixel_values: Tensor, **about: Tensor | list[int]) -> BaseModelOutput:
        """See `Tower.features`."""
        return self.features(pixel_values, **about)


class AudioTower(Tower):
    """Tower of clips."""

    def forward(self, input_features: Tensor, **about: Tensor | list[int]) -> BaseModelOutput:
        """See `Tower.features`."""
        return self.features(input_features, **about)


class GridTower(Tower):
    """Tower of pictures and videos in patches, with the grid of each."""

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> BaseModelOutput:
        """[1, tokens of all items, D_llm]; see `Tower.features`."""
        return self.features(pixel_values, **{f"{self.parts.modality}_grid_thw": grid_thw})


class TileTower(Tower):
    """Tower of pictures in tiles, with the size of each picture in pixels.

    LLaVA-OneVision's processor makes no tiles if a sample has several pictures, and its model takes the number of
    pictures per sample. Here, a one-tile picture implies that case. A call has only one-tile pictures, or none of them.
    """

    def __init__(self, whole: PreTrainedModel, parts: Parts):
        super().__init__(whole, parts)
        self.counts = COUNT in inspect.signature(self.base.get_image_features).parameters

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> BaseModelOutput:
        """[1, tokens of all items, D_llm]; see `Tower.features`."""
        alone = self.counts and len(pixel_values) == len(image_sizes)
        several = {COUNT: [max(2, len(image_sizes))]} if alone else {}
        return self.features(pixel_values, image_sizes=image_sizes, **several)


def tower_of(whole: PreTrainedModel, parts: Parts) -> Tower:
    """The tower of a whole model, with a forward whose arguments match the kind of its items."""
    base = getattr(whole, parts.base)
    inside = getattr(base, parts.tower)
    if "grid_thw" in inspect.signature(inside.forward).parameters:
        return GridTower(whole, parts)
    if hasattr(base, "pack_image_features"):
        return TileTower(whole, parts)
    return (AudioTower if parts.modality == AUDIO.name else ImageTower)(whole, parts)


class WholeEncoder(ModalityModule):
    """A ModalityModule of a `Tower`. Its features are HuggingFace's own: no class token is dropped here."""

    drops_prefix = False

    def __init__(self, whole: PreTrainedModel, parts: Parts):
        module = tower_of(whole, parts)
        super().__init__(module, projector=nn.Identity(), layers=f"{parts.base}.{parts.tower}.{parts.layers}")
        inside = f"module.{parts.base}.{parts.tower}"
        names = [*module.tower._modules, *module.tower._parameters] if parts.mergers else []
        self.tower_names = [f"{inside}.{name}" for name in names if name not in parts.mergers] or [inside]
        self.projector_names = [f"{inside}.{name}" for name in parts.mergers]
        self.projector_names += [f"module.{parts.base}.{name}" for name in parts.beside]

    @property
    def parts(self) -> Parts:
        """Parts of the whole model that this encoder belongs to."""
        parts: Parts = self.module.parts  # type: ignore[assignment]
        return parts

    def connect(self, out_features: int) -> None:
        """As in ModalityModule. Features are wider if they are added to several layers (deepstack.py)."""
        config: Any = self.module.config
        super().connect(out_features * (1 + len(getattr(config, INDEXES, None) or ())))

    def _unknown(self, error: Exception) -> ValueError:
        return ValueError(
            f"its tower does not take {self.kind} items in a supported form ({type(error).__name__}: {error}). Train "
            "it with HuggingFace's class"
        )

    def _measure(self, feeds: Sequence[Feed]) -> None:
        super()._measure(feeds)
        if self.images is not None and self.images.any_size:
            # A pixel shuffle may need squares, or a pooling one size.
            channels, tall, wide = self.default_shape
            try:
                self._feature_count(Item((channels, 2 * tall, wide)))
            except Exception:  # a model may raise anything for a size that it does not support
                self.feed = replace(self.images, any_size=False)
