"""Feed: the training batches and the held-out samples of a run, on every rank.

All ranks iterate over the same sequence of samples without communication. The sequence follows from the seed and the
files (verified before the first step), so the position in it is the only state. Each rank decodes only the media that
it reads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.train.config.data import Source
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.sections import Config
from interlace.train.data.own import opened
from interlace.train.data.prepared import data_log, say_on_stderr, write_chats
from interlace.train.data.texts import ModelTokenizer, tokenizer_of
from interlace.train.models.media_specs import check_inputs, media_specs

if TYPE_CHECKING:
    from interlace.balance.rearrange import AllToAllPlan
    from interlace.data import (
        ChatDataset,
        Loader,
        Media,
        MixedDataset,
        ReadAhead,
        Sample,
        SampleDataset,
        SampleStream,
        StreamLoader,
        Tokenizer,
    )
    from interlace.data.chats.encoding.tokens import ChatFormat
    from interlace.data.chats.files.sources import Rules
    from interlace.data.chats.stream import ChatStream
    from interlace.data.workers.produced import HeldOut, Producers
    from interlace.model import MultimodalModel
    from interlace.model.sample import SampleOutline
    from interlace.run.tables.batch import Dispatched

LEFT_OUT = "left_out.txt"
log = logging.getLogger("interlace.data")


@dataclass(frozen=True)
class Batch:
    """Samples of one step, of all replicas, and their position in the sequence."""

    samples: Sequence[Sample | SampleOutline]
    epoch: int
    position: int
    rows: list[list[Sample]] | None = None
    """Rows of samples if they are packed: each row is a microbatch."""
    sources: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Source -> (number of samples, their tokens); empty for a single source."""
    dispatched: Dispatched | None = None
    """Of a stream: the samples as distributed over the ranks."""
    exchange: AllToAllPlan | None = None
    """Of a stream: bytes exchanged between ranks for this batch."""

    @property
    def moved(self) -> int | None:
        """Bytes exchanged between ranks for this batch; None for data that are read at random, which need no
        exchange."""
        return None if self.exchange is None else int(self.exchange.moved)

    @property
    def given(self) -> Dispatched | Sequence[Sample | SampleOutline] | list[list[Sample]]:
        """Input of a step: packed rows, samples that the step assigns itself, or the distributed samples of a
        stream."""
        if self.dispatched is not None:
            return self.dispatched
        return self.samples if self.rows is None else self.rows

    @property
    def tokens(self) -> int:
        """Tokens that the language model reads."""
        return sum(map(len, self.samples))


