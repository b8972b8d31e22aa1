"""A rank's view of an elastic run: which generation it is in, and whether a step counts.

    member = Member.from_environment(timeout=60.0)
    generation = member.next_generation(after=0, timeout=600.0)
    while True:
        ...                                            # groups in member.store(generation); a step's gradients
        answer = member.vote(generation, step)         # after the last REDUCE_GRAD, before the optimizer
        if answer != "abort":
            optimizer.step()                           # no collective after the vote
        if answer != "commit":
            generation = member.next_generation(generation.number, timeout=60.0)

A step counts when every rank of its generation has voted for it and the coordinator has said so, once, in its store. It
says nothing of a generation that is over, so whoever waits knows by that that the step does not count. So all ranks
that ask see one answer, whatever dies when, and no collective is needed for it (which would need an agreement of its
own).

When the coordinator is started again, its store is a new one. What was asked of the old one is asked again, from the
beginning; the coordinator has put there what was decided.
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

from interlace.comm import recorder
from interlace.resilience.environment import COORDINATOR, LOCAL_RANK, NODE, PATIENCE, PROGRESS
from interlace.resilience.errors import ResilienceError, first_line
from interlace.resilience.generation import Answer, Generation
from interlace.resilience.link import Link
from interlace.resilience.progress import ProgressPage

T = TypeVar("T")
LONGEST_PAUSE = 0.05  # seconds between two looks at the store
NEWEST, GENERATION, READY, TEMPLATES = "newest", "generation", "ready", "templates"  # keys of the store
ENDS = "ends"
SPARE, REMOVED = "spare", "removed"  # with a node
GAVE_UP, WHY, OVER, COPIED, ENTERED = "gave up", "why", "over", "copied", "entered"  # under `prefix_of` a generation
VOTES, VOTED, DECISION = "votes", "voted", "decision"  # there, too; the first and the last with a step


class Member:
    """One rank of an elastic run.

    link: to the coordinator's store. node: id of its node. local_rank: its place there. progress: its page, written by
    the thread that makes the member. timeout: seconds that any wait here lasts at most where no other is given, beside
    those in which the coordinator may be started again.
    """

    def __init__(self, link: Link, node: str, local_rank: int, progress: ProgressPage, timeout: float) -> None:
        self._link, self.node, self.local_rank = link, node, local_rank
        self.progress, self.timeout = progress, timeout
        self._thread = threading.get_ident()
        self._is_ready, self._templates = False, ""
        link.tell_again = self._say_again

    @classmethod
    def from_environment(cls, timeout: float) -> Member:
        """The rank that a supervisor started: INTERLACE_COORDINATOR (host:port of the store), INTERLACE_NODE,
        INTERLACE_PROGRESS (path of the page), INTERLACE_PATIENCE, LOCAL_RANK. Raises ResilienceError."""
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
        """What the coordinator plans with, `interlace.resilience.roster.Templates.to_json()`: the same on all ranks,
        of which the first one's word is taken. Before `next_generation`."""
        self._ask("proposing pipeline templates", lambda store: store.compare_set(TEMPLATES, "", templates))
        self._templates = templates

    def next_generation(self, after: int, timeout: float) -> Generation:
        """The newest generation that is newer than number `after` and has this rank's node.

        The first call says that this rank is ready to train: its node is taken in once all of its ranks have said so.
        Raises ResilienceError when none comes within `timeout` seconds, unless the coordinator keeps the node as a
        spare, and when it took the node for lost.
        """
        what = f"waiting for a generation after {after}"
        timeout += self._link.patience  # in which nodes may come back to a coordinator that was started again

        def work(store: dist.Store) -> Generation:
            self.progress.idle(what, timeout)
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
                            f"node {self.node} was taken for lost: {store.get(f'{REMOVED}/{self.node}').decode()}"
                        )
                if not store.check([f"{SPARE}/{self.node}"]):
                    break
                self.progress.idle(f"a spare node, {what}", timeout)
            raise ResilienceError(
                f"rank {self.local_rank} of node {self.node}: no generation after {after} took this node in within "
                f"{timeout:g} s: too few nodes have come (resilience.nodes), or ranks of another node are not ready"
            )

        return self._ask(what, work)

    def store(self, generation: Generation) -> dist.PrefixStore:
        """The store of a generation: for `init_process_group`, and for notes among its ranks."""
        return dist.PrefixStore(f"{prefix_of(generation)}/of ranks", self._link.store)

    def own_store(self, generation: Generation) -> dist.Store:
        """The same, over a connection of its own, which may be cut."""

        def work(store: dist.Store) -> dist.Store:
            store.check([NEWEST])  # fails at once where the coordinator is gone, as `clone` does not
            found: dist.Store = self.store(generation).clone()  # type: ignore[attr-defined]
            return found

        return self._ask("connecting to the store of a generation", work)

    def over(self, generation: Generation) -> bool:
        """Whether the generation has ended: a node is lost, or a step was decided "regroup"."""
        return self._ask("asking whether the generation is over", lambda store: _is_over(store, generation))

    def vote(self, generation: Generation, step: int) -> Answer:
        """This rank has the whole gradient of `step`: may it be applied? The same answer on all ranks.

        "commit": yes. "regroup": yes, and then take the next generation (nodes join or leave). "abort": no: drop the
        gradients and take the next generation. Each step is voted on once in a generation, and every rank of it that
        trains votes. Raises ResilienceError when nothing is decided within the member's timeout.
        """
        world, what, timeout = generation.world, f"voting on step {step}", self.timeout + self._link.patience

        def work(store: dist.Store) -> Answer:
            self.progress.waiting([rank for rank in range(world) if rank != self.rank(generation)])
            cast(store, generation, step)
            for _ in _looking(timeout):
                answer = decided(store, generation, step)
                if answer is not None:
                    return answer
            raise ResilienceError(
                f"rank {self.rank(generation)}, {what}: not all {world} ranks of generation {generation.number} "
                f"voted within {timeout:g} s"
            )

        answer = self._ask(what, work)
        self.progress.computing()
        return answer

    def gave_up(self, generation: Generation, reason: str) -> None:
        """This rank cannot go on in the generation: the coordinator looks who is lost, and makes the next one."""
        prefix, words = prefix_of(generation), f"rank {self.rank(generation)}: {reason[:500]}"

        def work(store: dist.Store) -> None:
            store.compare_set(f"{prefix}/{WHY}", "", words)
            store.add(f"{prefix}/{GAVE_UP}", 1)

        self._ask("giving up a generation", work)

    def end(self, reason: str) -> None:
        """No generation can go on with the run: the coordinator ends it, and tells all nodes why."""
        self._ask("ending the run", lambda store: store.compare_set(ENDS, "", reason[:500]))

    def copied(self, generation: Generation) -> None:
        """This rank has all layers that it needs: as far as it is concerned, the leaving nodes may go."""
        self._ask("saying that layers are copied", lambda store: store.add(f"{prefix_of(generation)}/{COPIED}", 1))

    def released(self, generation: Generation, timeout: float) -> bool:
        """Of a rank whose node leaves: True when nobody needs its layers any more, False when the generation is over
        before that and the next one is to be taken. Raises ResilienceError after `timeout` seconds."""
        what = f"node {self.node} waiting to be released"

        def work(store: dist.Store) -> bool:
            self.progress.idle(what, timeout)
            for _ in _looking(timeout):
                if store.add(f"{prefix_of(generation)}/{COPIED}", 0) >= generation.world:
                    return True
                if _is_over(store, generation):
                    return False
            raise ResilienceError(
                f"{what}: generation {generation.number} did not copy its layers within {timeout:g} s"
            )

        return self._ask(what, work)

    def _say_again(self, store: dist.Store) -> None:
        """What a new store has to know of this rank, whatever it does just now."""
        if self._templates:
            store.compare_set(TEMPLATES, "", self._templates)
        if self._is_ready:
            store.add(f"{READY}/{self.node}", 1)

    def _ask(self, what: str, work: Callable[[dist.Store], T]) -> T:
        """What `work` comes to with the coordinator's store; it is done again from its beginning when that is gone and
        there is a new one. Raises ResilienceError when there is none."""
        while True:
            store = self._link.store
            try:
                return work(store)
            except dist.DistNetworkError as error:
                why = "waiting for the coordinator to be started again"
                own = threading.get_ident() == self._thread
                try:
                    with self.progress.idle_for(why, self._link.longest) if own else contextlib.nullcontext():
                        self._link.renew(store, first_line(error))
                except ResilienceError as gone:
                    raise ResilienceError(f"rank {self.local_rank} of node {self.node}, {what}: {gone}") from error
            except RuntimeError as error:
                if isinstance(error, ResilienceError):
                    raise
                raise ResilienceError(
                    f"rank {self.local_rank} of node {self.node}, {what}: the coordinator's store does not answer "
                    f"({first_line(error)})"
                ) from error


