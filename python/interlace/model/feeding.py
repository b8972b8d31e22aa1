"""Which of the kinds of inputs (images.py, patches.py, tiles.py, audio.py, clips.py) a module is fed with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from interlace.model.audio import AudioInputs
from interlace.model.clips import ClipInputs
from interlace.model.images import ImageInputs
from interlace.model.patches import GRID, PatchInputs
from interlace.model.tiles import SIZES, TileInputs

ARGUMENTS = {"pixel_values": "image", "input_features": "audio", "input_values": "audio", "input_ids": "text"}
"""Main input of a forward -> what kind of module it is."""
Feed = ImageInputs | PatchInputs | TileInputs | AudioInputs | ClipInputs


def config_of(module: nn.Module, layer_path: str) -> Any:
    """The config of the innermost part around the layers that has one: of the tower, where `module` is more."""
    config: Any = module.config
    for name in layer_path.split("."):
        module = getattr(module, name)
        config = getattr(module, "config", config)
    return config


def feeds_of(module: nn.Module, config: Any, layer_path: str, parameters: Sequence[str]) -> Sequence[Feed]:
    """How a module may be given its items, by the arguments of its forward; several only where shapes of clips differ.

    Raises what a config raises that does not tell sizes, and ValueError for what can not be fed.
    """
    if GRID in parameters:
        return [PatchInputs.of(module, config, layer_path, parameters)]
    argument = next(name for name in parameters if name in ARGUMENTS)
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
    """Whether the innermost part around the layers that takes images has an argument of this name."""
    found = False
    for name in ["", *layer_path.split(".")]:
        module = getattr(module, name) if name else module
        parameters = inspect.signature(module.forward).parameters
        if "pixel_values" in parameters:
            found = argument in parameters
    return found


def features_of(output: Any) -> Tensor:
    """The tokens among what a HuggingFace encoder returns. Raises ValueError where there are none."""
    if isinstance(output, Tensor):
        return output
    features = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
    if not isinstance(features, Tensor):
        raise ValueError(
            f"it returns a {type(output).__name__} without last_hidden_state: use the encoder inside, without its head"
        )
    return features
