"""Marks probe results caused by errors, so that they are not cached.

A probe treats every exception of a model as a negative result. The cause may be unrelated to the model, such as a
machine without free threads or files. Such a result is usually safe, but it may be wrong. It is valid in its process
only and is not cached (cache.py). Lack of memory gives no result at all: the error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

T = TypeVar("T")

NO_MEMORY = ("out of memory", "not enough memory", "allocate memory")

_failures: ContextVar[list[str] | None] = ContextVar("failures", default=None)


@contextmanager
def failures() -> Iterator[list[str]]:
    """List of the errors passed to `record_failure` inside this context. Enclosing contexts get them, too."""
    around, mine = _failures.get(), list[str]()
    token = _failures.set(mine)
    try:
        yield mine
    finally:
        _failures.reset(token)
        if around is not None:
            around += mine


def attempt(run: Callable[[], T], otherwise: T) -> T:
    """The result of `run`; `otherwise` if it raises an error, which is recorded."""
    try:
        return run()
    except Exception as problem:  # a model may raise anything
        record_failure(problem)
        return otherwise


def record_failure(problem: Exception) -> None:
    """Record that the coming result is caused by an error. If memory is short, raises `problem` itself."""
    raise_if_no_memory(problem)
    failures = _failures.get()
    if failures is not None:
        failures.append(f"{type(problem).__name__}: {problem}")


def raise_if_no_memory(problem: Exception) -> None:
    """Raise `problem` if it reports a lack of memory, which is unrelated to the model."""
    out_of_memory = isinstance(problem, RuntimeError) and any(words in str(problem).lower() for words in NO_MEMORY)
    if out_of_memory or isinstance(problem, (MemoryError, torch.OutOfMemoryError)):
        raise problem
