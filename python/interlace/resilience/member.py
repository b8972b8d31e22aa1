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

A step counts when every rank of its generation has voted for it: the last one to vote decides, once, by compare-and-set
in the coordinator's store. When the generation is over before that, whoever waits decides "abort" in the same way. So
all ranks that ask see one answer, whatever dies when, and no collective is needed for it (which would need an agreement
of its own).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import torch.distributed as dist

from interlace.comm import recorder
from interlace.resilience.environment import COORDINATOR, LOCAL_RANK, NODE, PROGRESS
from interlace.resilience.errors import ResilienceError, first_line
from interlace.resilience.generation import Generation
from interlace.resilience.progress import ProgressPage

Answer = Literal["commit", "regroup", "abort"]
LONGEST_PAUSE = 0.05  # seconds between two looks at the store
NEWEST, GENERATION, READY, TEMPLATES = "newest", "generation", "ready", "templates"  # keys of the store
ENDS = "ends"
SPARE, REMOVED = "spare", "removed"  # with a node
GAVE_UP, WHY, REGROUP, REGROUPED, OVER = (
    "gave up",
    "why",
    "regroup",
    "regrouped",
    "over",
)  # under `prefix_of` a generation
DECISION, COPIED, ENTERED = "decision", "copied", "entered"


class Member:
    """One rank of an elastic run.

    node: id of its node. local_rank: its place there. progress: its page. timeout: seconds that any wait here lasts at
    most where no other is given.
    """

    def __init__(self, store: dist.Store, node: str, local_rank: int, progress: ProgressPage, timeout: float) -> None:
        self._store, self.node, self.local_rank = store, node, local_rank
        self.progress, self.timeout = progress, timeout
        self._is_ready = False

    @classmethod
    def from_environment(cls, timeout: float) -> Member:
        """The rank that a supervisor started: INTERLACE_COORDINATOR (host:port of the store), INTERLACE_NODE,
        INTERLACE_PROGRESS (path of the page), LOCAL_RANK. Raises ResilienceError."""
        missing = [name for name in (COORDINATOR, NODE, PROGRESS, LOCAL_RANK) if name not in os.environ]
        if missing:
            raise ResilienceError(
                f"{', '.join(missing)} not set: `interlace train CONFIG --elastic` starts the ranks of an elastic run"
            )
        host, _, port = os.environ[COORDINATOR].rpartition(":")
        try:
            seconds = timedelta(seconds=timeout)
            store = dist.TCPStore(host, int(port), None, False, seconds, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise ResilienceError(
                f"no coordinator's store answers at {os.environ[COORDINATOR]!r} within {timeout:g} s "
                f"({first_line(error)}): is `interlace coordinator` running, and reachable from this node?"
            ) from error
        page = ProgressPage(Path(os.environ[PROGRESS]))
        recorder.use_page(page)
        return cls(store, os.environ[NODE], int(os.environ[LOCAL_RANK]), page, timeout)

    def rank(self, generation: Generation) -> int:
        """This rank's number in a generation."""
        return generation.ranks_of(self.node)[self.local_rank]

    def propose(self, templates: str) -> None:
        """What the coordinator plans with, `interlace.resilience.roster.Templates.to_json()`: the same on all ranks,
        of which the first one's word is taken. Before `next_generation`."""
        with self._asking("proposing pipeline templates"):
            self._store.compare_set(TEMPLATES, "", templates)

    def next_generation(self, after: int, timeout: float) -> Generation:
        """The newest generation that is newer than number `after` and has this rank's node.

        The first call says that this rank is ready to train: its node is taken in once all of its ranks have said so.
        Raises ResilienceError when none comes within `timeout` seconds, unless the coordinator keeps the node as a
        spare, and when it took the node for lost.
        """
        what = f"waiting for a generation after {after}"
        self.progress.idle(what, timeout)
        with self._asking(what):
            if not self._is_ready:
                self._store.add(f"{READY}/{self.node}", 1)
                self._is_ready = True
            seen = after
            while True:
                for _ in _looking(timeout):
                    newest = self._store.add(NEWEST, 0)
                    if newest > seen:
                        seen = newest
                        generation = Generation.from_json(self._store.get(f"{GENERATION}/{seen}"))
                        if self.node in generation.nodes:
                            self._store.add(f"{prefix_of(generation)}/{ENTERED}/{self.node}", 1)
                            self.progress.enter(generation.number)
                            return generation
                    if self._store.check([f"{REMOVED}/{self.node}"]):
                        raise ResilienceError(
                            f"node {self.node} was taken for lost: {self._store.get(f'{REMOVED}/{self.node}').decode()}"
                        )
                if not self._store.check([f"{SPARE}/{self.node}"]):
                    break
                self.progress.idle(f"a spare node, {what}", timeout)
        raise ResilienceError(
            f"rank {self.local_rank} of node {self.node}: no generation after {after} took this node in within "
            f"{timeout:g} s: too few nodes have come (resilience.nodes), or ranks of another node are not ready"
        )

    def store(self, generation: Generation) -> dist.PrefixStore:
        """The store of a generation: for `init_process_group`, and for notes among its ranks."""
        return dist.PrefixStore(f"{prefix_of(generation)}/of ranks", self._store)

    def over(self, generation: Generation) -> bool:
        """Whether the generation has ended: a node is lost, or a step was decided "regroup"."""
        with self._asking("asking whether the generation is over"):
            return self._is_over(generation)

    def vote(self, generation: Generation, step: int) -> Answer:
        """This rank has the whole gradient of `step`: may it be applied? The same answer on all ranks.

        "commit": yes. "regroup": yes, and then take the next generation (nodes join or leave). "abort": no: drop the
        gradients and take the next generation. Each step is voted on once in a generation, and every rank of it that
        trains votes. Raises ResilienceError when nothing is decided within the member's timeout.
        """
        prefix, world, what = prefix_of(generation), generation.world, f"voting on step {step}"
        decision = f"{prefix}/{DECISION}/{step}"
        self.progress.waiting([rank for rank in range(world) if rank != self.rank(generation)])
        with self._asking(what):
            if self._store.add(f"{prefix}/votes/{step}", 1) == world:
                answer = "regroup" if self._store.check([f"{prefix}/{REGROUP}"]) else "commit"
                answer = self._decide(decision, answer)
                # All have voted on this step, so all have seen what was decided on the one before.
                for old in (f"{prefix}/votes/{step - 1}", f"{prefix}/{DECISION}/{step - 1}"):
                    self._store.delete_key(old)
            else:
                answer = self._decided(decision, generation, what)
            if answer == "regroup":
                self._store.set(f"{prefix}/{REGROUPED}", str(step))
        self.progress.computing()
        return answer

    def gave_up(self, generation: Generation, reason: str) -> None:
        """This rank cannot go on in the generation: the coordinator looks who is lost, and makes the next one."""
        with self._asking("giving up a generation"):
            self._store.compare_set(
                f"{prefix_of(generation)}/{WHY}", "", f"rank {self.rank(generation)}: {reason[:500]}"
            )
            self._store.add(f"{prefix_of(generation)}/{GAVE_UP}", 1)

    def end(self, reason: str) -> None:
        """No generation can go on with the run: the coordinator ends it, and tells all nodes why."""
        with self._asking("ending the run"):
            self._store.compare_set(ENDS, "", reason[:500])

    def copied(self, generation: Generation) -> None:
        """This rank has all layers that it needs: as far as it is concerned, the leaving nodes may go."""
        with self._asking("saying that layers are copied"):
            self._store.add(f"{prefix_of(generation)}/{COPIED}", 1)

    def released(self, generation: Generation, timeout: float) -> bool:
        """Of a rank whose node leaves: True when nobody needs its layers any more, False when the generation is over
        before that and the next one is to be taken. Raises ResilienceError after `timeout` seconds."""
        what = f"node {self.node} waiting to be released"
        self.progress.idle(what, timeout)
        with self._asking(what):
            for _ in _looking(timeout):
                if self._store.add(f"{prefix_of(generation)}/{COPIED}", 0) >= generation.world:
                    return True
                if self._is_over(generation):
                    return False
        raise ResilienceError(f"{what}: generation {generation.number} did not copy its layers within {timeout:g} s")

    def _decided(self, decision: str, generation: Generation, what: str) -> Answer:
        for _ in _looking(self.timeout):
            if self._store.check([decision]):
                return _answer(self._store.get(decision))
            if self._is_over(generation):
                return self._decide(decision, "abort")
        raise ResilienceError(
            f"rank {self.rank(generation)}, {what}: not all {generation.world} ranks of generation {generation.number} "
            f"voted within {self.timeout:g} s"
        )

    def _decide(self, decision: str, answer: str) -> Answer:
        """What is decided, which is `answer` if nothing was before."""
        return _answer(self._store.compare_set(decision, "", answer))

    def _is_over(self, generation: Generation) -> bool:
        return bool(self._store.check([f"{prefix_of(generation)}/{OVER}"]))

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """The store's errors as a ResilienceError that says what was asked."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ResilienceError):
                raise
            raise ResilienceError(
                f"rank {self.local_rank} of node {self.node}, {what}: the coordinator's store does not answer "
                f"({first_line(error)}). The run cannot outlive its coordinator: resume from the last checkpoint"
            ) from error


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
    return f"of generation/{generation.number}"


def _answer(raw: bytes) -> Answer:
    text = raw.decode(errors="replace")
    if text not in get_args(Answer):
        raise ResilienceError(f"the store says that a step was decided {text[:100]!r}: do all nodes run one version?")
    return text  # type: ignore[return-value]
