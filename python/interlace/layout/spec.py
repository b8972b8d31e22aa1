"""ParallelSpec: parallel degrees and sharding of one module."""

from __future__ import annotations

from dataclasses import dataclass

_ORDERS = ("loop", "v")
_SHARDS = ("none", "optimizer", "full")


@dataclass(frozen=True)
class ParallelSpec:
    """The degrees of one module: tensor (tp), context (cp), pipeline (pp) and data (dp) parallel.

    virtual: stages of one pipeline per rank. order: placement of these stages. "loop": the i-th of the pp ranks (or
        lanes) has stages i, i + pp, ...; "v": down the ranks and up again, i and 2 * pp - 1 - i, for virtual = 2.

    shard: state of which each rank keeps only a slice, among the ranks that hold the same weights (those of dp and cp).
        "none"; "optimizer": summed gradients and optimizer state (ZeRO-1); "full": also weights, which are then whole
        only while their layer needs them, or from the start of a step to their last use. shard_ranks: number of ranks,
        at least 2, that share one set of slices; there may be several sets (default: all ranks share one set).

    Raises ValueError for a degree below 1, for an unknown `order` or `shard` or one that does not fit the other values,
    and for a `shard_ranks` without effect.
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
        if self.order not in _ORDERS:
            raise ValueError(f"unknown order {self.order!r}: use one of {', '.join(map(repr, _ORDERS))}")
        if self.order == "v" and self.virtual != 2:
            raise ValueError(f"order = 'v' needs virtual = 2, got {self.virtual}")
        if self.shard not in _SHARDS:
            raise ValueError(f"unknown shard {self.shard!r}: use one of {', '.join(map(repr, _SHARDS))}")
        if self.shard_ranks is not None and (self.shard == "none" or self.shard_ranks < 2):
            raise ValueError(
                f"shard_ranks = {self.shard_ranks} with shard = {self.shard!r}: use shard_ranks >= 2 with "
                "shard = 'optimizer' or 'full', or leave shard_ranks out"
            )

    @property
    def lane_size(self) -> int:
        """Ranks of one stage of one replica."""
        return self.tp * self.cp

    @property
    def stages(self) -> int:
        """Stages of one replica."""
        return self.pp * self.virtual

    def lane_index(self, stage: int) -> int:
        """Index of the lane, of the pp lanes of a replica, that runs stage `stage`."""
        lap, index = divmod(stage, self.pp)
        return self.pp - 1 - index if self.order == "v" and lap == 1 else index

    @property
    def ranks(self) -> int:
        """Ranks of all stages of all replicas."""
        return self.lane_size * self.pp * self.dp
