"""Where the ranks of a process group agree on a transport and hand each other what it needs to come up.

Values go through the store of the process group, not through its collectives: a rank that does not come is then named,
and the group is left as it was. (A wait of gloo that runs out closes the connections of the whole group.)
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.transports.base import CommError

_POLL = 0.005  # seconds


class Meeting:
    """One attempt of all ranks of a process group to connect. Every rank makes the same calls in the same order.

    store: of this meeting alone, for a library that wants one to connect through.
    name: of this meeting, equal on all ranks and used for no other.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self.rank, self.world = process_group.rank(), process_group.size()
        self.process_group, self.device, self.timeout = process_group, device, timeout
        store = dist.distributed_c10d._get_process_group_store(process_group)
        # Counted in the store, so that a group that is destroyed and made anew under its old name finds no old keys.
        count = store.add(f"interlace/connects of rank {self.rank}", 1)
        self.name = f"interlace/{count}"
        self.store: Any = dist.PrefixStore(self.name, store)  # its stub says that values are str
        self._round = 0

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value` (a small object, pickled), by rank. Raises CommError that names who does not come."""
        prefix, self._round = f"round {self._round} of rank ", self._round + 1
        try:
            self.store.set(f"{prefix}{self.rank}", pickle.dumps((what, value)))
            deadline = time.monotonic() + self.timeout
            missing = list(range(self.world))
            while missing := [rank for rank in missing if not self.store.check([f"{prefix}{rank}"])]:
                if time.monotonic() > deadline:
                    raise CommError(
                        f"rank {self.rank}, {what}: no word from {named(missing)} within {self.timeout:g} s: every "
                        "rank of the process group has to connect"
                    )
                time.sleep(_POLL)
            found = [pickle.loads(self.store.get(f"{prefix}{rank}")) for rank in range(self.world)]
        except (RuntimeError, OSError) as error:
            if isinstance(error, CommError):
                raise
            reason = " ".join(str(error).split())[:200]
            raise CommError(f"rank {self.rank}, {what}: the store of the process group is lost ({reason})") from error
        for rank, (theirs, _) in enumerate(found):
            if theirs != what:
                raise CommError(f"rank {self.rank} is in {what}, but rank {rank} is in {theirs}: the programs differ")
        return [value for _, value in found]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A step of every rank: if it fails on some, all raise CommError when all have tried, with all reasons."""
        failure = ""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            failure = " ".join(str(error).split())[:300] or type(error).__name__
        failures = {rank: text for rank, text in enumerate(self.exchange(failure, what)) if text}
        if failures:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            raise CommError(f"rank {self.rank}, {what}: {reasons}")

    def agree(self, failure: str, what: str) -> None:
        """As `together` for a step that is over: raises CommError on every rank if any says why it failed ("": not)."""
        with self.together(what):
            if failure:
                raise CommError(failure)


def named(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank) for rank in ranks)}"
