"""The samples of a run as every rank sees them: all of each batch, and the held-out ones.

All ranks walk through the same sequence of samples and agree on it without talking: it follows from the seed, the files
(verified before the first step) and the place in it alone, so that place is all the state there is. Each decodes only
the media that it reads.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
    """One step's samples, of all replicas, and where in the sequence they stand."""

    samples: list[Any]
    epoch: int
    position: int

    @property
    def tokens(self) -> int:
        """Tokens that the language model reads."""
        return sum(len(sample.input_ids) for sample in self.samples)


class Feed:
    """Batches from `train` and a fixed set of samples from `held_out` (`interlace.data.MultimodalDataset`).

    `batch_size` counts samples of all replicas. `wanted`: the media of a batch that this process will read, which are
    decoded ahead; None: all.
    """

    def __init__(
        self,
        train: Any,
        held_out: Any,
        *,
        batch_size: int,
        seed: int,
        validation_samples: int,
        wanted: Callable[[list[Any]], Iterable[Any]] | None = None,
    ) -> None:
        from interlace.data import Loader

        self.train, self.held_out_data = train, held_out
        try:
            self.loader = Loader(train, batch_size, seed=seed, wanted=wanted)
        except ValueError as error:
            raise ConfigError(f"[train] batch_size: {error}") from None
        count = min(validation_samples, len(held_out))
        self.held_out_indices = [i * len(held_out) // count for i in range(count)]  # spread over the whole split
        self._held_out: list[Any] | None = None

    @property
    def held_out(self) -> list[Any]:
        """The validation samples, the same on every rank."""
        if self._held_out is None:
            self._held_out = [self.held_out_data.sample(i, 0) for i in self.held_out_indices]
        return self._held_out

    def next(self) -> Batch:
        """The next batch."""
        epoch, position = self.loader.epoch, self.loader.position
        return Batch(next(self.loader), epoch, position)

    def state_dict(self) -> dict[str, Any]:
        """The place in the sequence, and what the sequence is made of."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` stood. Raises ConfigError when the data or its order are not the same."""
        try:
            self.loader.load_state_dict(dict(state))
        except ValueError as error:
            raise ConfigError(f"--resume: {error}") from None

    @property
    def blank_items(self) -> int:
        """Items of samples that this rank could no longer read and left blank."""
        return int(self.train.blank_items + self.held_out_data.blank_items)

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
    fetch: bool = True,
    gather: Callable[[str, Any], list[Any]] | None = None,
    source: str = "config",
    say: Callable[[str], None] | None = None,
) -> tuple[Any, Any, str]:
    """The training and the held-out dataset for `model`, and a note when other data than asked for was taken.

    `say` (default: a line on stderr) is told what takes long: fetching, reading headers, decoding. `gather` (what for,
    value) gives the values of all ranks of a group, which then take the same dataset: one rank of each machine fetches,
    and when any of them cannot, all take the digits. Raises ConfigError for settings that the data, the encoders or the
    language model's context cannot meet, naming the key.
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
        settings["jitter"] = config.data.digit_jitter
    else:
        settings |= _stamps_settings(config, model, source)
    try:
        with _progress(say or _say_on_stderr):
            train, held_out, note = load_dataset(
                config.data.dataset,
                tokens=tokens,
                seed=config.run.seed,
                cache=config.data.cache,
                fetch=partial(_fetch_together, gather=gather) if fetch and gather is not None else fetch,
                **settings,
            )
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"{source}: [data]: {error}") from None
    _check_context(config, model, [train, held_out], source)
    return train, held_out, note


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
    from interlace.data import cache_folder, find_stamps

    key = (__version__, config.data.model_dump_json(), config.model.model_dump_json(), config.run.seed)
    prepared = cache_folder(config.data.cache) / "prepared"
    marker = prepared / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    if marker.exists() and (config.data.dataset == "digits" or find_stamps(config.data.cache) is not None):
        return config
    from interlace.data import ByteTokenizer
    from interlace.train.build import build

    tokenizer = ByteTokenizer()
    train, _, note = datasets(config, build(config, tokenizer, source=source), tokenizer, source=source, say=say)
    if note:
        say(note)
        return config.model_copy(update={"data": config.data.model_copy(update={"dataset": train.name})})
    try:
        prepared.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise ConfigError(f"{source}: cannot write {prepared}: {error.strerror}; set data.cache") from None
    return config


def report_left_out(dataset: Any, folder: Path, say: Callable[[str], None]) -> None:
    """Says how many files the samples of a run do without, and lists them in left_out.txt of its `folder`."""
    listing = folder / "left_out.txt"
    if not dataset.failures and not dataset.skipped:
        listing.unlink(missing_ok=True)
        return
    listing.write_text(dataset.listing(), encoding="utf-8")
    say(f"{dataset.report()}; list in {listing}")


def _say_on_stderr(line: str) -> None:
    print(f"interlace: {line}", file=sys.stderr, flush=True)


@contextmanager
def _progress(say: Callable[[str], None]) -> Iterator[None]:
    """Hands what the data package logs meanwhile, warnings included, to `say`."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    log, handler = logging.getLogger("interlace.data"), Handler(logging.INFO)
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _fetch_together(cache: str | Path | None, gather: Callable[[str, Any], list[Any]]) -> tuple[Path | None, str]:
    """``find_or_fetch`` of all ranks at once: the first rank of each machine does it, the others wait for it.

    Either every rank gets its folder or none does, with the same words: they must not train on different data.
    """
    from interlace.data import fetch

    trouble = ""
    if int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0))) == 0:
        trouble = fetch.find_or_fetch(cache)[1]
    troubles = gather("fetching the data", trouble)
    first = next((rank for rank, text in enumerate(troubles) if text), None)
    if first is not None:
        return None, troubles[first] + (f", on the machine of rank {first}" if first else "")
    return fetch.find_stamps(cache), "not in the cache that the first rank of this machine filled"


def _check_context(config: Config, model: Any, splits: list[Any], source: str) -> None:
    """Raises ConfigError when the language model has too few positions for a sample that an epoch may draw."""
    most = model.max_length
    if most is None:
        return
    sample, prompt = (max(sizes) for sizes in zip(*(split.longest() for split in splits), strict=True))
    answered = config.log.samples or (config.log.accuracy_samples and splits[0].questions())
    written = prompt + config.log.max_new_tokens - 1 if answered else 0  # the last token is not read again
    if max(sample, written) <= most:
        return
    what = f"the longest sample has {sample:,} tokens"
    keys = "data.max_caption_bytes, data.max_image_tokens, data.max_images or data.max_audio_seconds"
    if splits[0].name == "digits":
        keys = "data.digit_size"
    if sample <= most:
        what = f"the longest prompt and log.max_new_tokens = {config.log.max_new_tokens} make {written:,} tokens"
        keys += " or log.max_new_tokens"
    raise ConfigError(
        f"{source}: {what}, but model.language_model.config.max_position_embeddings = {most:,}; raise it to "
        f"{max(sample, written)}, or lower {keys}"
    )


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
