"""How callers state what actions cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from interlace.schedule.actions import Op

Durations = Mapping[Any, float] | Callable[[Op, str, int, int], float]
"""Seconds of compute actions. A mapping, looked up with the keys (op, module, stage, microbatch), (op, module, stage),
(op, module), op in this order, so that general entries serve where specific ones are missing; or a function
of (op, module, stage, microbatch)."""


def duration_of(durations: Durations) -> Callable[[Op, str, int, int], float]:
    """A cached lookup of seconds; raises ValueError for an action without a cost or with a negative one."""
    cache: dict[tuple[Op, str, int, int], float] = {}

    def look_up(op: Op, module: str, stage: int, microbatch: int) -> float:
        if callable(durations):
            return durations(op, module, stage, microbatch)
        for key in ((op, module, stage, microbatch), (op, module, stage), (op, module), op):
            if key in durations:
                return durations[key]
        raise ValueError(
            f"durations has no entry for {op.name} of {module}/{stage}, microbatch {microbatch}: give one under "
            f"(Op.{op.name}, {module!r}, {stage}), (Op.{op.name}, {module!r}) or Op.{op.name}"
        )

    def duration(op: Op, module: str, stage: int, microbatch: int) -> float:
        key = (op, module, stage, microbatch)
        seconds = cache.get(key)
        if seconds is None:
            seconds = float(look_up(op, module, stage, microbatch))
            if not (seconds >= 0.0 and math.isfinite(seconds)):
                raise ValueError(f"{op.name} of {module}/{stage}, microbatch {microbatch} costs {seconds} seconds")
            cache[key] = seconds
        return seconds

    return duration
