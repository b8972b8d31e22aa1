"""A worker process that prepares data: it takes tasks from a pipe and answers each, until the trainer is gone."""

from __future__ import annotations

import contextlib
import pickle
import signal
from multiprocessing.connection import Connection

import torch

from interlace.data.decoded import Decoded, Place
from interlace.data.producing import Producing

READY = "ready"


def work(pipe: Connection, loader: bytes, where: Place | None) -> None:
    """Answers (number, task) with (number, answer, error) until the other end is closed. loader: pickled."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a whole group gets these: the trainer finishes its step and closes
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(contextlib.suppress(EOFError, OSError))  # the trainer is gone
        decoded = None if where is None else Decoded(where)
        if decoded is not None:
            cleanup.callback(decoded.close)
        producing = Producing(pickle.loads(loader), decoded)
        pipe.send(READY)
        while True:
            task_number, task = pipe.recv()
            try:
                answer, failed = producing.answer(task), None
            except Exception as error:
                answer, failed = None, portable(error)
            pipe.send((task_number, answer, failed))


def portable(error: Exception) -> Exception:
    """The error, or one with its words where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of its own raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
