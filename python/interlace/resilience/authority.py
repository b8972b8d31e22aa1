"""The coordinator's decisions, made known in the store: whether a step counts, who is lost, which generation follows.

With a `StateFile` each of them is written down before the store has it: who is started again (`Authority.resumed`)
decides nothing twice. What happens to connections is `interlace.resilience.coordinator`'s; which pipelines follow is
`interlace.resilience.roster`'s; who is at fault among ranks that stand still is `interlace.resilience.faults`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from interlace.resilience.errors import ResilienceError
from interlace.resilience.faults import CIRCLE, WAITS, culprits
from interlace.resilience.generation import Answer, Decision, Event, Generation, Node, Noticed
from interlace.resilience.member import (
    COPIED,
    DECISION,
    ENDS,
    ENTERED,
    GAVE_UP,
    GENERATION,
    NEWEST,
    OVER,
    READY,
    REMOVED,
    SPARE,
    TEMPLATES,
    VOTED,
    VOTES,
    WHY,
    prefix_of,
    prefix_of_number,
)
from interlace.resilience.roster import Roster, Templates
from interlace.resilience.settings import Settings
from interlace.resilience.state import StateFile
from interlace.resilience.watch import Stall

TOGETHER = 0.05  # seconds in which losses are one event
SURE = 0.5  # seconds in which a rank that is suspected may still move
SEARCH = 1.0  # seconds beyond a heartbeat in which it may turn out why a rank gave up
LATE = 60.0  # seconds in which a rank may come to a generation in which another gives up
MOST_FAILURES = 3  # in a row, without a committed step, in which a rank gave up and nobody was lost


class Removal(NamedTuple):
    """A node that is gone or has to go, and why. failed: a rank of it ended with an error of its own."""

    node: str
    kind: Noticed
    why: str
    failed: bool = False


class Authority:
    """Who trains together in one run. store: torch's, which this process serves. tell: notes what happened.
    state: where decisions are written down, if anywhere.

    Times are seconds of one clock that the caller reads. ended: why the run cannot go on; "" while it can, and after it
    has trained to the end. over: nothing more is to be decided. preempted: the run is saved, and what ended it is that
    its nodes were asked to go.
    """

    def __init__(
        self, settings: Settings, store: Any, tell: Callable[..., None], now: float, state: StateFile | None = None
    ) -> None:
        self.roster, self._store, self._tell, self._began = Roster(settings), store, tell, now
        self._state = state
        self._decided: Decision | None = None  # the vote that was decided last
        self._away: set[str] = set()  # nodes that have not come back since the coordinator was started again
        self._back_by = now
        self.false_alarms, self.ended, self.over, self.preempted = 0, "", False, False
        self._finishing = False  # a node has trained to the end, or saved
        self._broken: float | None = None  # since when the generation is over
        self._gave_up: float | None = None  # since when a rank of it has given up
        self._failures = 0
        self._absent: list[Removal] = []
        self._since = now  # of the generation
        self._errors: dict[str, str] = {}  # nodes that failed since a step counted last, with what they said
        self._suspects: dict[tuple[str, int], float] = {}

    @property
    def generation(self) -> Generation | None:
        return self.roster.generation

    def has(self, node: str) -> bool:
        """Whether a node is in the generation."""
        return self.generation is not None and node in self.generation.nodes

    # -- what is kept ----------------------------------------------------------------------------------------

    @classmethod
    def resumed(cls, state: StateFile, store: Any, tell: Callable[..., None], now: float) -> Authority:
        """Of a coordinator that was started again: goes on from what was written down, with a store that has nothing.

        A generation in which a step has counted goes on: all of its ranks have met, and need nothing more of what the
        old store had. Another is over. Nodes have the settings' patience to come back. Raises ResilienceError.
        """
        try:
            assert state.table is not None
            table = state.table
            roster = Roster.from_table(table["roster"])
            found = cls(roster.settings, store, tell, now, state)
            found.roster, found._decided, found._finishing = roster, state.decided, bool(table["finishing"])
            found._errors = {str(node): str(why) for node, why in table["errors"].items()}
            found._failures = int(table["failures"])
            found.ended, found.over, found.preempted = (
                str(table["ended"]),
                bool(table["over"]),
                bool(table["preempted"]),
            )
            found._broken = now if table["broken"] else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResilienceError(
                f"{state.path} holds no state that can be taken up ({type(error).__name__}: {error}): remove it, and "
                "resume the run from its last checkpoint"
            ) from error
        found._away, found._back_by = set(roster.nodes), now + roster.settings.patience
        found._refill()
        return found

    def _refill(self) -> None:
        """Gives a new store what ranks may still ask of the old one, or ends the generation."""
        generation, decided, roster = self.generation, self._decided, self.roster
        if roster.templates is not None:
            self._store.set(TEMPLATES, roster.templates.to_json())
        for spare in roster.ready:
            if generation is not None and spare not in generation.nodes:
                self._store.set(f"{SPARE}/{spare}", "1")
        if decided is not None:
            self._store.set(f"{prefix_of_number(decided.generation)}/{DECISION}/{decided.step}", decided.answer)
        if generation is None or self.over:
            return
        for number in range(1, generation.number):  # a rank may have been away for several
            self._store.set(f"{prefix_of_number(number)}/{OVER}", "1")
        all_have_met = decided is not None and self._committed(generation) and decided.answer == "commit"
        if self._broken is None and (all_have_met or self._finishing):
            prefix = prefix_of(generation)
            self._store.add(f"{prefix}/{COPIED}", generation.world)
            for node in generation.nodes.values():
                self._store.add(f"{prefix}/{ENTERED}/{node.id}", node.ranks)
            self._announce(generation)
            return
        if not roster.broken():
            roster.lost(Event("restart", "", time.time(), "the coordinator was started again as ranks were to meet"))
        self._end_generation(self._began)

    def _save(self) -> None:
        """Before the store or a node is told of it."""
        if self._state is not None:
            self._state.save(
                {
                    "roster": self.roster.to_table(),
                    "broken": self._broken is not None,
                    "finishing": self._finishing,
                    "errors": self._errors,
                    "failures": self._failures,
                    "ended": self.ended,
                    "over": self.over,
                    "preempted": self.preempted,
                }
            )

    def is_away(self, node: str) -> bool:
        """Whether a node is to come back, since the coordinator was started again."""
        return node in self._away

    def is_back(self, node: str) -> None:
        self._away.discard(node)
        self._tell("back", node=node, missing=len(self._away))

    # -- what nodes do ---------------------------------------------------------------------------------------

    def came(self, node: Node) -> None:
        self.roster.came(node)
        self._save()
        self._tell("came", node=node.id, host=node.host, nodes=len(self.roster.nodes))

    def leaves(self, node: str, seconds: float) -> bool:
        """A node was told that it will be gone in so many seconds; whether it may go at once."""
        detail = f"it was asked to go within {seconds:g} s"
        self._tell("leaving", node=node, detail=detail)
        self.roster.leaves(Event("leave", node, time.time(), detail))
        return not self.has(node)

    def lose(self, removal: Removal, now: float) -> None:
        """A node is gone without having finished."""
        node, generation = removal.node, self.generation
        if node not in self.roster.nodes:
            return
        self._away.discard(node)
        self._store.set(f"{REMOVED}/{node}", removal.why[:500])
        self._tell("lost", node=node, event=removal.kind, detail=removal.why)
        if generation is not None and node in generation.leaving and self._copied(generation):
            self.roster.forget(node)
        elif self.roster.lost(Event(removal.kind, node, time.time(), removal.why[:500])):
            self._end_generation(now)
            if self._finishing:
                self._stop(f"node {node} was lost when others had ended already ({removal.why}): resume the run")
            elif removal.failed:
                self._note_error(removal)
        elif generation is None and removal.failed:
            self._note_error(removal)
        self._save()

    def _note_error(self, removal: Removal) -> None:
        """A node of the generation, or before the first one any, ended with an error of its own. A second one before a
        step counts ends the run.

        What two nodes fail of, a third would, too: bad data, a wrong setting, a loss that is no number. Nodes that have
        just joined may be wrong themselves, with other data or files: they do not count.
        """
        generation = self.generation
        if generation is not None and generation.number > 1 and not self._committed(generation):
            if any(each.node == removal.node for each in generation.cause):
                return
        self._errors[removal.node] = removal.why
        if len(self._errors) > 1:
            node, why = next(iter(self._errors.items()))
            self._stop(
                f"nodes end with an error, one after the other, and no step counts in between: {node}, {why}. Mend "
                "that, and go on with --resume"
            )

    def finish(self, node: str) -> None:
        """All ranks of a node have ended well: it has left, or has trained to the end."""
        generation = self.generation
        self._tell("done", node=node)
        self.roster.forget(node)
        if generation is not None and node in generation.order():
            self._finishing = True
            if generation.kind == "save":
                self._saved(generation)
            self.over |= not any(each in self.roster.nodes for each in generation.order())
        self._away.discard(node)
        self._save()

    def _saved(self, generation: Generation) -> None:
        """A generation has saved what it held, and the run ends with it."""
        self.preempted = all(event.kind in ("leave", "join") for event in generation.cause)
        why = "nodes were asked to go and too few are left" if self.preempted else "too few nodes were left to train on"
        self.ended = f"{why}: what they held is saved; go on with --resume when there are enough{self._last_error()}"

    def _last_error(self) -> str:
        """What a node has said that ended with an error, if no step has counted since."""
        return "".join(f". {node} had an error: {why}" for node, why in self._errors.items())

    # -- what follows ----------------------------------------------------------------------------------------

    def decide(self, stalls: Mapping[str, Sequence[Stall]], now: float, slept: float) -> list[Removal]:
        """Looks into the store and at ranks that stand still (by node); returns nodes that have to go for it.

        slept: seconds in which this process should have looked and did not, which prove nothing.
        """
        self.count_votes(now)
        self._back_by += slept
        for node in sorted(self._away) if now > self._back_by else ():
            patience = self.roster.settings.patience
            why = f"it has not come back in the {patience:g} s since the coordinator was started again"
            self.lose(Removal(node, "death", why), now)
        try:
            if self._store.check([ENDS]):
                raise ResilienceError(self._store.get(ENDS).decode(errors="replace"))
            self._take_ready()
            self._move_on(now)
        except ResilienceError as error:
            self._stop(str(error))
        for suspect in self._suspects:
            self._suspects[suspect] += slept
        absent, self._absent = self._absent, []
        return absent or self._judge(stalls, now)

    def count_votes(self, now: float) -> None:
        """Decides the vote that all ranks of the generation have given, if there is one: nobody else does."""
        generation = self.generation
        if generation is None or self._broken is not None or self.over:
            return
        prefix, last = prefix_of(generation), self._decided
        if not self._store.check([f"{prefix}/{VOTED}"]):
            return
        step = int(self._store.get(f"{prefix}/{VOTED}"))
        self._store.delete_key(f"{prefix}/{VOTED}")
        self._store.delete_key(f"{prefix}/{VOTES}/{step}")
        counted = self._committed(generation)
        if last is not None and counted and step <= last.step:
            return  # asked again of a coordinator that was started again, whose store has the answer
        try:
            answer: Answer = "regroup" if not self._finishing and self.roster.wants_boundary() else "commit"
        except ResilienceError as error:
            self._stop(str(error))
            return
        self._decided = Decision(generation.number, step, answer)
        if self._state is not None:
            self._state.decide(self._decided)
        self._store.set(f"{prefix}/{DECISION}/{step}", answer)
        if last is not None and counted:  # all have voted on this step, so all have seen what became of the one before
            self._store.delete_key(f"{prefix}/{DECISION}/{last.step}")
        if answer == "regroup":
            self._end_generation(now)

    def _take_ready(self) -> None:
        for node in [node for node in self.roster.nodes.values() if node.id not in self.roster.ready]:
            if self._count(f"{READY}/{node.id}") >= node.ranks:
                if self.roster.templates is None and self._store.check([TEMPLATES]):
                    try:
                        self.roster.templates = Templates.from_json(self._store.get(TEMPLATES))
                    except ValueError as error:
                        raise ResilienceError(f"the ranks' proposal cannot be used: {error}") from error
                self.roster.is_ready(node.id, time.time())
                self._save()
                self._tell("ready", node=node.id)
                if self.generation is not None:
                    self._store.set(f"{SPARE}/{node.id}", "1")

    def _move_on(self, now: float) -> None:
        if self.over or self._away:  # who is lost turns out when all have had the time to come back
            return
        if self.generation is None:
            self._publish(self.roster.next(now - self._began), now)
            return
        if self._broken is not None and self._finishing:  # who has ended cannot be in another generation
            self._stop("a node was lost when others had ended already: resume the run")
            return
        prefix = prefix_of(self.generation)
        if self._gave_up is None and self._broken is None and self._count(f"{prefix}/{GAVE_UP}"):
            self._gave_up = now
        patience = self.roster.settings.heartbeat + SEARCH
        if self._broken is None and self._gave_up is not None and now - self._gave_up > patience:
            self._absent = self._missed(self.generation) if now - self._since > LATE else []
            if not self._absent:
                self._fail(self._store.get(f"{prefix}/{WHY}").decode(errors="replace"), now)
        elif self._broken is not None and (now - self._broken >= TOGETHER or not self.roster.broken()):
            self._publish(self.roster.next(0.0), now)

    def _missed(self, generation: Generation) -> list[Removal]:
        """Nodes whose ranks have not come to a generation in which others have given up: they stand still in what they
        may do for long, or in a library that has no limit of time."""
        prefix = prefix_of(generation)
        why = f"not all of its ranks have come to generation {generation.number} in {LATE:g} s, and others gave up"
        return [
            Removal(node.id, "hang", why)
            for node in generation.nodes.values()
            if node.id in self.roster.nodes and self._count(f"{prefix}/{ENTERED}/{node.id}") < node.ranks
        ]

    def _fail(self, why: str, now: float) -> None:
        """A rank gave up, and nobody turned out to be lost: the same nodes meet again."""
        assert self.generation is not None
        self._failures = 1 if self._committed(self.generation) else self._failures + 1
        if self._failures > MOST_FAILURES:
            raise ResilienceError(
                f"{self._failures} times in a row a rank gave up and no node was lost; the last: {why}"
            )
        self.roster.lost(Event("failure", "", time.time(), why))
        self._end_generation(now)

    def _committed(self, generation: Generation) -> bool:
        """Whether a step has counted in it."""
        return self._decided is not None and self._decided.generation == generation.number

    def _end_generation(self, now: float) -> None:
        assert self.generation is not None
        if self._broken is None and self._committed(self.generation):
            self._errors.clear()
        self._broken = now if self._broken is None else self._broken
        self._save()
        self._store.set(f"{prefix_of(self.generation)}/{OVER}", "1")

    def _publish(self, generation: Generation | None, now: float) -> None:
        """Makes a generation known; None: there is none."""
        if generation is None:
            if self.roster.generation is not None:
                self._stop(f"no node is left: resume from the last checkpoint{self._last_error()}")
            return
        self._broken = self._gave_up = None
        self._since = now
        self._save()
        for node in self.roster.ready:
            if node in generation.nodes:
                self._store.delete_key(f"{SPARE}/{node}")
            else:
                self._store.set(f"{SPARE}/{node}", "1")
        self._forget_keys(generation.number - 2)
        self._announce(generation)
        pipelines = [list(pipeline) for pipeline in generation.pipelines]
        cause = [f"{event.kind} {event.node}".strip() for event in generation.cause]
        self._tell(
            "generation",
            number=generation.number,
            of=generation.kind,
            pipelines=pipelines,
            cause=cause,
            leaving=list(generation.leaving),
        )

    def _announce(self, generation: Generation) -> None:
        self._store.set(f"{GENERATION}/{generation.number}", generation.to_json())
        self._store.set(NEWEST, str(generation.number))

    def _forget_keys(self, number: int) -> None:
        """Of a generation in which no rank can do anything any more. That it is over is kept: a rank that was busy, or
        waited for the coordinator, may ask later."""
        start = f"{prefix_of_number(number)}/"
        for key in map(str, self._store.list_keys()) if number > 0 else ():
            if key.startswith(start) and key != f"{start}{OVER}":
                self._store.delete_key(key)

    def _stop(self, why: str) -> None:
        self.ended, self.over = self.ended or why, True
        self._save()

    def _copied(self, generation: Generation) -> bool:
        return self._count(f"{prefix_of(generation)}/{COPIED}") >= generation.world

    def _count(self, key: str) -> int:
        return int(self._store.add(key, 0))

    # -- who hangs -------------------------------------------------------------------------------------------

    def _judge(self, stalls: Mapping[str, Sequence[Stall]], now: float) -> list[Removal]:
        """Nodes with a rank that was at fault for `SURE` seconds. One that moves before that was a false alarm."""
        guilty = self._guilty(stalls)
        for suspect in [suspect for suspect in self._suspects if suspect not in guilty]:
            del self._suspects[suspect]
            node, local_rank = suspect
            if node in stalls and all(stall.local_rank != local_rank for stall in stalls[node]):
                self.false_alarms += 1
                self._tell("false alarm", node=node, local_rank=local_rank)
        found: dict[str, Removal] = {}
        for suspect, stall in guilty.items():
            if now - self._suspects.setdefault(suspect, now) >= SURE:
                node, local_rank = suspect
                doing = "its process is stopped" if stall.stopped else f"{stall.state} {stall.what}".strip()
                why = f"rank {local_rank} of the node has not moved for {stall.seconds:.1f} s ({doing})"
                found.setdefault(node, Removal(node, "hang", why))
        for suspect in [suspect for suspect in self._suspects if suspect[0] in found]:
            del self._suspects[suspect]
        return list(found.values())

    def _guilty(self, stalls: Mapping[str, Sequence[Stall]]) -> dict[tuple[str, int], Stall]:
        generation, heartbeat = self.generation, self.roster.settings.heartbeat
        here: dict[int, tuple[tuple[str, int], Stall]] = {}
        found: dict[tuple[str, int], Stall] = {}
        for node, each in stalls.items():
            for stall in each:
                suspect = (node, stall.local_rank)
                # What it waits for is known of those in this generation; of others, that they do nothing for long.
                if generation is not None and node in generation.nodes and stall.generation == generation.number:
                    here[generation.ranks_of(node)[stall.local_rank]] = suspect, stall
                elif stall.stopped or stall.state not in WAITS or stall.seconds >= CIRCLE * heartbeat:
                    found[suspect] = stall
        for rank in culprits({rank: stall for rank, (_, stall) in here.items()}, heartbeat):
            found[here[rank][0]] = here[rank][1]
        return found
