"""One rank of a run from start to end: model, data, transport, training, and on rank 0 the closing report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from interlace.train import device as devices
from interlace.train import offload, report, runfolder
from interlace.train.build import architecture, build, build_layout, initialize, materialize, stored_weights
from interlace.train.checkpoint import checkpoints
from interlace.train.checkpoint.identity import identity_of
from interlace.train.chosen import choose
from interlace.train.config import ConfigError
from interlace.train.feed import Feed, datasets, kinds, pixels, report_left_out
from interlace.train.launch import launcher, lock
from interlace.train.launch.startup import Startup
from interlace.train.metrics import HELD_OUT, LOSS, free_memory
from interlace.train.schema import Config
from interlace.train.schema_train import Train
from interlace.train.texts import tokenizer_of
from interlace.train.trainer import BLANK, StopRequest, Trainer

MOST_OF_FREE = 0.8
"""The part of the host's free memory that the whole model may take for the closing report."""


def run(
    config: Config,
    *,
    source: str,
    folder: Path | None = None,
    at: Path | None = None,
    resume: str | None = None,
    held: lock.RunLock | None = None,
    take_over: bool = False,
) -> int:
    """Trains as rank RANK of WORLD_SIZE (one process when they are not set); returns the exit code.

    `resume` is None for a new run, else what ``--resume`` named. `folder` is the run folder of all ranks and `held` its
    lock (of rank 0); without a folder (under torchrun) rank 0 makes or finds it and locks it (`take_over` as in
    `lock.take`). `at` is the checkpoint to go on from, by default the newest. `source` names the config in messages.

    The code is 0 when all steps are trained, and 128 + the signal when one has ended the run, which then is saved.
    Raises ConfigError for what the user can mend; anything else is a failure of the run.
    """
    stop = StopRequest()
    # What has to be ended in order, however this ends: a thread of ours in C++ when Python ends would be SIGABRT.
    with contextlib.ExitStack() as cleanup:
        try:
            trained = _train(config, stop, source, folder, at, resume, held, take_over, cleanup)
        finally:
            stop.restore()  # what comes now can be begun again; nothing has to be saved
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
    cleanup: contextlib.ExitStack,
) -> int | tuple[Path, dict[str, Any], Any, Any, Feed]:
    """This rank's training: its exit code, or on rank 0 of a finished run what `close` needs."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    check_world(config, world, source)
    launcher.follow_launcher(config.parallel.timeout)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    kind = devices.choose(config.run.device, local_world, source=source)
    if config.train.offload_optimizer:
        offload.check_device(kind, source=source)
    device = devices.take(kind, int(os.environ.get("LOCAL_RANK", rank)), deterministic=config.run.deterministic)
    startup = Startup(rank, world, config.parallel.timeout, devices.BACKENDS[kind])
    cleanup.callback(startup.close)
    devices.agree(kind, startup, source=source)
    torch.set_num_threads(config.parallel.threads or launcher.default_threads(local_world))
    torch.manual_seed(config.run.seed)

    from interlace.run import parallelize

    tokenizer = tokenizer_of(config, source=source)
    model = build(config, tokenizer, source=source)
    layout = build_layout(config, model, source=source)
    stored = stored_weights(config, model, source=source) if resume is None else {}  # a checkpoint has all of them
    prepared = folder is not None
    if folder is None:
        folder, at, held = agree_on_folder(config, resume, startup, take_over)
        if held is not None:
            cleanup.callback(held.release)
    runfolder.check_shared(folder, startup)
    startup.gather("building the model", None)
    try:
        own = "try out how the model can be cut and make memory for its part of it"
        with startup.bounded("making the process groups of the pipeline", own):
            parallel = parallelize(
                model,
                layout,
                schedule=config.parallel.schedule,
                transport="distributed" if world > 1 else "local",
                device=device,
                checkpointing=config.train.activation_checkpointing,
                sequence_parallel=config.parallel.sequence_parallel,
                context_order=config.parallel.context_order,
                autocast=devices.AUTOCAST[config.train.precision],
                timeout=config.parallel.timeout,
                crash_folder=folder / "crash",
            )
    except ValueError as error:  # of the layout: every rank has it, before any has met another
        raise ConfigError(f"{source}: [parallel]: {error}") from None
    initialize(parallel, seed=config.run.seed, stored=stored)
    if config.train.compile:
        devices.compile_layers(parallel, device, source=source)
    gather = startup.gather if world > 1 else None
    train, held_out, note = datasets(config, model, tokenizer, gather=gather, source=source)
    if note and train.name != config.data.dataset:
        config = other_data(config, note, train.name, prepared=prepared or resume is not None, source=source)
        if rank == 0:
            launcher.say(f"interlace: {note}")
    check_data(f"{train.fingerprint()} {held_out.fingerprint()}", startup)
    if rank == 0:
        report_left_out([train, held_out], folder, lambda line: launcher.say(f"interlace: {line}"))
        if resume is None:
            runfolder.write_config(folder, config)
            runfolder.point_latest(folder)
    feed = Feed(
        train,
        held_out,
        batch_size=config.train.batch_size,
        seed=config.run.seed,
        validation_samples=config.train.validation_samples,
        wanted=partial(
            parallel.wanted,
            microbatches=None if config.data.pack else config.train.microbatches,
            chunks=config.chunks(),
        ),
        row_tokens=config.data.max_tokens if config.data.pack else None,
    )
    cleanup.callback(feed.close)
    config = with_steps(config, feed.loader.batches, source=source)
    if rank == 0:
        say_trained(config, model)
        if resume is None:
            runfolder.write_config(folder, config)  # again, with the steps of its epochs
    with startup.bounded("making the process group of the trainer"):
        trainer = Trainer(config, model, parallel, feed, folder, stop=lambda: stop.number, lock=held)
    startup.close()
    if resume is not None:
        path = trainer.resume(at)
        if rank == 0:
            runfolder.write_config(folder, config)  # only now: a refused config must not replace the run's own
            launcher.say(f"going on from {path}")
            if trainer.step == config.train.steps:
                launcher.say(f"all {trainer.step} steps are trained already; raise train.steps to train more")
            elif trainer.verdict.ends(config.train.early_stop):
                launcher.say(
                    f"the run was ended after step {trainer.step} by train.early_stop; raise its patience to train more"
                )
    elif rank == 0:
        draw_mask(model, feed, folder / "mask.png")
    outcome = trainer.run()
    feed.close()
    if world > 1:
        dist.destroy_process_group()
    if not outcome["finished"]:
        if rank == 0:
            launcher.say(f"stopped after step {outcome['step']} of {config.train.steps}; saved in {folder}")
        return 128 + int(outcome["signal"])
    if rank != 0:
        return 0
    return folder, outcome, model, tokenizer, feed


def with_steps(config: Config, batches: Callable[[int], int], *, source: str = "config") -> Config:
    """The config with as many steps as its epochs have batches; `batches` says how many an epoch has.

    Raises ConfigError where they are fewer than the warm-up, or none.
    """
    train = config.train
    if train.epochs is None:
        return config
    whole = int(train.epochs)
    steps = sum(batches(epoch) for epoch in range(whole))
    if train.epochs > whole:
        steps += round((train.epochs - whole) * batches(whole))
    table = train.model_dump() | {"steps": steps, "epochs": None}
    try:
        return config.model_copy(update={"train": Train.model_validate(table)})
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise ConfigError(
            f"{source}: [train] epochs = {train.epochs:g} of this data make steps = {steps}: {why}"
        ) from None


def say_trained(config: Config, model: Any) -> None:
    """Says what is trained, and how."""
    from interlace.train.tuning import rates, summary

    for line in summary(model, rates(config, model)):
        launcher.say(f"interlace: {line}")


def other_data(config: Config, note: str, name: str, *, prepared: bool, source: str) -> Config:
    """The config of a run that takes the dataset `name` because its own cannot be had, as `note` says.

    Raises ConfigError when the data were there before (`prepared`): a run does not change them under way.
    """
    if prepared:
        raise ConfigError(
            f"{source}: the data that this run was prepared with is gone: {note}; start the command again to fetch "
            f"it, or begin a new run with data.dataset = {name!r}"
        )
    return config.model_copy(update={"data": config.data.model_copy(update={"dataset": name})})


def agree_on_folder(
    config: Config, resume: str | None, startup: Startup, take_over: bool = False
) -> tuple[Path, Path | None, lock.RunLock | None]:
    """Rank 0 makes the run folder (or finds the one to resume), locks it and tells the others; only it has the lock."""
    found: list[str] = []
    held = None
    if startup.rank == 0:
        try:
            places = (runfolder.create(config), None) if resume is None else runfolder.resolve(config, resume)
            found = [str(place.absolute()) for place in places if place is not None]
            held = lock.take(places[0], take_over=take_over, say=lambda line: launcher.say(f"interlace: {line}"))
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


def check_world(config: Config, world: int, source: str) -> None:
    """Raises ConfigError when the number of started ranks is not the config's."""
    wanted = config.world_size()
    if world != wanted:
        degrees = "; ".join(f"{name}: {config.parallel.degrees(name)}" for name in config.modules())
        raise ConfigError(
            f"{source}: [parallel] asks for {wanted} ranks (placement {config.parallel.placement!r}; {degrees}), but "
            f"{world} were started; run torchrun with {wanted} processes in all, or change the degrees"
        )


