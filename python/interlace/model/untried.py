"""Tells answers of trials from those that were given because something failed.

A trial takes whatever a model raises for a no. So would it take what has nothing to do with the model, as a machine
that is out of threads or files; such an answer is mostly safe, and may be wrong. It holds for its process, and is not
kept (remembered.py). Where memory is short there is no answer at all: that is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

NO_MEMORY = ("out of memory", "not enough memory", "allocate memory")

_failures: ContextVar[list[str] | None] = ContextVar("failures", default=None)


@contextmanager
def failures() -> Iterator[list[str]]:
    """A list of what `gave_up` is told in here; those around this one are told, too."""
    around, mine = _failures.get(), list[str]()
    token = _failures.set(mine)
    try:
        yield mine
    finally:
        _failures.reset(token)
        if around is not None:
            around += mine


def gave_up(problem: Exception) -> None:
    """Note that the answer to come follows from a failure. Raises `problem` itself where memory is short."""
    raise_if_no_memory(problem)
    found = _failures.get()
    if found is not None:
        found.append(f"{type(problem).__name__}: {problem}")


def raise_if_no_memory(problem: Exception) -> None:
    """Raise `problem` if it says that memory is short, which says nothing of a model."""
    told = isinstance(problem, RuntimeError) and any(words in str(problem).lower() for words in NO_MEMORY)
    if told or isinstance(problem, (MemoryError, torch.OutOfMemoryError)):
        raise problem
