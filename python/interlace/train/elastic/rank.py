"""One rank of an elastic run. It survives the loss of other nodes and fetches missing state in the next generation.

    generation -> process groups -> layout -> missing layers -> training, until a node is lost, joins or leaves

The coordinator sets the members of a generation (`interlace.resilience`). Every rank computes the same layout by
itself. A step counts when all ranks have voted for it. A dropped step is repeated in the next generation with the same
samples. A rank keeps its part of the model in memory from one generation to the next.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import platform
import signal
import time
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from torch import Tensor

from interlace.layout import Layout
from interlace.resilience.coordinator.layouts import held_by, sizes_of
from interlace.resilience.environment import ERROR, PROGRESS, STOPPED
from interlace.resilience.errors import ResilienceError
from interlace.resilience.member import Member
from interlace.resilience.supervisor.progress import allowing
from interlace.resilience.takeover import assign, copy
from interlace.train import runfolder
from interlace.train.checkpoint.checkpoints import seconds_to_write
from interlace.train.checkpoint.identity import canonical_names, identity_of
from interlace.train.config.load import ConfigError, dumps
from interlace.train.config.sections import Config
from interlace.train.data.feed import batch_notes, report_left_out
from interlace.train.elastic import state as states
from interlace.train.elastic.config import check
from interlace.train.elastic.log import Clocks, Recoveries, Recovery
from interlace.train.elastic.meeting import Meeting, Over
from interlace.train.elastic.proposals import microbatches, propose, templates_of
from interlace.train.elastic.state import Held, Note
from interlace.train.job import Job, say_trained
from interlace.train.launch import launcher, lock
from interlace.train.models.build import architecture, initialize
from interlace.train.models.costs import flop_costs
from interlace.train.models.tuning import rates
from interlace.train.observers.base import Line, Observer, Outputs
from interlace.train.optim import state_sizes
from interlace.train.progress import Membership, Progress
from interlace.train.report import finished, trackers
from interlace.train.report.finished import Ended
from interlace.train.report.flops import Meter
from interlace.train.report.trackers import Trackers, made
from interlace.train.scheduling import step_options
from interlace.train.trainer import make_checkpoints

LONGEST_START = 1800.0
"""Maximum seconds from start until a rank is ready to train."""


def run(config: Config, *, source: str, resume: str | None = None) -> int:
    """Trains as a rank started by a supervisor; returns the exit code.

    0: all steps are trained. `STOPPED`: the node has left, or too few nodes were left and their state is saved. Raises
    ConfigError for errors that the user can fix; ResilienceError if the run cannot go on.
    """
    check(config, source=source)
    for number in (signal.SIGINT, signal.SIGTERM):  # the supervisor handles these signals
        signal.signal(number, signal.SIG_IGN)
    try:
        with contextlib.ExitStack() as cleanup:
            each = Rank(config, source, resume, cleanup)
            ended = each.train()
        if ended is not None:
            with allowing("the closing report", LONGEST_START):
                finished.close(ended)
    except Exception as error:
        with contextlib.suppress(OSError):  # for the supervisor, which otherwise has only the log
            Path(os.environ[PROGRESS] + ERROR).write_text(f"{type(error).__name__}: {error}")
        raise
    return 0 if each.finished else STOPPED


class Rank:
    """State that lives as long as the process."""

    def __init__(self, config: Config, source: str, resume: str | None, cleanup: contextlib.ExitStack) -> None:
        self.resume = resume
        self.member = Member.from_environment(config.parallel.timeout)
        self.member.progress.idle("reading data and building the model", LONGEST_START)
        self.job = job = Job(config, source, cleanup, Membership())
        job.choose_device()
        if job.kind != "cpu":
            raise ConfigError(
                f"{source}: --elastic has not been tried on GPUs: set run.device = 'cpu', or train without it"
            )
        job.take_device(self.member.local_rank)
        job.prepare_torch()
        trackers.check(config, source=source)  # any rank may become rank 0
        job.make_model()  # on meta; each generation has a copy
        self.templates = templates_of(config, job.model, flop_costs(config, job.model))
        job.make_data()
        self.first = canonical_names(job.model)
        self.order = [name for name, _ in job.model.named_parameters()]
        trained = state_sizes(config, job.model, rates(config, job.model))
        with job.blaming("--elastic"):
            lane = self.templates.layout([self.templates.lane_size])
            self.sizes = states.sizes_of(job.model, trained, lane, config)
        self.note = Note(platform.node(), _digest(dumps(config)), _digest(job.prints()))
        self.nonce = ""  # of the lock of the run folder; "" until the folder is known
        self.finished = False  # all steps are trained
        self.recovery: Recovery | None = None  # of the last generation in which a step counted
        self.held: Held | None = None
        self.has_feed = False
        self.clocks = Clocks()
        # Rank 0 counts FLOPs. The slow setup runs here, before other ranks wait for it.
        self.meter = Meter(job.model, [0.0], recompute=config.train.recompute)

    @cached_property
    def layers(self) -> dict[str, tuple[str, int]]:
        from interlace.run.graph import parameter_layers

        return parameter_layers(self.job.model)

    def train(self) -> Ended | None:
        """Trains from generation to generation. Returns the finished run on the rank that reports it."""
        job = self.job
        self.member.propose(propose(job.config, job.model, self.templates, source=job.source))
        gc.collect()
        gc.freeze()  # later collections skip these objects and quickly find models of past generations
        number = 0
        while True:
            patience = job.config.parallel.timeout if number else LONGEST_START
            generation = self.member.next_generation(number, patience)
            number = generation.number
            self.clocks.formed = time.time()
            try:
                with Meeting(self.member, generation, job.config.parallel.timeout) as meeting:
                    is_over, ended = self._in_generation(meeting)
                if is_over:
                    if job.lock is not None:
                        job.lock.release()
                    return ended
            except Over as over:
                self.clocks.gave_up()
                parallel = getattr(job, "parallel", None)
                if parallel is not None and parallel.channel is not None:
                    parallel.channel.close()  # its lanes have shared memory
                launcher.note(f"interlace: generation {number} is over: {over}")
            gc.collect()

    # -- one generation --------------------------------------------------------------------------------------

    def _in_generation(self, meeting: Meeting) -> tuple[bool, Ended | None]:
        """(True if the run is over for this rank, the finished run on the rank that reports it)."""
        generation, job = meeting.generation, self.job
        self.member.progress.idle("forming a generation", job.config.parallel.timeout)
        notes = self._tell(meeting)
        if meeting.rank != 0 and job.lock is not None:  # the lock belongs to rank 0, which is another rank now
            job.lock.leave()
            job.lock = None
        if meeting.rank >= meeting.world:
            self._give(meeting, notes)
            return self.member.released(generation, job.config.parallel.timeout), None
        meeting.join(seconds_to_write(self.identity))
        self._find_folder(meeting, notes)
        if generation.kind == "save":
            self._save(meeting, notes)
            return True, None
        layout = self.templates.layout(sizes_of(generation))
        model = deepcopy(job.model)
        mine = self._held_by(layout, meeting.rank)
        leader = leader_of(notes)
        current = self.held if self.held is not None and leader >= 0 and self._is_current(notes) else None
        before, cut = ({}, {}) if current is None else (current.tensors, current.regions)
        weights = {name: before[name][states.WEIGHT] for name in mine if name in before}
        states.give(model, {name: weight for name, weight in weights.items() if name not in cut})
        with allowing("making its pipelines", LONGEST_START):
            with job.blaming("--elastic"):
                job.make_parallel(model, layout, step_options(job.config), coordinated=True)
            states.give_pieces(job.parallel, weights)
            membership = Voting(self, meeting)
            job.membership = membership
            self._make_feed(meeting)
            self._make_trainer(meeting, membership)
        trainer = job.trainer
        recovery = Recovery.of(generation, sum(membership.microbatches(0, 0)))
        with allowing("filling its layers", LONGEST_START):
            if leader < 0:
                self._begin(meeting)
            else:
                self._take_over(meeting, notes, before, recovery)
        # The old state is dropped only after the barrier: by then every rank has received its part. A rank whose
        # barrier fails keeps both.
        now = Held.of(trainer)
        self.held = now.beside(current)
        meeting.peers.barrier("having all layers")
        self.held = now
        self.member.copied(generation)
        self.clocks.began(recovery)
        return self._train(meeting)

    def _tell(self, meeting: Meeting) -> dict[int, Note]:
        """Publishes the state of this rank and reads the notes of the others."""
        note, held = self.note, self.held
        folder = str(self.job.folder) if self.nonce else ""
        note = Note(note.host, note.config, note.data, folder=folder, nonce=self.nonce, halted=self.clocks.halted())
        if held is not None:
            note = Note(**{**vars(note), "step": held.step, "held": states.bits_of(held.tensors, self.order)})
            meeting.tell("progress", held.progress.model_dump_json())
        meeting.tell("note", note.to_json())
        notes = {rank: Note.from_json(meeting.hear("note", rank), rank) for rank in range(meeting.generation.sources)}
        leader = notes[max(leader_of(notes), 0)]
        for what in ("config", "data"):
            if getattr(leader, what) != getattr(self.note, what):
                raise ConfigError(
                    f"{self.job.source}: this node has another {what} than the run has on {leader.host}: start all "
                    "nodes with one config, and share or copy the data"
                )
        return notes

    def _is_current(self, notes: dict[int, Note]) -> bool:
        return self.held is not None and self.held.step == notes[leader_of(notes)].step

    def _give(self, meeting: Meeting, notes: dict[int, Note]) -> None:
        """On a rank whose node leaves: sends the state that others need."""
        takeover = self._takeover(meeting, notes)
        if takeover.transfers and not takeover.orphans:  # otherwise the training ranks load a checkpoint
            held = {} if self.held is None else self.held.tensors
            copy(takeover, meeting.rank, meeting.copying(), held, {}, done=self.member.progress.tick)

    def _takeover(self, meeting: Meeting, notes: dict[int, Note]) -> Any:
        layout = self.templates.layout(sizes_of(meeting.generation))
        step = notes[leader_of(notes)].step
        return assign(
            {rank: self._held_by(layout, rank) for rank in range(meeting.world)},
            {rank: set(note.names(self.order)) if note.step == step else () for rank, note in notes.items()},
            self.sizes,
            {rank: note.host for rank, note in notes.items()},
        )

    def _held_by(self, layout: Layout, rank: int) -> list[str]:
        """Parameters that `rank` holds, in whole or in part."""
        sizes = self.sizes[rank % len(self.sizes)]
        return [name for name in held_by(layout, rank, self.layers, self.first) if name in sizes]

    def _take_over(
        self, meeting: Meeting, notes: dict[int, Note], before: dict[str, dict[str, Tensor]], recovery: Recovery
    ) -> None:
        """Fills the trainer from this rank's state and its peers, at the progress of the leader."""
        trainer = self.job.trainer
        initialize(self.job.parallel, seed=self.job.config.run.seed, weights=False)  # buffers
        takeover = self._takeover(meeting, notes)
        leader = leader_of(notes)
        recovery.halted = notes[leader].halted
        if takeover.orphans:
            self._go_back(meeting, takeover.orphans)
            recovery.step = trainer.step + 1
            return
        states.adopt(trainer, before)
        with self.clocks.copying():
            if takeover.transfers:
                into, group = states.tensors_of(trainer), meeting.copying()
                recovery.received = copy(takeover, meeting.rank, group, before, into, done=self.member.progress.tick)
        recovery.bytes, recovery.transfers = takeover.bytes(self.sizes), len(takeover.transfers)
        try:
            progress = Progress.model_validate_json(meeting.hear("progress", leader))
        except ValidationError as error:
            raise ResilienceError(f"rank {leader} says what is no progress: {error.errors()[0]['msg']}") from None
        trainer.go_on(progress)
        recovery.step = progress.step + 1

    def _begin(self, meeting: Meeting) -> None:
        """Starts without any state: from random or stored weights, or from the run's newest checkpoint."""
        job, trainer = self.job, self.job.trainer
        goes_on = meeting.peers.on_first("looking for a checkpoint", lambda: self._has_checkpoint())
        weights = None if goes_on else job.stored()
        initialize(job.parallel, seed=job.config.run.seed, stored=weights, weights=not goes_on)
        if trainer.averages is not None:  # created from weights without values
            trainer.averages.begin_here(list(trainer.averages.held))
        if goes_on:
            path = trainer.resume(runfolder.resolve(job.config, self.resume)[1] if self.resume else None)
            if meeting.rank == 0:
                launcher.say(f"interlace: going on from {path}")

    def _has_checkpoint(self) -> bool:
        return runfolder.has_checkpoint(self.job.folder)

    def _go_back(self, meeting: Meeting, orphans: tuple[str, ...]) -> None:
        """Goes back to the last checkpoint: some layers are lost with all ranks that held them."""
        some = ", ".join(orphans[:3]) + (f" and {len(orphans) - 3} more" if len(orphans) > 3 else "")
        if not meeting.peers.on_first("looking for a checkpoint", lambda: self._has_checkpoint()):
            self._end(
                f"no node that is left has {some}, and there is no checkpoint yet: start the run anew, with more "
                "resilience.faults or a smaller checkpoint.every"
            )
        self.held = None  # this rank's weights are overwritten from here on
        path = self.job.trainer.resume()
        if meeting.rank == 0:
            launcher.say_error(f"interlace: no node that is left has {some}: going back to {path}")

    def _end(self, why: str) -> NoReturn:
        """Ends the run on all nodes, since a further generation would fail in the same way."""
        self.member.end(why)
        raise ResilienceError(why)

    # -- parts of a generation ------------------------------------------------------------------------------

    @cached_property
    def identity(self) -> dict[str, Any]:
        return identity_of(self.job.model, architecture(self.job.config))

    def _find_folder(self, meeting: Meeting, notes: dict[int, Note]) -> None:
        """Sets the run folder, which the first generation creates, and takes its lock on rank 0."""
        job = self.job
        known = next(((note.folder, note.nonce) for _, note in sorted(notes.items()) if note.folder), None)
        if known is None:
            # Rank 0 creates it. If rank 0 is lost before others read the path, the next rank 0 creates another.
            job.find_folder(meeting, self.resume)
            if meeting.rank == 0 and job.lock is not None:
                self.nonce = job.lock.nonce
            self.nonce = meeting.gather("locking the run folder", self.nonce)[0]
            runfolder.check_shared(job.folder, meeting)
            if meeting.rank == 0:
                if self.resume is None:
                    runfolder.write_config(job.folder, job.config)
                    runfolder.point_latest(job.folder)
                report_left_out([job.train_data, job.held_out], job.folder, launcher.note)
                say_trained(job.config, job.model)
        else:
            job.folder, self.nonce = Path(known[0]), known[1]
        if meeting.rank == 0 and job.lock is None:
            job.lock = lock.join(job.folder, self.nonce)

    def _make_feed(self, meeting: Meeting) -> None:
        """The feed, which stays from one generation to the next."""
        if self.has_feed:
            return
        self.job.make_feed()
        self.has_feed = True
        for line in batch_notes(self.job.feed.loader) if meeting.rank == 0 else ():
            launcher.note(line)

    def _make_trainer(self, meeting: Meeting, membership: Voting) -> None:
        job, first = self.job, meeting.rank == 0
        job.trackers = Trackers(job.config, job.folder, made(job.config, source=job.source) if first else {})
        meter = self.meter if first else None
        job.make_trainer(Outputs(job.folder, job.lock, job.trackers, meter=meter), [membership.recoveries])
        meeting.all_made()

    # -- training --------------------------------------------------------------------------------------------

    def _train(self, meeting: Meeting) -> tuple[bool, Ended | None]:
        job = self.job
        self.member.progress.computing()
        outcome: dict[str, Any] = {}
        try:
            outcome = job.trainer.run()
        finally:
            # Drops the gradients of an aborted step; the state is that of the last counted step.
            job.parallel.zero_grad()
            self.held = Held.of(job.trainer)
            if not outcome.get("finished"):
                job.trackers.close("stopped")
        if not outcome["finished"]:
            return False, None
        self.finished = True
        job.feed.close()
        return True, job.ended(outcome, job.page()) if meeting.rank == 0 else None

    def _save(self, meeting: Meeting, notes: dict[int, Note]) -> None:
        """Saves the model if the remaining nodes hold all of it. They are too few to train on."""
        job = self.job
        meeting.all_made()
        leader = leader_of(notes)
        current = self.held if leader >= 0 and self._is_current(notes) else None
        lane = len(self.sizes)
        there = {
            (name, rank % lane)
            for rank, note in notes.items()
            if note.step == notes[max(leader, 0)].step
            for name in note.names(self.order)
        }
        needed = {(name, place) for place, sizes in enumerate(self.sizes) for name in sizes}
        missing = needed - there
        few = "too few nodes are left to train on"
        if missing or leader < 0:
            last = "resume from the last checkpoint" if self._has_checkpoint() else "there is no checkpoint"
            self._end(f"{few}, and {len({name for name, _ in missing})} of the weights are gone with others: {last}")
        progress = Progress.model_validate_json(meeting.hear("progress", leader))
        outputs = Outputs(job.folder, job.lock)
        checkpoints = make_checkpoints(job.config, job.model, self.identity, outputs, meeting.peers, job.stored)
        weights, state = ({}, {}) if current is None else current.to_save()
        # The pending log line and validation of the step follow when the run resumes.
        table = progress.model_copy(update={"due": False}).model_dump()
        best = -1 if job.config.checkpoint.best is None else progress.verdict.step
        path = checkpoints.save(progress.step, weights, state, table, best=best)
        if meeting.rank == 0:
            launcher.say(f"interlace: {few}: what they hold is saved as {path}; resume when there are more nodes")


