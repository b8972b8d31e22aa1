"""The samples of a run as every rank sees them: all of each batch, and the held-out ones.

All ranks walk through the same sequence of samples and agree on it without talking: it follows from the seed, the files
(verified before the first step) and the place in it alone, so that place is all the state there is. Each decodes only
the media that it reads.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.train.config import ConfigError
from interlace.train.media_specs import check_inputs, media_specs
from interlace.train.schema import Config
from interlace.train.schema_data import Source
from interlace.train.texts import tokenizer_of

if TYPE_CHECKING:
    from interlace.data import ChatDataset, Loader
    from interlace.data.produced import HeldOut


LEFT_OUT = "left_out.txt"


@dataclass(frozen=True)
class Batch:
    """One step's samples, of all replicas, and where in the sequence they stand."""

    samples: list[Any]
    epoch: int
    position: int
    rows: list[list[Any]] | None = None
    """The samples in their rows, where these are packed: each is a microbatch."""
    sources: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Source -> how many of the samples are of it, and their tokens; of one source nothing."""
    dispatched: Any = None
    """Of a stream: the samples as the ranks have them."""
    exchange: Any = None
    """Of a stream: what travelled between ranks for it, in bytes (`interlace.balance.AllToAllPlan`)."""

    @property
    def moved(self) -> int | None:
        """Bytes that travelled between ranks for it; None where data are read at random, as nothing does then."""
        return None if self.exchange is None else int(self.exchange.moved)

    @property
    def given(self) -> Any:
        """What a step is given: the rows, samples that it spreads itself, or those of a stream."""
        if self.dispatched is not None:
            return self.dispatched
        return self.samples if self.rows is None else self.rows

    @property
    def tokens(self) -> int:
        """Tokens that the language model reads."""
        return sum(map(len, self.samples))


class Feed:
    """Batches from `train` and a fixed set of samples from `held_out` (`interlace.data.MultimodalDataset`).

    `batch_size` counts samples of all replicas, or with `row_tokens` rows of at most so many tokens. `drop_last`: leave
    out the samples at the end of an epoch that do not fill a batch. `wanted`: the media of a batch (of samples, or of
    rows of them) that this process will read, which are decoded ahead; None: all.
    `producers` make them apart from training (`preparing.producers_of`), `prefetch` batches ahead, in pinned memory
    for a GPU (`pinned`), and decode the held-out ones.
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
        drop_last: bool = False,
        producers: Callable[[Any], Any] | None = None,
        prefetch: int = 2,
        pinned: bool = False,
    ) -> None:
        self.train = train
        self.in_rows = row_tokens is not None
        ahead: dict[str, Any] = {"wanted": wanted, "producers": producers, "prefetch": prefetch, "pinned": pinned}
        ahead["held_out"] = held_out
        self.loader = loader(train, batch_size, row_tokens, seed=seed, drop_last=drop_last, **ahead)
        self.loader.begin()
        self._hold_out(held_out, validation_samples)

    @classmethod
    def of_config(cls, config: Config, train: Any, held_out: Any, wanted: Any, **settings: Any) -> Feed:
        """That of a config which reads at random. wanted, settings (producers, pinned): as of `Feed`."""
        return cls(
            train,
            held_out,
            batch_size=config.train.batch_size,
            seed=config.run.seed,
            validation_samples=config.train.validation_samples,
            wanted=wanted,
            row_tokens=config.data.row_tokens,
            drop_last=config.data.drop_last,
            prefetch=config.data.prefetch,
            **settings,
        )

    def _hold_out(self, held_out: Any, validation_samples: int) -> None:
        self.held_out_data = held_out
        count = min(validation_samples, len(held_out))
        self.held_out_indices = [i * len(held_out) // count for i in range(count)]  # spread over the whole split
        self._held_out: list[Any] | None = None
        self._apart: HeldOut | None = None  # who asks producers for them

    @property
    def held_out(self) -> list[Any]:
        """The validation samples, the same on every rank."""
        from interlace.data.produced import HeldOut

        if self._held_out is None and self.loader.producers is not None:
            self._apart = HeldOut(self.loader.producers, self.held_out_data, self.held_out_indices)
            self._held_out = self._apart.samples
        elif self._held_out is None:
            self._held_out = [self.held_out_data.sample(i, 0) for i in self.held_out_indices]
        return self._held_out

    def ask_held_out(self, parts: Iterable[list[Any]], wanted: Callable[[list[Any]], Iterable[Any]]) -> None:
        """Has those who prepare the data decode what this process reads of these `parts` of the validation samples, and
        does not wait for it. Without such, items are decoded when they are read."""
        if self._apart is not None:
            for part in parts:
                self._apart.ask(wanted(part))

    def next(self) -> Batch:
        """The next batch."""
        epoch, position = self.loader.epoch, self.loader.position
        found: list[Any] = next(self.loader)
        rows = found if self.in_rows else None
        samples = found if rows is None else [sample for row in rows for sample in row]
        return Batch(samples, epoch, position, rows, self._sources(epoch, position, samples))

    def _sources(self, epoch: int, position: int, samples: list[Any]) -> dict[str, tuple[int, int]]:
        from interlace.data import by_source

        if not self.mixed:
            return {}
        parts = by_source(self.train, self.loader.indices(epoch, position), samples)
        return {name: (len(part), sum(len(sample.input_ids) for sample in part)) for name, part in parts}

    @property
    def mixed(self) -> bool:
        """Whether the data are of several sources."""
        return len(getattr(self.train, "parts", ())) > 1

    def epochs(self, batch: Batch) -> dict[str, float]:
        """Source -> how often its samples were gone through, up to the end of `batch`; of one source nothing."""
        if not self.mixed:
            return {}
        end = self.loader.drawn(batch.epoch, batch.position)
        of = self.train.source_of(self.loader.order(batch.epoch)[:end])
        before = self.train.drawn(batch.epoch)
        return {
            part.name: (before[place] + int((of == place).sum())) / len(part.data)
            for place, part in enumerate(self.train.parts)
        }

    def held_out_by_source(self) -> list[tuple[str, list[Any]]]:
        """The validation samples of each source, under its name; of one source all, under ""."""
        from interlace.data import by_source

        return list(by_source(self.held_out_data, self.held_out_indices, self.held_out))

    def state_dict(self, gather: Callable[..., list[Any]] | None = None) -> dict[str, Any]:
        """The place in the sequence, and what the sequence and the validation data are made of. gather: not asked here,
        where all ranks know one place."""
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

    @property
    def decoded_items(self) -> int:
        """Items that were read for this rank, by it or by its producers, and that no other rank had read before."""
        return int(self.train.read_items + self.held_out_data.read_items)

    @property
    def worker_restarts(self) -> int:
        """Producers that were lost and replaced since this process began."""
        return 0 if self.loader.producers is None else self.loader.producers.restarts

    def close(self) -> None:
        """Stops reading ahead, and who prepares the data."""
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


def loader(data: Any, batch_size: int, row_tokens: int | None, **settings: Any) -> Loader:
    """The loader of batches of samples, or of rows of at most `row_tokens` tokens. Raises ConfigError."""
    from interlace.data import Loader, RowLoader

    try:
        if row_tokens is None:
            return Loader(data, batch_size, **settings)
        return RowLoader(data, batch_size, row_tokens, **settings)
    except ValueError as error:
        raise ConfigError(f"[train] batch_size: {error}") from None


def batch_notes(loader: Any) -> list[str]:
    """Lines for the start of a run: samples that ``data.drop_last`` leaves out, and data that make a single batch."""
    if loader.batches_per_epoch is None:
        return []
    count = len(loader.dataset)
    if loader.drop_last:
        left = loader.left_out(0)
        return [f"data.drop_last: the first epoch leaves out {left:,} of {count:,} samples, which do not fill a batch"]
    if loader.batches_per_epoch == 1:
        return [f"train.batch_size: one batch takes all {count:,} samples to train on, so each step is an epoch"]
    return []


def datasets(
    config: Config, model: Any, tokenizer: Any, *, source: str = "config", say: Callable[[str], None] | None = None
) -> tuple[Any, Any]:
    """The training and the held-out dataset for `model`.

    `say` (default: a line on stderr) is told what takes long: reading headers, decoding. Raises ConfigError for
    settings that the data, the encoders or the language model's context cannot meet, naming the key.
    """
    check_inputs(config, model, source=source)
    if config.data.dataset == "chats":
        return _chats(config, model, tokenizer, source, say or _say_on_stderr)
    from interlace.data import DigitsDataset

    tokens = {name: model.encoders[name].tokens for name in config.model.encoders()}
    try:
        train, held_out = (
            DigitsDataset(
                split=split,
                tokens=tokens,
                seed=config.run.seed,
                tokenizer=tokenizer,
                held_out=config.data.held_out,
                specs=media_specs(config, model, source=source),
                image_size=config.data.digit_size,
                jitter=config.data.digit_jitter,
            )
            for split in ("train", "heldout")
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{source}: [data]: {error}") from None
    _check_context(config, model, [train, held_out], source)
    return train, held_out


def _chats(config: Config, model: Any, tokenizer: Any, source: str, say: Callable[[str], None]) -> tuple[Any, Any]:
    """The training and the validation chats (`ChatDataset`, of several sources `MixedDataset`). Raises ConfigError."""
    from interlace.data import MixedDataset, Part, cache_folder, load_chats

    data = config.data
    chats = chat_format(config, model, tokenizer, source)
    train, held_out, name = [], [], "[data]"
    try:
        with data_log(say):
            if data.reading == "stream":
                return _streamed(config, chats, *chat_sources(config, model, source)[0])
            for each, rules in chat_sources(config, model, source):
                name = f"[[data.sources]] {each.name}" if data.sources else name
                found = load_chats(
                    each.train,
                    each.validation,
                    chats,
                    rules,
                    held_out=data.held_out,
                    limit=each.limit,
                    cache=data.cache,
                )
                train.append(Part(each.name, found[0], each.weight))
                held_out.append(Part(each.name, found[1]))
        if len(train) == 1:
            return train[0].data, held_out[0].data
        name = "[[data.sources]]"
        return MixedDataset(train, data.mix_by), MixedDataset(held_out, mixes=False)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{source}: {name}: {error}") from None
    except OSError as error:  # data files that cannot be read are ChatFileErrors
        place = error.filename or cache_folder(data.cache)
        raise ConfigError(
            f"{source}: {name}: {place}: {error.strerror or error}; set data.cache to a folder that can be written and "
            "has room"
        ) from None


def _streamed(config: Config, chats: Any, files: Source, rules: Any) -> tuple[Any, ChatDataset]:
    """The training chats as a stream, and the validation chats."""
    from interlace.data.chats import whole_chats
    from interlace.data.chats_stream import ChatStream

    cache = config.data.cache
    held_out = whole_chats(files.validation, chats, rules, cache=cache)
    return ChatStream(files.train, chats, rules, cache), held_out


def indexed(train: Any, held_out: Any) -> Any:
    """Of the two datasets that `datasets` returns, what has samples by number: not a stream."""
    return train if hasattr(train, "sample") else held_out


def chat_format(config: Config, model: Any, tokenizer: Any, source: str) -> Any:
    """How chats become tokens of `model` (`interlace.data.chats_tokens.ChatFormat`). Raises ConfigError."""
    specs = {} if tokenizer.processor is not None else media_specs(config, model, source=source)
    tokens = {name: encoder.tokens for name, encoder in model.encoders.items()}
    try:
        return tokenizer.format(model.placeholders, tokens, specs)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{source}: [data]: {error}") from None


def chat_sources(config: Config, model: Any, source: str) -> list[tuple[Source, Any]]:
    """The config's sources, each with what happens to its chats that are too long or broken
    (`interlace.data.chats_records.Rules`)."""
    from interlace.data.chats_records import Rules

    data = config.data
    said = (data.max_tokens or model.max_length, data.on_too_long, data.on_broken, data.decode_first, data.sizes)
    return [(each, Rules(each.media, *said, each.prompt)) for each in data.each_source()]


def prepare(config: Config, say: Callable[[str], None], *, source: str = "config") -> None:
    """Writes, verifies and decodes the data before any rank starts, so that ranks find all of it; raises ConfigError.

    Of the digits, which are made in no time, only that the config fits them is found out; a marker in the cache skips
    that, and the imports it takes, when the same config was prepared before.
    """
    from interlace import __version__
    from interlace.data import cache_folder

    key = (__version__, config.data.model_dump_json(), config.model.model_dump_json(), config.run.seed)
    prepared = cache_folder(config.data.cache) / "prepared"
    marker = prepared / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    own = config.data.dataset == "chats"  # whose files may have changed; what was prepared of them is kept by itself
    if not own and marker.exists():
        return
    from interlace.data.chats_tokens import NO_END
    from interlace.train.build import build

    if config.data.prepare is not None:
        _write_stamps(config, say, source)
    tokenizer = tokenizer_of(config, source=source)
    if own and not tokenizer.ends_answers:
        say(NO_END.format(tokenizer.tokenizer.eos_token))
    datasets(config, build(config, tokenizer, source=source), tokenizer, source=source, say=say)
    if own:
        return
    try:
        prepared.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise ConfigError(f"{source}: cannot write {prepared}: {error.strerror}; set data.cache") from None


def _write_stamps(config: Config, say: Callable[[str], None], source: str) -> None:
    """``data.prepare``: the folder of the stamps' chats, unless it is there; one of digits is made of stamps, with the
    settings that it has, once these can be had."""
    from interlace.data import stamps_folder

    folder = Path(config.data.train[0]).parent
    try:
        made = stamps_folder.look(folder)
        if made is None or made.source != stamps_folder.STAMPS:  # those may be had by now
            with data_log(say):
                settings = None if made is None else made.settings
                made = stamps_folder.make(folder, settings, cache=config.data.cache)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"{source}: [data] prepare: {error}") from None
    if made.source != stamps_folder.STAMPS:
        say(made.words)


def report_left_out(splits: Iterable[Any], folder: Path, say: Callable[[str], None], *, goes_on: bool = False) -> None:
    """Says what the samples of a run do without, cuts included, and lists it in left_out.txt of its `folder`.

    Splits of the same files share much of it: a split with nothing of its own is not told again. goes_on: a stream
    does, which left out before what it does not read again, so what is listed stays.
    """
    place, lines, reports = folder / LEFT_OUT, dict[str, None](), list[str]()
    if goes_on and place.exists():
        lines |= dict.fromkeys(place.read_text(encoding="utf-8").splitlines(keepends=True))
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
def data_log(say: Callable[[str], None]) -> Iterator[None]:
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
    what, keys = f"the longest sample has {sample:,} tokens", "data.digit_size"
    if sample <= most:
        what = f"the longest prompt and log.max_new_tokens = {config.log.max_new_tokens} make {written:,} tokens"
        keys += " or log.max_new_tokens"
    raise ConfigError(
        f"{source}: {what}, but model.language_model.config.max_position_embeddings = {most:,}; raise it to "
        f"{max(sample, written)}, or lower {keys}"
    )
