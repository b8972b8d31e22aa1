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
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.process.errors import CommError
from interlace.comm.process.lost import named, private_store
from interlace.comm.process.messages import Elsewhere, decode, encode
from interlace.comm.process.recorder import page_in_use

_POLL = 0.005  # seconds
_GRACE = 2.0  # extra seconds, so that ranks whose own wait has just timed out can report it


class Rounds:
    """Rounds of value exchange through a private store. All ranks begin the same rounds."""

    longest = 1 << 20  # bytes of one value

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._round = 0

    def begin(self, what: str, value: Any) -> None:
        """Starts the next round, named `what`, with this rank's `value` (JSON-serializable)."""
        self._round += 1
        self.say(self.rank, what, value)

    def say(self, place: int | str, what: str, value: Any) -> None:
        """Writes to a place (a rank, or a name chosen by the caller) in this round."""
        raw = encode(what, value)
        with self._asking(what):
            self.store.set(self._key(place), raw)

    def wait_for(
        self,
        places: Iterable[int | str],
        what: str,
        watch: Callable[[Sequence[int | str]], None],
        slowest: float = _POLL,
    ) -> None:
        """Returns when every one of `places` has a value in this round.

        Until then calls `watch` repeatedly with the missing places, at intervals that grow up to `slowest` seconds.
        `watch` raises to end the wait.
        """
        missing, pause, page = list(places), _POLL, page_in_use()
        if page is not None:
            page.waiting([place for place in missing if isinstance(place, int)])
        while True:
            with self._asking(what):
                missing = [place for place in missing if not self.store.check([self._key(place)])]
            if not missing:
                if page is not None:
                    page.computing()
                return
            watch(missing)
            time.sleep(pause)
            pause = min(2 * pause, max(slowest, _POLL))

    def hear(self, place: int | str, what: str, like: Any) -> Any:
        """The value at `place`. Raises ValueError if it is not about `what`, or not of the form of `like`."""
        with self._asking(what):
            raw = self.store.get(self._key(place))
        if len(raw) > self.longest:
            raise ValueError(f"says {len(raw)} bytes, more than {self.longest}")
        return decode(raw, what, like)

    def _key(self, place: int | str) -> str:
        return f"round {self._round} of {place}"

    def _asking(self, what: str) -> AbstractContextManager[None]:
        """Context of every store call."""
        return nullcontext()


class Rendezvous(Rounds):
    """One attempt of all ranks of a process group to connect. Every rank makes the same calls in the same order.

    store: private to this rendezvous, for a library that needs one to connect.
    name: unique to this rendezvous, equal on all ranks.
    called: global numbers of the ranks (in the whole job), used in error messages.
    over: a rank is missing or in another part of its program, so no further agreement is possible.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self.process_group, self.device, self.timeout = process_group, device, timeout
        self.rank, self.over = process_group.rank(), False
        self.called: Sequence[int] = range(process_group.size())
        with suppress(KeyError, ValueError):  # a group unknown to torch
            self.called = dist.get_process_group_ranks(process_group)
        self.me = self.called[self.rank]
        with self._asking_the_store("meeting the other ranks"):
            self.name, store = private_store(process_group, "connection")
        super().__init__(store, process_group.rank(), process_group.size())

    def exchange(self, value: Any, what: str, since: float | None = None) -> list[Any]:
        """Every rank's `value`, by rank. Raises CommError that names a missing rank or one with another message.

        value: JSON-serializable, on every rank with the same types in the same places, keys and lengths.
        since: start time of the preceding common step, from which the timeout counts; default: now.
        """
        with self._asking_the_store(what):
            self.begin(what, value)
            now = time.monotonic()
            deadline = now + self.timeout if since is None else max(since + self.timeout, now) + _GRACE

            def watch(missing: Sequence[int | str]) -> None:
                if time.monotonic() > deadline:
                    raise CommError(
                        f"rank {self.me}, {what}: no word from {named([self.called[int(rank)] for rank in missing])} "
                        f"within {self.timeout:g} s: every rank of the process group has to connect",
                        [self.called[int(rank)] for rank in missing],
                    )

            self.wait_for(range(self.world), what, watch)
            return [self._read(rank, value, what) for rank in range(self.world)]

    def _read(self, rank: int, mine: Any, what: str) -> Any:
        """The value of `rank`, of the form of `mine`."""
        try:
            return self.hear(rank, what, mine)
        except Elsewhere as error:
            other = self.called[rank]
            raise CommError(f"rank {self.me} is in {what}, but rank {other} {error}: the programs differ") from error
        except ValueError as error:
            raise CommError(f"rank {self.me}, {what}: rank {self.called[rank]} {error}") from error

    @contextmanager
    def _asking_the_store(self, what: str) -> Iterator[None]:
        try:
            yield
        except CommError:
            self.over = True
            raise
        except (RuntimeError, OSError) as error:
            self.over = True
            reason = " ".join(str(error).split())[:200]
            raise CommError(f"rank {self.me}, {what}: the store of the process group is lost ({reason})") from error

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A step of every rank. If it fails on some, all raise CommError with all reasons after all have finished."""
        failure, began = "", time.monotonic()
        try:
            yield
        except Exception as error:  # any error: the other ranks wait for this rank's result
            failure = " ".join(str(error).split())[:300] or type(error).__name__
            if not isinstance(error, (OSError, RuntimeError, ValueError)):
                failure = f"{type(error).__name__}: {failure}"
        failures = {rank: text for rank, text in enumerate(self.exchange(failure, what, began)) if text}
        if failures:
            reasons = "; ".join(f"rank {self.called[rank]}: {text}" for rank, text in failures.items())
            raise CommError(f"rank {self.me}, {what}: {reasons}")
