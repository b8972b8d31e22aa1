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
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import ValidationError

from interlace.resilience.coordinator.layouts import held_by, sizes_of
from interlace.resilience.environment import ERROR, PROGRESS, STOPPED
from interlace.resilience.errors import ResilienceError
from interlace.resilience.member import Member
from interlace.resilience.supervisor.progress import allowing
from interlace.resilience.takeover import assign, copy
from interlace.train import device as devices
from interlace.train import rank as whole_run
from interlace.train import runfolder
from interlace.train.checkpoint.checkpoints import Checkpoints, seconds_to_write
from interlace.train.checkpoint.identity import canonical_names, identity_of
from interlace.train.config.load import ConfigError, dumps
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed, batch_notes, datasets, report_left_out
from interlace.train.data.producers import producers_of
from interlace.train.data.texts import tokenizer_of
from interlace.train.elastic import state as states
from interlace.train.elastic.config import check
from interlace.train.elastic.log import Clocks, Recoveries, Recovery
from interlace.train.elastic.meeting import Meeting, Over
from interlace.train.elastic.proposals import microbatches, propose, templates_of
from interlace.train.elastic.state import Held, Note
from interlace.train.launch import launcher, lock
from interlace.train.models.build import architecture, build, initialize, stored_weights
from interlace.train.models.costs import flop_costs
from interlace.train.models.tuning import rates
from interlace.train.optim import state_sizes
from interlace.train.progress import Progress
from interlace.train.report import trackers
from interlace.train.report.facts import facts_of
from interlace.train.report.flops import Meter
from interlace.train.report.page import Page
from interlace.train.report.trackers import Trackers, made
from interlace.train.scheduling import step_options
from interlace.train.trainer import Trainer

Closing = tuple[Config, Page, Trackers, dict[str, Any], Any, Any, Feed]
"""Arguments of `rank.close`, except the last."""
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
            closing = each.train()
        if closing is not None:
            with allowing("the closing report", LONGEST_START):
                whole_run.close(*closing, source)
    except Exception as error:
        with contextlib.suppress(OSError):  # for the supervisor, which otherwise has only the log
            Path(os.environ[PROGRESS] + ERROR).write_text(f"{type(error).__name__}: {error}")
        raise
    return 0 if each.finished else STOPPED


