"""Checkpoint folder of a run: names of the checkpoints, the complete ones, and replacement of one by another.

step-00000100                finished              .step-00000100.<nonce>.tmp    a draft
step-00000100.torn           found damaged         .step-00000100.old            set aside for a newer one
step-00000100.superseded     of a run that resumed from an earlier step
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

from interlace.train.checkpoint.storage import MANIFEST, TornCheckpoint, digest, read_manifest, sync_folder

TORN, SUPERSEDED = ".torn", ".superseded"
_OLD = ".old"
LATE_SECONDS = 65.0  # time that a file of another host may be hidden: Linux caches NFS attributes for up to 60 s


def name_of(step: int) -> str:
    """Name of a step's folder: ``step-00000100``."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(path.name.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """Finished checkpoints in `folder`, newest first (finished, not verified)."""
    paths = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit() and path.is_dir()]
    return sorted(paths, key=step_of, reverse=True)


def newest(folder: Path, *, repair: bool = False) -> Path | None:
    """The newest checkpoint under `folder` that passes `verify`; torn ones are named on stderr.

    `repair`: torn ones are also set aside, and half-finished renames after a crash are repaired. Only the job that
    holds the run may do that: other processes may see a transient state.
    """
    if repair:
        restore(folder)
    deadline = time.monotonic() + LATE_SECONDS
    for path in complete(folder):
        try:
            verify(path, deadline)
            return path
        except TornCheckpoint as torn:
            if repair:
                replace(path, path.with_name(path.name + TORN))
            print(f"interlace: {torn}; using the checkpoint before it", file=sys.stderr, flush=True)
    return None


def restore(folder: Path) -> None:
    """Restores a checkpoint that was set aside if its replacement was interrupted; deletes those already replaced."""
    for old in folder.glob(f".step-*{_OLD}"):
        target = old.with_name(old.name[1 : -len(_OLD)])
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def verify(path: Path, deadline: float | None = None) -> None:
    """Verifies that every file exists with the size and SHA-256 of the manifest. Raises TornCheckpoint with its name.

    A missing or short file may only be late on this host: it is waited for until `deadline` (of time.monotonic;
    default: `LATE_SECONDS` from now).
    """
    deadline = time.monotonic() + LATE_SECONDS if deadline is None else deadline
    wait_until_visible(path / MANIFEST, deadline=deadline)
    for name, entry in read_manifest(path).files.items():
        file = path / name
        if not wait_until_visible(file, entry.size, deadline):
            size = f"has {file.stat().st_size} bytes instead of {entry.size}" if file.exists() else "is missing"
            raise TornCheckpoint(f"checkpoint {path} is torn: {file} {size}")
        if digest(file) != entry.sha256:
            raise TornCheckpoint(f"checkpoint {path} is torn: the contents of {file} have changed (SHA-256)")


def listing(folder: Path) -> str:
    """Names of the finished checkpoints, for a message."""
    return ", ".join(path.name for path in complete(folder)) or f"none in {folder}"


def wait_until_visible(path: Path, size: int | None = None, deadline: float | None = None) -> bool:
    """True if a file or folder exists (with `size` bytes); waits for it until `deadline` (of time.monotonic).

    This host's NFS cache of the folder or file may hide writes of another host. Opening them makes it query the server
    on most mounts; on the others, the cache expires.
    """
    deadline = time.monotonic() + LATE_SECONDS if deadline is None else deadline
    announced = False
    while True:
        with contextlib.suppress(OSError):
            os.listdir(path.parent)
            handle = os.open(path, os.O_RDONLY)
            try:
                if size is None or os.fstat(handle).st_size == size:
                    return True
            finally:
                os.close(handle)
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if not announced:
            print(
                f"interlace: waiting up to {left:.0f} s for {path}, which the file system may show late",
                file=sys.stderr,
            )
            announced = True
        time.sleep(min(0.2, left))


def replace(source: Path, target: Path) -> None:
    """Renames a folder over another, which is set aside first; `restore` brings it back after a crash in between."""
    old = target.with_name(f".{target.name}{_OLD}")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    source.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)
