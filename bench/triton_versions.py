"""Other versions of Triton beside the installed one: fetched once with pip into a separate cache folder.

Registers differ between versions, so a tile that is clean under one version spills under another. Compile processes run
with such a folder first on PYTHONPATH (`environment`). The cache is $INTERLACE_CACHE, else ~/.cache/interlace.
"""

from __future__ import annotations

import csv
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.9.0", "3.6.0")
"""Versions that the kernels are compiled under: the newest that the package allows, and the oldest, of a common H200
image."""


class Unavailable(RuntimeError):
    """A version of Triton is neither installed nor cached, and pip could not fetch it; the message has the cause."""


def cache_folder() -> Path:
    return Path(os.environ.get("INTERLACE_CACHE") or Path.home() / ".cache" / "interlace")


def site(version: str) -> Path | None:
    """The folder to put first on PYTHONPATH for this version of Triton; None if it is the installed one.

    Raises Unavailable. Safe if several processes call it at once: one installs and the others wait. Safe if
    interrupted: the folder is renamed to its final name once it is complete.
    """
    try:
        if metadata.version("triton") == version:
            return None
    except metadata.PackageNotFoundError:
        pass
    folder = cache_folder() / f"triton-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, even by a crash
        if not is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as fresh:
                _install(version, Path(fresh) / "site")
                os.rename(Path(fresh) / "site", folder)
    return folder


def is_complete(folder: Path) -> bool:
    """True if every file in the wheel's list exists in its full size (an interrupted copy or a cleaner of old files
    leaves gaps)."""
    records = list(folder.glob("triton-*.dist-info/RECORD"))
    if len(records) != 1:
        return False
    with records[0].open(newline="") as lines:
        for name, _, size in csv.reader(lines):
            path = folder / name
            if size and not name.startswith("..") and not (path.is_file() and path.stat().st_size == int(size)):
                return False
    return True


def environment(version: str) -> dict[str, str]:
    """The environment of a process that compiles under this version of Triton. Raises Unavailable."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    first = site(version)
    folders = [*([first] if first else []), ROOT / "python", ROOT]
    variables["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    return variables


def _install(version: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    process = subprocess.run(
        [*command, "--retries", "1", "--timeout", "30", "--target", str(folder), f"triton=={version}"],
        capture_output=True,
        text=True,
    )
    if process.returncode != 0 or not is_complete(folder):
        reason = (process.stderr.strip().splitlines() or ["it left an incomplete folder"])[-1]
        raise Unavailable(f"pip could not fetch triton=={version}: {reason}")