class Feed:
    """Batches from `train` and a fixed set of samples from `held_out` (`interlace.data.SampleDataset`).

    `batch_size` counts samples of all replicas. With `row_tokens` it counts rows of at most that many tokens.
    `drop_last`: leave out the samples at the end of an epoch that do not fill a batch. `ahead`: reading ahead; its
    producers (`producers.producers_of`) decode the held-out samples, too.
    """

    def __init__(
        self,
        train: SampleDataset,
        held_out: SampleDataset,
        *,
        batch_size: int,
        seed: int,
        validation_samples: int,
        row_tokens: int | None = None,
        drop_last: bool = False,
        ahead: ReadAhead | None = None,
    ) -> None:
        from interlace.data import ReadAhead

        ahead = replace(ahead or ReadAhead(), held_out=held_out)
        self.in_rows = row_tokens is not None
        self.train = train
        self.loader = loader(train, batch_size, row_tokens, seed=seed, drop_last=drop_last, ahead=ahead)
        self.loader.begin()
        self._hold_out(held_out, validation_samples)

    @classmethod
    def of_config(
        cls,
        config: Config,
        train: SampleDataset,
        held_out: SampleDataset,
        wanted: Callable[[list[Any]], Iterable[Media]] | None,
        *,
        producers: Callable[[Loader], Producers] | None = None,
        pinned: bool = False,
    ) -> Feed:
        """Feed of a config with random access. wanted, producers, pinned: as of `ReadAhead`."""
        from interlace.data import ReadAhead

        return cls(
            train,
            held_out,
            batch_size=config.train.batch_size,
            seed=config.run.seed,
            validation_samples=config.train.validation_samples,
            row_tokens=config.data.row_tokens,
            drop_last=config.data.drop_last,
            ahead=ReadAhead(config.data.prefetch, wanted, producers, pinned),
        )

    def _hold_out(self, held_out: SampleDataset, validation_samples: int) -> None:
        self.held_out_data = held_out
        count = min(validation_samples, len(held_out))
        self.held_out_indices = [i * len(held_out) // count for i in range(count)]  # spread over the whole split
        self._apart: HeldOut | None = None  # requests held-out items from producers

    @cached_property
    def held_out(self) -> list[Sample]:
        """The validation samples, the same on every rank."""
        from interlace.data.workers.produced import HeldOut

        if self.loader.producers is None:
            return [self.held_out_data.sample(i, 0) for i in self.held_out_indices]
        self._apart = HeldOut(self.loader.producers, self.held_out_data, self.held_out_indices)
        return self._apart.samples

    def ask_held_out(self, parts: Iterable[list[Any]], wanted: Callable[[list[Any]], Iterable[Media]]) -> None:
        """Requests decoding of the media that this process reads of these `parts` of the validation samples; does not
        wait.

        Without producers, items are decoded when they are read.
        """
        if self._apart is not None:
            for part in parts:
                self._apart.ask(wanted(part))

    def next(self) -> Batch:
        """The next batch."""
        epoch, position = self.loader.epoch, self.loader.position
        batch: list[Any] = next(self.loader)
        rows = batch if self.in_rows else None
        samples = batch if rows is None else [sample for row in rows for sample in row]
        return Batch(samples, epoch, position, rows, self._sources(epoch, position, samples))

    def _sources(self, epoch: int, position: int, samples: list[Sample]) -> dict[str, tuple[int, int]]:
        from interlace.data import by_source

        if self._mixture is None:
            return {}
        parts = by_source(self._mixture, self.loader.indices(epoch, position), samples)
        return {name: (len(part), sum(len(sample.input_ids) for sample in part)) for name, part in parts}

    @property
    def _mixture(self) -> MixedDataset | None:
        """The training data, if they have several sources."""
        from interlace.data import MixedDataset

        return self.train if isinstance(self.train, MixedDataset) and len(self.train.parts) > 1 else None

    def epochs(self, batch: Batch) -> dict[str, float]:
        """Source -> number of epochs over its samples, up to the end of `batch`; empty for a single source."""
        mixture = self._mixture
        if mixture is None:
            return {}
        end = self.loader.drawn(batch.epoch, batch.position)
        of = mixture.source_of(self.loader.order(batch.epoch)[:end])
        before = mixture.drawn(batch.epoch)
        return {
            part.name: (before[place] + int((of == place).sum())) / len(part.data)
            for place, part in enumerate(mixture.parts)
        }

    def held_out_by_source(self) -> list[tuple[str, list[Sample]]]:
        """Validation samples of each source, by its name; a single source has the name ""."""
        from interlace.data import by_source

        return list(by_source(self.held_out_data, self.held_out_indices, self.held_out))

    def state_dict(self, gather: Callable[..., list[Any]] | None = None) -> dict[str, Any]:
        """Position in the sequence, and identity of the sequence and the validation data.

        gather: not used here, because all ranks have the same position.
        """
        return self.loader.state_dict() | {"held_out": self.held_out_data.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any], *, new_order: bool = False) -> None:
        """Resumes at the position of `state`. new_order: samples of an earlier version of Interlace are replaced by
        others, whose order begins anew. Raises ConfigError if the data or its order have changed otherwise."""
        place = dict(state)
        if place.pop("held_out", None) != self.held_out_data.fingerprint():
            if new_order:
                log.warning("data.dataset = 'digits' of the saved run is read as chats: their order begins anew")
                return
            raise ConfigError(
                "--resume: the validation samples are not those of the saved run, so losses could not be compared; "
                "bring its data back, or start anew"
            )
        with blaming("--resume"):
            self.loader.load_state_dict(place)

    @property
    def blank_items(self) -> int:
        """Items of samples that this rank could no longer read and left blank."""
        return int(self.train.blank_items + self.held_out_data.blank_items)

    @property
    def decoded_items(self) -> int:
        """Items read for the first time by any rank, here by this rank or its producers."""
        return int(self.train.read_items + self.held_out_data.read_items)

    @property
    def worker_restarts(self) -> int:
        """Producers that were lost and replaced since this process began."""
        return 0 if self.loader.producers is None else self.loader.producers.restarts

    def close(self) -> None:
        """Stops reading ahead, and the producers."""
        self.loader.close()

    def baselines(self, vocabulary: int, limit: int = 4096) -> dict[str, float]:
        """Baseline losses in nats without a model: uniform over bytes (or tokens), and frequencies of single target
        tokens.

        The frequencies are those of (at most `limit`) training samples.
        """
        from interlace.data import unigram_nats

        picks = range(0, len(self.train), max(1, len(self.train) // limit))
        unigram = unigram_nats(
            (self.train.answer(i, 0) for i in picks),
            (self.held_out_data.answer(i, 0) for i in self.held_out_indices),
            vocabulary,
        )
        unit = self.held_out_data.unit
        return {f"uniform_{unit}": math.log(256 if unit == "byte" else vocabulary), f"unigram_{unit}": unigram}


def loader(
    data: SampleDataset, batch_size: int, row_tokens: int | None, *, seed: int, drop_last: bool, ahead: ReadAhead
) -> Loader:
    """Loader of batches of samples, or of rows of at most `row_tokens` tokens. Raises ConfigError."""
    from interlace.data import Loader, RowLoader

    with blaming("[train] batch_size"):
        if row_tokens is None:
            return Loader(data, batch_size, seed=seed, drop_last=drop_last, ahead=ahead)
        return RowLoader(data, batch_size, row_tokens, seed=seed, drop_last=drop_last, ahead=ahead)


def batch_notes(loader: Loader | StreamLoader) -> list[str]:
    """Log lines for the start of a run: samples that ``data.drop_last`` leaves out, and data that make a single
    batch."""
    from interlace.data import StreamLoader

    if isinstance(loader, StreamLoader):
        return []
    count = loader.size
    if loader.drop_last:
        left = loader.left_out(0)
        return [f"data.drop_last: the first epoch leaves out {left:,} of {count:,} samples, which do not fill a batch"]
    if loader.batches_per_epoch == 1:
        return [f"train.batch_size: one batch takes all {count:,} samples to train on, so each step is an epoch"]
    return []


def datasets(
    config: Config,
    model: MultimodalModel,
    tokenizer: Tokenizer,
    *,
    source: str = "config",
    say: Callable[[str], None] | None = None,
) -> tuple[Any, Any]:
    """The training and the held-out dataset for `model`.

    `say` (default: a line on stderr) receives progress of slow work: reading headers, decoding. Raises ConfigError,
    with the key, for settings that the data, the encoders or the language model's context do not support.
    """
    check_inputs(config, model, source=source)
    if config.data.own:
        return opened(config, model, tokenizer, source, say or say_on_stderr)
    assert isinstance(tokenizer, ModelTokenizer)  # of chats
    return _chats(config, model, tokenizer, source, say or say_on_stderr)


def _chats(
    config: Config, model: MultimodalModel, tokenizer: ModelTokenizer, source: str, say: Callable[[str], None]
) -> tuple[SampleDataset | ChatStream, SampleDataset]:
    """The training and the validation chats (`ChatDataset`; with several sources `MixedDataset`). Raises
    ConfigError."""
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
                splits = load_chats(
                    each.train,
                    each.validation,
                    chats,
                    rules,
                    held_out=data.held_out,
                    limit=each.limit,
                    cache=data.cache,
                )
                train.append(Part(each.name, splits[0], each.weight))
                held_out.append(Part(each.name, splits[1]))
        if len(train) == 1:
            return train[0].data, held_out[0].data
        name = "[[data.sources]]"
        return MixedDataset(train, data.mix_by), MixedDataset(held_out, mixes=False)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{source}: {name}: {error}") from None
    except OSError as error:  # unreadable data files are ChatFileErrors
        place = error.filename or cache_folder(data.cache)
        raise ConfigError(
            f"{source}: {name}: {place}: {error.strerror or error}; set data.cache to a folder that can be written and "
            "has room"
        ) from None


def _streamed(config: Config, chats: ChatFormat, files: Source, rules: Rules) -> tuple[ChatStream, ChatDataset]:
    """The training chats as a stream, and the validation chats."""
    from interlace.data.chats.dataset import whole_chats
    from interlace.data.chats.stream import ChatStream

    cache = config.data.cache
    held_out = whole_chats(files.validation, chats, rules, cache=cache)
    return ChatStream(files.train, chats, rules, cache), held_out


def indexed(train: SampleDataset | SampleStream, held_out: SampleDataset) -> SampleDataset:
    """The dataset of `datasets` with samples by number: not a stream."""
    from interlace.data import SampleStream

    return held_out if isinstance(train, SampleStream) else train


def chat_format(config: Config, model: MultimodalModel, tokenizer: ModelTokenizer, source: str) -> ChatFormat:
    """The format that converts chats to tokens of `model`. Raises ConfigError."""
    specs = {} if tokenizer.processor is not None else media_specs(config, model, source=source)
    tokens: dict[str, Any] = {name: encoder.tokens for name, encoder in model.encoders.items()}
    with blaming(f"{source}: [data]", (ValueError, ImportError)):
        return tokenizer.format(model.placeholders, tokens, specs)


def chat_sources(config: Config, model: MultimodalModel, source: str) -> list[tuple[Source, Rules]]:
    """The config's sources, each with its rules for chats that are too long or broken."""
    from interlace.data.chats.files.sources import Rules

    data = config.data
    settings = (data.max_tokens or model.max_length, data.on_too_long, data.on_broken, data.decode_first, data.sizes)
    return [(each, Rules(each.media, *settings, each.prompt)) for each in data.each_source()]


def prepare(config: Config, say: Callable[[str], None], *, source: str = "config") -> None:
    """Writes, verifies and decodes the data before any rank starts, so that ranks find it. Raises ConfigError."""
    from interlace.data.chats.encoding.tokens import NO_END
    from interlace.train.models.build import build

    if config.data.of_earlier_version:
        say(f"data.dataset = 'digits' of earlier versions is read as the chats of {Path(config.data.train[0]).parent}")
    if config.data.prepare is not None:
        write_chats(config, say, source=source)
    tokenizer = tokenizer_of(config, source=source)
    if isinstance(tokenizer, ModelTokenizer) and not tokenizer.ends_answers:
        say(NO_END.format(tokenizer.tokenizer.eos_token))
    datasets(config, build(config, tokenizer, source=source), tokenizer, source=source, say=say)


def report_left_out(
    splits: Iterable[SampleDataset], folder: Path, say: Callable[[str], None], *, goes_on: bool = False
) -> None:
    """Logs the data that the run does not use, including cuts, and lists it in left_out.txt of its `folder`.

    Splits of the same files share most of it: a split without entries of its own is not reported again. goes_on: True
    for a resumed stream, which does not read earlier data again; existing lines of the list are kept.
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
