"""How callers state what actions cost, and what chunks hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from interlace.schedule.actions import Op

Durations = Mapping[Any, float] | Callable[[Op, str, int, int], float]
"""Seconds of compute actions. A mapping, looked up with the keys (op, module, stage, chunk), (op, module, stage),
(op, module), op in this order, so that general entries serve where specific ones are missing; or a function
of (op, module, stage, chunk). A chunk is its place in `StepTable.chunks`."""

ActivationBytes = Mapping[Any, float]
"""Bytes that a chunk holds from its forward to its backward: (module, stage, chunk) or (module, stage) -> bytes."""


def duration_of(durations: Durations) -> Callable[[Op, str, int, int], float]:
    """A cached lookup of seconds; raises ValueError for an action without a cost or with a negative one."""
    cache: dict[tuple[Op, str, int, int], float] = {}

    def look_up(op: Op, module: str, stage: int, chunk: int) -> float:
        if callable(durations):
            return durations(op, module, stage, chunk)
        for key in ((op, module, stage, chunk), (op, module, stage), (op, module), op):
            if key in durations:
                return durations[key]
        raise ValueError(
            f"durations has no entry for {op.name} of {module}/{stage}, chunk {chunk}: give one under "
            f"(Op.{op.name}, {module!r}, {stage}), (Op.{op.name}, {module!r}) or Op.{op.name}"
        )

    def duration(op: Op, module: str, stage: int, chunk: int) -> float:
        key = (op, module, stage, chunk)
        seconds = cache.get(key)
        if seconds is None:
            seconds = float(look_up(op, module, stage, chunk))
            if not (seconds >= 0.0 and math.isfinite(seconds)):
                raise ValueError(f"{op.name} of {module}/{stage}, chunk {chunk} costs {seconds} seconds")
            cache[key] = seconds
        return seconds

    return duration


def bytes_held(activation_bytes: ActivationBytes, module: str, stage: int, chunk: int) -> float:
    """Of one chunk on one stage; 0 where nothing is given."""
    specific = activation_bytes.get((module, stage, chunk))
    return activation_bytes.get((module, stage), 0.0) if specific is None else specific
