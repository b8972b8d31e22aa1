"""Run folder, ``<run.folder>/<run.name>/<time>``, and resolution of ``--resume``.

``latest`` beside the run folders is a link to the last run that had its data.

run.json         its number among the runs of its name             run.lock         the job that has it (`launch.lock`)
config.toml      the resolved config                               metrics.jsonl    one line per logged step
checkpoints/     see `checkpoint`                                  tensorboard/     event files
trace.json       one measured step, for Perfetto                   timeline.png     the same, as a picture
mask.png         the attention mask of a batch                     report.html      the run on one page
samples.png      held-out answers as a picture                     trackers/        state of the run's trackers
profile/         steps recorded by torch.profiler                  crash/           last events of failed ranks
logs/rank-N.log  stderr of each rank                               summary.json     the closing table
left_out.txt     files of the data that no sample uses, and why
recovery.jsonl   cost of generation changes in an elastic run      recovery.html    the same, drawn
layout.toml      layout chosen by parallel.layout = "auto"         layout.png       the candidates it was chosen from

The newest run is the one with the highest number. Names are times (UTC), which are unreliable if clocks are set back.
"""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from interlace._files import draft_of, write_whole
from interlace.train.config.load import ConfigError, dumps
from interlace.train.config.sections import Config


def create(config: Config) -> Path:
    """Makes a new run folder, named by the time and numbered after the existing runs."""
    parent = Path(config.run.folder) / config.run.name
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    for attempt in range(1000):
        folder = parent / (stamp if attempt == 0 else f"{stamp}.{attempt}")
        try:
            number = 1 + max(map(_number, _runs(parent)), default=0)
            folder.mkdir(parents=True)
            (folder / "run.json").write_text(json.dumps({"number": number, "created": stamp}))
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot make the run folder {folder}: {error.strerror}; set run.folder") from None
        return folder
    raise ConfigError(f"{parent} already has 1000 runs of {stamp}: set run.folder")


def discard(folder: Path) -> None:
    """Removes a run folder after a failed start, if it has neither a checkpoint nor a logged step.

    ``latest`` is then the newest remaining run.
    """
    metrics = folder / "metrics.jsonl"
    if has_checkpoint(folder) or (metrics.exists() and metrics.stat().st_size):
        return
    shutil.rmtree(folder, ignore_errors=True)
    link, left = folder.parent / "latest", _runs(folder.parent)
    with contextlib.suppress(OSError):
        if link.is_symlink() and not link.exists():
            link.unlink()
            if left:
                point_latest(_newest(left))
        if not left:
            folder.parent.rmdir()  # fails if other files are there


def checkpoints_of(folder: Path) -> Path:
    """Checkpoint folder of a run folder."""
    return folder / "checkpoints"


def resolve(config: Config, resume: str | None) -> tuple[Path, Path | None]:
    """The run folder to resume and, if the user named one, the checkpoint in it.

    `resume` is "" for "the newest run of this name that has a checkpoint", or a run folder, its ``checkpoints`` folder,
    or one checkpoint. Raises ConfigError, with the place searched, if nothing is found.
    """
    if not resume:
        parent = Path(config.run.folder) / config.run.name
        with_state = [path for path in _runs(parent) if has_checkpoint(path)]
        if not with_state:
            raise ConfigError(f"--resume: no run with a checkpoint under {parent}; start without --resume")
        return _newest(with_state), None
    path = Path(resume)
    if not path.is_dir():
        raise ConfigError(f"--resume {resume}: there is no such folder")
    path = path.resolve() if path.is_symlink() else path
    if path.name.startswith("step-") and path.parent.name == "checkpoints":
        return path.parent.parent, path
    if path.name == "checkpoints":
        path = path.parent
    if not has_checkpoint(path):
        raise ConfigError(f"--resume {resume}: no checkpoint under {checkpoints_of(path)}; start without --resume")
    return path, None


def _runs(parent: Path) -> list[Path]:
    return [path for path in parent.glob("*") if path.is_dir() and not path.is_symlink()]


def _newest(runs: Iterable[Path]) -> Path:
    return max(runs, key=lambda path: (_number(path), path.name))


def _number(folder: Path) -> int:
    """Number of a run; 0 for runs of older versions without a number, which sort before all others."""
    try:
        return int(json.loads((folder / "run.json").read_text())["number"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def has_checkpoint(folder: Path) -> bool:
    """True if a run folder has a finished checkpoint."""
    place = checkpoints_of(folder)
    names = [path.name for path in place.glob("step-*")]
    names += [path.name[1:-4] for path in place.glob(".step-*.old")]  # `checkpointfolder.restore` will bring it back
    return any(name.removeprefix("step-").isdigit() for name in names)


def json_lines(path: Path) -> list[Any]:
    """Lines of a JSONL file, if it exists. A half-written line of a killed process is skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def write_config(folder: Path, config: Config) -> None:
    """Writes the resolved config.toml of a run folder."""
    write_whole(folder / "config.toml", dumps(config))


def point_latest(folder: Path) -> None:
    """Points ``latest`` beside a run folder at it."""
    # A convenience; some file systems have no links.
    with contextlib.suppress(OSError), draft_of(folder.parent / "latest") as link:
        link.symlink_to(folder.name)


class Gathering(Protocol):
    """Ranks that agree on a run folder: `Startup`, or the `Meeting` of a generation."""

    rank: int
    world: int

    def gather(self, what: str, value: object) -> list[Any]:
        """Every rank's `value` (any JSON value), by rank. Collective."""


PROBE_SECONDS = 15.0  # time until a new file must be visible on all nodes


def check_shared(folder: Path, startup: Gathering) -> None:
    """Raises ConfigError on all ranks unless they share one run folder. Collective (`startup.Startup`).

    With separate folders, each node would keep its own part of a checkpoint. Every rank must see the file of rank 0,
    and rank 0 must see the file of every rank.
    """
    if startup.world == 1:
        return
    action, rank = "probing the run folder", startup.rank
    probe = folder / f".probe-{startup.gather(action, secrets.token_hex(8))[0]}"

    def write() -> None:
        probe.mkdir(exist_ok=True)
        (probe / str(rank)).touch()

    def answer() -> None:
        _find(probe, [0])
        write()

    troubles: list[str] = []
    try:
        for mine, work in (
            (rank == 0, write),
            (rank > 0, answer),
            (rank == 0, lambda: _find(probe, range(1, startup.world))),
        ):
            troubles = startup.gather(action, _error_of(work) if mine else "")
            if any(troubles):
                break
    finally:
        if rank == 0:
            shutil.rmtree(probe, ignore_errors=True)
    failures = [f"rank {rank} {trouble}" for rank, trouble in enumerate(troubles) if trouble]
    if failures:
        raise ConfigError(
            f"the ranks do not share the run folder {folder}: {'; '.join(failures[:4])}. Put run.folder on a file "
            "system that all nodes see under the same path"
        )


def _error_of(work: Callable[[], None]) -> str:
    try:
        work()
    except OSError as error:
        return f"on {platform.node()}: {error.strerror}: {error.filename}"
    return ""


def _find(probe: Path, ranks: Iterable[int]) -> None:
    """Raises FileNotFoundError if a rank's file does not become visible here."""
    from interlace.train.checkpoint.folder import wait_until_visible

    deadline = time.monotonic() + PROBE_SECONDS
    for rank in ranks:
        if not wait_until_visible(probe / str(rank), deadline=deadline):
            raise FileNotFoundError(errno.ENOENT, f"does not see what rank {rank} wrote", str(probe / str(rank)))
