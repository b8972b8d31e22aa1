"""Batches of streams: each reader owns what it read; items are sent to the ranks that compute with them.

    loader = StreamLoader(stream, parallel, batch_size=64)
    batch = next(loader)                                  # waits for items in flight
    parallel.step(batch.given, place=(batch.epoch, batch.position, step))

A thread per rank works ahead of the steps. During step t it sends the items of batch t + 1 to the ranks that need them.
This is one all-to-all, started by the DISPATCH of step t. Then it reads its share of batch t + 2 and gathers the
lengths of all ranks. So two batches are in memory: the current one and the one in flight. Every rank computes the same
tables from these lengths. An item is decoded once, for the rank that has read it, either by that thread or by worker
processes. Workers are AHEAD shares of a batch further ahead.

A batch takes the same number of samples from every reader. When a reader reaches the end of its share, the others take
over. When all have, the next epoch begins, in the middle of a batch if need be: no sample is dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlace.balance.rearrange import AllToAllPlan
from interlace.comm.process.errors import CommError
from interlace.comm.transports.base import Transport
from interlace.data.streams.base import PLACE, Reader, SampleStream, dealt_anew
from interlace.data.streams.decode import DecodedReader
from interlace.data.workers.produced import Producers, ReadAhead, Stopped
from interlace.data.workers.tasks import OfStream
from interlace.model.sample import Sample
from interlace.run.execute.exchange import MIB, Exchange, Moved, Offer, offer_of, offered
from interlace.run.tables.batch import Dispatched

if TYPE_CHECKING:
    from interlace.run.parallel_model import ParallelModel

LENGTHS = "lengths of a coming batch"
AHEAD = 2
"""Shares of a batch that worker processes decode ahead, so that one slow sample does not delay the others."""


class StreamError(RuntimeError):
    """The data cannot be read any further; the message names the reader, the rank and the reason."""


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """given: argument for `ParallelModel.step`. epoch, position: its start in the stream. exchange: bytes sent between
    ranks for it, over all ranks."""

    given: Dispatched
    epoch: int
    position: int
    exchange: AllToAllPlan

    @property
    def moved(self) -> int:
        """Bytes sent between ranks for it, over all ranks."""
        return self.exchange.moved


@dataclass(frozen=True)
class StreamOptions:
    """Work of the ranks for a stream.

    readers: number of ranks that read, spread evenly; None: all. limit: bytes a rank may send or receive for a step.
    timeout: limit in seconds of one wait for a rank, or for this rank's data. microbatches, chunks: as passed to
    `ParallelModel.step`.
    """

    readers: int | None = None
    limit: int = 1024 * MIB
    timeout: float = 300.0
    microbatches: int | None = None
    chunks: Mapping[str, int] | None = None


class StreamLoader:
    """Endless iterator over the batches of a stream.

    stream: the same on every rank. parallel: the model that computes with the batches. batch_size: samples of all ranks
        together. buffer: see `Reader`.
    ahead: its producers decode, from the first batch or `begin` on. Their loader has the stream as its `dataset`. All
        ranks of this process share them. Without producers, the thread of each rank decodes.

    Collective: all ranks make it at the same time. Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        stream: SampleStream,
        parallel: ParallelModel,
        batch_size: int,
        *,
        seed: int = 0,
        buffer: int = 0,
        options: StreamOptions = StreamOptions(),
        ahead: ReadAhead = ReadAhead(),  # noqa: B008 (frozen)
    ) -> None:
        readers, limit = options.readers, options.limit
        world = parallel.layout.world
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: a batch needs at least one sample")
        if readers is not None and not 1 <= readers <= world:
            raise ValueError(f"readers is {readers}: there are {world} ranks, of which 1 to {world} can read")
        if limit < 1:
            raise ValueError(f"limit is {limit}: nothing could travel")
        self.stream, self.parallel, self.batch_size, self.seed = stream, parallel, batch_size, seed
        self.readers, self.buffer, self.limit, self.timeout = readers or world, buffer, limit, options.timeout
        self.ranks_that_read = [reader * world // self.readers for reader in range(self.readers)]
        self.options, self.ahead = options, ahead
        self.epoch = self.position = 0
        self.batches_per_epoch: int | None = None  # unknown
        self._places: dict[int, dict[str, Any]] | None = None  # reader -> argument of `Reader.load`
        self._ended = [False] * self.readers
        self._transports: dict[int, Transport] = parallel.item_transports()
        self._ahead: dict[int, _Ahead] = {}
        self.producers: Producers | None = None
        self._closed = False

    def begin(self) -> None:
        """Starts the producers before the first batch is requested; this takes seconds."""
        if self.ahead.producers is not None and self.producers is None:
            self.producers = self.ahead.producers(OfStream(self.stream, self.ahead.held_out))

    def __iter__(self) -> StreamLoader:
        return self

    def __next__(self) -> StreamBatch:
        """The next batch. Raises StreamError, CommError or ValueError if it cannot be read or sent, on all ranks that
        still respond; RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("this loader is closed; make a new one and load its state_dict")
        if not self._ahead:
            self.begin()
            self._ahead = {rank: _Ahead(self, rank, transport) for rank, transport in self._transports.items()}
        for ahead in self._ahead.values():
            ahead.due()
        batches = {rank: ahead.get() for rank, ahead in self._ahead.items()}
        first = next(iter(batches.values()))
        self.epoch, self.position, self._ended = first.epoch, first.position, list(first.ended)
        self._places = {each.reader: each.place for each in batches.values() if each.place is not None}
        given = Dispatched({rank: each.moved.samples for rank, each in batches.items()}, self._start)
        return StreamBatch(given, *first.began, first.moved.transfers)

    def _start(self, rank: int) -> Callable[[], float | None]:
        """The DISPATCH of a step: begins the exchange of the next batch."""
        return self._ahead[rank].start()

    # -- position in the stream ------------------------------------------------------------------------------

    def places(self) -> dict[str, Any]:
        """Reader index as text -> its position after the last batch handed out, for the readers of this process."""
        if self._places is None:
            made = {
                reader: self._reader(reader)
                for reader, rank in enumerate(self.ranks_that_read)
                if rank in self._transports
            }
            return {str(number): reader.state() for number, reader in made.items()}
        return {str(number): place for number, place in self._places.items()}

    def state_dict(self, everyone: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Position of the next batch: plain data, the same on every rank.

        everyone: `places` of all processes; optional if this process runs all ranks.
        """
        places: dict[str, Any] = {}
        for each in everyone if everyone is not None else [self.places()]:
            places |= each
        if len(places) != self.readers:
            raise ValueError(f"state_dict was given the places of {len(places)} of {self.readers} readers: give all")
        return self._settings() | {
            "epoch": self.epoch,
            "position": self.position,
            "ended": list(self._ended),
            "places": [places[str(reader)] for reader in range(self.readers)],
        }

    def _settings(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "buffer": self.buffer,
            "shards": self.stream.shards,
            "fingerprint": self.stream.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state`, before the first batch. With another number of readers, the rest of the epoch is dealt
        again, shard by shard. Raises ValueError if it belongs to other data or settings."""
        if self._ahead:
            raise ValueError("load_state_dict comes before the first batch")
        mine = self._settings()
        if set(state) != {*mine, "epoch", "position", "ended", "places"} or len(state["ended"]) != len(state["places"]):
            raise ValueError(f"the saved state is none of a stream: it has {sorted(state)}; set data.reading back")
        if any(set(place) != PLACE for place in state["places"]):
            raise ValueError("the saved state is of a stream as another version reads it: start anew")
        for key, value in mine.items():
            if state[key] != value:
                raise ValueError(
                    f"the saved state of the stream has {key} = {state[key]!r}, this run {value!r}: other samples "
                    "would come; resume with the same data settings, or start anew"
                )
        places = state["places"]
        self.epoch, self.position, self._ended = state["epoch"], state["position"], list(state["ended"])
        if len(places) != self.readers:
            places = dealt_anew(places, self.stream, self.seed, self.readers)
            self._ended = [False] * self.readers
        self._places = dict(enumerate(places))

    def _reader(self, number: int) -> Reader:
        reader = Reader(self.stream, number, self.readers, seed=self.seed, buffer=self.buffer)
        if self._places is not None:
            reader.load(self._places[number])
        return reader

    def close(self) -> None:
        """Stops reading ahead and closes the connections. Safe to call twice."""
        self._closed = True
        for ahead in self._ahead.values():
            ahead.stop()
        for transport in self._transports.values():
            transport.close()
        for ahead in self._ahead.values():
            ahead.join()
        if self.producers is not None:
            self.producers.close()

    def __enter__(self) -> StreamLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class _Ready:
    """A batch on one rank. began: its epoch and position. epoch, position, ended: after it. reader, place: of this
    rank's reader, if any."""

    moved: Moved
    began: tuple[int, int]
    epoch: int
    position: int
    ended: Sequence[bool]
    reader: int
    place: dict[str, Any] | None


class _Ahead:
    """Read-ahead of one rank, batch after batch. All ranks run the same collectives in the same order."""

    def __init__(self, loader: StreamLoader, rank: int, transport: Transport) -> None:
        self._loader, self._rank = loader, rank
        self._exchange = Exchange(transport, loader.limit)
        self._encoders = [name for name in loader.parallel.layout.modules if name in loader.parallel.mllm.encoders]
        self._number = loader.ranks_that_read.index(rank) if rank in loader.ranks_that_read else -1
        self._epoch, self._position, self._ended = loader.epoch, loader.position, list(loader._ended)
        self._ready: queue.Queue[_Ready | BaseException] = queue.Queue()
        self._go = threading.Semaphore(0)
        self._stopping = False
        self._started = self._asked = 0  # exchanges that may begin; batches requested
        self._ends: dict[int, float] = {}  # exchange -> its end time
        self._doing = "opening the data"
        self._thread = threading.Thread(target=self._run, name=f"interlace-stream-{rank}", daemon=True)
        self._thread.start()

    # -- called by the main thread ---------------------------------------------------------------------------

    def start(self) -> Callable[[], float | None]:
        """Starts the exchange of the batch after the last one handed out. Returns a function that gives the end time
        of the exchange."""
        number = self._started
        if number <= self._asked:
            self._started += 1
            self._go.release()
        return lambda: self._ends.get(number)

    def due(self) -> None:
        """Registers a request for a batch; starts its exchange unless a step has done so."""
        if self._started <= self._asked:
            self.start()
        self._asked += 1

    def get(self) -> _Ready:
        """The requested batch."""
        try:
            ready = self._ready.get(timeout=self._loader.timeout + 15.0)  # longer than the transport's own timeout
        except queue.Empty:
            raise StreamError(
                f"rank {self._rank}: no batch for {self._loader.timeout:g} s, while {self._doing}: is the storage "
                "slow? Raise parallel.timeout, or make it faster"
            ) from None
        if isinstance(ready, BaseException):
            self._ready.put(ready)  # raised again by the next call
            raise ready
        return ready

    def stop(self) -> None:
        self._stopping = True
        self._go.release()

    def join(self) -> None:
        self._thread.join(5.0)  # a hung source is not waited for: its thread ends with the process

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Makes batches until it is stopped."""
        reader: DecodedReader | None = None
        try:
            reader = self._decoded() if self._number >= 0 else None
            count = 0
            while not self._stopping:
                began = self._epoch, self._position
                offers, own = self._take(reader)
                outlines, options = [offer.outline for offer in offers], self._loader.options
                needs = self._loader.parallel.needs(outlines, microbatches=options.microbatches, chunks=options.chunks)
                self._doing = "waiting for the step before"
                self._go.acquire()
                if self._stopping:
                    return
                self._doing = "exchanging the items of a batch"
                moved = self._exchange.move(offers, own, needs)
                self._ends[count] = time.monotonic()
                self._ends.pop(count - 2, None)
                count += 1
                place = reader.reader.state() if reader is not None else None
                self._ready.put(
                    _Ready(moved, began, self._epoch, self._position, tuple(self._ended), self._number, place)
                )
        except Stopped:
            return
        except BaseException as error:  # passed to the consumer, not swallowed
            with contextlib.suppress(Exception):
                self._exchange.transport._abort(
                    error if isinstance(error, CommError) else CommError(f"rank {self._rank} stopped reading: {error}")
                )
            self._ready.put(error)
        finally:
            if reader is not None:
                reader.drop()

    def _decoded(self) -> DecodedReader:
        loader = self._loader
        return DecodedReader(
            loader._reader(self._number),
            loader.producers,
            ahead=AHEAD * -(-loader.batch_size // loader.readers),
            stopping=lambda: self._stopping,
            timeout=loader.timeout,
        )

    def _take(self, reader: DecodedReader | None) -> tuple[list[Offer], dict[int, Sample]]:
        """The next batch: the offers of all readers, and this rank's samples by their index in the batch."""
        size, offers, own = self._loader.batch_size, list[Offer](), dict[int, Sample]()
        since_start = -1  # samples since the start of the epoch, if it started in this batch
        while len(offers) < size:
            asked = self._shares(size - len(offers))
            if not asked:
                if since_start == 0:
                    raise StreamError(f"{self._loader.stream.name}: the stream has no sample that can be read")
                self._epoch, self._position, since_start = self._epoch + 1, 0, 0
                self._ended = [False] * self._loader.readers
                continue
            mine, message = self._read(reader, asked.get(self._number, 0))
            self._doing = "gathering the " + LENGTHS
            messages = self._exchange.gather(message, LENGTHS)
            for number, rank in enumerate(self._loader.ranks_that_read):
                if not isinstance(messages[rank], dict) or not isinstance(messages[rank].get("samples"), list):
                    raise CommError(f"rank {rank} says something else of its samples: do the ranks run one version?")
                if messages[rank].get("error"):
                    raise StreamError(f"reader {number}, on rank {rank}: {messages[rank]['error']}")
            for number, count in asked.items():
                rank = self._loader.ranks_that_read[number]
                rank_offers = messages[rank]["samples"]
                self._ended[number] = len(rank_offers) < count
                if number == self._number:
                    own |= {len(offers) + i: sample for i, sample in enumerate(mine)}
                offers += [offer_of(rank, each, self._encoders) for each in rank_offers]
                since_start += len(rank_offers) if since_start >= 0 else 0
        self._position += 1
        return offers, own

    def _shares(self, wanted: int) -> dict[int, int]:
        """Number of samples to request from each reader that has any left. Extra samples rotate among the readers."""
        left = [reader for reader, ended in enumerate(self._ended) if not ended]
        if not left:
            return {}
        each, more = divmod(wanted, len(left))
        turn = self._position % len(left)
        counts = {reader: each + ((place - turn) % len(left) < more) for place, reader in enumerate(left)}
        return {reader: count for reader, count in counts.items() if count}

    def _read(self, reader: DecodedReader | None, count: int) -> tuple[list[Sample], dict[str, Any]]:
        """At most `count` decoded samples of this rank's reader, fewer at the end of its share; and the message."""
        samples: list[Sample] = []
        offers: list[Any] = []
        try:
            while reader is not None and len(samples) < count:
                self._doing = f"reading {self._loader.stream.name}"
                sample = reader.next()
                if sample is None:
                    if reader.reader.epoch >= self._epoch:
                        break
                    reader.reader.advance()
                    continue
                offer = offered(sample, self._loader.parallel.mllm.placeholders)
                size = offer_of(self._rank, offer, self._encoders).bytes
                if size > self._loader.limit:
                    raise ValueError(
                        f"{sample.name} has {size / MIB:,.1f} MiB, and {self._loader.limit / MIB:,.1f} may travel in a "
                        "step: raise data.exchange_mb, or make its media smaller"
                    )
                samples.append(sample)
                offers.append(offer)
        except Stopped:
            raise
        except Exception as error:  # sent to all ranks, so that they do not wait for this one
            return [], {"samples": [], "error": f"{type(error).__name__}: {error}"}
        return samples, {"samples": offers, "error": ""}


__all__ = ["StreamBatch", "StreamError", "StreamLoader", "StreamOptions"]
