"""``interlace train``: starts the ranks of a config, or runs as one of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from pathlib import Path

from interlace.resilience.environment import NODE
from interlace.train import runfolder
from interlace.train.config.load import ConfigError, dumps, load, loads
from interlace.train.config.sections import Config
from interlace.train.launch import launcher, lock
from interlace.train.report import trackers


def train(options: argparse.Namespace) -> int:
    """``interlace train``: runs as a rank if the variables of torchrun or of an elastic run's supervisor are set; else
    launches the ranks of the config."""
    if NODE in os.environ and launcher.CONFIG in os.environ:
        from interlace.train.elastic.rank import run as run_elastic

        source = os.environ[launcher.SOURCE]
        config = loads(os.environ[launcher.CONFIG], source=source)
        return run_elastic(config, source=source, resume=options.resume)
    if launcher.under_launcher():
        return _as_rank(options)
    path = _config_path(options)
    config = load(path, options.set)
    laid_out = None
    if options.layout is not None:  # refused before anything is created or prepared
        from interlace.train.auto.resolve import check_fits, config_of_layout  # only here: it imports torch

        laid_out = config_of_layout(config, options.layout, source=str(path))
    if options.elastic:
        from interlace.train.commands import elastic

        return elastic.supervise(options, config, path)
    trackers.made(config, source=str(path))  # checked before anything is created
    if options.take_over and options.resume is None:
        raise ConfigError("--take-over is for going on in a run folder; name it with --resume")
    from interlace.train.data.feed import prepare

    resumed = None if options.resume is None else runfolder.resolve(config, options.resume)
    with launcher.leaving_on_sigterm():
        prepare(config, launcher.note, source=str(path))
        if laid_out is not None:
            check_fits(laid_out, options.layout)
        return _in_run_folder(options, config, path, resumed)


def _in_run_folder(
    options: argparse.Namespace, config: Config, path: Path, resumed: tuple[Path, Path | None] | None
) -> int:
    """Locks the run folder and trains. resumed: folder and checkpoint; None: a new folder, which is removed if the
    config is refused."""
    new = resumed is None
    folder, at = resumed or (runfolder.create(config), None)
    try:
        with lock.take(folder, take_over=options.take_over, say=launcher.note) as held:
            code = _in_folder(options, config, path, folder, at, held)
    except BaseException as error:  # other failures keep the folder for inspection, once it has a config
        if new and (isinstance(error, ConfigError) or not (folder / "config.toml").exists()):
            runfolder.discard(folder)
        raise
    if new and code == launcher.USER_ERROR:
        runfolder.discard(folder)
    return code


def _in_folder(
    options: argparse.Namespace, config: Config, path: Path, folder: Path, at: Path | None, held: lock.RunLock
) -> int:
    """Trains in a run folder that is locked."""
    if config.parallel.auto:
        from interlace.train.auto.resolve import resolve_config

        config = resolve_config(config, source=str(path), folder=folder, given=options.layout, say=launcher.note)
    if options.resume is None:
        runfolder.write_config(folder, config)
    world = config.world_size()
    if world == 1:
        from interlace.train.rank import Start, run

        return run(config, source=str(path), start=Start(folder, at, options.resume, held))
    resume = None if options.resume is None else str(at or folder)
    ranks = launcher.RankProcesses(
        launcher.rank_command(path, debug=options.debug, resume=resume),
        world,
        folder=folder,
        timeout=config.parallel.timeout,
        threads=config.parallel.threads,
        environment={
            launcher.RUN_FOLDER: str(folder),
            launcher.LOCK: held.nonce,
            launcher.CONFIG: dumps(config),
            launcher.SOURCE: str(path),
        },
    )
    again = f"interlace train --resume {shlex.quote(str(folder))}"
    return ranks.run(resume=lambda: again if runfolder.has_checkpoint(folder) else "")


def _config_path(options: argparse.Namespace) -> Path:
    if options.config is not None:
        return Path(options.config)
    if not options.resume:
        raise ConfigError("train needs a config, such as: interlace train configs/stamps.toml")
    folder = Path(options.resume)
    if not folder.is_dir():
        raise ConfigError(f"--resume {options.resume}: there is no such folder")
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / "config.toml").exists():
            return place / "config.toml"
    raise ConfigError(f"--resume {options.resume}: not a run folder (no config.toml); name one, or the config as well")


def _as_rank(options: argparse.Namespace) -> int:
    """Runs a rank of the launcher (which has chosen and locked the folder) or of torchrun."""
    from interlace.train.rank import Start, run

    resume, folder = options.resume, os.environ.get(launcher.RUN_FOLDER)
    if folder is None:
        path = _config_path(options)
        config = load(path, options.set, open_replicas=True)
        return run(config, source=str(path), start=Start(None, None, resume, None, options.take_over, options.layout))
    source = os.environ[launcher.SOURCE]
    config = loads(os.environ[launcher.CONFIG], source=source)
    at = runfolder.resolve(config, resume)[1] if resume else None
    with contextlib.ExitStack() as cleanup:
        held = None
        if int(os.environ["RANK"]) == 0:
            held = cleanup.enter_context(lock.join(Path(folder), os.environ[launcher.LOCK]))
        return run(config, source=source, start=Start(Path(folder), at, resume, held))
