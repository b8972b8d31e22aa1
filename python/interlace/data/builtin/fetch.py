"""Fetches Debian's ``tuxpaint-stamps-default`` into a cache folder: apt-get download, dpkg -x, nothing installed.

- Works as root and as any user: apt gets its own folders for lists and cache. So it needs no rights and does not
  change the system's apt. Costs one ``apt-get update`` into those folders (some MB, seconds), once.
- Atomic: unpacked into a temporary folder, checked against the sizes that the package declares, then renamed. A lock
  serialises processes: a second one waits and finds the result.
- The data is GPL-2: it is stored in the user's cache and is never part of this project.

Layout: ``<cache>/stamps/<version>/{stamps/, copyright, complete.json, index.json}``; ``<cache>`` is
``$INTERLACE_CACHE``, else ``$XDG_CACHE_HOME/interlace``, else ``~/.cache/interlace``.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from interlace._files import cache_folder

PACKAGE = "tuxpaint-stamps-default"
NEEDED_BYTES = 700 << 20  # for the package, the unpacked tree and derived files
Made = TypeVar("Made")
log = logging.getLogger("interlace.data")


class FetchError(RuntimeError):
    """The package is not available; the message has the step and the reason, in one line."""


def find_stamps(cache: str | Path | None = None) -> Path | None:
    """The newest complete stamps folder in the cache, or None. Does not use the network."""
    folder = cache_folder(cache)
    complete = sorted((folder / "stamps").glob("[!.]*/complete.json"), key=lambda p: (p.stat().st_mtime, str(p)))
    return complete[-1].parent / "stamps" if complete else None


def find_or_fetch(cache: str | Path | None = None, *, timeout: float = 300.0) -> tuple[Path | None, str]:
    """(The stamps folder, fetched if it is not in the cache, or None; the error in one line, or "").

    ``timeout``: seconds for each subprocess and for waiting on another process that fetches.
    """
    folder = cache_folder(cache)
    try:
        lock = folder / "fetch.lock"
        return made_once(lock, timeout, lambda: find_stamps(folder), lambda: _fetch(folder, timeout)), ""
    except (FetchError, OSError, TimeoutError) as error:
        return None, " ".join(str(error).split())


def made_once(lock: Path, timeout: float, load: Callable[[], Made | None], make: Callable[[], object]) -> Made | None:
    """Result of `load`. If it is None, one process calls `make` first, and the others wait. Raises TimeoutError."""
    made = load()
    if made is None:
        with exclusive(lock, timeout):
            made = load()
            if made is None:
                make()
                made = load()
    return made


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Temporary folder beside `folder`, which it replaces if the block raises no error. To be used under a lock."""
    mine = re.compile(rf"\.{re.escape(folder.name)}\.tmp-\d+")
    for stale in folder.parent.iterdir():  # of a killed process: the lock shows that none is running
        if mine.fullmatch(stale.name):
            shutil.rmtree(stale, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
        yield temporary
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Holds an inter-process lock file (released by the kernel when the holder dies).

    Raises TimeoutError after ``timeout`` seconds of waiting.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has held {path} for {timeout:g} s; end it or try again later"
                    ) from None
                time.sleep(0.1)
        yield


def _fetch(cache: Path, timeout: float) -> None:
    for tool in ("apt-get", "dpkg", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FetchError(f"{tool} not found (the package comes from Debian or Ubuntu archives)")
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise FetchError(f"{cache} has {free >> 20} MiB free, {NEEDED_BYTES >> 20} MiB are needed")
    log.info("fetching %s (157 MB) into %s", PACKAGE, cache)
    parent = cache / "stamps"
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(".tmp-*"):  # left by a killed process: the lock shows that none is running
        shutil.rmtree(stale, ignore_errors=True)
    work = parent / f".tmp-{os.getpid()}"
    try:
        package = _download(cache / "apt", work, timeout)
        version = _run(["dpkg-deb", "-f", str(package), "Version"], timeout).strip()
        target = parent / version.replace(":", "_")
        _unpack(package, work / "tree", timeout)
        ready = work / "ready"
        ready.mkdir()
        (work / "tree/usr/share/tuxpaint/stamps").rename(ready / "stamps")
        licence = work / f"tree/usr/share/doc/{PACKAGE}/copyright"
        if licence.exists():
            licence.rename(ready / "copyright")
        (ready / "complete.json").write_text(json.dumps({"package": PACKAGE, "version": version}))
        if target.exists():  # an incomplete folder, made by hand
            shutil.rmtree(target)
        ready.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(cache / "apt", ignore_errors=True)


def _download(apt: Path, work: Path, timeout: float) -> Path:
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True)
    options = []
    for key, value in {
        "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        # As root, apt drops to user _apt, which may have no write access here. Other users cannot drop and need not.
        "APT::Sandbox::User": pwd.getpwuid(os.getuid()).pw_name if os.getuid() == 0 else "",
        "Acquire::Languages": "none",
        "Acquire::http::Timeout": 20,
        "Acquire::https::Timeout": 20,
        "Acquire::Retries": 1,
        "APT::Update::Error-Mode": "any",  # offline, a plain update "succeeds" with warnings
    }.items():
        options += ["-o", f"{key}={value}"]
    update_error = ""
    try:
        _run(["apt-get", *options, "-qq", "update"], timeout)
    except FetchError as error:
        update_error = f" ({error})"  # one unreachable source may not matter: the download decides
    try:
        _run(["apt-get", *options, "-qq", "download", PACKAGE], timeout, cwd=work)
    except FetchError as error:
        raise FetchError(f"{error}{update_error}") from error
    packages = list(work.glob("*.deb"))
    if len(packages) != 1:
        raise FetchError(f"apt-get download {PACKAGE} left {len(packages)} packages instead of 1")
    record = _run(["apt-cache", *options, "show", "--no-all-versions", PACKAGE], timeout)
    sizes = [int(line.split(":")[1]) for line in record.splitlines() if line.startswith("Size:")]
    if sizes and packages[0].stat().st_size not in sizes:
        raise FetchError(f"{packages[0].name} is {packages[0].stat().st_size} bytes, the archive lists {sizes[0]}")
    return packages[0]


def _unpack(package: Path, tree: Path, timeout: float) -> None:
    declared = int(_run(["dpkg-deb", "-f", str(package), "Installed-Size"], timeout).strip() or 0) << 10
    _run(["dpkg", "-x", str(package), str(tree)], timeout)
    if not (tree / "usr/share/tuxpaint/stamps").is_dir():
        raise FetchError(f"{package.name} holds no usr/share/tuxpaint/stamps folder")
    # Installed-Size rounds every file up to whole KiB and counts 1 KiB for each folder and link.
    contents = tree.rglob("*")
    unpacked = sum(1024 if p.is_symlink() or p.is_dir() else -(-p.stat().st_size // 1024) * 1024 for p in contents)
    if declared and abs(unpacked - declared) > 0.02 * declared:
        raise FetchError(f"{package.name} unpacked to {unpacked} bytes, it declares {declared}; is the disk full?")


def _run(command: Sequence[str], timeout: float, cwd: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    name = " ".join([command[0], *(c for c in command[1:] if c in ("update", "download", "-x", "-f", "show"))])
    try:
        done = subprocess.run(
            list(command),
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{name} took longer than {timeout:g} s") from None
    except OSError as error:
        raise FetchError(f"{name}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")] or done.stderr.splitlines()
        raise FetchError(f"{name}: {lines[-1].removeprefix('E: ') if lines else f'exit status {done.returncode}'}")
    return done.stdout