def check_data(mine: str, startup: Startup) -> None:
    """Raises ConfigError when the ranks do not see the same data."""
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


def close(
    config: Config, folder: Path, outcome: dict[str, Any], model: Any, tokenizer: Any, feed: Feed, source: str
) -> None:
    """Rank 0 after the last step: summary, answers, page, accuracy, table.

    The summary of what was trained is written first, and nothing that fails afterwards makes the run a failed one.
    """
    held_out = feed.held_out_data
    metrics, seconds = outcome["metrics"], max(outcome["seconds"], 1e-9)
    rows: dict[str, Any] = {
        "data": held_out.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": outcome["step"],
        "train_loss": metrics.get(LOSS),
        "held_out_loss": metrics[HELD_OUT],
        "seconds_of_training": seconds,
        "samples_per_second": outcome["samples"] / seconds,
        "tokens_per_second": outcome["tokens"] / seconds,
        "run_folder": str(folder),
    }
    if BLANK in metrics:
        rows["items_read_as_blank"] = metrics[BLANK]
    if rows["train_loss"] is None:  # fp16 has left out every step
        del rows["train_loss"]
    best = -1 if config.checkpoint.best is None else outcome["verdict"].step
    if best >= 0:
        rows |= {"best_step": best, "best_held_out_loss": outcome["verdict"].best}
    report.write_summary(folder, rows)
    with optional("the baselines"):
        baselines = feed.baselines(tokenizer.vocab_size)
        rows |= {f"{name}_baseline": nats for name, nats in baselines.items()}
    counts = bool(held_out.questions()) and config.log.accuracy_samples > 0
    if config.log.samples or counts:
        with optional("the answers to held-out samples"):
            check_room(model)
            whole = load_whole(config, folder, tokenizer, source)
            counted = report.accuracies(whole, held_out, tokenizer, config) if counts else []
            for each in counted:
                rows |= each.rows()
            if config.log.samples:
                picks = report.spread_by_kind(held_out, config.log.samples)
                answers = report.held_out_answers(whole, held_out, picks, tokenizer, config)
                shown = {
                    name: pixels(config, whole, name) if kind == "image" else None
                    for name, kind in kinds(whole).items()
                }
                report.write_page(answers, folder, config, shown, counted)
    report.write_summary(folder, rows)
    with contextlib.suppress(OSError, SystemExit):  # nobody reads it any more
        report.print_summary(rows, f"{config.run.name}: trained")


def check_room(model: Any) -> None:
    """Raises MemoryError where the whole model would not fit into what is free on this machine, of which ranks had
    pieces: Linux would end the process then."""
    size, free = sum(parameter.nbytes for parameter in model.parameters()), free_memory()
    if free is not None and size > MOST_OF_FREE * free:
        raise MemoryError(
            f"the whole model has {size / 2**30:,.1f} GiB of weights, and of this machine's memory {free / 2**30:,.1f} "
            "GiB are free; interlace generate answers where there is more"
        )


def load_whole(config: Config, folder: Path, tokenizer: Any, source: str) -> Any:
    """The whole model in this process, as `choose` says: from the run's best checkpoint or its newest, with averaged
    weights where the held-out loss was measured with them."""
    model = build(config, tokenizer, source=source)
    materialize(model, seed=config.run.seed)
    chosen = choose(config, folder)
    identity = identity_of(model, architecture(config))
    checkpoints.load_parameters(chosen.path, model, identity, averaged=chosen.averaged)
    return model


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Lets the closing report do without `what` when it fails, and says so in one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        launcher.say_error(f"interlace: training is done and saved; the closing report lacks {what}: {reason}")
