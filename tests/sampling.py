"""Which cases of a long sweep a run tries: a sample, always the same, or with INTERLACE_EVERY_CASE=1 all."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def sample(cases: Sequence[T], most: int) -> list[T]:
    """At most so many of the cases, in their order."""
    if os.environ.get("INTERLACE_EVERY_CASE") or len(cases) <= most:
        return list(cases)
    return [cases[place] for place in sorted(random.Random(0).sample(range(len(cases)), most))]