class Voting(Membership):
    """Membership in one generation: every step is voted on."""

    def __init__(self, owner: Rank, meeting: Meeting) -> None:
        super().__init__(peers=meeting.peers)
        self.owner, self.meeting = owner, meeting
        self.recoveries = RecoveryMetrics()
        self._sizes, self._total = sizes_of(meeting.generation), microbatches(owner.job.config)
        self._leaves = False

    def commit(self, step: int) -> None:
        """Votes on a step. Raises Over if the step does not count."""
        owner = self.owner
        answer = owner.member.vote(self.meeting.generation, step)
        if answer == "abort":
            raise Over(f"step {step} does not count: not all ranks have its gradients")
        self._leaves = answer == "regroup"
        recovery = owner.clocks.counted()
        if recovery is not None:
            self.recoveries.values |= recovery.metrics()
            if self.meeting.rank == 0:
                Recoveries(owner.job.folder).add(recovery, owner.recovery, owner.job.config)
            owner.recovery = recovery

    def leaves(self) -> bool:
        return self._leaves

    def microbatches(self, rows: int, count: int) -> tuple[int, ...]:
        """Number of microbatches of each replica. Their sum is the same in all generations."""
        return self.owner.templates.shares(self._sizes, rows or self._total)


class RecoveryMetrics(Observer):
    """Adds the metrics of a recovery to the next line."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def measure(self, line: Line, progress: Progress) -> None:
        if line.values:
            line.values |= self.values
            self.values = {}


def leader_of(notes: dict[int, Note]) -> int:
    """Leader: the lowest rank among those with the latest step; -1 if no rank has state."""
    furthest = max(note.step for note in notes.values())
    return -1 if furthest < 0 else min(rank for rank, note in notes.items() if note.step == furthest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
