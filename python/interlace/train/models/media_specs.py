"""Media specs: how the files of a dataset become inputs of a model's encoders."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from interlace.modalities import named
from interlace.modalities.base import Geometry
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.models.architectures import HALF, pixel_statistics

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


def kinds(model: MultimodalModel) -> dict[str, str]:
    """Encoder -> name of its modality."""
    return {name: model.encoders[name].kind for name in model.encoders}


def check_inputs(config: Config, model: MultimodalModel, *, source: str = "config") -> None:
    """Raises ConfigError if the encoders cannot take the media of [data]. Opens no files.

    Training, planning and data checks all use this function.
    """
    data, most = config.data, model.max_length
    if config.model.path is None:  # a whole model has its own processor
        media_specs(config, model, source=source)
    if data.max_tokens is not None and most is not None and data.max_tokens > most:
        raise ConfigError(
            f"{source}: data.max_tokens = {data.max_tokens}, but the language model has positions for {most} "
            "(max_position_embeddings): lower data.max_tokens or raise max_position_embeddings"
        )


def media_specs(config: Config, model: MultimodalModel, *, source: str = "config") -> dict[str, Any]:
    """Encoder -> the spec of its modality, which converts files to the encoder's inputs.

    Raises ConfigError for an encoder that takes other items than files become. Raises it also for an encoder with
    trained weights whose pixel scaling is unknown.
    """
    from interlace.model.inputs.spectrograms import AudioInputs
    from interlace.model.projector import unit_of

    specs = {}
    for name, kind in kinds(model).items():
        encoder, modality = model.encoders[name], named(kind)
        geometry = Geometry(
            encoder.default_shape,
            patch=None if encoder.images is None else encoder.images.patch,
            mel_bins=encoder.default_shape[0] if isinstance(encoder.feed, AudioInputs) else None,
            unit=unit_of(encoder.projector),
            scaling=partial(pixels, config, model, name, source),
        )
        spec = modality.spec(geometry, config.data)
        if spec is None:
            raise ConfigError(
                f"{source}: [model.{name}] {type(encoder.module).__name__} does not take {modality.wanted}, the items "
                f"of the dataset {config.data.dataset!r}: use another encoder or another data.dataset"
            )
        specs[name] = spec
    return specs


def pixels(
    config: Config, model: MultimodalModel, name: str, source: str = "config"
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of an image encoder's pixels: from the config, its folder, or its architecture.

    Raises ConfigError if the scaling that trained weights expect is unknown.
    """
    spec = config.model.encoders()[name]
    module: Any = model.encoders[name].module
    known = pixel_statistics(module.config.model_type)
    if known is None and spec.path is not None and (spec.mean is None or spec.std is None):
        raise ConfigError(
            f"{source}: {spec.path} has no preprocessor_config.json with the mean and std of pixels that the encoder "
            f"was trained with: set [model.{name}] mean and std, three numbers each"
        )
    mean, std = known or HALF
    return tuple(spec.mean or mean), tuple(spec.std or std)
