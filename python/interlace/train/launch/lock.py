"""Run lock: one job at a time in a run folder. The lock file names its holder; also works over NFS.

Checkpoints of one run from two jobs would be mixed, so ``interlace train`` holds ``run.lock`` as long as it runs.
Kernel locks (flock, fcntl) are not sufficient: on some NFS mounts they hold within one host only, without an error.

- The file is written under another name and then linked to its own. On any file system only one job can succeed.
- It names its processes. If they have died on this machine (same boot, same process ids), the lock is taken over at
  once. The state of processes on another machine is unknown, and clocks differ. A holder therefore changes the file
  every few seconds (heartbeat). A job that wants the folder watches, by its own clock, for changes.
- A takeover replaces the file in one step. Before that, the job makes a claim on exactly this lock, which only one job
  can do. A job that was wrongly considered dead (stopped for minutes, for example) finds another job's name in the
  file. It checks every few seconds and before it makes a checkpoint visible, and ends with an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlace.train.config.load import ConfigError
from interlace.train.errors import TrainingError

NAME = "run.lock"
BEAT_SECONDS = 5.0  # between two heartbeats
STALE_SECONDS = 60.0  # a job on another machine without a heartbeat for this time is considered dead
CLAIM_SECONDS = 10.0  # longer than a takeover takes
_SLOT = 1024  # bytes for the record of one process; each process writes only its own record
_FIELDS = {"nonce": str, "host": str, "machine": str, "process": int, "started": int, "since": str}
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class RunLock:
    """Lock of a run folder, held by this process: made by `take`, or by `join` in a rank of the job."""

    def __init__(self, path: Path, record: dict[str, Any], handle: int, slot: int) -> None:
        self.path, self.record, self.handle, self.slot = path, record, handle, slot
        self.nonce: str = record["nonce"]
        self.trouble = ""
        """Reason that the run folder is no longer this job's; "" while it is (checked every few seconds)."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raises TrainingError if the run folder is no longer this job's."""
        try:
            self._look()
        except OSError as error:
            raise TrainingError(f"cannot read {self.path}: {error.strerror}") from None
        if self.trouble:
            raise TrainingError(self.trouble)

    def release(self) -> None:
        """Releases the run folder, unless another process of the job is still alive. Safe to call twice."""
        if not self.leave():
            return
        claim = self.path.with_name(f"{NAME}.{self.nonce}.claim")
        with contextlib.suppress(OSError):  # a remaining file is recognized as one of dead processes
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # fails if a takeover has the claim
            try:
                holders = _holders(_contents(self.path))
                others = [holder for slot, holder in enumerate(holders) if slot != self.slot]
                if holders and holders[0]["nonce"] == self.nonce and not any(map(_lives, others)):
                    self.path.unlink()
            finally:
                claim.unlink(missing_ok=True)

    def leave(self) -> bool:
        """Ends this process's use of the lock: another process of the job has joined, or will.

        Returns True if the job still had the lock.
        """
        if self.over.is_set():
            return False
        self.over.set()
        self.thread.join()
        os.close(self.handle)
        return True

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self.over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the server does not answer for now
                _sign(self.handle, self.record, self.slot)
                self._look()

    def _look(self) -> None:
        contents = _contents(self.path)
        holders = _holders(contents)
        if contents is None:
            self.trouble = f"{self.path} was removed, so another job may use this run folder: start the run again"
        elif not holders or holders[0]["nonce"] != self.nonce:
            self.trouble = f"the run folder {self.path.parent} was taken over by {_named(holders)}"


def take(folder: Path, *, take_over: bool = False, say: Callable[[str], None] = lambda _: None) -> RunLock:
    """Locks a run folder for this process and those that `join` it.

    Raises ConfigError, with the holder's name, if another job holds the lock and is alive or may be alive. `take_over`
    takes the folder from it. Checking a job on another machine may take `STALE_SECONDS`, which is reported through
    `say`.
    """
    path, record = folder / NAME, _record(secrets.token_hex(8))
    draft = folder / f".{NAME}.{record['nonce']}"
    try:
        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write in the run folder {folder}: {error.strerror}") from None
    try:
        _sign(handle, record, 0)
        deadline = time.monotonic() + STALE_SECONDS + 2 * CLAIM_SECONDS
        while not (_publish(draft, path) or _replace(draft, path, take_over, say)):
            if time.monotonic() > deadline:
                raise ConfigError(f"cannot lock {folder}: {path} keeps changing or cannot be read: check the file")
            time.sleep(0.05)  # the previous lock is gone, or has just changed
    except BaseException as error:
        os.close(handle)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot lock the run folder {folder}: {error.strerror}") from None
        raise
    finally:
        draft.unlink(missing_ok=True)
    return RunLock(path, record, handle, 0)


def join(folder: Path, nonce: str) -> RunLock:
    """Adds this process to the job that locked the run folder under `nonce`: the lock lasts while any of them lives.

    Raises TrainingError if another job has the lock by now.
    """
    path, record = folder / NAME, _record(nonce)
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError as error:
        raise TrainingError(f"cannot open {path}: {error.strerror}") from None
    holders = _holders(os.pread(handle, 4 * _SLOT, 0))
    if not holders or holders[0]["nonce"] != nonce:
        os.close(handle)
        raise TrainingError(f"the run folder {folder} was taken over by {_named(holders)}")
    _sign(handle, record, 1)
    return RunLock(path, record, handle, 1)


def _record(nonce: str) -> dict[str, Any]:
    """Record of this process in the lock file."""
    return {
        "nonce": nonce,
        "host": platform.node()[:64],
        "machine": _machine(),
        "process": os.getpid(),
        "started": _started(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _sign(handle: int, record: dict[str, Any], slot: int) -> None:
    """Writes a process's record, different each time, as a heartbeat."""
    text = json.dumps({**record, "sign": secrets.token_hex(4)})
    os.pwrite(handle, text.encode().ljust(_SLOT - 1) + b"\n", slot * _SLOT)
    os.fsync(handle)


