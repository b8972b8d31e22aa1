"""Cache of decoded items, one per node, shared by all processes of a run: a bounded folder of memory-mapped files.

The folder is in shared memory (/dev/shm) if that has room, else in the cache on disk. An item is a file of
safetensors. It is written under a temporary name and renamed, so readers never see a partial item, even if the
writer is killed. The least recently used items are evicted first. A process holds a file lock while it decodes a
sample, so the ranks of a node decode it once. The kernel releases the lock if the process dies.

The last process that uses a folder removes it: a trainer, or the workers of one that was killed. If they were killed,
too, the next run of the same user on the node removes it: the folder's lock is then free.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from interlace._files import draft_of

SHARED = Path("/dev/shm")
PREFIX = "interlace-decoded-"
STRIPES = 1024  # locks, shared by all samples
SMALL = 1 << 16  # bytes; smaller items are read, not mapped: a process may have 65,530 maps
KEPT_SHARE = 0.9  # fraction of the limit that eviction leaves, so that it does not run for every item
LEFT_BEHIND = 60.0  # seconds after which an unfinished file counts as abandoned
HEADER = 128  # bytes of a file besides the numbers, about
ITEM = "item"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Place:
    """Location of the cache, the same for all processes of a run on a node. limit: bytes."""

    folder: Path
    limit: int


def place(run: str, limit: int, disk: Path) -> Place | None:
    """Cache location for `run`, a text that only the processes of this run have in common. None: no room.

    Shared memory, if it has twice the room for `limit` bytes beside other needs; else `disk`.
    """
    if limit <= 0:
        return None
    name = PREFIX + hashlib.sha256(f"{os.getuid()} {socket.gethostname()} {run}".encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if (SHARED / name).is_dir() or shutil.disk_usage(SHARED).free >= 2 * limit:
            return Place(SHARED / name, limit)
    return Place(disk / "decoded" / name, limit)


class Decoded:
    """One process's handle of a `Place`. Raises OSError if the folder cannot be made."""

    def __init__(self, where: Place) -> None:
        self.folder, self.limit = where.folder, where.limit
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(self.folder.parent)
        while True:  # retried if another process removes the folder before it is locked
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self.folder.mkdir(mode=0o700, exist_ok=True)
                self._alive = os.open(self.folder / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._alive, fcntl.LOCK_SH)
                if _is_at(self._alive, self.folder / "alive"):
                    break
                os.close(self._alive)

    # ------------------------------------------------------------------ items

    def _file(self, key: Sequence[object]) -> Path:
        return self.folder / hashlib.blake2b(repr(tuple(key)).encode(), digest_size=16).hexdigest()

    def get(self, key: Sequence[object]) -> Tensor | None:
        """The item, or None if it is not cached. Its memory is copy-on-write."""
        path = self._file(key)
        try:
            os.utime(path)
            if path.stat().st_size <= SMALL:
                return safetensors.torch.load(path.read_bytes())[ITEM]
            with safe_open(path, "pt") as file:
                item: Tensor = file.get_tensor(ITEM)
                return item
        except (OSError, RuntimeError, SafetensorError):  # evicted, no memory for one more map, or not an item
            return None

    def has(self, key: Sequence[object]) -> bool:
        """True if the item is cached; marks it as used."""
        try:
            os.utime(self._file(key))
        except OSError:
            return False
        return True

    def put(self, key: Sequence[object], item: Tensor) -> bool:
        """Caches the item. False if it is too large or the disk is full."""
        item = item.detach().contiguous()
        size = HEADER + item.nbytes
        if size > KEPT_SHARE * self.limit or item.dtype not in DTYPES:
            return False
        path = self._file(key)
        try:
            self._make_room(size)
            with draft_of(path) as draft:
                safetensors.torch.save_file({ITEM: item}, draft)
        except (OSError, SafetensorError):  # of a full disk
            return False
        return True

    def _make_room(self, size: int) -> None:
        """Adds `size` bytes to the total, and evicts the least recently used items beyond the limit."""
        with open(self.folder / "used", "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            held = file.read(8)
            used = int.from_bytes(held, "little") if len(held) == 8 else self.limit + 1  # unknown: recount
            if used + size > self.limit:
                used = self._remove_oldest(KEPT_SHARE * self.limit - size)
            file.truncate(0)
            file.write((used + size).to_bytes(8, "little"))

    def _remove_oldest(self, most: float) -> int:
        """Evicts items until at most `most` bytes are left; returns the bytes left."""
        files, long_ago = [], time.time() - LEFT_BEHIND
        for entry in os.scandir(self.folder):
            unfinished = entry.name.startswith(".")
            if not unfinished and len(entry.name) != 32:
                continue
            with contextlib.suppress(FileNotFoundError):
                about = entry.stat()
                if not unfinished or about.st_mtime < long_ago:  # a recent one is still being written
                    files.append((about.st_mtime, about.st_size, entry.path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= most:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= size
        return used

    # ------------------------------------------------------------------ locks on samples

    @contextlib.contextmanager
    def claimed(self, key: Sequence[object]) -> Iterator[bool]:
        """Context with the lock of sample `key`. Yields False, without waiting, if another process decodes it."""
        stripe = int.from_bytes(hashlib.blake2b(repr(tuple(key)).encode(), digest_size=4).digest(), "little") % STRIPES
        with open(self.folder / f"lock-{stripe}", "ab") as file:  # closing releases the lock
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def mark_broken(self, key: Sequence[object], why: str) -> None:
        """Marks a sample as undecodable for all processes of the node."""
        with contextlib.suppress(OSError):
            (self.folder / f"broken-{self._file(key).name}").write_text(why, encoding="utf-8")

    def broken(self, key: Sequence[object]) -> str | None:
        """Reason why a sample is undecodable; None if it is not marked."""
        try:
            return (self.folder / f"broken-{self._file(key).name}").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Closes this handle; the last process removes the folder. Tensors already read stay valid."""
        if self._alive < 0:
            return
        _remove_unused(self.folder, self._alive)
        os.close(self._alive)
        self._alive = -1


def _sweep(parent: Path) -> None:
    """Removes this user's folders that no live process uses."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with open(folder / "alive", "rb") as file:
                _remove_unused(folder, file.fileno())


def _remove_unused(folder: Path, alive: int) -> None:
    """Removes the folder if no other process holds the lock of its file `alive`, here open as a descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(alive, fcntl.LOCK_UN)  # of two processes that both kept theirs, neither would be the last
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(alive, folder / "alive"):
            # Renamed first: another process may make the folder anew at once. If this one is killed, a sweep finds it.
            removed = folder.with_name(f"{folder.name}-{os.getpid()}")
            folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def _is_at(descriptor: int, path: Path) -> bool:
    """True if `path` is the open file, False if that one was removed, even if another has taken its place."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


__all__ = ["Decoded", "Place", "place"]
