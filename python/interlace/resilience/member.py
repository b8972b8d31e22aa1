"""Rank's view of an elastic run: its generation, and votes on steps.

    member = Member.from_environment(timeout=60.0)
    generation = member.next_generation(after=0, timeout=600.0)
    while True:
        ...                                            # groups in member.store(generation); a step's gradients
        answer = member.vote(generation, step)         # after the last REDUCE_GRAD, before the optimizer
        if answer != "abort":
            optimizer.step()                           # no collective after the vote
        if answer != "commit":
            generation = member.next_generation(generation.number, timeout=60.0)

A step is committed when every rank of its generation has voted for it and the coordinator has written the decision once
to its store. The coordinator decides nothing for a generation that is over, so undecided steps of it are aborted. All
ranks therefore see the same answer, whatever fails and when. This needs no collective, which would itself need an
agreement.

A restarted coordinator has a new store, already filled with the decisions so far. Ranks repeat their pending requests
from the beginning.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, get_args

import torch.distributed as dist

from interlace._text import first_line
from interlace.comm.process import recorder
from interlace.resilience.environment import COORDINATOR, LOCAL_RANK, NODE, PATIENCE, PROGRESS
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Answer, Generation
from interlace.resilience.link import Link
from interlace.resilience.supervisor.progress import ProgressPage

T = TypeVar("T")
LONGEST_PAUSE = 0.05  # longest polling interval of the store, seconds
NEWEST, GENERATION, READY, TEMPLATES = "newest", "generation", "ready", "templates"  # keys of the store
ENDS = "ends"
SPARE, REMOVED = "spare", "removed"  # keys per node
ABORTED, WHY, OVER, COPIED, ENTERED = "gave up", "why", "over", "copied", "entered"  # under `prefix_of` of a generation
VOTES, VOTED, DECISION = "votes", "voted", "decision"  # likewise; VOTES and DECISION per step


class Member:
    """One rank of an elastic run.

    link: connection to the coordinator's store. node: id of its node. local_rank: its index on the node.
    progress: its progress page, written by the thread that creates the member.
    timeout: default timeout of every wait here, seconds. Time for a coordinator restart is added.
    """

    def __init__(self, link: Link, node: str, local_rank: int, progress: ProgressPage, timeout: float) -> None:
        self._link, self.node, self.local_rank = link, node, local_rank
        self.progress, self.timeout = progress, timeout
        self._thread = threading.get_ident()
        self._is_ready, self._templates = False, ""
        link.publish_again = self._publish_again

    @classmethod
    def from_environment(cls, timeout: float) -> Member:
        """Member for a rank started by a supervisor. Raises ResilienceError.

        Reads INTERLACE_COORDINATOR (host:port of the store), INTERLACE_NODE, INTERLACE_PROGRESS (path of the page),
        INTERLACE_PATIENCE and LOCAL_RANK.
        """
        missing = [name for name in (COORDINATOR, NODE, PROGRESS, PATIENCE, LOCAL_RANK) if name not in os.environ]
        if missing:
            raise ResilienceError(
                f"{', '.join(missing)} not set: `interlace train CONFIG --elastic` starts the ranks of an elastic run"
            )
        page = ProgressPage(Path(os.environ[PROGRESS]))
        recorder.use_page(page)
        link = Link(os.environ[COORDINATOR], float(os.environ[PATIENCE]), timeout, Path(os.environ[PROGRESS]))
        return cls(link, os.environ[NODE], int(os.environ[LOCAL_RANK]), page, timeout)

    def rank(self, generation: Generation) -> int:
        """This rank's number in a generation."""
        return generation.ranks_of(self.node)[self.local_rank]

    def propose(self, templates: str) -> None:
        """Proposes the coordinator's pipeline templates. Call it before `next_generation`.

        templates: `interlace.resilience.coordinator.roster.Templates.to_json()`, equal on all ranks. The first proposal
        is used.
        """
        self._ask("proposing pipeline templates", lambda store: store.compare_set(TEMPLATES, "", templates))
        self._templates = templates

    def next_generation(self, after: int, timeout: float) -> Generation:
        """Newest generation with a number above `after` that contains this rank's node.

        The first call reports this rank as ready to train. A node is admitted once all of its ranks are ready. Raises
        ResilienceError if no generation follows within `timeout` seconds, unless the node is a spare. Also raises it if
        the coordinator considers the node lost.
        """
        waiting_for = f"waiting for a generation after {after}"
        timeout += self._link.patience  # time for nodes to reconnect to a restarted coordinator

        def work(store: dist.Store) -> Generation:
            self.progress.idle(waiting_for, timeout)
            if not self._is_ready:
                store.add(f"{READY}/{self.node}", 1)
                self._is_ready = True
            seen = after
            while True:
                for _ in _looking(timeout):
                    newest = store.add(NEWEST, 0)
                    if newest > seen:
                        seen = newest
                        generation = Generation.from_json(store.get(f"{GENERATION}/{seen}"))
                        if self.node in generation.nodes:
                            store.add(f"{prefix_of(generation)}/{ENTERED}/{self.node}", 1)
                            self.progress.enter(generation.number)
                            return generation
                    if store.check([f"{REMOVED}/{self.node}"]):
                        raise ResilienceError(
                            f"node {self.node} was removed from the run: {store.get(f'{REMOVED}/{self.node}').decode()}"
                        )
                if not store.check([f"{SPARE}/{self.node}"]):
                    break
                self.progress.idle(f"a spare node, {waiting_for}", timeout)
            raise ResilienceError(
                f"rank {self.local_rank} of node {self.node}: no generation after {after} included this node within "
                f"{timeout:g} s: too few nodes have joined (resilience.nodes), or ranks of another node are not ready"
            )

        return self._ask(waiting_for, work)

    def store(self, generation: Generation) -> dist.PrefixStore:
        """Store of a generation, for `init_process_group` and for data shared among its ranks."""
        return dist.PrefixStore(f"{prefix_of(generation)}/of ranks", self._link.store)

    def own_store(self, generation: Generation) -> dist.Store:
        """Store of a generation over its own connection, which may be cut."""

        def work(store: dist.Store) -> dist.Store:
            store.check([NEWEST])  # fails at once if the coordinator is gone; `clone` does not
            own_store: dist.Store = self.store(generation).clone()  # type: ignore[attr-defined]
            return own_store

        return self._ask("connecting to the store of a generation", work)

    def over(self, generation: Generation) -> bool:
        """True if the generation has ended: a node is lost, or a step was decided "regroup"."""
        return self._ask("asking whether the generation is over", lambda store: _is_over(store, generation))

    def vote(self, generation: Generation, step: int) -> Answer:
        """Vote on applying the gradient of `step`, which this rank has in full. All ranks get the same answer.

        "commit": apply the gradient. "regroup": apply it, then take the next generation (nodes join or leave). "abort":
        drop the gradient and take the next generation. Every training rank of a generation votes once per step. Raises
        ResilienceError if there is no decision within the member's timeout.
        """
        world, action, timeout = generation.world, f"voting on step {step}", self.timeout + self._link.patience

        def work(store: dist.Store) -> Answer:
            self.progress.waiting([rank for rank in range(world) if rank != self.rank(generation)])
            cast(store, generation, step)
            for _ in _looking(timeout):
                answer = decided(store, generation, step)
                if answer is not None:
                    return answer
            raise ResilienceError(
                f"rank {self.rank(generation)}, {action}: not all {world} ranks of generation {generation.number} "
                f"voted within {timeout:g} s"
            )

        answer = self._ask(action, work)
        self.progress.computing()
        return answer

    def abort(self, generation: Generation, reason: str) -> None:
        """Reports that this rank cannot continue in the generation.

        The coordinator finds lost nodes and creates the next generation.
        """
        prefix, words = prefix_of(generation), f"rank {self.rank(generation)}: {reason[:500]}"

        def work(store: dist.Store) -> None:
            store.compare_set(f"{prefix}/{WHY}", "", words)
            store.add(f"{prefix}/{ABORTED}", 1)

        self._ask("giving up a generation", work)

    def end(self, reason: str) -> None:
        """Ends the run because no generation can continue it. The coordinator sends the reason to all nodes."""
        self._ask("ending the run", lambda store: store.compare_set(ENDS, "", reason[:500]))

    def copied(self, generation: Generation) -> None:
        """Reports that this rank has all layers that it needs, and no longer needs the leaving nodes."""
        self._ask("saying that layers are copied", lambda store: store.add(f"{prefix_of(generation)}/{COPIED}", 1))

    def released(self, generation: Generation, timeout: float) -> bool:
        """Waits until the layers of a leaving rank are no longer needed.

        True when all layers are copied. False if the generation ended first; then take the next one. Raises
        ResilienceError after `timeout` seconds.
        """
        action = f"node {self.node} waiting to be released"

        def work(store: dist.Store) -> bool:
            self.progress.idle(action, timeout)
            for _ in _looking(timeout):
                if store.add(f"{prefix_of(generation)}/{COPIED}", 0) >= generation.world:
                    return True
                if _is_over(store, generation):
                    return False
            raise ResilienceError(
                f"{action}: generation {generation.number} did not copy its layers within {timeout:g} s"
            )

        return self._ask(action, work)

    def _publish_again(self, store: dist.Store) -> None:
        """Writes this rank's state to a new store: its templates and its readiness."""
        if self._templates:
            store.compare_set(TEMPLATES, "", self._templates)
        if self._is_ready:
            store.add(f"{READY}/{self.node}", 1)

    def _ask(self, action: str, work: Callable[[dist.Store], T]) -> T:
        """Result of `work` on the coordinator's store.

        After a coordinator restart, `work` is repeated from its beginning on the new store. Raises ResilienceError if
        the coordinator does not come back.
        """
        while True:
            store = self._link.store
            try:
                return work(store)
            except dist.DistNetworkError as error:
                why = "waiting for a restart of the coordinator"
                own = threading.get_ident() == self._thread
                try:
                    with self.progress.idle_for(why, self._link.longest) if own else contextlib.nullcontext():
                        self._link.renew(store, first_line(error))
                except ResilienceError as gone:
                    raise ResilienceError(f"rank {self.local_rank} of node {self.node}, {action}: {gone}") from error
            except RuntimeError as error:
                if isinstance(error, ResilienceError):
                    raise
                raise ResilienceError(
                    f"rank {self.local_rank} of node {self.node}, {action}: the coordinator's store does not answer "
                    f"({first_line(error)})"
                ) from error