def _publish(draft: Path, path: Path) -> bool:
    """Links the draft to the name `path`, unless that file exists."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        os.replace(draft, path)
    return True


def _replace(draft: Path, path: Path, take_over: bool, say: Callable[[str], None]) -> bool:
    """Replaces a lock without a living holder by the draft. Returns False if that lock changed: check again."""
    contents = _contents(path)
    if contents is None:
        return False
    holders = _holders(contents)
    nonce = holders[0]["nonce"] if holders else "damaged"
    if draft.name.endswith(nonce):
        return True  # a repeated NFS request may report that the name exists although this job created it
    lives = [_lives(holder) for holder in holders]
    unknown = None in lives or not lives
    if not take_over and (any(lives) or (unknown and not _is_stale(path, contents, say))):
        holders = _holders(_contents(path))
        living = [holder for holder in holders if _lives(holder) is not False] or holders
        raise ConfigError(
            f"{path.parent} is in use by {_named(living)}: wait for that job or stop it, or use --take-over "
            "(that job then fails before its next checkpoint)"
        )
    claim = path.with_name(f"{NAME}.{nonce}.claim")
    deadline = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            if _nonce_of(path) != nonce:
                return False
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another job has been taking over {path.parent} for {CLAIM_SECONDS:g} s; if no such job exists, "
                    f"remove {claim}"
                ) from None
            time.sleep(0.1)
    try:
        if _nonce_of(path) != nonce:
            return False
        os.replace(draft, path)
    finally:
        claim.unlink(missing_ok=True)
    return True


def _is_stale(path: Path, contents: bytes, say: Callable[[str], None]) -> bool:
    """True if a lock file does not change for `STALE_SECONDS` (or disappears meanwhile)."""
    say(
        f"{path.parent} is held by {_named(_holders(contents))}; "
        f"checking for {STALE_SECONDS:g} s whether that job still runs"
    )
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, STALE_SECONDS / 10))
        now = _contents(path)
        if now != contents:
            return now is None
    return True


def _contents(path: Path) -> bytes | None:
    """Contents of a lock file; None if it does not exist. Opening it makes NFS query the server."""
    try:
        with path.open("rb") as file:
            return file.read(4 * _SLOT)
    except FileNotFoundError:
        return None


def _holders(contents: bytes | None) -> list[dict[str, Any]]:
    """Records in a lock file, first the one of its creator; empty if that one is damaged."""
    records = []
    for line in (contents or b"").split(b"\n"):
        try:
            record = json.loads(line)
            sound = all(type(record.get(name)) is kind for name, kind in _FIELDS.items()) and record["process"] > 0
        except (ValueError, AttributeError, RecursionError):
            sound = False
        if not sound:
            break
        records.append(record)
    return records


def _nonce_of(path: Path) -> str | None:
    contents = _contents(path)
    holders = _holders(contents)
    return None if contents is None else holders[0]["nonce"] if holders else "damaged"


def _named(holders: list[dict[str, Any]]) -> str:
    if not holders:
        return f"a job that left a damaged {NAME}"
    return f"process {holders[0]['process']} on {holders[0]['host']} (since {holders[0]['since']})"


def _lives(holder: dict[str, Any]) -> bool | None:
    """True if a process is alive; None if this cannot be determined here."""
    if not holder["machine"] or holder["machine"] != _machine():
        return None
    try:
        os.kill(holder["process"], 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return _started(holder["process"]) in (holder["started"], 0)


def _machine() -> str:
    """Id of this boot of this machine and its process ids (containers have their own); "" if not available."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: int) -> int:
    """Start time of a process, in the kernel's ticks; -1 if it has ended, 0 if that is not visible."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return -1 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0
