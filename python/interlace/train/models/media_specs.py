"""Media specs: how the files of a dataset become inputs of a model's encoders."""

from __future__ import annotations

import math
from typing import Any

from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.models.architectures import HALF, pixel_statistics


def kinds(model: Any) -> dict[str, str]:
    """Encoder -> kind of its input: "image" or "audio"."""
    return {name: encoder.kind for name, encoder in model.encoders.items()}


def check_inputs(config: Config, model: Any, *, source: str = "config") -> None:
    """Raises ConfigError if the encoders cannot take the media of [data]. Opens no files.

    Training, planning and data checks all use this function.
    """
    data, most = config.data, model.max_length
    if data.dataset == "digits" and "image" not in kinds(model).values():
        raise ConfigError(f"{source}: the digits are images, but [model] has no image encoder: add one")
    if data.dataset == "digits" or config.model.path is None:  # a whole model has its own processor for chats
        media_specs(config, model, source=source)
    if data.max_tokens is not None and most is not None and data.max_tokens > most:
        raise ConfigError(
            f"{source}: data.max_tokens = {data.max_tokens}, but the language model has positions for {most} "
            "(max_position_embeddings): lower data.max_tokens or raise max_position_embeddings"
        )


def media_specs(config: Config, model: Any, *, source: str = "config") -> dict[str, Any]:
    """Encoder -> ImageSpec or AudioSpec of `interlace.data`, which converts files to the encoder's inputs.

    Raises ConfigError for an encoder that takes neither pictures of three colours nor mel frames. Raises it also for an
    encoder with trained weights whose pixel scaling is unknown.
    """
    from interlace.data import AudioSpec, ImageSpec
    from interlace.model.inputs.spectrograms import AudioInputs
    from interlace.model.projector import unit_of

    specs: dict[str, Any] = {}
    for name, kind in kinds(model).items():
        encoder = model.encoders[name]
        if isinstance(encoder.feed, AudioInputs):
            specs[name] = AudioSpec(encoder.default_shape[0], config.data.max_audio_seconds)
            continue
        images = encoder.images
        if images is None or images.patch[0] != images.patch[1]:
            what = "images (3, height, width) of square patches" if kind == "image" else "(mel bins, frames) of 10 ms"
            raise ConfigError(
                f"{source}: [model.{name}] {type(encoder.module).__name__} does not take {what}, the items of the "
                f"dataset {config.data.dataset!r}: use another encoder or another data.dataset"
            )
        unit = unit_of(encoder.projector)  # patches that it joins on each side
        own = math.prod(side // images.patch[0] for side in images.size)
        budget = max(1, config.data.image_tokens(own) // unit**2)
        specs[name] = ImageSpec(images.patch[0] * unit, budget, *pixels(config, model, name, source))
    return specs


def pixels(config: Config, model: Any, name: str, source: str = "config") -> tuple[Any, Any]:
    """Mean and standard deviation of an image encoder's pixels: from the config, its folder, or its architecture.

    Raises ConfigError if the scaling that trained weights expect is unknown.
    """
    spec = config.model.encoders()[name]
    known = pixel_statistics(model.encoders[name].module.config.model_type)
    if known is None and spec.path is not None and (spec.mean is None or spec.std is None):
        raise ConfigError(
            f"{source}: {spec.path} has no preprocessor_config.json with the mean and std of pixels that the encoder "
            f"was trained with: set [model.{name}] mean and std, three numbers each"
        )
    mean, std = known or HALF
    return tuple(spec.mean or mean), tuple(spec.std or std)
