"""Worker process that prepares data: reads tasks from a pipe and answers them until the trainer closes it."""

from __future__ import annotations

import contextlib
import pickle
import signal
from multiprocessing.connection import Connection

import torch

from interlace.data.workers.decode_cache import Decoded, Place
from interlace.data.workers.tasks import Producing

READY = "ready"


def work(pipe: Connection, loader: bytes, where: Place | None) -> None:
    """Answers (number, task) with (number, answer, error) until the other end is closed. loader: pickled."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the trainer handles them
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
    """The error itself, or one with the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # user classes may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
