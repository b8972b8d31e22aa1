"""One rank of a run from start to end: model, data, transport, training, and on rank 0 the closing report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from interlace.train import device as devices
from interlace.train import offload, runfolder
from interlace.train.auto import planlock
from interlace.train.config.load import ConfigError
from interlace.train.config.parallel import Parallel
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed, batch_notes, datasets, indexed, report_left_out
from interlace.train.data.feed_stream import StreamFeed
from interlace.train.data.producers import producers_of
from interlace.train.data.texts import tokenizer_of
from interlace.train.launch import launcher, lock
from interlace.train.launch.startup import Startup
from interlace.train.models.build import build, build_layout, initialize, materialize, stored_weights
from interlace.train.models.costs import ranks_per_node, stated_links
from interlace.train.models.media_specs import kinds, pixels
from interlace.train.report import closing as report
from interlace.train.report import forecast as forecasts
from interlace.train.report.facts import facts_of
from interlace.train.report.metrics import BLANK, HELD_OUT, LOSS, free_memory
from interlace.train.report.page import Page
from interlace.train.report.trackers import Trackers, made
from interlace.train.scheduling import schedule_options, step_options
from interlace.train.selection import choose, fill
from interlace.train.trainer import StopRequest, Trainer

MOST_OF_FREE = 0.8
"""Share of the host's free memory that the whole model may use for the closing report."""


def run(
    config: Config,
    *,
    source: str,
    folder: Path | None = None,
    at: Path | None = None,
    resume: str | None = None,
    held: lock.RunLock | None = None,
    take_over: bool = False,
    plan: Path | None = None,
) -> int:
    """Trains as rank RANK of WORLD_SIZE (one process if they are not set); returns the exit code.

    `resume` is None for a new run, else the argument of ``--resume``. `folder` is the run folder of all ranks. `held`
    is its lock, on rank 0. Without a folder (under torchrun) rank 0 makes or finds it and locks it (`take_over` as in
    `lock.take`). `at` is the checkpoint to resume from, by default the newest. `source` names the config in messages.
    `plan` is a plan.lock to repeat if the config leaves its layout open; the default is the run folder's, else rank 0
    chooses.

    The code is 0 when all steps are trained, and 128 + the signal when a signal ended the run, which is then saved.
    Raises ConfigError for errors that the user can correct; anything else is a failure of the run.
    """
    stop = StopRequest()
    # Ends these in order on every exit path: a C++ thread that is still running when Python exits would be SIGABRT.
    with contextlib.ExitStack() as cleanup:
        try:
            trained = _train(config, stop, source, folder, at, resume, held, take_over, plan, cleanup)
        finally:
            stop.restore()  # a later signal may end the process at once: nothing is left to save
        if isinstance(trained, int):
            return trained
        close(config, *trained, source)
    return 0


