"""Settings of an elastic run: the [resilience] section of its config, for supervisors and coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from interlace.resilience.wire import from_table


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
        settings = from_table(cls, table)
        if settings.nodes < 1 or settings.faults < 0 or settings.min_nodes < 0 or settings.ranks_per_node < 1:
            raise ValueError(f"counts of nodes must be positive, got {settings}")
        if not settings.heartbeat > 0 or not settings.gather >= 0 or not settings.patience >= 0:
            raise ValueError(f"seconds must be positive, got {settings}")
        return settings
