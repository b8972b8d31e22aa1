"""Rendezvous: ranks exchange small values through a store.

A store is used instead of collectives of the process group for two reasons: a missing rank can be named, and the group
stays intact. (A gloo wait that times out closes the connections of the whole group.) Values are JSON, checked before
use. Messages of peers are never executed.

`Rounds` exchanges the values. In a `Rendezvous` the ranks of a process group agree on a transport and exchange its
connection data. Before the first step of a run, ranks use `interlace.train.launch.startup`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from interlace._text import one_line
from interlace.comm.process.abort_reports import named, private_store
from interlace.comm.process.errors import CommError
from interlace.comm.process.messages import OtherOperation, decode, encode
from interlace.comm.process.recorder import page_in_use

T = TypeVar("T")
Key = int | str  # a rank, or a name chosen by the caller
_POLL = 0.005  # seconds
_GRACE = 2.0  # extra seconds, so that ranks whose own wait has just timed out can report it


class Rounds:
    """Rounds of value exchange through a private store. All ranks begin the same rounds."""

    longest = 1 << 20  # bytes of one value

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._round = 0

    def begin(self, operation: str, value: object) -> None:
        """Starts the next round, named `operation`, with this rank's `value` (JSON-serializable)."""
        self._round += 1
        self.put(self.rank, operation, value)

    def put(self, key: Key, operation: str, value: object) -> None:
        """Writes to a key in this round."""
        raw = encode(operation, value)
        with self._store_call(operation):
            self.store.set(self._key(key), raw)  # type: ignore[arg-type]

    def wait_for(
        self, keys: Iterable[Key], operation: str, watch: Callable[[Sequence[Key]], None], slowest: float = _POLL
    ) -> None:
        """Returns when every one of `keys` has a value in this round.

        Until then calls `watch` repeatedly with the missing keys, at intervals that grow up to `slowest` seconds.
        `watch` raises to end the wait.
        """
        missing, pause, page = list(keys), _POLL, page_in_use()
        if page is not None:
            page.waiting([key for key in missing if isinstance(key, int)])
        while True:
            with self._store_call(operation):
                missing = [key for key in missing if not self.store.check([self._key(key)])]
            if not missing:
                if page is not None:
                    page.computing()
                return
            watch(missing)
            time.sleep(pause)
            pause = min(2 * pause, max(slowest, _POLL))

    def get(self, key: Key, operation: str, like: object) -> Any:
        """The value at `key`. Raises ValueError if it is not about `operation`, or not of the form of `like`."""
        with self._store_call(operation):
            raw = self.store.get(self._key(key))
        if len(raw) > self.longest:
            raise ValueError(f"sent {len(raw)} bytes, more than {self.longest}")
        return decode(raw, operation, like)

    def _key(self, key: Key) -> str:
        return f"round {self._round} of {key}"

    def _store_call(self, operation: str) -> AbstractContextManager[None]:
        """Context of every store call."""
        return nullcontext()


class Rendezvous(Rounds):
    """One attempt of all ranks of a process group to connect. Every rank makes the same calls in the same order.

    store: private to this rendezvous, for a library that needs one to connect.
    name: unique to this rendezvous, equal on all ranks.
    global_ranks: global numbers of the ranks (in the whole job), used in error messages.
    failed: a rank is missing or in another part of its program, so no further agreement is possible.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self.process_group, self.device, self.timeout = process_group, device, timeout
        self.rank, self.failed = process_group.rank(), False
        self.global_ranks: Sequence[int] = range(process_group.size())
        with suppress(KeyError, ValueError):  # a group unknown to torch
            self.global_ranks = dist.get_process_group_ranks(process_group)
        self.global_rank = self.global_ranks[self.rank]
        with self._store_errors("connecting to the other ranks"):
            self.name, store = private_store(process_group, "connection")
        super().__init__(store, process_group.rank(), process_group.size())

    def exchange(self, value: T, operation: str, since: float | None = None) -> list[T]:
        """Every rank's `value`, by rank. Raises CommError that names a missing rank or one with another message.

        value: JSON-serializable, on every rank with the same types in the same places, keys and lengths.
        since: start time of the preceding common step, from which the timeout counts; default: now.
        """
        with self._store_errors(operation):
            self.begin(operation, value)
            now = time.monotonic()
            deadline = now + self.timeout if since is None else max(since + self.timeout, now) + _GRACE

            def watch(missing: Sequence[Key]) -> None:
                if time.monotonic() > deadline:
                    lost = [self.global_ranks[int(rank)] for rank in missing]
                    raise CommError(
                        f"rank {self.global_rank}, {operation}: no message from {named(lost)} within "
                        f"{self.timeout:g} s: every rank of the process group must connect",
                        lost,
                    )

            self.wait_for(range(self.world), operation, watch)
            return [self._read(rank, value, operation) for rank in range(self.world)]

    def _read(self, rank: int, like: object, operation: str) -> Any:
        """The value of `rank`, of the form of `like`."""
        try:
            return self.get(rank, operation, like)
        except OtherOperation as error:
            peer = self.global_ranks[rank]
            raise CommError(
                f"rank {self.global_rank} is in {operation}, but rank {peer} {error}: the programs of the ranks differ"
            ) from error
        except ValueError as error:
            raise CommError(f"rank {self.global_rank}, {operation}: rank {self.global_ranks[rank]} {error}") from error

    @contextmanager
    def _store_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except CommError:
            self.failed = True
            raise
        except (RuntimeError, OSError) as error:
            self.failed = True
            raise CommError(
                f"rank {self.global_rank}, {operation}: lost the store of the process group ({one_line(error)})"
            ) from error

    @contextmanager
    def collective_step(self, operation: str) -> Iterator[None]:
        """A step of every rank. If it fails on some, all raise CommError with all reasons after all have finished."""
        failure, start = "", time.monotonic()
        try:
            yield
        except Exception as error:  # any error: the other ranks wait for this rank's result
            failure = one_line(error, 300)
            if not isinstance(error, (OSError, RuntimeError, ValueError)):
                failure = f"{type(error).__name__}: {failure}"
        failures = {rank: text for rank, text in enumerate(self.exchange(failure, operation, start)) if text}
        if failures:
            reasons = "; ".join(f"rank {self.global_ranks[rank]}: {text}" for rank, text in failures.items())
            raise CommError(f"rank {self.global_rank}, {operation}: {reasons}")
