"""Where the ranks of a process group agree on a transport and hand each other what it needs to come up.

Values go through the store of the process group, not through its collectives: a rank that does not come is then named,
and the group is left as it was. (A wait of gloo that runs out closes the connections of the whole group.)

They travel as JSON, and one that has not the form of this rank's own is refused: what peers say is never executed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.transports.base import CommError
from interlace.comm.transports.messages import Elsewhere, decode, encode

_POLL = 0.005  # seconds
_LONGEST = 1 << 20  # bytes of what a rank says
_GRACE = 2.0  # seconds more for those whose own wait in a step ran out just now, to say so


class Meeting:
    """One attempt of all ranks of a process group to connect. Every rank makes the same calls in the same order.

    store: of this meeting alone, for a library that wants one to connect through.
    name: of this meeting, equal on all ranks and used for no other.
    over: a rank stayed away or is elsewhere in its program: nothing more can be agreed on.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self.rank, self.world = process_group.rank(), process_group.size()
        self.process_group, self.device, self.timeout = process_group, device, timeout
        self.over = False
        with self._asking_the_store("meeting the other ranks"):
            store = dist.distributed_c10d._get_process_group_store(process_group)
            # Counted in the store, so that a group that is made anew under its old name finds no old keys.
            count = store.add(f"interlace/connects of rank {self.rank}", 1)
        self.name = f"interlace/{count}"
        self.store: Any = dist.PrefixStore(self.name, store)  # its stub says that values are str
        self._round = 0

    def exchange(self, value: Any, what: str, since: float | None = None) -> list[Any]:
        """Every rank's `value`, by rank. Raises CommError that names who does not come, or says something else.

        value: what JSON can hold, on every rank with the same types in the same places, keys and lengths.
        since: when the step began that all ranks took, from where the timeout counts; default: now.
        """
        prefix, self._round = f"round {self._round} of rank ", self._round + 1
        with self._asking_the_store(what):
            self.store.set(f"{prefix}{self.rank}", encode(what, value))
            now = time.monotonic()
            deadline = now + self.timeout if since is None else max(since + self.timeout, now) + _GRACE
            missing = list(range(self.world))
            while missing := [rank for rank in missing if not self.store.check([f"{prefix}{rank}"])]:
                if time.monotonic() > deadline:
                    raise CommError(
                        f"rank {self.rank}, {what}: no word from {named(missing)} within {self.timeout:g} s: every "
                        "rank of the process group has to connect"
                    )
                time.sleep(_POLL)
            return [self._read(self.store.get(f"{prefix}{rank}"), rank, value, what) for rank in range(self.world)]

    def _read(self, raw: bytes, rank: int, mine: Any, what: str) -> Any:
        """What `rank` said, of the form of `mine`."""
        try:
            if len(raw) > _LONGEST:
                raise ValueError(f"says {len(raw)} bytes, more than {_LONGEST}")
            return decode(raw, what, mine)
        except Elsewhere as error:
            raise CommError(f"rank {self.rank} is in {what}, but rank {rank} {error}: the programs differ") from error
        except ValueError as error:
            raise CommError(f"rank {self.rank}, {what}: rank {rank} {error}") from error

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
            raise CommError(f"rank {self.rank}, {what}: the store of the process group is lost ({reason})") from error

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
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            raise CommError(f"rank {self.rank}, {what}: {reasons}")


def named(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank) for rank in ranks)}"
