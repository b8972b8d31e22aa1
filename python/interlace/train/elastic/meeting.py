"""Meeting: rendezvous of the ranks of one generation, without waits for lost peers.

A thread of each rank polls the coordinator's store for the end of the generation. At the end it cuts the connections of
the process groups, so that every pending wait fails at once. This also works if a peer's machine is lost without
closing a connection.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from interlace._text import first_line
from interlace.comm.channels.connections import Connections
from interlace.comm.process.errors import CommError
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Generation
from interlace.resilience.member import Member
from interlace.train.launch.peers import Peers

T = TypeVar("T")
LOOK = 0.1  # poll interval for the end of the generation, in seconds
LEFT = 2.0  # grace period for a process group in the making when the generation ends, in seconds


class Over(Exception):
    """The generation has ended, or a peer of it is lost. Another generation follows."""


class Meeting:
    """View of one generation by one of its ranks: `with Meeting(...) as meeting`.

    rank: this rank's number; ranks of leaving nodes are numbered from `world` on. store: for notes. peers: the training
    ranks, available after `join`.

    A failure caused by a lost peer or by the end of the generation is raised as Over. Then, and at exit, all
    connections of the generation are cut and its process groups are destroyed.
    """

    peers: Peers

    def __init__(self, member: Member, generation: Generation, timeout: float) -> None:
        self.member, self.generation, self.timeout = member, generation, timeout
        self.rank, self.world = member.rank(generation), generation.world
        self._of_groups = [Connections()]
        self._copying: dist.ProcessGroupGloo | None = None
        self._ended, self._cut = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="generation", daemon=True)

    def __enter__(self) -> Meeting:
        self.store = self.member.own_store(self.generation)  # its own connection: cutting it ends all waits on it
        self.store.set_timeout(timedelta(seconds=self.timeout))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._cut_all()
        self._thread.join(self.timeout)
        self._copying = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        if isinstance(error, Exception) and not isinstance(error, Over) and self._is_of_a_loss(error):
            if not self.member.over(self.generation):
                self.member.abort(self.generation, first_line(error, 300))
            raise Over(first_line(error, 300)) from error

    def join(self, allowance: float) -> None:
        """Creates the process groups of the training ranks. allowance: see `Peers`."""
        if self.world > 1:
            if dist.is_initialized():  # created late by an abandoned thread
                dist.destroy_process_group()
            # Torch names a group, and its keys in the store, by the number of groups so far. A failed attempt counts
            # only on the ranks that began it, so the names would differ between ranks and rendezvous would fail.
            dist.distributed_c10d._world.group_count = 0
            store, limit = dist.PrefixStore("group", self.store), timedelta(seconds=self.timeout)
            self._make(
                lambda: dist.init_process_group(
                    "gloo", store=store, rank=self.rank, world_size=self.world, timeout=limit
                )
            )
        self.peers = Peers(self.timeout, allowance=allowance, coordinated=True)

    def all_made(self) -> None:
        """Marks all process groups as created: later connections do not belong to them."""
        self._of_groups[0].note()

    def copying(self) -> dist.ProcessGroupGloo:
        """Creates a process group of all ranks that hold layers, including leaving ones.

        It stays until the generation ends. Destroying it earlier would close its connections, and peers that are still
        connecting would fail.
        """
        store, limit = dist.PrefixStore("copying", self.store), timedelta(seconds=self.timeout)
        own = Connections()
        self._of_groups.append(own)
        group = self._make(lambda: dist.ProcessGroupGloo(store, self.rank, self.generation.sources, limit))
        own.note()
        self._copying = group
        return group

    def _make(self, group: Callable[[], T]) -> T:
        """Creates a process group in a separate thread. The thread is abandoned if the generation ends meanwhile.

        If a peer is lost while gloo connects all ranks, the others can hang beyond their timeout, even after their
        connections were cut (seen with torch 2.13).
        """
        made: Future[T] = Future()

        def make() -> None:
            try:
                made.set_result(group())
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=make, name="making a group", daemon=True).start()
        while not wait([made], LOOK).done:
            if self._cut.is_set() and not wait([made], LEFT).done:
                raise CommError("gloo, making a process group: the generation ended meanwhile")
        return made.result()

    def tell(self, what: str, text: str) -> None:
        """Publishes a text for the other ranks of the generation."""
        self.store.set(f"{what}/{self.rank}", text)

    def hear(self, what: str, rank: int) -> bytes:
        """Text published by `rank`; waits for it."""
        return bytes(self.store.get(f"{what}/{rank}"))

    def gather(self, what: str, value: object) -> list[Any]:
        """Every training rank's `value` (JSON-serializable), by rank."""
        return self.peers.together(what, lambda: value)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK):
            try:
                over = self.member.over(self.generation)
            except ResilienceError:  # the coordinator is lost for good; the next call to it reports this
                over = True
            if over:
                self._cut_all()
                return

    def _cut_all(self) -> None:
        for each in list(self._of_groups):
            each.cut()
        self._cut.set()

    def _is_of_a_loss(self, error: BaseException) -> bool:
        """True if the error was caused by a lost peer, not by this rank."""
        with contextlib.suppress(ResilienceError):
            if self.member.over(self.generation):
                return True
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, CommError | dist.DistError) or "gloo" in str(cause):
                return True
            cause = cause.__cause__ or cause.__context__
        return False
