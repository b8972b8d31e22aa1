"""Parts of a whole HuggingFace model: towers, the modules after them, and the language model.

    LlavaForConditionalGeneration
        model                              the base, whose get_image_features makes features of pictures
            vision_tower                   the tower: its layers are cut into stages
            multi_modal_projector          after the tower: the encoder's "projector"
            language_model                 the decoder
        lm_head                            belongs to the language model, too

HuggingFace identifies the parts: get_decoder(), get_encoder(modality), get_image_features. The tables here cover the
rest. No other code in this package depends on a family of whole models.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from interlace.modalities import AUDIO, IMAGE, all_modalities, named
from interlace.model.inputs.patches import GRID
from interlace.model.stages.slice import clone, find_layers

MEDIA = ("pixel_values", "input_features", "input_values", GRID)
"""Prefixes of the media arguments of a tower's forward."""


class InTurn(NamedTuple):
    """Children of the base that compute the features of a modality one after the other."""

    tower: str
    projector: str


IN_TURN = {
    # get_image_features drops all-zero pictures, which cannot be detected from shapes alone
    ("idefics3", IMAGE.name): InTurn("vision_model", "connector"),
    ("smolvlm", IMAGE.name): InTurn("vision_model", "connector"),
    # a forward without get_audio_features
    ("qwen2_audio", AUDIO.name): InTurn("audio_tower", "multi_modal_projector"),
}
"""(model_type, modality) -> parts that make its features, for bases without a method that a stage may call."""


MERGERS = ("merger", "deepstack_merger_list")
"""Names of projectors inside towers (Qwen-VL and its relatives). HuggingFace has no method to find them."""


class Gone(nn.Module):
    """Placeholder for a removed tower: some models read its device before they check for media."""

    device = torch.device("cpu")
    dtype = torch.float32


@dataclass(frozen=True)
class Parts:
    """Names of the parts of a whole model.

    base: attribute of the whole that holds the rest.
    decoder, tower: attributes of the base.
    modality: name of the modality of the tower's items.
    layers: path of the layers inside the tower.
    beside: the base's other attributes, modules and parameters, which belong to the encoder.
    mergers: children of the tower that make the language model's features, if the projector is inside the tower.
    """

    base: str
    decoder: str
    tower: str
    modality: str
    layers: str
    beside: tuple[str, ...]
    mergers: tuple[str, ...]
    in_turn: InTurn | None

    @property
    def encoder(self) -> str:
        """Name of the encoder in a MultimodalModel."""
        return named(self.modality).encoder

    @classmethod
    def of(cls, whole: PreTrainedModel) -> Parts:
        """The parts of a HuggingFace model. Raises ValueError for a model with a different structure."""
        name, kind = type(whole).__name__, whole.config.model_type
        base = whole.base_model
        at = _attribute(whole, base)
        if at is None:
            raise ValueError(f"{name} is no model with a head around a base: it cannot be cut into its modules")
        decoder = _attribute(base, base.get_decoder())
        if decoder is None:
            raise ValueError(
                f"{name} has no language model of its own inside {at!r}: it cannot be cut into its modules"
            )
        parts = {}
        for modality in (each.name for each in all_modalities() if each.has_tower):
            turns = IN_TURN.get((kind, modality))
            tower = turns.tower if turns else _attribute(base, base.get_encoder(modality=modality))
            if tower is not None and tower != decoder and (turns or hasattr(base, f"get_{modality}_features")):
                parts[modality] = tower, turns
        if len(parts) != 1:
            what = f"towers for {' and '.join(parts)}" if parts else "no tower whose features HuggingFace tells"
            raise ValueError(f"{name} has {what} beside its language model; whole models of one tower can be cut")
        [(modality, (tower, turns))] = parts.items()
        own = [key for key, child in base.named_children() if any(True for _ in child.parameters())]
        children = getattr(base, tower)._modules
        own += [key for key, parameter in base._parameters.items() if parameter is not None]
        beside = tuple(key for key in own if key not in (decoder, tower))
        second = next((key for key in beside if _takes_media(base._modules.get(key))), None)
        if second is not None:
            raise ValueError(
                f"{name} has a second tower, {second!r}, beside {tower!r}: whole models of one tower can be cut"
            )
        return cls(
            base=at,
            decoder=decoder,
            tower=tower,
            modality=modality,
            layers=find_layers(getattr(base, tower)),
            mergers=tuple(key for key in MERGERS if key in children),
            beside=beside,
            in_turn=turns,
        )

    def language_model(self, whole: PreTrainedModel) -> PreTrainedModel:
        """The whole model without the tower and the modules after it. It shares everything else."""
        base = clone(getattr(whole, self.base))
        for key in self.beside:
            base._modules.pop(key, None)
            parameter = base._parameters.pop(key, None)
            if parameter is not None:  # HuggingFace's weight initialisation fills it wherever it finds the base
                vars(base)[key] = torch.empty_like(parameter, device="meta", requires_grad=False)
        base._modules[self.tower] = Gone()
        made = self._around(whole, base)
        # Without the tower's config: otherwise the library would look for its model in each call. The base keeps the
        # whole config.
        made.config = copy.copy(whole.config)
        for key, config in vars(whole.config).items():
            if config is getattr(getattr(whole, self.base), self.tower).config:
                vars(made.config)[key] = None
        return made

    def tower_side(self, whole: PreTrainedModel) -> PreTrainedModel:
        """The base without the language model. It shares everything else."""
        base = clone(getattr(whole, self.base))
        del base._modules[self.decoder]
        return base

    def joined(self, language_model: PreTrainedModel, tower_side: PreTrainedModel) -> PreTrainedModel:
        """Join the results of `language_model` and `tower_side` into the whole model, in HuggingFace's order."""
        base = clone(tower_side)
        decoder = getattr(language_model, self.base)._modules[self.decoder]
        base._modules[self.decoder] = decoder
        made = self._around(language_model, base)
        made.config = base.config
        return made

    def _around(self, whole: PreTrainedModel, base: nn.Module) -> PreTrainedModel:
        made = clone(whole)
        made._modules[self.base] = base
        return made


