"""Worker process that prepares data: reads tasks from a pipe and answers them until the trainer ends it."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
from multiprocessing.connection import Connection, wait

import torch

from interlace.data.workers.decode_cache import Decoded, Place
from interlace.data.workers.tasks import Producing

READY = "ready"
STOP = "stop"
EXIT = 10.0  # seconds for a killed trainer to exit


def work(pipe: Connection, loader: bytes, where: Place | None) -> None:
    """Answers (number, task) with (number, answer, error) until it reads STOP. loader: pickled."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the trainer handles them
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as cleanup:
        decoded = None if where is None else Decoded(where)
        if decoded is not None:
            cleanup.callback(decoded.close)
        producing = Producing(pickle.loads(loader), decoded)
        try:
            _answer_tasks(pipe, producing)
        except (EOFError, OSError):  # the trainer has closed the pipe, or was killed
            if not _told_to_stop(pipe):
                _await_exit_of_trainer()


def _answer_tasks(pipe: Connection, producing: Producing) -> None:
    pipe.send(READY)
    while (message := pipe.recv()) != STOP:
        task_number, task = message
        try:
            answer, failed = producing.answer(task), None
        except Exception as error:
            answer, failed = None, portable(error)
        pipe.send((task_number, answer, failed))


def _told_to_stop(pipe: Connection) -> bool:
    """True if STOP is among the messages that are still unread: the trainer closes the pipe after it."""
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll():
            if pipe.recv() == STOP:
                return True
    return False


def _await_exit_of_trainer() -> None:
    """Waits until a killed trainer has exited: the kernel closes its pipes before it releases its file locks."""
    trainer = mp.parent_process()
    with contextlib.suppress(OSError, AttributeError):  # it has exited; or not Linux
        assert trainer is not None and trainer.pid is not None
        descriptor = os.pidfd_open(trainer.pid)
        wait([descriptor], EXIT)
        os.close(descriptor)


def portable(error: Exception) -> Exception:
    """The error itself, or one with the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # user classes may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
