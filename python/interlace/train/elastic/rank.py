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
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from interlace.layout import Layout
from interlace.resilience.coordinator.layouts import held_by, sizes_of
from interlace.resilience.environment import ERROR, PROGRESS, STOPPED
from interlace.resilience.errors import ResilienceError
from interlace.resilience.member import Member
from interlace.resilience.supervisor.progress import allowing
from interlace.resilience.takeover import Takeover, Tensors, assign, copy
from interlace.run.graph import parameter_layers
from interlace.train import runfolder
from interlace.train.checkpoint.checkpoints import seconds_to_write
from interlace.train.checkpoint.identity import canonical_names, identity_of
from interlace.train.config.load import ConfigError, blaming, dumps
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed, batch_notes, report_left_out
from interlace.train.elastic import state as states
from interlace.train.elastic.config import check
from interlace.train.elastic.log import Clocks, Recovery, write_recovery
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
from interlace.train.report import finished
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
    """State of a rank that lives as long as its process."""

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
        made(config, source=source)  # checked on all ranks, since any of them may become rank 0
        job.make_model()  # on meta; each generation has a copy
        self.identity = identity_of(job.model, architecture(config))
        self.layers = parameter_layers(job.model)
        self.templates = templates_of(config, job.model, flop_costs(config, job.model))
        job.make_data()
        self.first = canonical_names(job.model)
        self.order = [name for name, _ in job.model.named_parameters()]
        trained = state_sizes(config, job.model, rates(config, job.model))
        with blaming(f"{source}: --elastic"):
            lane = self.templates.layout([self.templates.lane_size])
            self.sizes = states.sizes_of(job.model, trained, lane, config)
        self.note = Note(platform.node(), _digest(dumps(config)), _digest(job.prints()))
        self.nonce = ""  # of the lock of the run folder; "" until the folder is known
        self.finished = False  # all steps are trained
        self.recovery: Recovery | None = None  # of the last generation in which a step counted
        self.held: Held | None = None
        self.feed: Feed | None = None  # the same in all generations
        self.clocks = Clocks()
        # Rank 0 counts FLOPs. The slow setup runs here, before other ranks wait for it.
        self.meter = Meter(job.model, [0.0], recompute=config.train.recompute)

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
                    self.member.progress.idle("forming a generation", job.config.parallel.timeout)
                    is_over, ended = Turn(self, meeting).take()
                if is_over:
                    if job.lock is not None:
                        job.lock.release()
                    return ended
            except Over as over:
                self.clocks.gave_up()
                job.close_channel()  # its lanes have shared memory
                launcher.note(f"interlace: generation {number} is over: {over}")
            gc.collect()

    def end(self, why: str) -> NoReturn:
        """Ends the run on all nodes, since a further generation would fail in the same way."""
        self.member.end(why)
        raise ResilienceError(why)


