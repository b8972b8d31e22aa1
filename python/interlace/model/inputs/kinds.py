"""Choice of a module's kind of inputs (images.py, patches.py, tiles.py, spectrograms.py, clips.py)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from interlace.modalities import IMAGE, all_modalities, of_argument
from interlace.model.inputs.clips import ClipInputs
from interlace.model.inputs.images import ImageInputs
from interlace.model.inputs.patches import GRID, PatchInputs
from interlace.model.inputs.spectrograms import AudioInputs
from interlace.model.inputs.tiles import SIZES, TileInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Feed = ImageInputs | PatchInputs | TileInputs | AudioInputs | ClipInputs


def arguments() -> dict[str, str]:
    """Main input of a forward -> kind of module: the name of its modality, or "text"."""
    return {name: each.name for each in all_modalities() for name in each.arguments} | {"input_ids": "text"}


def kind_of(module: nn.Module) -> str:
    """Kind of a module by the arguments of its forward. Raises ValueError if it takes no known ones."""
    parameters = inspect.signature(module.forward).parameters
    known = arguments()
    argument = next((name for name in parameters if name in known), "")
    if not argument and GRID not in parameters:
        *others, last = dict.fromkeys(known.values())
        raise ValueError(
            f"{type(module).__name__}.forward takes none of {', '.join(known)}: pass a model of "
            f"{', '.join(others)} or {last}"
        )
    return known.get(argument, IMAGE.name)


def config_of(module: nn.Module, layer_path: str) -> PretrainedConfig:
    """Config of the innermost module around the layers that has one: the tower's, if `module` contains more."""
    config: Any = module.config
    for name in layer_path.split("."):
        module = getattr(module, name)
        config = getattr(module, "config", config)
    return config


def feeds_of(module: nn.Module, config: PretrainedConfig, layer_path: str) -> Sequence[Feed]:
    """Possible input kinds of a module: those of its modality, or from the arguments of its forward; several only for
    different shapes of clips.

    Raises the config's own error if it lacks sizes, and ValueError for an unsupported module.
    """
    parameters = list(inspect.signature(module.forward).parameters)
    if GRID in parameters:
        return [PatchInputs.of(module, config, layer_path, parameters)]
    argument = next(name for name in parameters if name in arguments())
    modality = of_argument(argument)
    if modality is not None and (own := modality.inputs(module, config, layer_path)):
        return own
    if argument == "pixel_values" and SIZES in parameters and not _tower_takes(module, layer_path, SIZES):
        images = ImageInputs.of(config, parameters)
        return [TileInputs((images.channels, *images.size))]
    if argument == "pixel_values":
        return [ImageInputs.of(config, parameters)]
    if argument == "input_features" and getattr(config, "max_source_positions", None) is not None:
        audio = AudioInputs.of(module, config)
        if audio.channels:
            return [audio]
    return ClipInputs.of(module, config, argument, layer_path)


def _tower_takes(module: nn.Module, layer_path: str, argument: str) -> bool:
    """True if the innermost module around the layers that takes images has an argument of this name."""
    accepted = False
    for name in ["", *layer_path.split(".")]:
        module = getattr(module, name) if name else module
        parameters = inspect.signature(module.forward).parameters
        if "pixel_values" in parameters:
            accepted = argument in parameters
    return accepted


def features_of(output: object) -> Tensor:
    """The tokens in the output of a HuggingFace encoder. Raises ValueError if there are none."""
    if isinstance(output, Tensor):
        return output
    features = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
    if not isinstance(features, Tensor):
        raise ValueError(
            f"it returns a {type(output).__name__} without last_hidden_state: use the encoder inside, without its head"
        )
    return features
