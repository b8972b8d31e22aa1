"""Batches of streams: readers own what they read, and what a rank computes with comes to it.

    loader = StreamLoader(stream, parallel, batch_size=64)
    batch = next(loader)                                  # waits for what is on its way
    parallel.step(batch.given, place=(batch.epoch, batch.position, step))

A thread per rank works ahead of the steps. While step t computes, it brings the items of batch t + 1 to where they are
needed by one all-to-all, which the DISPATCH of step t starts; then it reads its share of batch t + 2 and gathers the
lengths of everybody's. So two batches are in memory: one that is computed with and one on its way. Every rank makes the
same tables of these lengths. An item is decoded once, for the rank that has read it: by that thread, or by worker
processes, which have AHEAD shares of a batch more before them.

A batch takes equally many samples of every reader; where one has come to the end of its share, the others take its
place. When all have, the next epoch begins, within a batch where the samples do not fill it: none is dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from interlace.balance.rearrange import AllToAllPlan
from interlace.comm.transports.base import CommError, Transport
from interlace.data.produced import Producers, Stopped
from interlace.data.producing import OfStream
from interlace.data.stream import PLACE, Reader, SampleStream, dealt_anew
from interlace.data.stream_decode import DecodedReader
from interlace.model.sample import Sample
from interlace.run.batch import Dispatched
from interlace.run.exchange import MIB, Exchange, Moved, Offer, offer_of, offered

LENGTHS = "lengths of a coming batch"
AHEAD = 2
"""Shares of a batch that worker processes decode ahead: one may be slow, and the others must not wait for it."""


class StreamError(RuntimeError):
    """The data cannot be read on; says which reader, on which rank, and why."""


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """given: what `ParallelModel.step` takes. epoch, position: where in the stream it begins. exchange: what changed
    ranks for it, of all ranks, in bytes."""

    given: Dispatched
    epoch: int
    position: int
    exchange: AllToAllPlan

    @property
    def moved(self) -> int:
        """Bytes that changed ranks for it, of all ranks."""
        return self.exchange.moved


class StreamLoader:
    """Endless iterator over the batches of a stream.

    stream: the same on every rank. parallel: the `ParallelModel` whose ranks compute with them. batch_size: samples of
        all ranks together. microbatches, chunks: as its `step` is given them.
    readers: how many ranks read, spread evenly; by default all. buffer: see `Reader`. limit: bytes that a rank may send
        or be sent for a step. timeout: seconds that one wait for a rank, or for the data of this one, may last.
    producers: makes those who decode from what has the stream as its `dataset`, when the first batch is asked for or
        `begin` called; one for all ranks of this process. None: the thread of each rank does. held_out: a dataset whose
        samples they can be asked for, too (`produced.HeldOut`).

    Collective: all ranks make it at the same time. Raises ValueError for sizes that do not fit.
    """

    def __init__(
        self,
        stream: SampleStream,
        parallel: Any,
        batch_size: int,
        *,
        seed: int = 0,
        readers: int | None = None,
        buffer: int = 0,
        limit: int = 1024 * MIB,
        microbatches: int | None = None,
        chunks: Mapping[str, int] | None = None,
        timeout: float = 300.0,
        producers: Callable[[Any], Producers] | None = None,
        held_out: Any = None,
    ) -> None:
        world = parallel.layout.world
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: a batch needs at least one sample")
        if readers is not None and not 1 <= readers <= world:
            raise ValueError(f"readers is {readers}: there are {world} ranks, of which 1 to {world} can read")
        if limit < 1:
            raise ValueError(f"limit is {limit}: nothing could travel")
        self.stream, self.parallel, self.batch_size, self.seed = stream, parallel, batch_size, seed
        self.readers, self.buffer, self.limit, self.timeout = readers or world, buffer, limit, timeout
        self.ranks_that_read = [reader * world // self.readers for reader in range(self.readers)]
        self.cut = {"microbatches": microbatches, "chunks": chunks}
        self.epoch = self.position = 0
        self.batches_per_epoch: int | None = None  # nobody knows
        self._places: dict[int, dict[str, Any]] | None = None  # reader -> what `Reader.load` takes
        self._ended = [False] * self.readers
        self._transports: dict[int, Transport] = parallel.item_transports()
        self._ahead: dict[int, _Ahead] = {}
        self.start_producers, self.held_out = producers, held_out
        self.producers: Producers | None = None
        self._closed = False

    def begin(self) -> None:
        """Starts the producers, which takes seconds, before the first batch is asked for."""
        if self.start_producers is not None and self.producers is None:
            self.producers = self.start_producers(OfStream(self.stream, self.held_out))

    def __iter__(self) -> StreamLoader:
        return self

    def __next__(self) -> StreamBatch:
        """The next batch. Raises StreamError, CommError or ValueError where it cannot be read or travel, on all ranks
        that still answer; RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("this loader is closed; make a new one and load its state_dict")
        if not self._ahead:
            self.begin()
            self._ahead = {rank: _Ahead(self, rank, transport) for rank, transport in self._transports.items()}
        for ahead in self._ahead.values():
            ahead.due()
        found = {rank: ahead.get() for rank, ahead in self._ahead.items()}
        first = next(iter(found.values()))
        self.epoch, self.position, self._ended = first.epoch, first.position, list(first.ended)
        self._places = {each.reader: each.place for each in found.values() if each.place is not None}
        given = Dispatched({rank: each.moved.samples for rank, each in found.items()}, self._start)
        return StreamBatch(given, *first.began, first.moved.plan)

    def _start(self, rank: int) -> Callable[[], float | None]:
        """The DISPATCH of a step: begins the exchange of the coming batch."""
        return self._ahead[rank].start()

    # -- the place in the stream -----------------------------------------------------------------------------

    def places(self) -> dict[str, Any]:
        """Of the readers here, their numbers as text -> their places after the last batch that was handed out."""
        if self._places is None:
            made = {
                reader: self._reader(reader)
                for reader, rank in enumerate(self.ranks_that_read)
                if rank in self._transports
            }
            return {str(number): reader.state() for number, reader in made.items()}
        return {str(number): place for number, place in self._places.items()}

    def state_dict(self, everyone: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Where the next batch comes from, plain data, the same on every rank.

        everyone: `places` of all processes; may be left out where this one plays all ranks.
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
        """Goes on where `state` was taken, before the first batch. With another number of readers what is left is dealt
        anew, shard by shard. Raises ValueError where it belongs to other data or settings."""
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
        """Stops reading ahead and ends the connections. Safe to call twice."""
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
    """A batch on one rank. began: its epoch and position. epoch, position, ended: after it. reader, place: of the
    reader on this rank, if there is one."""

    moved: Moved
    began: tuple[int, int]
    epoch: int
    position: int
    ended: Sequence[bool]
    reader: int
    place: dict[str, Any] | None


class _Ahead:
    """What one rank does ahead of its steps, batch after batch; all ranks do the same collectives in the same order."""

    def __init__(self, loader: StreamLoader, rank: int, transport: Transport) -> None:
        self._loader, self._rank = loader, rank
        self._exchange = Exchange(transport, loader.limit)
        self._encoders = [name for name in loader.parallel.layout.modules if name in loader.parallel.mllm.encoders]
        self._number = loader.ranks_that_read.index(rank) if rank in loader.ranks_that_read else -1
        self._epoch, self._position, self._ended = loader.epoch, loader.position, list(loader._ended)
        self._ready: queue.Queue[_Ready | BaseException] = queue.Queue()
        self._go = threading.Semaphore(0)
        self._stopping = False
        self._started = self._asked = 0  # exchanges that may begin; batches that were asked for
        self._ends: dict[int, float] = {}  # exchange -> when it ended
        self._doing = "opening the data"
        self._thread = threading.Thread(target=self._run, name=f"interlace-stream-{rank}", daemon=True)
        self._thread.start()

    # -- what the program's thread asks ----------------------------------------------------------------------

    def start(self) -> Callable[[], float | None]:
        """Lets the exchange of the batch after the last one that was handed out begin; returns what says when it
        ended."""
        number = self._started
        if number <= self._asked:
            self._started += 1
            self._go.release()
        return lambda: self._ends.get(number)

    def due(self) -> None:
        """A batch is asked for: where no step has started its exchange, it begins now."""
        if self._started <= self._asked:
            self.start()
        self._asked += 1

    def get(self) -> _Ready:
        """The batch that was asked for."""
        try:
            found = self._ready.get(timeout=self._loader.timeout + 15.0)  # the transport's own error comes first
        except queue.Empty:
            raise StreamError(
                f"rank {self._rank}: no batch for {self._loader.timeout:g} s, while {self._doing}: is the storage "
                "slow? Raise parallel.timeout, or make it faster"
            ) from None
        if isinstance(found, BaseException):
            self._ready.put(found)  # whoever asks again is told again
            raise found
        return found

    def stop(self) -> None:
        self._stopping = True
        self._go.release()

    def join(self) -> None:
        self._thread.join(5.0)  # a source that hangs is left alone: its thread ends with the process

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Batch after batch until it is stopped."""
        reader: DecodedReader | None = None
        try:
            reader = self._decoded() if self._number >= 0 else None
            count = 0
            while not self._stopping:
                began = self._epoch, self._position
                offers, own = self._take(reader)
                needs = self._loader.parallel.needs([offer.outline for offer in offers], **self._loader.cut)
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
        except BaseException as error:  # handed over, not swallowed
            with contextlib.suppress(Exception):
                self._exchange.transport._give_up(
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
            loader.stream,
            loader.producers,
            ahead=AHEAD * -(-loader.batch_size // loader.readers),
            stopping=lambda: self._stopping,
            timeout=loader.timeout,
        )

    def _take(self, reader: DecodedReader | None) -> tuple[list[Offer], dict[int, Sample]]:
        """The coming batch: what everybody offers of it, and the samples of this rank by their place in it."""
        size, offers, own = self._loader.batch_size, list[Offer](), dict[int, Sample]()
        found = -1  # samples since the epoch began, if it began in this batch
        while len(offers) < size:
            asked = self._shares(size - len(offers))
            if not asked:
                if found == 0:
                    raise StreamError(f"{self._loader.stream.name}: the stream has no sample that can be read")
                self._epoch, self._position, found = self._epoch + 1, 0, 0
                self._ended = [False] * self._loader.readers
                continue
            mine, message = self._read(reader, asked.get(self._number, 0))
            self._doing = "gathering the " + LENGTHS
            said = self._exchange.gather(message, LENGTHS)
            for number, rank in enumerate(self._loader.ranks_that_read):
                self._hear(number, rank, said[rank])
            for number, count in asked.items():
                rank = self._loader.ranks_that_read[number]
                told = said[rank]["samples"]
                self._ended[number] = len(told) < count
                if number == self._number:
                    own |= {len(offers) + i: sample for i, sample in enumerate(mine)}
                offers += [offer_of(rank, each, self._encoders) for each in told]
                found += len(told) if found >= 0 else 0
        self._position += 1
        return offers, own

    def _shares(self, wanted: int) -> dict[int, int]:
        """How many samples each reader is asked for, of those that have any left; who gives one more changes."""
        left = [reader for reader, ended in enumerate(self._ended) if not ended]
        if not left:
            return {}
        each, more = divmod(wanted, len(left))
        turn = self._position % len(left)
        counts = {reader: each + ((place - turn) % len(left) < more) for place, reader in enumerate(left)}
        return {reader: count for reader, count in counts.items() if count}

    def _read(self, reader: DecodedReader | None, count: int) -> tuple[list[Sample], dict[str, Any]]:
        """So many decoded samples of this rank's reader, fewer at the end of its share; and what it says of them."""
        samples: list[Sample] = []
        said: list[Any] = []
        try:
            while reader is not None and len(samples) < count:
                self._doing = f"reading {self._loader.stream.name}"
                sample = reader.next()
                if sample is None:
                    if reader.reader.epoch >= self._epoch:
                        break
                    reader.reader.advance()
                    continue
                told = offered(sample, self._loader.parallel.mllm.placeholders)
                size = offer_of(self._rank, told, self._encoders).bytes
                if size > self._loader.limit:
                    raise ValueError(
                        f"{sample.name} has {size / MIB:,.1f} MiB, and {self._loader.limit / MIB:,.1f} may travel in a "
                        "step: raise data.exchange_mb, or make its media smaller"
                    )
                samples.append(sample)
                said.append(told)
        except Stopped:
            raise
        except Exception as error:  # told to all, so that none waits for this one
            return [], {"samples": [], "error": f"{type(error).__name__}: {error}"}
        return samples, {"samples": said, "error": ""}

    def _hear(self, number: int, rank: int, said: Any) -> None:
        if not isinstance(said, dict) or not isinstance(said.get("samples"), list):
            raise CommError(f"rank {rank} says something else of its samples: do the ranks run one version?")
        if said.get("error"):
            raise StreamError(f"reader {number}, on rank {rank}: {said['error']}")


__all__ = ["StreamBatch", "StreamError", "StreamLoader"]