class Turn:
    """Part of a rank in one generation.

    notes: of all ranks. leader: the rank whose state the others continue from; -1 if no rank has state. step: of its
    state. layout: of the training ranks. current: this rank's state, if it is of the leader's step.
    """

    def __init__(self, owner: Rank, meeting: Meeting) -> None:
        self.owner, self.meeting, self.job = owner, meeting, owner.job
        self.notes = self._tell()
        self.leader = leader_of(self.notes)
        self.step = self.notes[max(self.leader, 0)].step
        held = owner.held
        self.current = held if held is not None and self.leader >= 0 and held.step == self.step else None

    def take(self) -> tuple[bool, Ended | None]:
        """(True if the run is over for this rank, the finished run on the rank that reports it)."""
        owner, meeting, job, current = self.owner, self.meeting, self.job, self.current
        generation = meeting.generation
        if meeting.rank != 0 and job.lock is not None:  # the lock belongs to rank 0, which is another rank now
            job.lock.leave()
            job.lock = None
        if meeting.rank >= meeting.world:
            self._give()
            return owner.member.released(generation, job.config.parallel.timeout), None
        meeting.join(seconds_to_write(owner.identity))
        self._find_folder()
        if generation.kind == "save":
            self._save()
            return True, None
        model = deepcopy(job.model)
        before, cut = ({}, {}) if current is None else (current.tensors, current.regions)
        mine = self._held_by(meeting.rank)
        weights = {name: before[name][states.WEIGHT] for name in mine if name in before}
        states.give(model, {name: weight for name, weight in weights.items() if name not in cut})
        with allowing("making its pipelines", LONGEST_START):
            with blaming(f"{job.source}: --elastic"):
                job.make_parallel(model, self.layout, step_options(job.config), coordinated=True)
            states.give_pieces(job.parallel, weights)
            membership = Voting(owner, meeting)
            job.membership = membership
            self._make_feed()
            self._make_trainer(membership)
        trainer = job.trainer
        recovery = Recovery.of(generation, sum(membership.microbatches(0, 0)))
        with allowing("filling its layers", LONGEST_START):
            if self.leader < 0:
                self._begin()
            else:
                self._take_over(before, recovery)
        # The old state is dropped only after the barrier: by then every rank has received its part. A rank whose
        # barrier fails keeps both.
        now = Held.of(trainer)
        owner.held = now.beside(current)
        meeting.peers.barrier("having all layers")
        owner.held = now
        owner.member.copied(generation)
        owner.clocks.began(recovery)
        return self._train()

    def _tell(self) -> dict[int, Note]:
        """Publishes the state of this rank and reads the notes of the others."""
        owner, meeting, held = self.owner, self.meeting, self.owner.held
        folder = str(self.job.folder) if owner.nonce else ""
        note = replace(owner.note, folder=folder, nonce=owner.nonce, halted=owner.clocks.halted())
        if held is not None:
            note = replace(note, step=held.step, held=states.bits_of(held.tensors, owner.order))
            meeting.tell("progress", held.progress.model_dump_json())
        meeting.tell("note", note.to_json())
        notes = {rank: Note.from_json(meeting.hear("note", rank), rank) for rank in range(meeting.generation.sources)}
        leader = notes[max(leader_of(notes), 0)]
        for what in ("config", "data"):
            if getattr(leader, what) != getattr(note, what):
                raise ConfigError(
                    f"{self.job.source}: this node has another {what} than the run has on {leader.host}: start all "
                    "nodes with one config, and share or copy the data"
                )
        return notes

    @cached_property
    def layout(self) -> Layout:
        return self.owner.templates.layout(sizes_of(self.meeting.generation))

    def _give(self) -> None:
        """On a rank whose node leaves: sends the state that others need."""
        takeover = self._takeover()
        if takeover.transfers and not takeover.orphans:  # otherwise the training ranks load a checkpoint
            self._copy(takeover, {} if self.owner.held is None else self.owner.held.tensors, {})

    def _copy(self, takeover: Takeover, source: Tensors, into: Tensors) -> int:
        """Copies the missing layers between the ranks; returns the bytes copied to this one."""
        done = self.owner.member.progress.tick
        return copy(takeover, self.meeting.rank, self.meeting.copying(), source, into, done=done)

    def _takeover(self) -> Takeover:
        owner = self.owner
        return assign(
            {rank: self._held_by(rank) for rank in range(self.meeting.world)},
            {rank: set(self._names(note)) for rank, note in self.notes.items()},
            owner.sizes,
            {rank: note.host for rank, note in self.notes.items()},
        )

    def _names(self, note: Note) -> list[str]:
        """Parameters that a rank has in the state of the leader's step."""
        return note.names(self.owner.order) if note.step == self.step else []

    def _held_by(self, rank: int) -> list[str]:
        """Parameters that `rank` holds, in whole or in part."""
        owner = self.owner
        sizes = owner.sizes[rank % len(owner.sizes)]
        return [name for name in held_by(self.layout, rank, owner.layers, owner.first) if name in sizes]

    def _take_over(self, before: Tensors, recovery: Recovery) -> None:
        """Fills the trainer from this rank's state and its peers, at the progress of the leader."""
        trainer = self.job.trainer
        initialize(self.job.parallel, seed=self.job.config.run.seed, weights=False)  # buffers
        takeover = self._takeover()
        recovery.halted = self.notes[self.leader].halted
        if takeover.orphans:
            self._go_back(takeover.orphans)
            recovery.step = trainer.step + 1
            return
        states.adopt(trainer, before)
        with self.owner.clocks.copying():
            if takeover.transfers:
                recovery.received = self._copy(takeover, before, states.tensors_of(trainer))
        recovery.bytes, recovery.transfers = takeover.bytes(self.owner.sizes), len(takeover.transfers)
        trainer.go_on(self._progress())
        recovery.step = trainer.step + 1

    def _progress(self) -> Progress:
        """Progress of the run on the leader."""
        try:
            return Progress.model_validate_json(self.meeting.hear("progress", self.leader))
        except ValidationError as error:
            raise ResilienceError(f"rank {self.leader} says what is no progress: {error.errors()[0]['msg']}") from None

    def _begin(self) -> None:
        """Starts without any state: from random or stored weights, or from the run's newest checkpoint."""
        job, trainer, resume = self.job, self.job.trainer, self.owner.resume
        goes_on = self._has_checkpoint()
        weights = None if goes_on else job.stored()
        initialize(job.parallel, seed=job.config.run.seed, stored=weights, weights=not goes_on)
        if trainer.averages is not None:  # created from weights without values
            trainer.averages.begin_here(list(trainer.averages.held))
        if goes_on:
            path = trainer.resume(runfolder.resolve(job.config, resume)[1] if resume else None)
            if self.meeting.rank == 0:
                launcher.say(f"interlace: going on from {path}")

    def _has_checkpoint(self) -> bool:
        """True if rank 0 sees a checkpoint. Collective."""
        folder = self.job.folder
        return self.meeting.peers.on_first("looking for a checkpoint", lambda: runfolder.has_checkpoint(folder))

    def _go_back(self, orphans: tuple[str, ...]) -> None:
        """Goes back to the last checkpoint: some layers are lost with all ranks that held them."""
        some = ", ".join(orphans[:3]) + (f" and {len(orphans) - 3} more" if len(orphans) > 3 else "")
        if not self._has_checkpoint():
            self.owner.end(
                f"no node that is left has {some}, and there is no checkpoint yet: start the run anew, with more "
                "resilience.faults or a smaller checkpoint.every"
            )
        self.owner.held = None  # this rank's weights are overwritten from here on
        path = self.job.trainer.resume()
        if self.meeting.rank == 0:
            launcher.say_error(f"interlace: no node that is left has {some}: going back to {path}")

    def _find_folder(self) -> None:
        """Sets the run folder, which the first generation creates, and takes its lock on rank 0."""
        owner, meeting, job = self.owner, self.meeting, self.job
        known = next((note for _, note in sorted(self.notes.items()) if note.folder), None)
        if known is not None:
            job.folder, owner.nonce = Path(known.folder), known.nonce
        else:
            # Rank 0 creates it. If rank 0 is lost before others read the path, the next rank 0 creates another.
            job.find_folder(meeting, owner.resume)
            nonce = job.lock.nonce if meeting.rank == 0 and job.lock is not None else owner.nonce
            owner.nonce = meeting.gather("locking the run folder", nonce)[0]
            runfolder.check_shared(job.folder, meeting)
            if meeting.rank == 0:
                if owner.resume is None:
                    runfolder.write_config(job.folder, job.config)
                    runfolder.point_latest(job.folder)
                report_left_out([job.train_data, job.held_out], job.folder, launcher.note)
                say_trained(job.config, job.model)
        if meeting.rank == 0 and job.lock is None:
            job.lock = lock.join(job.folder, owner.nonce)

    def _make_feed(self) -> None:
        """The feed, which stays from one generation to the next."""
        if self.owner.feed is None:
            self.job.make_feed()
            self.owner.feed = self.job.feed
            for line in batch_notes(self.job.feed.loader) if self.meeting.rank == 0 else ():
                launcher.note(line)

    def _make_trainer(self, membership: Voting) -> None:
        job, first = self.job, self.meeting.rank == 0
        job.trackers = Trackers(job.config, job.folder, made(job.config, source=job.source) if first else {})
        meter = self.owner.meter if first else None
        job.make_trainer(Outputs(job.folder, job.lock, job.trackers, meter=meter), [membership.recoveries])
        self.meeting.all_made()

    def _train(self) -> tuple[bool, Ended | None]:
        owner, job = self.owner, self.job
        owner.member.progress.computing()
        outcome: dict[str, Any] = {}
        try:
            outcome = job.trainer.run()
        finally:
            # Drops the gradients of an aborted step; the state is that of the last counted step.
            job.parallel.zero_grad()
            owner.held = Held.of(job.trainer)
            if not outcome.get("finished"):
                job.trackers.close("stopped")
        if not outcome["finished"]:
            return False, None
        owner.finished = True
        job.feed.close()
        return True, Ended(job, outcome, job.page()) if self.meeting.rank == 0 else None

    def _save(self) -> None:
        """Saves the model if the remaining nodes hold all of it. They are too few to train on."""
        owner, meeting, job, lane = self.owner, self.meeting, self.job, len(self.owner.sizes)
        meeting.all_made()
        there = {(name, rank % lane) for rank, note in self.notes.items() for name in self._names(note)}
        missing = {(name, place) for place, sizes in enumerate(owner.sizes) for name in sizes} - there
        few = "too few nodes are left to train on"
        if missing or self.leader < 0:
            saved = runfolder.has_checkpoint(job.folder)
            last = "resume from the last checkpoint" if saved else "there is no checkpoint"
            owner.end(f"{few}, and {len({name for name, _ in missing})} of the weights are gone with others: {last}")
        progress = self._progress()
        outputs = Outputs(job.folder, job.lock)
        checkpoints = make_checkpoints(job.config, job.model, owner.identity, outputs, meeting.peers, job.stored)
        weights, state = ({}, {}) if self.current is None else self.current.to_save()
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
                write_recovery(owner.job.folder, recovery, owner.recovery, owner.job.config)
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
