"""One job at a time in a run folder: a lock file that says who holds it, also over NFS.

Two jobs that write one run's checkpoints would leave a mixture, so ``interlace train`` holds ``run.lock`` as long as it
runs. Kernel locks (flock, fcntl) will not do: on some mounts of NFS they hold within one host only, and do not say so.

- The file is written under another name and then linked to its own, which exactly one job can do on any file system.
- It names its processes. If they have died on this machine (same boot, same process ids), the lock is taken over at
  once. Of another machine nobody can tell, and clocks differ: so a holder changes the file every few seconds, and who
  wants the folder watches, by its own clock, whether it still changes.
- Who takes a lock over replaces the file in one step, and first makes a claim on just this lock, as only one job can.
  A job that was taken for dead and is not (it was stopped for minutes, say) finds another's name in the file: it
  looks every few seconds and before it makes a checkpoint visible, and ends with an error.
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

from interlace.train.config import ConfigError
from interlace.train.errors import TrainingError

NAME = "run.lock"
BEAT_SECONDS = 5.0  # between two signs of life
STALE_SECONDS = 60.0  # without a sign of life a job on another machine is taken for dead
CLAIM_SECONDS = 10.0  # more than a job needs to take a lock over
_SLOT = 1024  # bytes for the record of one process, which writes only its own
_FIELDS = {"nonce": str, "host": str, "machine": str, "process": int, "started": int, "since": str}
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class RunLock:
    """The lock of a run folder, held by this process: made by `take`, or by `join` in a rank of the job."""

    def __init__(self, path: Path, record: dict[str, Any], handle: int, slot: int) -> None:
        self.path, self.record, self.handle, self.slot = path, record, handle, slot
        self.nonce: str = record["nonce"]
        self.trouble = ""
        """Why the run folder is no longer this job's; "" as long as it is (looked up every few seconds)."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raises TrainingError when the run folder is no longer this job's."""
        try:
            self._look()
        except OSError as error:
            raise TrainingError(f"cannot read {self.path}: {error.strerror}") from None
        if self.trouble:
            raise TrainingError(self.trouble)

    def release(self) -> None:
        """Gives the run folder back, if no other process of the job still lives. Safe to call twice."""
        if not self.leave():
            return
        claim = self.path.with_name(f"{NAME}.{self.nonce}.claim")
        with contextlib.suppress(OSError):  # what is left of the file is seen to be of dead processes
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL))  # who takes over has it, and is left alone
            try:
                holders = _holders(_contents(self.path))
                others = [holder for slot, holder in enumerate(holders) if slot != self.slot]
                if holders and holders[0]["nonce"] == self.nonce and not any(map(_lives, others)):
                    self.path.unlink()
            finally:
                claim.unlink(missing_ok=True)

    def leave(self) -> bool:
        """Ends this process's part in it: another process of the job has joined, or will. Whether it had one still."""
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
            self.trouble = f"{self.path} is gone: somebody removed it so that another job may use this run folder"
        elif not holders or holders[0]["nonce"] != self.nonce:
            self.trouble = f"the run folder {self.path.parent} was taken over by {_named(holders)}"


def take(folder: Path, *, take_over: bool = False, say: Callable[[str], None] = lambda _: None) -> RunLock:
    """Locks a run folder for this process and those that `join` it.

    A job that holds it, and lives or may live, is a ConfigError that names it; `take_over` takes the folder from it. To
    learn whether a job on another machine lives may take `STALE_SECONDS`, of which `say` is told.
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
                raise ConfigError(f"cannot lock {folder}: {path} changes all the time, or cannot be read; look at it")
            time.sleep(0.05)  # what held it is gone, or has just changed
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"cannot lock the run folder {folder}: {error.strerror}") from None
    except BaseException:
        os.close(handle)
        raise
    finally:
        draft.unlink(missing_ok=True)
    return RunLock(path, record, handle, 0)


def join(folder: Path, nonce: str) -> RunLock:
    """Makes this process one of the job that locked the run folder under `nonce`: its lock lasts as long as either.

    Raises TrainingError when another job has it by now.
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
    """What this process writes about itself."""
    return {
        "nonce": nonce,
        "host": platform.node()[:64],
        "machine": _machine(),
        "process": os.getpid(),
        "started": _started(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _sign(handle: int, record: dict[str, Any], slot: int) -> None:
    """Writes a process's record, never twice the same: a sign of life."""
    text = json.dumps({**record, "sign": secrets.token_hex(4)})
    os.pwrite(handle, text.encode().ljust(_SLOT - 1) + b"\n", slot * _SLOT)
    os.fsync(handle)


def _publish(draft: Path, path: Path) -> bool:
    """Gives the draft the name `path`, unless there is such a file."""
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
    """Puts the draft in the place of a lock that nobody alive holds. False: that lock changed, so look again."""
    contents = _contents(path)
    if contents is None:
        return False
    holders = _holders(contents)
    nonce = holders[0]["nonce"] if holders else "damaged"
    if draft.name.endswith(nonce):
        return True  # NFS may report that a name was there when it made it itself, asked a second time
    lives = [_lives(holder) for holder in holders]
    unknown = None in lives or not lives
    if not take_over and (any(lives) or (unknown and not _stands_still(path, contents, say))):
        holders = _holders(_contents(path))
        living = [holder for holder in holders if _lives(holder) is not False] or holders
        raise ConfigError(
            f"{path.parent} is in use by {_named(living)}: wait for it or end it, or take the "
            "folder from it with --take-over (it then ends with an error before its next checkpoint)"
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
                    f"another job has been taking over {path.parent} for {CLAIM_SECONDS:g} s; if there is none, "
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


def _stands_still(path: Path, contents: bytes, say: Callable[[str], None]) -> bool:
    """Whether a lock file does not change for `STALE_SECONDS` (or goes away meanwhile)."""
    say(
        f"{path.parent} is held by {_named(_holders(contents))}; "
        f"looking for {STALE_SECONDS:g} s whether that job still lives"
    )
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, STALE_SECONDS / 10))
        now = _contents(path)
        if now != contents:
            return now is None
    return True


def _contents(path: Path) -> bytes | None:
    """What a lock file holds; None when there is none. Opening it makes NFS ask the server."""
    try:
        with path.open("rb") as file:
            return file.read(4 * _SLOT)
    except FileNotFoundError:
        return None


def _holders(contents: bytes | None) -> list[dict[str, Any]]:
    """The records in a lock file, the one of the process that made it first; none when that one is damaged."""
    found = []
    for line in (contents or b"").split(b"\n"):
        try:
            record = json.loads(line)
            sound = all(type(record.get(name)) is kind for name, kind in _FIELDS.items()) and record["process"] > 0
        except (ValueError, AttributeError, RecursionError):
            sound = False
        if not sound:
            break
        found.append(record)
    return found


def _nonce_of(path: Path) -> str | None:
    contents = _contents(path)
    holders = _holders(contents)
    return None if contents is None else holders[0]["nonce"] if holders else "damaged"


def _named(holders: list[dict[str, Any]]) -> str:
    if not holders:
        return f"a job that left a damaged {NAME}"
    return f"process {holders[0]['process']} on {holders[0]['host']} (since {holders[0]['since']})"


def _lives(holder: dict[str, Any]) -> bool | None:
    """Whether a process lives; None when it cannot be known here."""
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
    """This boot of this machine and its process ids (containers have their own); "" where that cannot be had."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: int) -> int:
    """When a process began, in the kernel's ticks; -1 when it has ended, 0 when that cannot be seen."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return -1 if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0
