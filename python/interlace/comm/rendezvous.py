"""Where ranks meet: in a store, through which they tell each other small values.

Values go through a store, not through collectives of a process group: a rank that does not come is then named, and the
group is left as it was. (A wait of gloo that runs out closes the connections of the whole group.) They travel as JSON
and are checked before they are used: what peers say is never executed.

`Rounds` is how values travel. `Rendezvous` is where the ranks of a process group agree on a transport and hand each
other what it needs to come up; before the first step of a run, ranks meet in `interlace.train.launch.startup`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.lost import named, private_store
from interlace.comm.recorder import page_in_use
from interlace.comm.transports.base import CommError
from interlace.comm.transports.messages import Elsewhere, decode, encode

_POLL = 0.005  # seconds
_GRACE = 2.0  # seconds more for those whose own wait in a step ran out just now, to say so


class Rounds:
    """Rounds in which ranks say values through a store that no other purpose uses. All ranks begin the same rounds."""

    longest = 1 << 20  # bytes of what is said at one place

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self._round = 0

    def begin(self, what: str, value: Any) -> None:
        """The next round, about `what`; this rank says `value` in it, which JSON can hold."""
        self._round += 1
        self.say(self.rank, what, value)

    def say(self, place: int | str, what: str, value: Any) -> None:
        """Fills a place (a rank, or a name that a caller chose) in this round."""
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
        """Returns when something was said in this round at each of `places`.

        Until then calls `watch` with those that are missing, again and again, at last every `slowest` seconds; it
        raises when it has waited long enough.
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
        """What was said at `place`. Raises ValueError when it is not about `what`, or not of the form of `like`."""
        with self._asking(what):
            raw = self.store.get(self._key(place))
        if len(raw) > self.longest:
            raise ValueError(f"says {len(raw)} bytes, more than {self.longest}")
        return decode(raw, what, like)

    def _key(self, place: int | str) -> str:
        return f"round {self._round} of {place}"

    def _asking(self, what: str) -> AbstractContextManager[None]:
        """Around every call of the store."""
        return nullcontext()


class Rendezvous(Rounds):
    """One attempt of all ranks of a process group to connect. Every rank makes the same calls in the same order.

    store: of this rendezvous alone, for a library that wants one to connect through.
    name: of this rendezvous, equal on all ranks and used for no other.
    called: the numbers of the ranks in the whole job, by which errors call them.
    over: a rank stayed away or is elsewhere in its program: nothing more can be agreed on.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self.process_group, self.device, self.timeout = process_group, device, timeout
        self.rank, self.over = process_group.rank(), False
        self.called: Sequence[int] = range(process_group.size())
        with suppress(KeyError, ValueError):  # a group that torch does not know
            self.called = dist.get_process_group_ranks(process_group)
        self.me = self.called[self.rank]
        with self._asking_the_store("meeting the other ranks"):
            self.name, store = private_store(process_group, "connection")
        super().__init__(store, process_group.rank(), process_group.size())

    def exchange(self, value: Any, what: str, since: float | None = None) -> list[Any]:
        """Every rank's `value`, by rank. Raises CommError that names who does not come, or says something else.

        value: what JSON can hold, on every rank with the same types in the same places, keys and lengths.
        since: when the step began that all ranks took, from where the timeout counts; default: now.
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
        """What `rank` said, of the form of `mine`."""
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
        """A step of every rank: if it fails on some, all raise CommError when all have tried, with all reasons."""
        failure, began = "", time.monotonic()
        try:
            yield
        except Exception as error:  # whatever it is: the others wait for a word from this rank
            failure = " ".join(str(error).split())[:300] or type(error).__name__
            if not isinstance(error, (OSError, RuntimeError, ValueError)):
                failure = f"{type(error).__name__}: {failure}"
        failures = {rank: text for rank, text in enumerate(self.exchange(failure, what, began)) if text}
        if failures:
            reasons = "; ".join(f"rank {self.called[rank]}: {text}" for rank, text in failures.items())
            raise CommError(f"rank {self.me}, {what}: {reasons}")
