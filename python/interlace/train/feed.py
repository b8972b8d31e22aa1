"""The samples of a run as one rank sees them: this replica's share of every batch, and the held-out ones.

All ranks walk through the same global sequence of samples and agree on it without talking: it follows from the seed,
the files (verified before the first step) and the place in it alone, so that place is all the state there is.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.train.config import ConfigError
from interlace.train.schema import Config

# Pixel statistics that the families were pretrained with.
PIXELS = {
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


@dataclass(frozen=True)
class Batch:
    """One step's samples of this replica, with how many samples and LLM tokens the step has over all replicas."""

    samples: list[Any]
    count: int
    tokens: int


class Feed:
    """Batches from `train` and a fixed set of samples from `held_out` (`interlace.data.MultimodalDataset`).

    `batch_size` counts samples of all replicas; replica `replica` of `dp` gets its part of each batch.
    """

    def __init__(
        self,
        train: Any,
        held_out: Any,
        *,
        batch_size: int,
        seed: int,
        validation_samples: int,
        replica: int = 0,
        dp: int = 1,
    ) -> None:
        from interlace.data import Loader

        self.train, self.held_out_data = train, held_out
        self.replica, self.dp = replica, dp
        try:
            self.loader = Loader(train, batch_size, seed=seed, dp_rank=replica, dp_size=dp)
        except ValueError as error:
            raise ConfigError(f"[train] batch_size: {error}") from None
        count = min(validation_samples, len(held_out))
        self.held_out_indices = [i * len(held_out) // count for i in range(count)]  # spread over the whole split
        self._held_out: list[Any] | None = None

    @property
    def held_out(self) -> list[Any]:
        """This replica's share of the validation samples, equally many on every replica."""
        if self._held_out is None:
            indices = self.held_out_indices[: len(self.held_out_indices) // self.dp * self.dp] or self.held_out_indices
            self._held_out = [self.held_out_data.sample(i, 0) for i in indices[self.replica :: self.dp]]
        return self._held_out

    def next(self) -> Batch:
        """The next batch."""
        epoch, position = self.loader.epoch, self.loader.position
        samples = next(self.loader)
        indices = self.loader.indices(epoch, position)
        if self.dp == 1:
            tokens = sum(len(sample.input_ids) for sample in samples)
        else:
            tokens = sum(sum(map(sum, self.train.lengths(index, epoch).values())) for index in indices)
        return Batch(samples, len(indices), tokens)

    def state_dict(self) -> dict[str, Any]:
        """The place in the sequence, and what the sequence is made of."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` stood. Raises ConfigError when the data or its order are not the same."""
        try:
            self.loader.load_state_dict(dict(state))
        except ValueError as error:
            raise ConfigError(f"--resume: {error}") from None

    def close(self) -> None:
        """Stops reading ahead."""
        self.loader.close()

    def baselines(self, vocabulary: int, limit: int = 4096) -> dict[str, float]:
        """Losses in nats that need no model: uniform over bytes, and the frequencies of single target tokens.

        The frequencies are those of (at most `limit`) training samples.
        """
        from interlace.data import unigram_nats

        picks = range(0, len(self.train), max(1, len(self.train) // limit))
        unigram = unigram_nats(
            (self.train.answer(i, 0) for i in picks),
            (self.held_out_data.answer(i, 0) for i in self.held_out_indices),
            vocabulary,
        )
        return {"uniform_bytes": math.log(256), "unigram_bytes": unigram}


def datasets(
    config: Config,
    model: Any,
    tokenizer: Any,
    *,
    decode: set[str] | None = None,
    fetch: bool = True,
    source: str = "config",
) -> tuple[Any, Any, str]:
    """The training and the held-out dataset for `model`, and a note when other data than asked for was taken.

    `decode` names the modalities that this rank runs. Raises ConfigError for settings that the data or the encoders
    cannot meet, naming the key.
    """
    from interlace.data import load_dataset

    tokens = {name: model.encoders[name].tokens for name in config.model.encoders()}
    settings: dict[str, Any] = {"tokenizer": tokenizer, "held_out": config.data.held_out}
    if "vision" in tokens:
        spec = media_specs(config, model)["vision"]
        settings["patch_size"], settings["max_image_tokens"] = spec.patch_size, spec.max_tokens
        settings["mean"], settings["std"] = spec.mean, spec.std
    if config.data.dataset == "digits":
        if "vision" not in tokens:
            raise ConfigError(f"{source}: the digits are images, but the model has no [model.vision]")
        settings["image_size"] = config.data.digit_size
    else:
        settings |= _stamps_settings(config, model, source)
    try:
        return tuple(  # type: ignore[return-value]
            load_dataset(
                config.data.dataset,
                tokens=tokens,
                decode=None if decode is None else decode & set(tokens),
                seed=config.run.seed,
                cache=config.data.cache,
                fetch=fetch,
                **settings,
            )
        )
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"{source}: [data]: {error}") from None


def media_specs(config: Config, model: Any) -> dict[str, Any]:
    """How files become the encoders' inputs: modality -> ImageSpec or AudioSpec of `interlace.data`."""
    from interlace.data import AudioSpec, ImageSpec

    specs: dict[str, Any] = {}
    vision = config.model.vision
    if vision is not None:
        patch = model.encoders["vision"].module.config.patch_size
        mean, std = PIXELS[vision.family]
        specs["vision"] = ImageSpec(patch, config.data.max_image_tokens, mean, std)
    if config.model.audio is not None:
        specs["audio"] = AudioSpec(model.encoders["audio"].module.config.num_mel_bins, config.data.max_audio_seconds)
    return specs


def prepare(config: Config, say: Callable[[str], None], *, source: str = "config") -> Config:
    """Fetches, verifies and decodes the data before any rank starts, so that ranks find all of it in the cache.

    Returns the config with the dataset that there is (the digits when the stamps cannot be had; one line says so).
    A marker in the cache skips all this, and the imports it takes, when the same config was prepared before.
    """
    from interlace import __version__

    cache = _cache(config)
    key = (__version__, config.data.model_dump_json(), config.model.model_dump_json(), config.run.seed)
    marker = cache / "prepared" / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    if marker.exists() and (config.data.dataset == "digits" or any(cache.glob("stamps/[!.]*/complete.json"))):
        return config
    from interlace.data import ByteTokenizer
    from interlace.train.build import build

    tokenizer = ByteTokenizer()
    train, _, note = datasets(config, build(config, tokenizer, source=source), tokenizer, source=source)
    if note:
        say(note)
        return config.model_copy(update={"data": config.data.model_copy(update={"dataset": train.name})})
    if train.failures or train.skipped:
        say(train.report())
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return config


def _cache(config: Config) -> Path:
    """What `interlace.data.cache_folder` says, found without importing torch."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(config.data.cache or os.environ.get("INTERLACE_CACHE") or f"{base}/interlace").expanduser()


def _stamps_settings(config: Config, model: Any, source: str) -> dict[str, Any]:
    from interlace.data.stamps import KINDS

    spec, encoders = config.data, set(config.model.encoders())
    named = {kind.replace("+", "_"): kind for kind in KINDS}
    settings: dict[str, Any] = {
        "weights": {
            named[key]: weight
            for key, weight in spec.mixture.model_dump().items()
            if set(KINDS[named[key]]) <= encoders
        },
        "on_too_large": spec.on_too_large,
        "max_images": spec.max_images,
        "max_audio_seconds": spec.max_audio_seconds,
        "max_caption_bytes": spec.max_caption_bytes,
    }
    if spec.languages is not None:
        settings["languages"] = spec.languages
    if "audio" in encoders:
        audio = model.encoders["audio"].module.config
        settings["mel_bins"] = audio.num_mel_bins
        longest = audio.max_source_positions / 50.0  # 10 ms frames, halved by the second convolution
        if spec.max_audio_seconds > longest:
            raise ConfigError(
                f"{source}: [data] max_audio_seconds = {spec.max_audio_seconds:g}, but [model.audio.config] "
                f"max_source_positions = {audio.max_source_positions} holds only {longest:g} s; lower the one or "
                f"raise the other to {math.ceil(spec.max_audio_seconds * 50)}"
            )
    return settings
