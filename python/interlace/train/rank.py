"""One rank of a fixed run: meets the others, makes its job, trains, and on rank 0 writes the closing report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from interlace._files import write_whole
from interlace._text import one_line
from interlace.train import device as devices
from interlace.train import runfolder
from interlace.train.auto.layout_file import NAME as LAYOUT_FILE
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.parallel import Parallel
from interlace.train.config.sections import Config
from interlace.train.data.feed import batch_notes, indexed, report_left_out
from interlace.train.data.feed_stream import StreamFeed
from interlace.train.job import Job, say_trained, settled
from interlace.train.launch import launcher, lock
from interlace.train.launch.startup import Startup
from interlace.train.models.build import build_layout, initialize
from interlace.train.models.costs import ranks_per_node, stated_links
from interlace.train.observers.base import Outputs
from interlace.train.progress import Membership, stop_request
from interlace.train.report import finished
from interlace.train.report import forecast as forecasts
from interlace.train.report.finished import Ended
from interlace.train.report.trackers import Tracker, Trackers, made
from interlace.train.scheduling import schedule_options, step_options


@dataclass(frozen=True)
class Start:
    """Start of a run on this rank.

    folder: the run folder of all ranks; without it (under torchrun) rank 0 makes or finds it and locks it (`take_over`
    as in `lock.take`). at: checkpoint to resume from, by default the newest. resume: None for a new run, else the
    argument of ``--resume``. held: lock of `folder`, on rank 0. layout_file: a layout.toml to repeat if the config
    leaves its layout open; the default is the run folder's, else rank 0 chooses.
    """

    folder: Path | None = None
    at: Path | None = None
    resume: str | None = None
    held: lock.RunLock | None = None
    take_over: bool = False
    layout_file: Path | None = None


NEW = Start()


def run(config: Config, *, source: str, start: Start = NEW) -> int:
    """Trains as rank RANK of WORLD_SIZE (one process if they are not set); returns the exit code.

    `source` names the config in messages.

    The code is 0 when all steps are trained, and 128 + the signal when a signal ended the run, which is then saved.
    Raises ConfigError for errors that the user can correct; anything else is a failure of the run.
    """
    # Ends these in order on every exit path: a C++ thread that is still running when Python exits would be SIGABRT.
    with contextlib.ExitStack() as cleanup:
        with stop_request() as stop:  # a later signal may end the process at once: nothing is left to save
            job = Job(config, source, cleanup, Membership(stop=lambda: stop.number))
            rank = Rank(job, start)
            code = rank.train()
        if rank.finished is not None:
            finished.close(rank.finished)
    return code


class Rank:
    """One rank of a fixed run, which is a run of one generation: each step of its job is made once.

    finished: the run after its last step, on rank 0.
    """

    def __init__(self, job: Job, start: Start) -> None:
        self.job, self.start = job, start
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.finished: Ended | None = None

    def train(self) -> int:
        """Trains to the last step, or until a signal; returns the exit code."""
        job, start = self.job, self.start
        self.asked, job.config = job.config.parallel, with_replicas(job.config, self.world, job.source)
        if not job.config.parallel.auto:
            check_world(job.config, self.world, job.source)
        tracked = made(job.config, source=job.source) if self.rank == 0 else {}
        self._meet()
        chosen = self._choose_layout()
        job.prepare_torch()
        job.make_model()
        job.layout = build_layout(job.config, job.model, source=job.source)
        if start.resume is None:  # else a checkpoint has all of them, or all except the frozen ones
            job.stored()
        at = self._find_folder()
        if chosen and self.rank == 0:
            write_whole(job.folder / LAYOUT_FILE, chosen)
        runfolder.check_shared(job.folder, self.startup)
        self._make_parallel()
        self._make_data()
        self._make_trainer(tracked)
        self.startup.close()
        if start.resume is not None:
            self._resume(at)
        elif self.rank == 0:
            mask = job.model.collate(job.feed.held_out[:4], only=["language_model"])["mask"]
            mask.plot(job.folder / "mask.png", names=dict(enumerate(job.model.encoders, start=1)))
        return self._run()

    def _meet(self) -> None:
        """Takes the device and meets the other ranks."""
        job = self.job
        launcher.follow_launcher(job.config.parallel.timeout)
        job.choose_device()
        job.take_device(int(os.environ.get("LOCAL_RANK", self.rank)))
        self.startup = Startup(self.rank, self.world, job.config.parallel.timeout, devices.backend(job.kind))
        job.cleanup.callback(self.startup.close)
        devices.agree(job.kind, self.startup, source=job.source)

    def _choose_layout(self) -> str:
        """Settles parallel = "auto"; returns the text of its layout.toml, or "". Collective."""
        job, start = self.job, self.start
        if not job.config.parallel.auto:
            if start.layout_file is not None:
                raise ConfigError(f"--layout {start.layout_file}: {job.source} fixes its own layout; omit --layout")
            return ""
        from interlace.train.auto.agree import agree

        job.config, chosen = agree(
            job.config, self.startup, source=job.source, given=start.layout_file, resume=start.resume
        )
        self.asked = job.config.parallel
        return chosen

    def _find_folder(self) -> Path | None:
        """Sets the run folder; returns the checkpoint to resume from, None for the newest. Collective."""
        job, start = self.job, self.start
        if start.folder is not None:
            job.folder, job.lock = start.folder, start.held
            return start.at
        at = job.find_folder(self.startup, start.resume, take_over=start.take_over)
        if job.lock is not None:
            if start.resume is None:
                job.cleanup.push(partial(_discard_after, job.folder))
            job.cleanup.callback(job.lock.release)
        return at

    def _make_parallel(self) -> None:
        """This rank's share of the model, with its weights if no checkpoint follows. Collective."""
        job, startup, new = self.job, self.startup, self.start.resume is None
        config = job.config
        nodes = startup.gather("building the model", job.local_world)
        own = "try out how the model can be cut and make memory for its part of it"
        # Errors of the layout are raised on every rank, before any collective.
        with blaming(f"{job.source}: [parallel]"), startup.bounded("making the process groups of the pipeline", own):
            options = replace(
                step_options(config),
                schedule_options=schedule_options(config, job.model, job.layout, config.train.microbatches),
                ranks_per_node=ranks_per_node(config, nodes),
                crash_folder=job.folder / "crash",
            )
            job.make_parallel(job.model, job.layout, options)
        initialize(job.parallel, seed=config.run.seed, stored=job.stored() if new else None, weights=new)
        if config.train.compile:
            devices.compile_layers(job.parallel, job.device, source=job.source)
        say = launcher.note if self.rank == 0 else lambda line: None
        devices.warm_up_attention(job.parallel, job.device, config.train.precision, say)

    def _make_data(self) -> None:
        """The data and the feed; on rank 0 the run folder gets its config. Collective."""
        job, new = self.job, self.start.resume is None
        job.make_data()
        check_data(job.prints(), self.startup)
        streams = job.config.data.reading == "stream"
        if self.rank == 0:
            report_left_out([job.train_data, job.held_out], job.folder, launcher.note, goes_on=streams and not new)
            if new:
                record(job.folder, job.config, self.asked)
                runfolder.point_latest(job.folder)
        with self.startup.bounded("connecting the readers of the data") if streams else contextlib.nullcontext():
            job.make_feed()
        if self.rank == 0:
            launcher.say(f"run folder: {job.folder}")  # only now: a refused config has none
            say_trained(job.config, job.model)
            for line in batch_notes(job.feed.loader):
                launcher.note(line)
            if new:
                record(job.folder, job.config, self.asked)  # again, with the steps of its epochs

    def _make_trainer(self, tracked: Mapping[str, Tracker]) -> None:
        """The trainer and its reports. Collective."""
        job = self.job
        forecast = foresee(job) if job.config.log.predict else None
        job.trackers = Trackers(job.config, job.folder, tracked)
        job.cleanup.callback(job.trackers.close, "failed")  # no effect if it was closed before
        with self.startup.bounded("making the process group of the trainer"):
            job.make_trainer(Outputs(job.folder, job.lock, job.trackers, forecast if self.rank == 0 else None))

    def _resume(self, at: Path | None) -> None:
        """Resumes from checkpoint `at`, or from the newest. Collective."""
        job, train = self.job, self.job.config.train
        path = job.trainer.resume(at)
        if self.rank != 0:
            return
        record(job.folder, job.config, self.asked)  # only now: a refused config must not replace the run's own
        launcher.say(f"going on from {path}")
        step = job.trainer.step
        if step == train.steps:
            launcher.say(f"all {step} steps are trained already; raise train.steps to train more")
        elif job.trainer.progress.is_over(train):
            launcher.say(f"the run was ended after step {step} by train.early_stop; raise its patience to train more")

    def _run(self) -> int:
        """Runs the trainer and ends the process group; returns the exit code."""
        job = self.job
        page = job.page()
        outcome = job.trainer.run()
        job.feed.close()
        if isinstance(job.feed, StreamFeed):
            with finished.optional("what was left out"):
                say = launcher.note if self.rank == 0 else None
                job.feed.tell_left_out(job.trainer.peers.together, job.folder, say)
        if self.world > 1:
            dist.destroy_process_group()
        if self.rank == 0:
            ended = Ended(job, outcome, page)
            if outcome["finished"]:
                self.finished = ended
            else:
                finished.stop(ended)
        return 0 if outcome["finished"] else 128 + int(outcome["signal"])


