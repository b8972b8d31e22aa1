"""Time of a rank's step outside its action lists: in the trainer, and in the thread that reads ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class HostOverhead:
    """Host seconds of a rank per step, outside its action lists.

    sample: per sample of the global batch, before the first action and after the last: table, comparison of ranks,
    counting. read: per sample of the global batch, in the thread that reads ahead. decode: encoder -> seconds in that
    thread per sample whose items this rank encodes. error: relative difference between measurement rounds (nan if
    nothing was measured).

    Work of that thread is not free if it shares a core, or the GIL, with the rank.
    """

    sample: float = 0.0
    read: float = 0.0
    decode: Mapping[str, float] = field(default_factory=dict)
    error: float = math.nan

    def __post_init__(self) -> None:
        for name, value in (("sample", self.sample), ("read", self.read), *self.decode.items()):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}: it must be a number of seconds >= 0")

    def step_seconds(self, samples: int) -> float:
        """Seconds before the first action and after the last, of a step over `samples` samples."""
        return self.sample * samples

    def read_seconds(self, samples: int, encoded: Mapping[str, int]) -> float:
        """Seconds that a rank takes to read a step's data ahead. encoded: encoder -> samples whose items it decodes."""
        return self.read * samples + sum(self.decode.get(name, 0.0) * count for name, count in encoded.items())

    def to_table(self) -> dict[str, Any]:
        """JSON-compatible table; `from_table` reads it."""
        return asdict(self) | {"error": None if math.isnan(self.error) else self.error}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> HostOverhead:
        """Reads a table made by `to_table`. Raises KeyError, TypeError or ValueError for an invalid table."""
        decode = {str(name): float(seconds) for name, seconds in table["decode"].items()}
        error = math.nan if table["error"] is None else float(table["error"])
        return cls(float(table["sample"]), float(table["read"]), decode, error)


NO_HOST_OVERHEAD = HostOverhead()
"""HostOverhead of a step that consists only of its lists and the optimizer."""
