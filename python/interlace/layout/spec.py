"""ParallelSpec: how one module is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

_ORDERS = ("loop",)
_SHARDS = ("none",)


@dataclass(frozen=True)
class ParallelSpec:
    """The degrees of one module: tensor, context, pipeline and data parallel; its replicas have dp of them.

    virtual: stages of one pipeline per rank. order: how these follow each other ("loop": rank i has stages i, i + pp,
    ...). shard: what a rank keeps of gradients and optimizer state ("none": all). shard_ranks: ranks that share it.

    Raises ValueError for a degree below 1, and for what this version does not run: virtual stages, sharded state.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    virtual: int = 1
    order: str = "loop"
    shard: str = "none"
    shard_ranks: int | None = None

    def __post_init__(self) -> None:
        for degree in ("tp", "cp", "pp", "dp", "virtual"):
            if getattr(self, degree) < 1:
                raise ValueError(f"{degree} must be at least 1, got {getattr(self, degree)}")
        if self.virtual != 1 or self.order not in _ORDERS:
            raise ValueError("this version runs one stage of a module per rank: leave virtual = 1 and order = 'loop'")
        if self.shard not in _SHARDS or self.shard_ranks is not None:
            raise ValueError("this version shards no state: leave shard = 'none' and shard_ranks = None")

    @property
    def lane_size(self) -> int:
        """Ranks of one stage of one replica."""
        return self.tp * self.cp

    @property
    def ranks(self) -> int:
        """Ranks of all stages of all replicas."""
        return self.lane_size * self.pp * self.dp