def _takes_media(part: nn.Module | None) -> bool:
    """True if a HuggingFace model inside `part` takes pictures, videos or clips, as towers do."""
    models = (each for each in part.modules() if isinstance(each, PreTrainedModel)) if part is not None else ()
    return any(name.startswith(MEDIA) for each in models for name in inspect.signature(each.forward).parameters)


def check_fed(model: nn.Module, layer_path: str, unread: Sequence[int]) -> None:
    """Raise ValueError for a language model with parts that would get no gradient when encoders are used.

    These are an encoder of its own, or layers that text does not pass through because they attend to that encoder
    (`unread`).
    """
    kind = type(model).__name__
    for name, part in model.named_modules():
        if name and isinstance(part, PreTrainedModel) and not layer_path.startswith(f"{name}.") and _takes_media(part):
            raise ValueError(
                f"{kind} has an encoder of its own, {name!r}, which would never be run: give its language model alone, "
                "or take the whole model with MultimodalModel.from_pretrained(folder)"
            )
    if unread:
        raise ValueError(
            f"{kind} has layers that only features of its own encoder come through, {', '.join(map(str, unread))} of "
            f"{layer_path!r}: they would never be run. Use a language model that reads text alone"
        )


def _attribute(parent: nn.Module, child: nn.Module) -> str | None:
    """Attribute name of `child` in `parent`."""
    return next((key for key, each in parent.named_children() if each is child), None)


def decoder_layers(model: PreTrainedModel) -> str | None:
    """Path of the layers of the text decoder, because a model may also hold towers; None if it cannot be found."""
    decoder: PreTrainedModel | None = model.get_decoder() if hasattr(model, "get_decoder") else None
    name = next((name for name, part in model.named_modules() if part is decoder and name), None)
    if name is None or decoder is None:
        return None
    own = [key for key, part in decoder.named_children() if isinstance(part, nn.ModuleList) and len(part)]
    try:
        return f"{name}.{own[0] if len(own) == 1 else find_layers(decoder)}"
    except ValueError:
        return None
