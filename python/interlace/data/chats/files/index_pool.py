"""Process pool that makes an index: sends orders, collects answers, handles dead and hung processes.

The processes are separate programs (`index_worker`), not forks: the training process may have threads, and user
scripts need no main guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from interlace._cores import usable_cores
from interlace.data.chats.files.records import ChatFileError, Piece
from interlace.data.chats.files.sources import Rules
from interlace.modalities import all_modalities

SILENT = 600.0
"""Seconds without a heartbeat after which a process counts as hung; while it reads it sends one every two seconds."""
SAY_EVERY = 10.0  # seconds between progress messages
TRIES = 2
"""Number of attempts for a piece before a process's death is attributed to the piece."""


def run(
    pieces: Sequence[tuple[Piece, Path]],
    rules: Rules,
    media: Path,
    processes: int | None,
    say: Callable[[str], None],
) -> None:
    """Indexes all pieces into their files, with `processes` at a time (default: one per core).

    Raises ChatFileError with the file and the problem; pieces finished by then are kept.
    """
    if not pieces:
        return
    count = min(processes or usable_cores(), len(pieces))
    idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
    for _ in range(count):
        idle.put(None)  # started by its first piece
    stopping = threading.Event()

    def index(piece: Piece, place: Path) -> dict[str, int]:
        worker = idle.get()
        try:
            for _ in range(TRIES):
                worker = worker or _Worker()
                try:
                    return worker.ask(piece, place, rules, media, stopping)
                except _DiedError as error:
                    worker.close()
                    worker, problem = None, error
                    if stopping.is_set():
                        break
        finally:
            idle.put(worker)
        raise ChatFileError(
            f"{piece.file}: the process that indexes it from byte {piece.start:,} on {problem}; what is done is kept, "
            "start again to go on"
        )

    records = broken = 0
    logged = began = time.monotonic()
    pool = ThreadPoolExecutor(count, "interlace-index")
    try:
        answers = as_completed([pool.submit(index, *each) for each in pieces])
        for done, answer in enumerate(answers, 1):
            records, broken = records + answer.result()["records"], broken + answer.result()["broken"]
            if time.monotonic() - logged > SAY_EVERY:
                logged = time.monotonic()
                rate = records / max(logged - began, 1e-9)
                say(f"{done} of {len(pieces)} pieces, {records:,} records ({rate:,.0f}/s), {broken:,} of them broken")
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)
        while not idle.empty():
            if (worker := idle.get()) is not None:
                worker.close()


class _DiedError(Exception):
    """A dead or hung worker; the message describes it."""


class _Worker:
    """One process."""

    def __init__(self) -> None:
        path = os.pathsep.join([entry for entry in sys.path if entry])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "interlace.data.chats.files.index_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self._read = b""

    def ask(self, piece: Piece, place: Path, rules: Rules, media: Path, stopping: threading.Event) -> dict[str, int]:
        """Indexes a piece. Raises ChatFileError for a problem with the file, _DiedError."""
        modules = sorted({type(each).__module__ for each in all_modalities()})  # they register on import
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pickle.dumps((modules, piece, place, rules, media)))
            self._process.stdin.flush()
        except OSError:
            raise _DiedError(f"ended with code {self._process.wait()}") from None
        while True:
            answer = json.loads(self._line(stopping))
            if "error" in answer:
                raise (ImportError if answer["missing"] else ChatFileError)(answer["error"])
            if "done" in answer:
                counts: dict[str, int] = answer["done"]
                return counts

    def _line(self, stopping: threading.Event) -> bytes:
        assert self._process.stdout is not None
        number = self._process.stdout.fileno()
        last = time.monotonic()
        while b"\n" not in self._read:
            if stopping.is_set():
                raise _DiedError("was stopped")
            if time.monotonic() - last > SILENT:
                raise _DiedError(f"has given no sign for {SILENT:g} s")
            if select.select([number], [], [], 0.5)[0]:
                data = os.read(number, 1 << 16)
                if not data:
                    raise _DiedError(f"ended with code {self._process.wait()}")
                self._read, last = self._read + data, time.monotonic()
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
