"""Opening media files: a plain path, or a member of a tar as a window into that tar.

A member is named ``/data/shard-000.tar!1536+20480!cat.jpg``: path of the tar, offset of the member's bytes, their
number, name of the member. Reading a member needs no index, and nothing is unpacked to disk.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from interlace.modalities.errors import BrokenSampleError

_MEMBER = re.compile(r"(?P<tar>.+\.tar)!(?P<offset>\d+)\+(?P<size>\d+)!(?P<name>.*)", re.DOTALL | re.IGNORECASE)


class Member(NamedTuple):
    """A member of a tar: path of the tar, byte offset, size in bytes, name."""

    tar: str
    offset: int
    size: int
    name: str

    def __str__(self) -> str:
        return f"{self.tar}!{self.offset}+{self.size}!{self.name}"


def member_of(path: str | Path) -> Member | None:
    """The tar member that `path` names, or None for a plain file."""
    text = str(path)
    match = _MEMBER.fullmatch(text) if ".tar!" in text.lower() else None
    return None if match is None else Member(match["tar"], int(match["offset"]), int(match["size"]), match["name"])


def container_of(path: str) -> str:
    """The file on disk that contains a medium: the medium's own file, or its tar."""
    member = member_of(path)
    return path if member is None else member.tar


class _Window(io.RawIOBase):
    """A range of bytes of a file, as a file object."""

    def __init__(self, member: Member) -> None:
        self._file = open(member.tar, "rb", buffering=0)  # closed in `close`
        self._start, self._size, self._at = member.offset, member.size, 0
        if os.fstat(self._file.fileno()).st_size < member.offset + member.size:
            self._file.close()
            raise OSError(f"{member.tar}: ends within {member.name}")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the file's begin")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._at))
        data = os.pread(self._file.fileno(), wanted, self._start + self._at)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """Yields a path as text, or an open file for a tar's member, as libraries accept them. Raises OSError."""
    member = member_of(path)
    if member is None:
        yield str(path)
        return
    with io.BufferedReader(_Window(member)) as file:
        yield file


def read_head(path: str | Path, size: int) -> bytes:
    """The first `size` bytes at most; -1: all. Raises OSError."""
    with opened(path) as stream:
        if not isinstance(stream, str):
            data: bytes = stream.read(size)
            return data
        with open(stream, "rb") as file:
            return file.read(size)


def size_of(path: str | Path) -> os.stat_result:
    """`os.stat` of the file on disk that contains a medium. Raises OSError, also for a member beyond its tar's end."""
    member = member_of(path)
    if member is None:
        return os.stat(path)
    status = os.stat(member.tar)
    if status.st_size < member.offset + member.size:
        raise OSError(0, f"{member.tar} ends within it")
    return status


def check_file(path: str) -> None:
    """Raises BrokenSampleError unless the file exists."""
    name = path if len(path) <= 300 else f"{path[:300]}..."
    try:
        mode = size_of(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenSampleError("missing file", f"{name}: no such file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise BrokenSampleError("broken file", f"{name}: cannot be read: {error.strerror}") from None
        raise BrokenSampleError("no file", f"{name}: no path; inline data have to be saved to a file") from None
    if not stat.S_ISREG(mode):
        raise BrokenSampleError("no file", f"{name}: not a file")


@cache
def library(name: str) -> Any:
    """The module `name`, imported on first use. Raises ImportError with the package to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is needed to read this data: pip install 'interlace[data]' ({error})") from error
