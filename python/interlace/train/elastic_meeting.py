"""How the ranks of one generation come together, and how none of them waits for one that is gone.

A thread of each rank asks the coordinator's store whether the generation is over. When it is, the connections of its
process groups are cut, and whatever the rank waits for fails at once: also where the peer's machine is gone without
having closed a connection.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from interlace.comm.connections import Connections
from interlace.comm.transports.base import CommError
from interlace.resilience.errors import ResilienceError, first_line
from interlace.resilience.generation import Generation
from interlace.resilience.member import Member
from interlace.train.launch.peers import Peers

LOOK = 0.1  # seconds between two looks whether the generation is over
LEFT = 2.0  # seconds in which what was being made then may still end by itself


class Over(Exception):
    """The generation has ended, or a peer of it is lost: another one follows."""


class Meeting:
    """One generation as a rank of it sees it, while it lasts: `with Meeting(...) as meeting`.

    rank: this one's number; those of leaving nodes are from `world` on. store: for notes. peers: the ranks that train,
    once `join` has been called.

    What fails inside because a peer is lost, or the generation is over, is raised as Over; then and at the end all
    connections of the generation are cut and its process groups gone.
    """

    peers: Peers

    def __init__(self, member: Member, generation: Generation, timeout: float) -> None:
        self.member, self.generation, self.timeout = member, generation, timeout
        self.rank, self.world = member.rank(generation), generation.world
        self._of_groups = [Connections()]
        self._copying: Any = None
        self._ended, self._cut = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="generation", daemon=True)

    def __enter__(self) -> Meeting:
        self.store = self.member.own_store(self.generation)  # its own connection, so that cutting it ends waits
        self.store.set_timeout(timedelta(seconds=self.timeout))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._ended.set()
        self._cut_all()
        self._thread.join(self.timeout)
        self._copying = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        if isinstance(error, Exception) and not isinstance(error, Over) and self._is_of_a_loss(error):
            if not self.member.over(self.generation):
                self.member.gave_up(self.generation, first_line(error, 300))
            raise Over(first_line(error, 300)) from error

    def join(self, allowance: float) -> None:
        """Makes the process groups of the ranks that train. allowance: as of `Peers`."""
        if self.world > 1:
            if dist.is_initialized():  # made after all by a thread that was left behind
                dist.destroy_process_group()
            # Torch names a group, and what it keeps in the store, by how many there were. One that came to nothing
            # counts on the ranks that began it, and not on others: they would never find each other again.
            dist.distributed_c10d._world.group_count = 0
            store, limit = dist.PrefixStore("group", self.store), timedelta(seconds=self.timeout)
            self._make(
                lambda: dist.init_process_group(
                    "gloo", store=store, rank=self.rank, world_size=self.world, timeout=limit
                )
            )
        self.peers = Peers(self.timeout, allowance=allowance, coordinated=True)

    def all_made(self) -> None:
        """All process groups have been made: connections that come later are none of theirs."""
        self._of_groups[0].note()

    def copying(self) -> Any:
        """A process group of all ranks that layers can be copied from, leaving ones included.

        It stays until the generation ends: with a group that is gone its connections are closed, at which peers fail
        that are not done with making theirs."""
        store, limit = dist.PrefixStore("copying", self.store), timedelta(seconds=self.timeout)
        own = Connections()
        self._of_groups.append(own)
        self._copying = self._make(lambda: dist.ProcessGroupGloo(store, self.rank, self.generation.sources, limit))
        own.note()
        return self._copying

    def _make(self, group: Callable[[], Any]) -> Any:
        """A process group, made in a thread of its own. When the generation ends meanwhile, that is left to itself.

        A peer that is gone as gloo connects all with all has been seen to leave others in it beyond their limit of
        time, and after their connections were cut (torch 2.13)."""
        made: Future[Any] = Future()

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
        """Says something to the others of the generation."""
        self.store.set(f"{what}/{self.rank}", text)

    def hear(self, what: str, rank: int) -> bytes:
        """What `rank` says about it, as soon as it does."""
        raw: bytes = self.store.get(f"{what}/{rank}")
        return raw

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every training rank's `value`, by rank, of what JSON can hold."""
        return self.peers.together(what, lambda: value)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK):
            try:
                over = self.member.over(self.generation)
            except ResilienceError:  # the coordinator is gone for good: whoever asks it next says so
                over = True
            if over:
                self._cut_all()
                return

    def _cut_all(self) -> None:
        for each in list(self._of_groups):
            each.cut()
        self._cut.set()

    def _is_of_a_loss(self, error: BaseException) -> bool:
        """Whether an error comes of a peer that is lost, not of what this rank did itself."""
        with contextlib.suppress(ResilienceError):
            if self.member.over(self.generation):
                return True
        found: BaseException | None = error
        while found is not None:
            if isinstance(found, CommError | dist.DistError) or "gloo" in str(found):
                return True
            found = found.__cause__ or found.__context__
        return False
