"""The folder of a run, ``<run.folder>/<run.name>/<time>``, and which one ``--resume`` means.

``latest`` beside the run folders is a link to the last run that had its data.

config.toml      the resolved config                               metrics.jsonl    one line per logged step
checkpoints/     see `checkpoint`                                  tensorboard/     event files
trace.json       one measured step, for Perfetto                   timeline.png     the same, as a picture
mask.png         the attention mask of a batch                     samples.html, samples.png    held-out answers
logs/rank-N.log  what each rank wrote to stderr                    summary.json     the closing table
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from interlace.train.config import ConfigError, dumps
from interlace.train.schema import Config


def create(config: Config) -> Path:
    """Makes a new run folder named by the time."""
    parent = Path(config.run.folder) / config.run.name
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    for attempt in range(1000):
        folder = parent / (stamp if attempt == 0 else f"{stamp}.{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot make the run folder {folder}: {error.strerror}; set run.folder") from None
        return folder
    raise ConfigError(f"{parent} already holds 1000 runs of {stamp}")


def checkpoints_of(folder: Path) -> Path:
    """Where a run folder keeps its checkpoints."""
    return folder / "checkpoints"


def resolve(config: Config, resume: str | None) -> tuple[Path, Path | None]:
    """The run folder to go on in and, when the user named one, the checkpoint in it.

    `resume` is "" for "the newest run of this name that has a checkpoint", or a run folder, its ``checkpoints``
    folder, or one checkpoint. Raises ConfigError when there is nothing there, saying what was looked for.
    """
    if not resume:
        parent = Path(config.run.folder) / config.run.name
        runs = [path for path in parent.glob("*") if path.is_dir() and not path.is_symlink()]
        with_state = [path for path in runs if has_checkpoint(path)]
        if not with_state:
            raise ConfigError(f"--resume: no run with a checkpoint under {parent}; start it without --resume")
        return max(with_state, key=lambda path: path.name), None
    path = Path(resume)
    if not path.is_dir():
        raise ConfigError(f"--resume {resume}: there is no such folder")
    path = path.resolve() if path.is_symlink() else path
    if path.name.startswith("step-") and path.parent.name == "checkpoints":
        return path.parent.parent, path
    if path.name == "checkpoints":
        path = path.parent
    if not has_checkpoint(path):
        raise ConfigError(f"--resume {resume}: no checkpoint under {checkpoints_of(path)}; start it without --resume")
    return path, None


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder has a finished checkpoint."""
    place = checkpoints_of(folder)
    names = [path.name for path in place.glob("step-*")]
    names += [path.name[1:-4] for path in place.glob(".step-*.old")]  # `checkpoint.restore` will bring it back
    return any(name.removeprefix("step-").isdigit() for name in names)


def write_config(folder: Path, config: Config) -> None:
    """Writes the resolved config.toml of a run folder; a reader finds the old one or the new one, never a part."""
    draft = folder / f".config.toml.{os.getpid()}"
    draft.write_text(dumps(config), encoding="utf-8")
    draft.replace(folder / "config.toml")


def point_latest(folder: Path) -> None:
    """Points ``latest`` beside a run folder at it."""
    link = folder.parent / "latest"
    draft = folder.parent / f".latest.{os.getpid()}"
    with contextlib.suppress(OSError):  # a convenience; some file systems have no links
        draft.symlink_to(folder.name)
        draft.replace(link)
