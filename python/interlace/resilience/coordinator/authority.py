"""Decisions of the coordinator, published in the store: committed steps, lost nodes, the next generation.

With a `StateFile`, each decision is on disk before it is in the store. A restarted coordinator (`Authority.resumed`)
therefore decides nothing twice. Related modules: `interlace.resilience.coordinator.process` for connections,
`interlace.resilience.coordinator.roster` for new pipelines, `interlace.resilience.supervisor.faults` for the ranks at
fault among stalled ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from interlace.resilience.coordinator.hangs import Hangs, Removal, Report
from interlace.resilience.coordinator.roster import Roster, Templates
from interlace.resilience.coordinator.state import StateFile
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Answer, Decision, Event, Generation, Node
from interlace.resilience.member import (
    ABORTED,
    COPIED,
    DECISION,
    ENDS,
    ENTERED,
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
from interlace.resilience.settings import Settings
from interlace.resilience.supervisor.watch import Stall

if TYPE_CHECKING:
    import torch.distributed as dist

TOGETHER = 0.05  # seconds: losses within it are one event
SEARCH = 1.0  # seconds beyond a heartbeat to find out why a rank aborted the generation
LATE = 60.0  # seconds that a rank has to enter a generation that another rank aborts
MOST_FAILURES = 3  # consecutive aborts by a rank, without a committed step or a lost node
KEPT = ("finishing", "errors", "failures", "ended", "over", "preempted")  # attributes in the state file


class Authority:
    """Decisions on membership and steps of one run.

    store: torch store that this process serves. report: logs an event. state: file for decisions, if any.

    Times are seconds of one clock that the caller reads.

    ended: reason why the run cannot continue; "" while it can, and after training has completed. over: no more
    decisions will be made. preempted: the run is saved, and it ended because its nodes were asked to leave.
    finishing: a node has trained to the end, or saved. failures: aborts in a row. errors: nodes that failed since the
    last committed step, with their errors.
    """

    def __init__(
        self,
        settings: Settings,
        store: dist.Store,
        report: Report,
        now: float,
        state: StateFile | None = None,
    ) -> None:
        self.roster, self._store, self._report_event, self._began = Roster(settings), store, report, now
        self._state = state
        self._decided: Decision | None = None  # the last decided vote
        self._away: set[str] = set()  # nodes that have not reconnected since the coordinator restart
        self._reconnect_deadline = now
        self.ended, self.over, self.preempted, self.finishing = "", False, False, False
        self.failures = 0
        self.errors: dict[str, str] = {}
        self._broken: float | None = None  # time at which the generation ended
        self._aborted: float | None = None  # time at which a rank aborted it
        self._absent: list[Removal] = []
        self._since = now  # start of the generation
        self.hangs = Hangs(settings.heartbeat, report)

    @property
    def generation(self) -> Generation | None:
        return self.roster.generation

    def has(self, node: str) -> bool:
        """True if a node is in the generation."""
        return self.generation is not None and node in self.generation.nodes

    # -- state file and restart ------------------------------------------------------------------------------

    @classmethod
    def resumed(cls, state: StateFile, store: dist.Store, report: Report, now: float) -> Authority:
        """Authority of a restarted coordinator, from its state file and with an empty store.

        A generation with a committed step continues: all of its ranks have connected to each other, and no longer need
        the old store. Any other generation is over. Nodes may reconnect within the settings' patience. Raises
        ResilienceError.
        """
        try:
            assert state.table is not None
            table = state.table
            roster = Roster.from_table(table["roster"])
            authority = cls(roster.settings, store, report, now, state)
            authority.roster, authority._decided = roster, state.decided
            for name in KEPT:
                setattr(authority, name, type(getattr(authority, name))(table[name]))
            authority._broken = now if table["broken"] else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResilienceError(
                f"{state.path}: invalid coordinator state ({type(error).__name__}: {error}): remove the file, and "
                "resume the run from its last checkpoint"
            ) from error
        authority._away, authority._reconnect_deadline = set(roster.nodes), now + roster.settings.patience
        authority._refill()
        return authority

    def _refill(self) -> None:
        """Fills a new store with the keys that ranks may still request, or ends the generation."""
        generation, decided, roster = self.generation, self._decided, self.roster
        if roster.templates is not None:
            self._store.set(TEMPLATES, roster.templates.to_json())
        if generation is not None:
            self._mark_spares(generation)
        if decided is not None:
            self._store.set(f"{prefix_of_number(decided.generation)}/{DECISION}/{decided.step}", decided.answer)
        if generation is None or self.over:
            return
        for number in range(1, generation.number):  # a rank may have missed several
            self._store.set(f"{prefix_of_number(number)}/{OVER}", "1")
        all_have_met = decided is not None and self._committed(generation) and decided.answer == "commit"
        if self._broken is None and (all_have_met or self.finishing):
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
        """Writes the state file. Called before a decision is published in the store or sent to a node."""
        if self._state is not None:
            kept = {name: getattr(self, name) for name in KEPT}
            self._state.save({"roster": self.roster.to_table(), "broken": self._broken is not None, **kept})

    def is_away(self, node: str) -> bool:
        """True if a node has not reconnected yet since the coordinator restart."""
        return node in self._away

    def reconnected(self, node: str) -> None:
        self._away.discard(node)
        self._report_event("back", node=node, missing=len(self._away))

    # -- events from nodes -----------------------------------------------------------------------------------

    def join(self, node: Node) -> None:
        self.roster.join(node)
        self._save()
        self._report_event("came", node=node.id, host=node.host, nodes=len(self.roster.nodes))

    def leaves(self, node: str, seconds: float) -> bool:
        """Records that a node was asked to leave within `seconds`. Returns whether it may leave at once."""
        detail = f"it was asked to leave within {seconds:g} s"
        self._report_event("leaving", node=node, detail=detail)
        self.roster.leaves(Event("leave", node, time.time(), detail))
        return not self.has(node)

    def lose(self, removal: Removal, now: float) -> None:
        """Records that a node is lost before it has finished."""
        node, generation = removal.node, self.generation
        if node not in self.roster.nodes:
            return
        self._away.discard(node)
        self._store.set(f"{REMOVED}/{node}", removal.why[:500])
        self._report_event("lost", node=node, event=removal.kind, detail=removal.why)
        if generation is not None and node in generation.leaving and self._copied(generation):
            self.roster.forget(node)
        elif self.roster.lost(Event(removal.kind, node, time.time(), removal.why[:500])):
            self._end_generation(now)
            if self.finishing:
                self._stop(f"node {node} was lost after other nodes had finished ({removal.why}): resume the run")
            elif removal.failed:
                self._note_error(removal)
        elif generation is None and removal.failed:
            self._note_error(removal)
        self._save()

    def _note_error(self, removal: Removal) -> None:
        """Records that a node of the generation ended with its own error; before the first generation, any node.

        A second such node without a committed step in between ends the run: the cause is probably common to all nodes,
        such as bad data, a wrong setting or a NaN loss. Nodes that have just joined are not counted, because their own
        data or files may be wrong.
        """
        generation = self.generation
        if generation is not None and generation.number > 1 and not self._committed(generation):
            if any(each.node == removal.node for each in generation.cause):
                return
        self.errors[removal.node] = removal.why
        if len(self.errors) > 1:
            node, why = next(iter(self.errors.items()))
            self._stop(
                f"several nodes failed without a committed step in between; the first: {node}, {why}. Fix the error, "
                "then continue with --resume"
            )

    def finish(self, node: str) -> None:
        """Records that all ranks of a node ended successfully: it has left, or has completed training."""
        generation = self.generation
        self._report_event("done", node=node)
        self.roster.forget(node)
        if generation is not None and node in generation.order():
            self.finishing = True
            if generation.kind == "save":
                self._saved(generation)
            joined = self._joined_too_late(generation)
            self.over |= not any(each in self.roster.nodes and each not in joined for each in generation.order())
        self._away.discard(node)
        self._save()

    def _joined_too_late(self, generation: Generation) -> set[str]:
        """Nodes that joined with a generation although the step before it was the last one: they have nothing to train.

        Called when a node of the generation has completed training. The first node is never among them: its first rank
        writes the closing report, even if it took over from a lost node.
        """
        if self._decided is None or self._committed(generation):
            return set()
        return {event.node for event in generation.cause if event.kind == "join"} - {generation.order()[0]}

    def _saved(self, generation: Generation) -> None:
        """Records that a "save" generation has saved its state. The run ends with it."""
        self.preempted = all(event.kind in ("leave", "join") for event in generation.cause)
        why = "nodes were asked to leave and too few remain" if self.preempted else "too few nodes remain to train on"
        self.ended = f"{why}: the state is saved; continue with --resume when enough nodes are up{self._last_error()}"

    def _last_error(self) -> str:
        """Errors of nodes that failed since the last committed step."""
        return "".join(f". {node} had an error: {why}" for node, why in self.errors.items())

    # -- decisions -------------------------------------------------------------------------------------------

    def decide(self, stalls: Mapping[str, Sequence[Stall]], now: float, slept: float) -> list[Removal]:
        """Evaluates the store and the stalled ranks (by node); returns nodes to remove.

        slept: seconds in which this process itself was not running. They are not counted against ranks or nodes.
        """
        self.count_votes(now)
        self._reconnect_deadline += slept
        for node in sorted(self._away) if now > self._reconnect_deadline else ():
            patience = self.roster.settings.patience
            why = f"it did not reconnect within {patience:g} s after the restart of the coordinator"
            self.lose(Removal(node, "death", why), now)
        try:
            if self._store.check([ENDS]):
                raise ResilienceError(self._store.get(ENDS).decode(errors="replace"))
            self._take_ready()
            self._move_on(now)
        except ResilienceError as error:
            self._stop(str(error))
        self.hangs.slept(slept)
        absent, self._absent = self._absent, []
        return absent or self.hangs.hung(stalls, self.generation, now)

    def count_votes(self, now: float) -> None:
        """Decides a vote that all ranks of the generation have cast. No other code decides votes."""
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
            return  # repeated vote after a coordinator restart: the store has the answer
        try:
            answer: Answer = "regroup" if not self.finishing and self.roster.wants_boundary() else "commit"
        except ResilienceError as error:
            self._stop(str(error))
            return
        self._decided = Decision(generation.number, step, answer)
        if self._state is not None:
            self._state.decide(self._decided)
        self._store.set(f"{prefix}/{DECISION}/{step}", answer)
        if last is not None and counted:  # all ranks voted on this step, so all have read the previous decision
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
                self._report_event("ready", node=node.id)
                if self.generation is not None:
                    self._store.set(f"{SPARE}/{node.id}", "1")

    def _move_on(self, now: float) -> None:
        if self.over or self._away:  # lost nodes are known only after the time to reconnect
            return
        if self.generation is None:
            self._publish(self.roster.next(now - self._began), now)
            return
        if self._broken is not None and self.finishing:  # finished ranks cannot enter another generation
            self._stop("a node was lost after other nodes had finished: resume the run")
            return
        prefix = prefix_of(self.generation)
        if self._aborted is None and self._broken is None and self._count(f"{prefix}/{ABORTED}"):
            self._aborted = now
        patience = self.roster.settings.heartbeat + SEARCH
        if self._broken is None and self._aborted is not None and now - self._aborted > patience:
            self._absent = self._missing_nodes(self.generation) if now - self._since > LATE else []
            if not self._absent:
                self._fail(self._store.get(f"{prefix}/{WHY}").decode(errors="replace"), now)
        elif self._broken is not None and (now - self._broken >= TOGETHER or not self.roster.broken()):
            self._publish(self.roster.next(0.0), now)

    def _missing_nodes(self, generation: Generation) -> list[Removal]:
        """Nodes whose ranks have not entered a generation that others aborted.

        They hang in an operation with a long limit, or in a library without a timeout.
        """
        prefix = prefix_of(generation)
        why = f"not all of its ranks entered generation {generation.number} within {LATE:g} s, and other ranks aborted"
        return [
            Removal(node.id, "hang", why)
            for node in generation.nodes.values()
            if node.id in self.roster.nodes and self._count(f"{prefix}/{ENTERED}/{node.id}") < node.ranks
        ]

    def _fail(self, reason: str, now: float) -> None:
        """Ends a generation that a rank aborted although no node is lost. The same nodes form the next one."""
        assert self.generation is not None
        self.failures = 1 if self._committed(self.generation) else self.failures + 1
        if self.failures > MOST_FAILURES:
            raise ResilienceError(
                f"a rank aborted {self.failures} times in a row although no node was lost; the last: {reason}"
            )
        self.roster.lost(Event("failure", "", time.time(), reason))
        self._end_generation(now)

    def _committed(self, generation: Generation) -> bool:
        """True if a step has been committed in the generation."""
        return self._decided is not None and self._decided.generation == generation.number

    def _end_generation(self, now: float) -> None:
        assert self.generation is not None
        if self._broken is None and self._committed(self.generation):
            self.errors.clear()
        self._broken = now if self._broken is None else self._broken
        self._save()
        self._store.set(f"{prefix_of(self.generation)}/{OVER}", "1")

    def _publish(self, generation: Generation | None, now: float) -> None:
        """Publishes a generation; None: no generation can be made."""
        if generation is None:
            if self.roster.generation is not None:
                self._stop(f"no node is left: resume from the last checkpoint{self._last_error()}")
            return
        self._broken = self._aborted = None
        self._since = now
        self._save()
        self._mark_spares(generation)
        self._forget_keys(generation.number - 2)
        self._announce(generation)
        pipelines = [list(pipeline) for pipeline in generation.pipelines]
        cause = [f"{event.kind} {event.node}".strip() for event in generation.cause]
        self._report_event(
            "generation",
            number=generation.number,
            of=generation.kind,
            pipelines=pipelines,
            cause=cause,
            leaving=list(generation.leaving),
        )

    def _mark_spares(self, generation: Generation) -> None:
        for node in self.roster.ready:
            if node in generation.nodes:
                self._store.delete_key(f"{SPARE}/{node}")
            else:
                self._store.set(f"{SPARE}/{node}", "1")

    def _announce(self, generation: Generation) -> None:
        self._store.set(f"{GENERATION}/{generation.number}", generation.to_json())
        self._store.set(NEWEST, str(generation.number))

    def _forget_keys(self, number: int) -> None:
        """Deletes the keys of an old generation except "over".

        A rank that was busy, or waited for the coordinator, may read that key later.
        """
        start = f"{prefix_of_number(number)}/"
        for key in map(str, self._store.list_keys()) if number > 0 else ():
            if key.startswith(start) and key != f"{start}{OVER}":
                self._store.delete_key(key)

    def _stop(self, reason: str) -> None:
        self.ended, self.over = self.ended or reason, True
        self._save()

    def _copied(self, generation: Generation) -> bool:
        return self._count(f"{prefix_of(generation)}/{COPIED}") >= generation.world

    def _count(self, key: str) -> int:
        return int(self._store.add(key, 0))