def cast(store: dist.Store, generation: Generation, step: int) -> None:
    """Casts a rank's vote for a step, once per store."""
    prefix = prefix_of(generation)
    if store.add(f"{prefix}/{VOTES}/{step}", 1) == generation.world:
        store.set(f"{prefix}/{VOTED}", str(step))


def decided(store: dist.Store, generation: Generation, step: int) -> Answer | None:
    """Result of a vote; None if undecided."""
    key = f"{prefix_of(generation)}/{DECISION}/{step}"
    over = _is_over(store, generation)  # read first: no decision follows the end of a generation
    if store.check([key]):
        return _answer(store.get(key))
    return "abort" if over else None


def _is_over(store: dist.Store, generation: Generation) -> bool:
    return bool(store.check([f"{prefix_of(generation)}/{OVER}"]))


def _looking(seconds: float) -> Iterator[None]:
    """Polling loop of the store, for `seconds`. Pauses grow with the wait and prolong it by at most 1/8.

    `Store.wait` is not used: it cannot wait for either of two keys, and logs a warning at each timeout.
    """
    begin = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - begin
        if waited > seconds:
            return
        time.sleep(min(max(waited / 8, 0.0002), LONGEST_PAUSE))


def prefix_of(generation: Generation) -> str:
    """Key prefix of a generation in the store."""
    return prefix_of_number(generation.number)


def prefix_of_number(number: int) -> str:
    """Key prefix of generation `number` in the store."""
    return f"of generation/{number}"


def _answer(raw: bytes) -> Answer:
    text = raw.decode(errors="replace")
    if text not in get_args(Answer):
        raise ResilienceError(f"unknown decision {text[:100]!r} in the store: install the same version on all nodes")
    return text  # type: ignore[return-value]
