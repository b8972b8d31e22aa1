"""Settings of an elastic run: the [resilience] section of its config, for supervisors and coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Fields are explained in `interlace.train.config.resilience.Resilience`.

    min_nodes: 0 takes the ranks' proposal. patience: coordinator_patience of the config.
    """

    nodes: int
    faults: int = 1
    min_nodes: int = 0
    heartbeat: float = 5.0
    gather: float = 60.0
    ranks_per_node: int = 1
    patience: float = 30.0

    def to_table(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Settings:
        """Raises ValueError."""
        try:
            found = cls(**{str(key): value for key, value in table.items()})
            numbers = asdict(found)
            whole = all(type(numbers[key]) is int for key in ("nodes", "faults", "min_nodes", "ranks_per_node"))
            if not whole or not all(isinstance(value, int | float) for value in numbers.values()):
                raise TypeError("a value is no number")
        except TypeError as error:
            raise ValueError(f"these are no settings of a run ({error})") from error
        if found.nodes < 1 or found.faults < 0 or found.min_nodes < 0 or found.ranks_per_node < 1:
            raise ValueError(f"counts of nodes must be positive, got {found}")
        if not found.heartbeat > 0 or not found.gather >= 0 or not found.patience >= 0:
            raise ValueError(f"seconds must be positive, got {found}")
        return found