def cast(store: dist.Store, generation: Generation, step: int) -> None:
    """Casts a rank's vote for a step: once in each store."""
    prefix = prefix_of(generation)
    if store.add(f"{prefix}/{VOTES}/{step}", 1) == generation.world:
        store.set(f"{prefix}/{VOTED}", str(step))


def decided(store: dist.Store, generation: Generation, step: int) -> Answer | None:
    """What became of a vote; None: nothing yet."""
    key = f"{prefix_of(generation)}/{DECISION}/{step}"
    over = _is_over(store, generation)  # first: from then on nothing more is decided
    if store.check([key]):
        return _answer(store.get(key))
    return "abort" if over else None


def _is_over(store: dist.Store, generation: Generation) -> bool:
    return bool(store.check([f"{prefix_of(generation)}/{OVER}"]))


def _looking(seconds: float) -> Iterator[None]:
    """Looks at the store, for so many seconds. Pauses grow with the wait, so that they prolong it by an eighth at most.

    Not `Store.wait`: it cannot wait for one of two keys, and writes a warning whenever its time is up.
    """
    begin = time.monotonic()
    while True:
        yield
        waited = time.monotonic() - begin
        if waited > seconds:
            return
        time.sleep(min(max(waited / 8, 0.0002), LONGEST_PAUSE))


def prefix_of(generation: Generation) -> str:
    """Where the store keeps what concerns a generation."""
    return prefix_of_number(generation.number)


def prefix_of_number(number: int) -> str:
    """The same of the generation of that number."""
    return f"of generation/{number}"


def _answer(raw: bytes) -> Answer:
    text = raw.decode(errors="replace")
    if text not in get_args(Answer):
        raise ResilienceError(f"the store says that a step was decided {text[:100]!r}: do all nodes run one version?")
    return text  # type: ignore[return-value]
