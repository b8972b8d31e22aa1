"""What a rank does for a step outside of its lists: in the trainer, and in the thread that reads ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Around:
    """Seconds of a rank's own, per step; all of the host's.

    sample: of each sample of the global batch before the first action and behind the last: its table, what the ranks
    compare, what is counted of it. read: of each sample of the global batch in the thread that reads ahead. decode:
    encoder -> there, of each sample whose items this rank encodes. error: the part by which turns of measuring differ
    (nan where nothing was measured).

    What a thread does beside the lists is not free where it shares a core, or Python's lock, with the rank.
    """

    sample: float = 0.0
    read: float = 0.0
    decode: Mapping[str, float] = field(default_factory=dict)
    error: float = math.nan

    def __post_init__(self) -> None:
        for name, value in (("sample", self.sample), ("read", self.read), *self.decode.items()):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}: give seconds from 0 upwards")

    def aside(self, samples: int) -> float:
        """Seconds before the first action and behind the last, of a step over so many samples."""
        return self.sample * samples

    def ahead(self, samples: int, encoded: Mapping[str, int]) -> float:
        """Seconds in which a rank reads a step's data ahead. encoded: encoder -> samples whose items it decodes."""
        return self.read * samples + sum(self.decode.get(name, 0.0) * count for name, count in encoded.items())

    def to_table(self) -> dict[str, Any]:
        """What JSON can hold; `from_table` reads it."""
        return asdict(self) | {"error": None if math.isnan(self.error) else self.error}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Around:
        """Of a table as `to_table` makes it. Raises KeyError, TypeError or ValueError for anything else."""
        decode = {str(name): float(seconds) for name, seconds in table["decode"].items()}
        error = math.nan if table["error"] is None else float(table["error"])
        return cls(float(table["sample"]), float(table["read"]), decode, error)


NOTHING_AROUND = Around()
"""Of a step whose lists and optimizer are all there is."""