def foresee(job: Job) -> forecasts.Forecast | None:
    """Times the parts of a step; rank 0 writes costs.json and predicts. Collective.

    Returns None if a model cannot be timed layer by layer: rank 0 reports the reason, and the run continues.
    """
    from interlace.estimate.measured_links import measure_links

    config, parallel = job.config, job.parallel
    costs, why = None, ""
    try:
        costs = forecasts.measure(config, job.model, indexed(job.train_data, job.held_out), job.device)
    except Exception as error:  # a model run in parts may raise anything; forecasting is optional
        why = one_line(error, None)
    links = stated_links(config) or measure_links(parallel.channel, job.model.modules_order())
    if parallel.channel is not None and parallel.channel.rank:
        return None
    if costs is None:
        launcher.say_error(f"interlace: no steps are predicted (log.predict): {why[:300]}")
        return None
    forecasts.save(job.folder, costs, links)
    return forecasts.Forecast(config, parallel, costs, links)


def _discard_after(folder: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Removes the run folder if the run ended with an error of this kind at its start (caused by the user's config)."""
    if kind is not None and issubclass(kind, ConfigError):
        runfolder.discard(folder)


def with_replicas(config: Config, world: int, source: str) -> Config:
    """The config with the number of replicas that `world` ranks make, if it leaves ``parallel.dp`` open.

    Raises ConfigError for settings that do not fit this number, which could not be checked earlier.
    """
    if not config.open_replicas() or world % config.world_size():
        return config  # `check_world` reports a number that does not fit
    replicas = world // config.world_size()
    made = "1 rank makes 1 replica" if world == 1 else f"{world} ranks make {replicas} replicas"
    return settled(config, "parallel", {"dp": replicas}, f"{source}: {made} (parallel.dp)")


def record(folder: Path, config: Config, asked: Parallel) -> None:
    """Writes the run's config, with dp left open if the user left it open: the run may resume with another number."""
    runfolder.write_config(folder, config.model_copy(update={"parallel": asked}))


def check_world(config: Config, world: int, source: str) -> None:
    """Raises ConfigError if the number of started ranks is not the config's."""
    wanted = config.world_size()
    if world != wanted:
        processes = f"a multiple of {wanted}" if config.open_replicas() else str(wanted)
        degrees = "; ".join(f"{name}: {config.parallel.degrees(name)}" for name in config.modules())
        raise ConfigError(
            f"{source}: [parallel] asks for {wanted} ranks (placement {config.parallel.placed!r}; {degrees}), but "
            f"{world} were started; run torchrun with {processes} processes in all, or change the degrees"
        )


def check_data(mine: str, startup: Startup) -> None:
    """Raises ConfigError if the ranks do not see the same data."""
    all_prints = startup.gather("reading and decoding the data", mine)
    other = [r for r, theirs in enumerate(all_prints) if theirs != all_prints[0]]
    if other:
        raise ConfigError(
            f"ranks {other} do not have the data that rank 0 has: share one cache (data.cache) or fetch it on each node"
        )