class Rank:
    """State that lives as long as the process."""

    def __init__(self, config: Config, source: str, resume: str | None, cleanup: contextlib.ExitStack) -> None:
        self.config, self.source, self.resume, self.cleanup = config, source, resume, cleanup
        self.member = Member.from_environment(config.parallel.timeout)
        self.member.progress.idle("reading data and building the model", LONGEST_START)
        kind = devices.choose(config.run.device, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), source=source)
        if kind != "cpu":
            raise ConfigError(
                f"{source}: --elastic has not been tried on GPUs: set run.device = 'cpu', or train without it"
            )
        self.device = devices.take(kind, self.member.local_rank, deterministic=config.run.deterministic)
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(config.parallel.threads or launcher.default_threads(local_world))
        torch.manual_seed(config.run.seed)
        trackers.check(config, source=source)  # any rank may become rank 0
        self.tokenizer = tokenizer_of(config, source=source)
        self.model = build(config, self.tokenizer, source=source)  # on meta; each generation has a copy
        self.templates = templates_of(config, self.model, flop_costs(config, self.model))
        self.data = datasets(config, self.model, self.tokenizer, source=source)
        self.stored = cache(partial(stored_weights, config, self.model, source=source))
        self.first = canonical_names(self.model)
        self.order = [name for name, _ in self.model.named_parameters()]
        trained = state_sizes(config, self.model, rates(config, self.model))
        try:
            lane = self.templates.layout([self.templates.lane_size])
            self.sizes = states.sizes_of(self.model, trained, lane, config)
        except ValueError as error:
            raise ConfigError(f"{source}: --elastic: {error}") from None
        self.note = Note(
            platform.node(),
            _digest(dumps(config)),
            _digest(f"{self.data[0].fingerprint()} {self.data[1].fingerprint()}"),
        )
        self.folder: Path | None = None
        self.nonce = ""
        self.lock: lock.RunLock | None = None
        self.finished = False  # all steps are trained
        self.recovery: Recovery | None = None  # of the last generation in which a step counted
        self.held: Held | None = None
        self.feed: Feed | None = None
        self.parallel: Any = None  # of the newest generation; the prefetch thread reads it
        self.shares: tuple[int, ...] = ()
        self.clocks = Clocks()
        # Rank 0 counts FLOPs. The slow setup runs here, before other ranks wait for it.
        self.meter = Meter(self.model, [0.0], recompute=config.train.recompute)

    @cached_property
    def layers(self) -> dict[str, tuple[str, int]]:
        from interlace.run.graph import parameter_layers

        return parameter_layers(self.model)

    def train(self) -> Closing | None:
        """Trains from generation to generation. Returns the closing report's arguments on the rank that writes it."""
        self.member.propose(propose(self.config, self.model, self.templates, source=self.source))
        gc.collect()
        gc.freeze()  # later collections skip these objects and quickly find models of past generations
        number = 0
        while True:
            patience = self.config.parallel.timeout if number else LONGEST_START
            generation = self.member.next_generation(number, patience)
            number = generation.number
            self.clocks.formed = time.time()
            try:
                with Meeting(self.member, generation, self.config.parallel.timeout) as meeting:
                    ended, closing = self._in_generation(meeting)
                if ended:
                    if self.lock is not None:
                        self.lock.release()
                    return closing
            except Over as over:
                self.clocks.gave_up()
                if self.parallel is not None and self.parallel.channel is not None:
                    self.parallel.channel.close()  # its lanes have shared memory
                launcher.note(f"interlace: generation {number} is over: {over}")
            gc.collect()

    # -- one generation --------------------------------------------------------------------------------------

    def _in_generation(self, meeting: Meeting) -> tuple[bool, Closing | None]:
        """(True if the run is over for this rank, arguments of the closing report)."""
        generation = meeting.generation
        self.member.progress.idle("forming a generation", self.config.parallel.timeout)
        notes = self._tell(meeting)
        if meeting.rank != 0 and self.lock is not None:  # the lock belongs to rank 0, which is another rank now
            self.lock.leave()
            self.lock = None
        if meeting.rank >= meeting.world:
            self._give(meeting, notes)
            return self.member.released(generation, self.config.parallel.timeout), None
        meeting.join(seconds_to_write(self.identity))
        self._find_folder(meeting, notes)
        if generation.kind == "save":
            self._save(meeting, notes)
            return True, None
        layout = self.templates.layout(sizes_of(generation))
        model = deepcopy(self.model)
        mine = self._held_by(layout, meeting.rank)
        leader = leader_of(notes)
        current = self.held if self.held is not None and leader >= 0 and self._is_current(notes) else None
        before, cut = ({}, {}) if current is None else (current.tensors, current.regions)
        weights = {name: before[name][states.WEIGHT] for name in mine if name in before}
        states.give(model, {name: weight for name, weight in weights.items() if name not in cut})
        with allowing("making its pipelines", LONGEST_START):
            self.parallel = self._parallelize(model, layout, meeting)
            states.give_pieces(self.parallel, weights)
            self._make_feed(meeting)
            trainer = self._trainer(model, meeting)
        recovery = Recovery.of(generation, sum(self.shares))
        with allowing("filling its layers", LONGEST_START):
            if leader < 0:
                self._begin(meeting, trainer)
            else:
                self._take_over(meeting, notes, layout, trainer, before, recovery)
        # The old state is dropped only after the barrier: by then every rank has received its part. A rank whose
        # barrier fails keeps both.
        now = Held.of(trainer)
        self.held = now.beside(current)
        meeting.peers.barrier("having all layers")
        self.held = now
        self.member.copied(generation)
        self.clocks.began(recovery)
        return self._train(meeting, trainer, model, layout)

    def _tell(self, meeting: Meeting) -> dict[int, Note]:
        """Publishes the state of this rank and reads the notes of the others."""
        note, held = self.note, self.held
        folder = "" if self.folder is None else str(self.folder)
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
                    f"{self.source}: this node has another {what} than the run has on {leader.host}: start all nodes "
                    "with one config, and share or copy the data"
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

    def _held_by(self, layout: Any, rank: int) -> list[str]:
        """Parameters that `rank` holds, in whole or in part."""
        sizes = self.sizes[rank % len(self.sizes)]
        return [name for name in held_by(layout, rank, self.layers, self.first) if name in sizes]

    def _take_over(
        self, meeting: Meeting, notes: dict[int, Note], layout: Any, trainer: Trainer, before: Any, recovery: Recovery
    ) -> None:
        """Fills a trainer from this rank's state and its peers, at the progress of the leader."""
        initialize(self.parallel, seed=self.config.run.seed, weights=False)  # buffers
        takeover = self._takeover(meeting, notes)
        leader = leader_of(notes)
        recovery.halted = notes[leader].halted
        if takeover.orphans:
            self._go_back(meeting, trainer, takeover.orphans)
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

    def _begin(self, meeting: Meeting, trainer: Trainer) -> None:
        """Starts without any state: from random or stored weights, or from the run's newest checkpoint."""
        goes_on = meeting.peers.on_first("looking for a checkpoint", lambda: self._has_checkpoint())
        weights = None if goes_on else self.stored()
        initialize(self.parallel, seed=self.config.run.seed, stored=weights, weights=not goes_on)
        if trainer.averages is not None:  # created from weights without values
            trainer.averages.begin_here(list(trainer.averages.held))
        if goes_on:
            path = trainer.resume(runfolder.resolve(self.config, self.resume)[1] if self.resume else None)
            if meeting.rank == 0:
                launcher.say(f"interlace: going on from {path}")

    def _has_checkpoint(self) -> bool:
        assert self.folder is not None
        return runfolder.has_checkpoint(self.folder)

    def _go_back(self, meeting: Meeting, trainer: Trainer, orphans: tuple[str, ...]) -> None:
        """Goes back to the last checkpoint: some layers are lost with all ranks that held them."""
        some = ", ".join(orphans[:3]) + (f" and {len(orphans) - 3} more" if len(orphans) > 3 else "")
        if not meeting.peers.on_first("looking for a checkpoint", lambda: self._has_checkpoint()):
            self._end(
                f"no node that is left has {some}, and there is no checkpoint yet: start the run anew, with more "
                "resilience.faults or a smaller checkpoint.every"
            )
        self.held = None  # this rank's weights are overwritten from here on
        path = trainer.resume()
        if meeting.rank == 0:
            launcher.say_error(f"interlace: no node that is left has {some}: going back to {path}")

    def _end(self, why: str) -> NoReturn:
        """Ends the run on all nodes, since a further generation would fail in the same way."""
        self.member.end(why)
        raise ResilienceError(why)

    # -- parts of a generation ------------------------------------------------------------------------------

    @cached_property
    def identity(self) -> dict[str, Any]:
        return identity_of(self.model, architecture(self.config))

    def _find_folder(self, meeting: Meeting, notes: dict[int, Note]) -> None:
        """Sets the run folder, which the first generation creates, and takes its lock on rank 0."""
        known = next(((note.folder, note.nonce) for _, note in sorted(notes.items()) if note.folder), None)
        if known is None:
            # Rank 0 creates it. If rank 0 is lost before others read the path, the next rank 0 creates another.
            found, _, held = whole_run.agree_on_folder(self.config, self.resume, meeting)  # type: ignore[arg-type]
            if held is not None:
                self.lock, self.nonce, self.folder = held, held.nonce, found
            self.nonce = meeting.gather("locking the run folder", self.nonce)[0]
            self.folder = found
            runfolder.check_shared(found, meeting)
            if meeting.rank == 0 and self.resume is None:
                runfolder.write_config(found, self.config)
                runfolder.point_latest(found)
            if meeting.rank == 0:
                report_left_out(self.data, found, launcher.note)
                whole_run.say_trained(self.config, self.model)
        else:
            self.folder, self.nonce = Path(known[0]), known[1]
        if meeting.rank == 0 and self.lock is None:
            self.lock = lock.join(self.folder, self.nonce)

    def _parallelize(self, model: Any, layout: Any, meeting: Meeting) -> Any:
        from interlace.run import parallelize

        transport, options = "distributed" if meeting.world > 1 else "local", step_options(self.config)
        try:
            return parallelize(
                model, layout, transport=transport, device=self.device, coordinated=True, options=options
            )
        except ValueError as error:
            raise ConfigError(f"{self.source}: --elastic: {error}") from None

    def _make_feed(self, meeting: Meeting) -> None:
        sizes = sizes_of(meeting.generation)
        total = microbatches(self.config)
        self.shares_of = lambda rows: self.templates.shares(sizes, rows or total)
        self.shares = self.shares_of(0)
        if self.feed is not None:
            return
        assert self.folder is not None
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        producers = producers_of(self.config, self.folder, local_world, source=self.source)
        self.feed = Feed.of_config(self.config, *self.data, self._wanted, producers=producers)
        self.cleanup.callback(self.feed.close)
        for line in batch_notes(self.feed.loader) if meeting.rank == 0 else ():
            launcher.note(line)
        self.config = whole_run.with_steps(self.config, self.feed.loader.batches, source=self.source)

    def _wanted(self, batch: list[Any]) -> Any:
        """Media of a batch that this rank reads in the newest generation."""
        rows = len(batch) if self.config.data.pack else 0
        return self.parallel.wanted(batch, microbatches=self.shares_of(rows), chunks=self.config.chunks())

    def _trainer(self, model: Any, meeting: Meeting) -> Trainer:
        assert self.feed is not None and self.folder is not None
        self._leaves = False
        tracked = made(self.config, source=self.source) if meeting.rank == 0 else {}
        trainer = Trainer(
            self.config,
            model,
            self.parallel,
            self.feed,
            self.folder,
            lock=self.lock if meeting.rank == 0 else None,
            trackers=Trackers(self.config, self.folder, tracked),
            stored=self.stored,
            commit=lambda step: self._commit(meeting, trainer, step),
            leaves=lambda: self._leaves,
            shares=self.shares_of,
            peers=meeting.peers,
            meter=self.meter if meeting.rank == 0 else None,
        )
        meeting.all_made()
        return trainer

    # -- training --------------------------------------------------------------------------------------------

    def _commit(self, meeting: Meeting, trainer: Trainer, step: int) -> None:
        """Votes on a step. Raises Over if the step does not count."""
        answer = self.member.vote(meeting.generation, step)
        if answer == "abort":
            raise Over(f"step {step} does not count: not all ranks have its gradients")
        self._leaves = answer == "regroup"
        recovery = self.clocks.counted()
        if recovery is not None:
            trainer.beside |= recovery.metrics()
            if meeting.rank == 0 and self.folder is not None:
                Recoveries(self.folder).add(recovery, self.recovery, self.config)
            self.recovery = recovery

    def _train(self, meeting: Meeting, trainer: Trainer, model: Any, layout: Any) -> tuple[bool, Closing | None]:
        self.member.progress.computing()
        assert self.feed is not None and self.folder is not None
        outcome: dict[str, Any] = {}
        try:
            outcome = trainer.run()
        finally:
            # Drops the gradients of an aborted step; the state is that of the last counted step.
            self.parallel.zero_grad()
            self.held = Held.of(trainer)
            if not outcome.get("finished"):
                trainer.trackers.close("stopped")
        if not outcome["finished"]:
            return False, None
        self.finished = True
        self.feed.close()
        if meeting.rank != 0:
            return True, None
        page = Page(self.folder, self.config, facts_of(model, layout))
        return True, (self.config, page, trainer.trackers, outcome, model, self.tokenizer, self.feed)

    def _save(self, meeting: Meeting, notes: dict[int, Note]) -> None:
        """Saves the model if the remaining nodes hold all of it. They are too few to train on."""
        assert self.folder is not None
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
        checkpoints = Checkpoints(
            runfolder.checkpoints_of(self.folder),
            keep=self.config.checkpoint.keep,
            identity=self.identity,
            peers=meeting.peers,
            check=self.lock.check if meeting.rank == 0 and self.lock is not None else lambda: None,
            stored=self.stored,
            frozen={name for name, parameter in self.model.named_parameters() if not parameter.requires_grad},
        )
        weights, state = ({}, {}) if current is None else current.to_save()
        # The pending log line and validation of the step follow when the run resumes.
        table = progress.model_copy(update={"due": False}).model_dump()
        best = -1 if self.config.checkpoint.best is None else progress.verdict.step
        path = checkpoints.save(progress.step, weights, state, table, best=best)
        if meeting.rank == 0:
            launcher.say(f"interlace: {few}: what they hold is saved as {path}; resume when there are more nodes")


def leader_of(notes: dict[int, Note]) -> int:
    """Leader: the lowest rank among those with the latest step; -1 if no rank has state."""
    furthest = max(note.step for note in notes.values())
    return -1 if furthest < 0 else min(rank for rank, note in notes.items() if note.step == furthest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
