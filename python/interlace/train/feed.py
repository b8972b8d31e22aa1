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
from typing import TYPE_CHECKING, Any

from interlace.train.architectures import HALF, pixel_statistics
from interlace.train.config import ConfigError
from interlace.train.schema import Config
from interlace.train.texts import tokenizer_of

if TYPE_CHECKING:
    from interlace.data import ChatDataset

MODALITY = {"image": "vision", "audio": "audio"}
"""What an encoder takes -> what datasets call files of that kind."""


@dataclass(frozen=True)
class Batch:
    """One step's samples, of all replicas, and where in the sequence they stand."""

    samples: list[Any]
    epoch: int
    position: int
    rows: list[list[Any]] | None = None
    """The samples in their rows, where these are packed: each is a microbatch."""

    @property
    def given(self) -> list[Any]:
        """What a step is given: the rows, or samples that it spreads itself."""
        return self.samples if self.rows is None else self.rows

    @property
    def tokens(self) -> int:
        """Tokens that the language model reads."""
        return sum(len(sample.input_ids) for sample in self.samples)


class Feed:
    """Batches from `train` and a fixed set of samples from `held_out` (`interlace.data.MultimodalDataset`).

    `batch_size` counts samples of all replicas, or with `row_tokens` rows of at most so many tokens. `wanted`: the
    media of a batch (of samples, or of rows of them) that this process will read, which are decoded ahead; None: all.
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
        row_tokens: int | None = None,
    ) -> None:
        from interlace.data import Loader, RowLoader

        self.train, self.held_out_data = train, held_out
        self.in_rows = row_tokens is not None
        try:
            if row_tokens is None:
                self.loader = Loader(train, batch_size, seed=seed, wanted=wanted)
            else:
                self.loader = RowLoader(train, batch_size, row_tokens, seed=seed, wanted=wanted)
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
        found: list[Any] = next(self.loader)
        if self.in_rows:
            return Batch([sample for row in found for sample in row], epoch, position, found)
        return Batch(found, epoch, position)

    def state_dict(self) -> dict[str, Any]:
        """The place in the sequence, and what the sequence and the validation data are made of."""
        return self.loader.state_dict() | {"held_out": self.held_out_data.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` stood. Raises ConfigError when the data or its order are not the same."""
        place = dict(state)
        if place.pop("held_out", None) != self.held_out_data.fingerprint():
            raise ConfigError(
                "--resume: the validation samples are not those of the saved run, so losses could not be compared; "
                "bring its data back, or start anew"
            )
        try:
            self.loader.load_state_dict(place)
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
        """Losses in nats that need no model: uniform over bytes (or tokens), and frequencies of single target tokens.

        The frequencies are those of (at most `limit`) training samples.
        """
        from interlace.data import unigram_nats

        picks = range(0, len(self.train), max(1, len(self.train) // limit))
        unigram = unigram_nats(
            (self.train.answer(i, 0) for i in picks),
            (self.held_out_data.answer(i, 0) for i in self.held_out_indices),
            vocabulary,
        )
        if self.held_out_data.name == "chats":
            return {"uniform_token": math.log(vocabulary), "unigram_token": unigram}
        return {"uniform_byte": math.log(256), "unigram_byte": unigram}


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
    if config.data.dataset == "chats":
        return *_chats(config, model, tokenizer, source, say or _say_on_stderr), ""
    from interlace.data import load_dataset

    tokens = {name: model.encoders[name].tokens for name in config.model.encoders()}
    specs = media_specs(config, model, source=source)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "held_out": config.data.held_out, "specs": specs}
    if config.data.dataset == "digits":
        if "image" not in kinds(model).values():
            raise ConfigError(f"{source}: the digits are images, but the model has no encoder of images in [model]")
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


def _chats(
    config: Config, model: Any, tokenizer: Any, source: str, say: Callable[[str], None]
) -> tuple[ChatDataset, ChatDataset]:
    """The training and the validation chats. Raises ConfigError."""
    from interlace.data import load_chats

    data = config.data
    chats, rules = chat_format(config, model, tokenizer, source), chat_rules(config, model, source)
    try:
        with _progress(say):
            return load_chats(data.train, data.validation, chats, rules, held_out=data.held_out, cache=data.cache)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"{source}: [data]: {error}") from None


def chat_format(config: Config, model: Any, tokenizer: Any, source: str) -> Any:
    """How chats become tokens of `model` (`interlace.data.chats_tokens.ChatFormat`). Raises ConfigError."""
    specs = {} if tokenizer.processor is not None else media_specs(config, model, source=source)
    tokens = {name: encoder.tokens for name, encoder in model.encoders.items()}
    try:
        return tokenizer.format(model.placeholders, tokens, specs)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{source}: [data]: {error}") from None


def chat_rules(config: Config, model: Any, source: str) -> Any:
    """What happens to chats that are too long or broken (`interlace.data.chats_store.Rules`). Raises ConfigError."""
    from interlace.data.chats_store import Rules

    data, most = config.data, model.max_length
    if data.max_tokens is not None and most is not None and data.max_tokens > most:
        raise ConfigError(
            f"{source}: data.max_tokens = {data.max_tokens}, but the language model has positions for {most} "
            "(max_position_embeddings): lower the one or raise the other"
        )
    return Rules(data.media, data.max_tokens or most, data.on_too_long, data.on_broken, data.decode_first)