def _train(
    config: Config,
    stop: StopRequest,
    source: str,
    folder: Path | None,
    at: Path | None,
    resume: str | None,
    held: lock.RunLock | None,
    take_over: bool,
    plan: Path | None,
    cleanup: contextlib.ExitStack,
) -> int | tuple[Page, Trackers, dict[str, Any], Any, Any, Feed]:
    """Training of this rank. Returns its exit code, or on rank 0 of a finished run the arguments of `close`."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    asked, config = config.parallel, with_replicas(config, world, source)
    if not config.parallel.auto:
        check_world(config, world, source)
    tracked = made(config, source=source) if rank == 0 else {}
    launcher.follow_launcher(config.parallel.timeout)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    kind = devices.choose(config.run.device, local_world, source=source)
    if config.train.offload_optimizer:
        offload.check_device(kind, source=source)
    device = devices.take(kind, int(os.environ.get("LOCAL_RANK", rank)), deterministic=config.run.deterministic)
    startup = Startup(rank, world, config.parallel.timeout, devices.backend(kind))
    cleanup.callback(startup.close)
    devices.agree(kind, startup, source=source)
    chosen = ""
    if config.parallel.auto:
        from interlace.train.auto.agree import agree

        config, chosen = agree(config, startup, source=source, lock=plan, resume=resume)
        asked = config.parallel
    elif plan is not None:
        raise ConfigError(f"--lock {plan}: {source} fixes its own layout; a lock is for parallel = 'auto'")
    torch.set_num_threads(config.parallel.threads or launcher.default_threads(local_world))
    torch.manual_seed(config.run.seed)

    from interlace.run import parallelize

    tokenizer = tokenizer_of(config, source=source)
    model = build(config, tokenizer, source=source)
    layout = build_layout(config, model, source=source)
    stored = cache(partial(stored_weights, config, model, source=source))
    if resume is None:  # else a checkpoint has all of them, or all except the frozen ones
        stored()
    if folder is None:
        folder, at, held = agree_on_folder(config, resume, startup, take_over)
        if held is not None:
            if resume is None:
                cleanup.push(partial(_discard_after, folder))
            cleanup.callback(held.release)
    if chosen and rank == 0:
        runfolder.write_whole(folder / planlock.NAME, chosen)
    runfolder.check_shared(folder, startup)
    nodes = startup.gather("building the model", local_world)
    try:
        own = "try out how the model can be cut and make memory for its part of it"
        with startup.bounded("making the process groups of the pipeline", own):
            options = step_options(
                config,
                schedule_options=schedule_options(config, model, layout, config.train.microbatches),
                ranks_per_node=ranks_per_node(config, nodes),
                crash_folder=folder / "crash",
            )
            transport = "distributed" if world > 1 else "local"
            parallel = parallelize(model, layout, transport=transport, device=device, options=options)
    except ValueError as error:  # of the layout: raised on every rank, before any collective
        raise ConfigError(f"{source}: [parallel]: {error}") from None
    initialize(parallel, seed=config.run.seed, stored=stored() if resume is None else None, weights=resume is None)
    if config.train.compile:
        devices.compile_layers(parallel, device, source=source)
    say = launcher.note if rank == 0 else lambda line: None
    devices.warm_up_attention(parallel, device, config.train.precision, say)
    train, held_out = datasets(config, model, tokenizer, source=source)
    check_data(f"{train.fingerprint()} {held_out.fingerprint()}", startup)
    if rank == 0:
        goes_on = resume is not None and config.data.reading == "stream"
        report_left_out([train, held_out], folder, launcher.note, goes_on=goes_on)
        if resume is None:
            record(folder, config, asked)
            runfolder.point_latest(folder)
    producers = producers_of(config, folder, local_world, source=source)
    feed = feed_of(config, train, held_out, parallel, startup, producers, pinned=kind != "cpu")
    cleanup.callback(feed.close)
    if config.data.reading == "random":
        config = with_steps(config, feed.loader.batches, source=source)
    if rank == 0:
        say_trained(config, model)
        for line in batch_notes(feed.loader):
            launcher.note(line)
        if resume is None:
            record(folder, config, asked)  # again, with the steps of its epochs
    forecast = (
        foresee(config, model, parallel, indexed(train, held_out), device, folder) if config.log.predict else None
    )
    trackers = Trackers(config, folder, tracked)
    cleanup.callback(trackers.close, "failed")  # no effect if it was closed before
    with startup.bounded("making the process group of the trainer"):
        trainer = Trainer(
            config,
            model,
            parallel,
            feed,
            folder,
            stop=lambda: stop.number,
            lock=held,
            trackers=trackers,
            forecast=forecast if rank == 0 else None,
            stored=stored,
        )
    startup.close()
    if resume is not None:
        path = trainer.resume(at)
        if rank == 0:
            record(folder, config, asked)  # only now: a refused config must not replace the run's own
            launcher.say(f"going on from {path}")
            if trainer.step == config.train.steps:
                launcher.say(f"all {trainer.step} steps are trained already; raise train.steps to train more")
            elif trainer.verdict.ends(config.train.early_stop):
                launcher.say(
                    f"the run was ended after step {trainer.step} by train.early_stop; raise its patience to train more"
                )
    elif rank == 0:
        draw_mask(model, feed, folder / "mask.png")
    page = Page(folder, config, facts_of(model, layout))
    outcome = trainer.run()
    feed.close()
    if isinstance(feed, StreamFeed):
        with optional("what was left out"):
            feed.tell_left_out(trainer.peers.together, folder, launcher.note if rank == 0 else None)
    if world > 1:
        dist.destroy_process_group()
    if not outcome["finished"]:
        if rank == 0:
            with optional("the page"):  # without answers, so that a stopped run exits quickly
                rows = summary_rows(config, outcome, model, feed, folder)
                page.write(page.status(outcome), rows)
                trackers.show(rows, page.files())
            trackers.close("stopped")
            launcher.say(f"stopped after step {outcome['step']} of {config.train.steps}; saved in {folder}")
        return 128 + int(outcome["signal"])
    if rank != 0:
        return 0
    return page, trackers, outcome, model, tokenizer, feed


def feed_of(
    config: Config,
    train: Any,
    held_out: Any,
    parallel: Any,
    startup: Startup,
    producers: Callable[[Any], Any] | None,
    *,
    pinned: bool,
) -> Feed:
    """The run's samples. producers, pinned: as in `Feed`. Collective."""
    if config.data.reading == "stream":
        with startup.bounded("connecting the readers of the data"):
            return StreamFeed(config, train, held_out, parallel, producers)
    microbatches = None if config.data.pack else config.train.microbatches
    wanted = partial(parallel.wanted, microbatches=microbatches, chunks=config.chunks())
    return Feed.of_config(config, train, held_out, wanted, producers=producers, pinned=pinned)


