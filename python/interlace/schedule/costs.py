"""Durations of actions and bytes of chunks, in the formats that callers use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.schedule.actions import CODES, OPS, Op

Durations = Mapping[Any, float] | Callable[[Op, str, int, int], float] | NDArray[np.float64]
"""Seconds of compute actions, in one of three forms:

- a mapping, looked up with the keys (op, module, stage, chunk), (op, module, stage), (op, module), op in this order, so
  that general entries are the fallback for specific ones
- a function of (op, module, stage, chunk)
- float64 [ops, stages, chunks], nan for missing entries, ops numbered as in `CODES`

A chunk is its index in `StepTable.chunks`."""

ActivationBytes = Mapping[Any, float]
"""Bytes that a chunk holds from its forward to its backward: (module, stage, chunk) or (module, stage) -> bytes."""


def duration_of(durations: Durations) -> Callable[[Op, str, int, int], float]:
    """Cached lookup of seconds. It raises ValueError for an action without a cost or with a negative one."""

    @cache
    def duration(op: Op, module: str, stage: int, chunk: int) -> float:
        if callable(durations):
            seconds = durations(op, module, stage, chunk)
        elif isinstance(durations, np.ndarray):
            seconds = durations[CODES[op], stage, chunk]
        else:
            keys = ((op, module, stage, chunk), (op, module, stage), (op, module), op)
            key = next((key for key in keys if key in durations), None)
            if key is None:
                raise ValueError(
                    f"durations has no entry for {op.name} of {module}/{stage}, chunk {chunk}: give one under "
                    f"(Op.{op.name}, {module!r}, {stage}), (Op.{op.name}, {module!r}) or Op.{op.name}"
                )
            seconds = durations[key]
        if not (seconds >= 0.0 and math.isfinite(seconds)):
            raise ValueError(
                f"{op.name} of {module}/{stage}, chunk {chunk} costs {seconds} seconds: it must be finite and >= 0"
            )
        return float(seconds)

    return duration


def seconds_of(durations: Durations, work: NDArray[np.integer[Any]], modules: Sequence[str]) -> NDArray[np.float64]:
    """Seconds of each row of `work`, float64 [n].

    work: int [n, 4], op, module, stage and chunk. modules: names by number. Each op and stage is looked up once; each
    chunk too if durations depend on it. Errors as in `duration_of`, for the first such row.
    """
    if isinstance(durations, np.ndarray):
        op, _, stage, chunk = work.T
        seconds = np.asarray(durations[op, stage, chunk])
        wrong = ~((seconds >= 0.0) & np.isfinite(seconds))
        if wrong.any():
            first = work[wrong.argmax()].tolist()
            duration_of(durations)(OPS[first[0]], modules[first[1]], *first[2:])  # raises
        return seconds
    chunk_free = not callable(durations) and not any(isinstance(key, tuple) and len(key) == 4 for key in durations)
    columns = work.astype(np.int64)
    if chunk_free:
        columns[:, 3] = 0
    sizes = columns.max(axis=0, initial=0) + 1
    kind = ((columns[:, 0] * sizes[1] + columns[:, 1]) * sizes[2] + columns[:, 2]) * sizes[3] + columns[:, 3]
    _, first, number = np.unique(kind, return_index=True, return_inverse=True)
    cost = duration_of(durations)
    costs = np.zeros(len(first))
    for k in np.argsort(first).tolist():  # in order, so that the error names the first action without a cost
        op, module, stage, chunk = work[first[k]].tolist()
        costs[k] = cost(OPS[op], modules[module], stage, chunk)
    return np.asarray(costs[number.reshape(-1)])


def bytes_held(activation_bytes: ActivationBytes, module: str, stage: int, chunk: int) -> float:
    """Bytes of one chunk on one stage; 0 without an entry."""
    specific = activation_bytes.get((module, stage, chunk))
    return activation_bytes.get((module, stage), 0.0) if specific is None else specific
