"""Feed of a run whose training data are a stream (``data.reading = "stream"``); wraps `interlace.data`'s StreamLoader.

Each reader has its own position only, so the positions are gathered when a checkpoint is saved.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.comm.process.errors import CommError
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.sections import Config
from interlace.train.data.feed import LEFT_OUT, Batch, Feed
from interlace.train.errors import TrainingError

if TYPE_CHECKING:
    from interlace.data import SampleDataset, StreamLoader
    from interlace.data.chats.stream import ChatStream
    from interlace.data.workers.produced import Producers
    from interlace.data.workers.tasks import OfStream
    from interlace.run.parallel_model import ParallelModel

MOST_TOLD = 10_000  # maximum number of lines per rank in left_out.txt


class StreamFeed(Feed):
    """Batches of `stream` for `parallel`, and held-out samples, with the interface of `Feed`.

    producers: for decoding, as in `Feed`. Collective: all ranks construct it together.
    """

    def __init__(
        self,
        config: Config,
        stream: ChatStream,
        held_out: SampleDataset,
        parallel: ParallelModel,
        producers: Callable[[OfStream], Producers] | None = None,
    ) -> None:
        from interlace.data import ReadAhead, StreamLoader, StreamOptions
        from interlace.run.execute.exchange import MIB

        data, train = config.data, config.train
        limit, timeout = data.exchange_mb * MIB, config.parallel.timeout
        self.train, self.in_rows = stream, False  # type: ignore[assignment]
        with blaming("[data] reading = 'stream'"):
            self.loader: StreamLoader = StreamLoader(  # type: ignore[assignment]
                stream,
                parallel,
                train.batch_size,
                seed=config.run.seed,
                buffer=data.shuffle_buffer,
                options=StreamOptions(data.readers, limit, timeout, train.microbatches, config.chunks()),
                ahead=ReadAhead(producers=producers, held_out=held_out),
            )
        self.loader.begin()
        self._hold_out(held_out, train.validation_samples)

    def next(self) -> Batch:
        """The next batch. Raises TrainingError if the data can no longer be read."""
        from interlace.data import StreamError

        try:
            batch = next(self.loader)
        except (StreamError, CommError, ValueError) as error:
            raise TrainingError(f"the data cannot be read on: {error}") from error
        return Batch(batch.given.samples, batch.epoch, batch.position, dispatched=batch.given, exchange=batch.exchange)

    def state_dict(self, gather: Callable[..., list[Any]] | None = None) -> dict[str, Any]:
        """Position of every reader, and identity of the stream and the validation data.

        gather: collects values from all ranks (`Peers.together`); None for a single rank.
        """
        mine = self.loader.places
        everyone = [mine()] if gather is None else gather("gathering where the readers are", mine)
        return self.loader.state_dict(everyone) | {"held_out": self.held_out_data.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any], *, new_order: bool = False) -> None:
        if "places" not in state:
            raise ConfigError("--resume: the saved run read at random; set data.reading = 'random', or start anew")
        super().load_state_dict(state, new_order=new_order)

    @property
    def blank_items(self) -> int:
        """Held-out items that this rank could no longer read; of a stream such samples are left out."""
        return int(self.held_out_data.blank_items)

    def tell_left_out(self, gather: Callable[..., list[Any]], folder: Path, say: Callable[[str], None] | None) -> None:
        """Appends the data that all readers left out to left_out.txt of the run's `folder`. Collective.

        gather: collects values from all ranks (`Peers.together`). say: on the rank that writes.
        """
        mine = self.train.listing().splitlines(keepends=True)
        messages = gather("gathering what was left out", lambda: [len(mine), mine[:MOST_TOLD]])
        lines_of_all = dict.fromkeys(line for _, lines in messages for line in lines)
        if say is None or not lines_of_all:
            return
        more = "" if all(count == len(lines) for count, lines in messages) else "more than "
        place = folder / LEFT_OUT
        before = place.read_text(encoding="utf-8").splitlines(keepends=True) if place.exists() else []
        place.write_text("".join(dict.fromkeys([*before, *lines_of_all])), encoding="utf-8")
        example = textwrap.shorten(next(iter(lines_of_all)), 200, placeholder=" ...")
        count = f"{more}{len(lines_of_all):,} records left out"
        say(f"{self.train.name}/train, a stream: {count}, e.g. {example}; list in {place}")

    def baselines(self, vocabulary: int, limit: int = 4096) -> dict[str, float]:
        """Baseline loss in nats without a model; tokens of a stream are not counted, so there are no frequencies."""
        return {"uniform_token": math.log(vocabulary)}


__all__ = ["StreamFeed"]