def with_steps(config: Config, batches: Callable[[int], int], *, source: str = "config") -> Config:
    """The config with the number of steps of its epochs. batches: number of batches of an epoch.

    Raises ConfigError if the number is 0, or less than the warm-up or log.profile.start.
    """
    train = config.train
    if train.epochs is None:
        return config
    whole = int(train.epochs)
    steps = sum(batches(epoch) for epoch in range(whole))
    if train.epochs > whole:
        steps += round((train.epochs - whole) * batches(whole))
    table = train.model_dump() | {"steps": steps, "epochs": None}
    try:  # validates the whole config, because other sections refer to steps, too
        return Config.model_validate(config.model_dump() | {"train": table})
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise ConfigError(
            f"{source}: [train] epochs = {train.epochs:g} of this data make steps = {steps}: {why}"
        ) from None


def foresee(
    config: Config, model: Any, parallel: Any, data: Any, device: torch.device, folder: Path
) -> forecasts.Forecast | None:
    """Times the parts of a step; rank 0 writes costs.json and predicts. Collective.

    Returns None if a model cannot be timed layer by layer: rank 0 reports the reason, and the run continues.
    """
    from interlace.estimate.measured_links import measure_links

    costs, why = None, ""
    try:
        costs = forecasts.measure(config, model, data, device)
    except Exception as error:  # a model run in parts may raise anything; forecasting is optional
        why = " ".join(str(error).split()) or type(error).__name__
    links = stated_links(config) or measure_links(parallel.channel, model.modules_order())
    if parallel.channel is not None and parallel.channel.rank:
        return None
    if costs is None:
        launcher.say_error(f"interlace: no steps are predicted (log.predict): {why[:300]}")
        return None
    forecasts.save(folder, costs, links)
    return forecasts.Forecast(config, parallel, costs, links)