def kinds(model: Any) -> dict[str, str]:
    """What the encoders take, by name: "image" or "audio"."""
    return {name: encoder.kind for name, encoder in model.encoders.items()}


def media_specs(config: Config, model: Any, *, source: str = "config") -> dict[str, Any]:
    """How files become the encoders' inputs: encoder -> ImageSpec or AudioSpec of `interlace.data`.

    Raises ConfigError for an encoder that takes neither pictures of three colours nor mel frames, and for one with
    trained weights of whose pixels nobody says how they are scaled.
    """
    from interlace.data import AudioSpec, ImageSpec
    from interlace.model.audio import AudioInputs
    from interlace.model.projector import unit_of

    specs: dict[str, Any] = {}
    for name, kind in kinds(model).items():
        encoder = model.encoders[name]
        if isinstance(encoder.feed, AudioInputs):
            specs[name] = AudioSpec(encoder.default_shape[0], config.data.max_audio_seconds)
            continue
        images = encoder.images
        if images is None or images.patch[0] != images.patch[1]:
            what = (
                "no pictures (3, height, width) of square patches"
                if kind == "image"
                else "no (mel bins, frames) of 10 ms"
            )
            raise ConfigError(
                f"{source}: [model.{name}] {type(encoder.module).__name__} takes {what}, which is what the dataset "
                f"{config.data.dataset!r} has: use another encoder or another data.dataset"
            )
        unit = unit_of(encoder.projector)  # patches that it joins on each side
        own = math.prod(side // images.patch[0] for side in images.size)
        budget = max(1, config.data.image_tokens(own) // unit**2)
        specs[name] = ImageSpec(images.patch[0] * unit, budget, *pixels(config, model, name, source))
    return specs


def pixels(config: Config, model: Any, name: str, source: str = "config") -> tuple[Any, Any]:
    """Mean and standard deviation of an image encoder's pixels: the config's, its folder's, or its architecture's.

    Raises ConfigError where trained weights were made with nobody knows which.
    """
    spec = config.model.encoders()[name]
    known = pixel_statistics(model.encoders[name].module.config.model_type)
    if known is None and spec.path is not None and (spec.mean is None or spec.std is None):
        raise ConfigError(
            f"{source}: {spec.path} has no preprocessor_config.json that says which mean and std of pixels the encoder "
            f"was trained with: give [model.{name}] mean and std, three numbers each"
        )
    mean, std = known or HALF
    return tuple(spec.mean or mean), tuple(spec.std or std)


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
    # Own files may have changed; what was prepared of them is kept by themselves.
    own = config.data.dataset == "chats"
    if not own and marker.exists() and (config.data.dataset == "digits" or find_stamps(config.data.cache) is not None):
        return config
    from interlace.train.build import build

    tokenizer = tokenizer_of(config, source=source)
    train, _, note = datasets(config, build(config, tokenizer, source=source), tokenizer, source=source, say=say)
    if note:
        say(note)
        return config.model_copy(update={"data": config.data.model_copy(update={"dataset": train.name})})
    if own:
        return config
    try:
        prepared.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise ConfigError(f"{source}: cannot write {prepared}: {error.strerror}; set data.cache") from None
    return config


def report_left_out(splits: Iterable[Any], folder: Path, say: Callable[[str], None]) -> None:
    """Says what the samples of a run do without, cuts included, and lists it in left_out.txt of its `folder`.

    Splits of the same files share much of it: a split with nothing of its own is not told again.
    """
    place, lines, reports = folder / "left_out.txt", dict[str, None](), list[str]()
    for dataset in splits:
        new = dict.fromkeys(dataset.listing().splitlines(keepends=True))
        if new.keys() - lines.keys():
            reports.append(dataset.report())
        lines |= new
    if not lines:
        place.unlink(missing_ok=True)
        return
    place.write_text("".join(lines), encoding="utf-8")
    for report in reports:
        say(f"{report}; list in {place}")


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

    spec, heard = config.data, {MODALITY[kind] for kind in kinds(model).values()}
    named = {kind.replace("+", "_"): kind for kind in KINDS}
    settings: dict[str, Any] = {
        "weights": {
            named[key]: weight for key, weight in spec.mixture.model_dump().items() if set(KINDS[named[key]]) <= heard
        },
        "on_too_large": spec.on_too_large,
        "max_images": spec.max_images,
        "max_audio_seconds": spec.max_audio_seconds,
        "max_caption_bytes": spec.max_caption_bytes,
    }
    if spec.languages is not None:
        settings["languages"] = spec.languages
    for name, kind in kinds(model).items():
        if kind != "audio":
            continue
        longest = model.encoders[name].default_shape[1] / 100.0  # frames of 10 ms
        if spec.max_audio_seconds > longest:
            positions = getattr(model.encoders[name].module.config, "max_source_positions", None)
            where, hint = f"[model.{name}]", "lower it"
            if positions is not None:
                where = f"[model.{name}.config] max_source_positions = {positions}"
                hint = f"lower the one or raise the other to {math.ceil(spec.max_audio_seconds * positions / longest)}"
            raise ConfigError(
                f"{source}: [data] max_audio_seconds = {spec.max_audio_seconds:g}, but {where} holds only "
                f"{longest:g} s; {hint}"
            )
    return settings