def _discard_after(folder: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Removes the run folder if the run ended with an error of this kind at its start (caused by the user's config)."""
    if kind is not None and issubclass(kind, ConfigError):
        runfolder.discard(folder)


def say_trained(config: Config, model: Any) -> None:
    """Logs the trained parameters and their rates."""
    from interlace.train.models.tuning import rates, summary

    for line in summary(model, rates(config, model)):
        launcher.note(line)


def agree_on_folder(
    config: Config, resume: str | None, startup: Startup, take_over: bool = False
) -> tuple[Path, Path | None, lock.RunLock | None]:
    """Rank 0 makes the run folder (or finds the one to resume), locks it and sends its path. Only it has the lock."""
    found: list[str] = []
    held = None
    if startup.rank == 0:
        try:
            places = (runfolder.create(config), None) if resume is None else runfolder.resolve(config, resume)
            found = [str(place.absolute()) for place in places if place is not None]
            held = lock.take(places[0], take_over=take_over, say=launcher.note)
        except ConfigError as error:
            found = ["", str(error)]
    try:
        folder, *at = startup.gather("finding the run folder", found)[0]
    except BaseException:
        if held is not None:
            held.release()
        raise
    if not folder:
        raise ConfigError(at[0])
    return Path(folder), Path(at[0]) if at else None, held


def with_replicas(config: Config, world: int, source: str) -> Config:
    """The config with the number of replicas that `world` ranks make, if it leaves ``parallel.dp`` open.

    Raises ConfigError for settings that do not fit this number, which could not be checked earlier.
    """
    if not config.open_replicas() or world % config.world_size():
        return config  # `check_world` reports a number that does not fit
    replicas = world // config.world_size()
    try:
        table = config.model_dump() | {"parallel": config.parallel.model_dump() | {"dp": replicas}}
        return Config.model_validate(table)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        made = "1 rank makes 1 replica" if world == 1 else f"{world} ranks make {replicas} replicas"
        raise ConfigError(f"{source}: {made} (parallel.dp): {why}") from None


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


def draw_mask(model: Any, feed: Feed, path: Path, samples: int = 4) -> None:
    """mask.png: the attention mask of a few packed held-out samples."""
    model.collate(feed.held_out[:samples], only=["language_model"])["mask"].plot(
        path, names=dict(enumerate(model.encoders, start=1))
    )


def summary_rows(config: Config, outcome: dict[str, Any], model: Any, feed: Feed, folder: Path) -> dict[str, Any]:
    """Results of a run: the closing table."""
    metrics, seconds = outcome["metrics"], max(outcome["seconds"], 1e-9)
    rows: dict[str, Any] = {
        "data": feed.held_out_data.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": outcome["step"],
        "train_loss": metrics.get(LOSS),
        "held_out_loss": metrics.get(HELD_OUT),
        "seconds_of_training": seconds,
        "samples_per_second": outcome["samples"] / seconds,
        "tokens_per_second": outcome["tokens"] / seconds,
        "seconds_waiting_for_data": outcome["waited"],
        "seconds_of_validation": outcome["validating"],
        "seconds_of_saving": outcome["saving"],
        "run_folder": str(folder),
    }
    # These cover the steps since the second-last line; the speeds above cover the whole run.
    rows |= {f"last_{name}": value for name, value in metrics.items() if name.startswith(("tflops", "mfu", "hfu"))}
    rows |= outcome["forecast"]
    if BLANK in metrics:
        rows["items_read_as_blank"] = metrics[BLANK]
    best = -1 if config.checkpoint.best is None else outcome["verdict"].step
    if best >= 0:
        rows |= {"best_step": best, "best_held_out_loss": outcome["verdict"].best}
    # No loss if fp16 skipped every step or nothing was logged yet. No held-out loss before a validation.
    return {name: value for name, value in rows.items() if value is not None}


def close(
    config: Config,
    page: Page,
    trackers: Trackers,
    outcome: dict[str, Any],
    model: Any,
    tokenizer: Any,
    feed: Feed,
    source: str,
) -> None:
    """Closing report of rank 0 after the last step: summary, answers, page, accuracy, table; then closes the trackers.

    The training summary is written first. Later failures do not make the run a failed one.
    """
    held_out, folder = feed.held_out_data, page.folder
    rows = summary_rows(config, outcome, model, feed, folder)
    report.write_summary(folder, rows)
    with optional("the baselines"):
        baselines = feed.baselines(tokenizer.vocab_size)
        rows |= {f"{name}_baseline": nats for name, nats in baselines.items()}
    counts = bool(held_out.questions()) and config.log.accuracy_samples > 0
    shown: dict[str, Any] = {}
    if config.log.samples or counts:
        with optional("the answers to held-out samples"):
            check_room(model)
            whole = load_whole(config, folder, tokenizer, source)
            shown["counted"] = report.accuracies(whole, held_out, tokenizer, config) if counts else []
            for each in shown["counted"]:
                rows |= each.rows()
            if config.log.samples:
                picks = report.spread_by_kind(held_out, config.log.samples)
                shown["answers"] = report.held_out_answers(whole, held_out, picks, tokenizer, config)
                shown["scalings"] = {
                    name: (kind, pixels(config, whole, name) if whole.encoders[name].images is not None else None)
                    for name, kind in kinds(whole).items()
                }
    with optional("the answers in summary.json"):
        report.write_summary(folder, rows)
    with optional("the page"):
        page.write(page.status(outcome), rows, **shown)
    trackers.show(rows, page.files())
    trackers.close("finished")
    with contextlib.suppress(OSError, SystemExit):  # stdout was closed
        report.print_summary(rows, f"{config.run.name}: trained")


def check_room(model: Any) -> None:
    """Raises MemoryError if the whole model does not fit into the free memory of this machine.

    Ranks held only pieces of it. Without this check Linux would kill the process.
    """
    size, free = sum(parameter.nbytes for parameter in model.parameters()), free_memory()
    if free is not None and size > MOST_OF_FREE * free:
        raise MemoryError(
            f"the whole model has {size / 2**30:,.1f} GiB of weights, and of this machine's memory {free / 2**30:,.1f} "
            "GiB are free; interlace generate answers where there is more"
        )


def load_whole(config: Config, folder: Path, tokenizer: Any, source: str) -> Any:
    """The whole model in this process, with the weights that `choose` selects: the run's best checkpoint or its newest.

    Uses averaged weights if the held-out loss was measured with them.
    """
    model = build(config, tokenizer, source=source)
    materialize(model, seed=config.run.seed)
    fill(config, model, choose(config, folder), source=source)
    return model


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Lets the closing report continue without `what` if it fails, and logs this in one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        launcher.say_error(f"interlace: training is done and saved; the closing report lacks {what}: {reason}")
