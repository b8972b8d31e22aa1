"""Rank groups: thousands of ranks as a few hundred groups, with the utilisation of each group over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interlace.layout import Layout
from interlace.schedule import Schedule
from interlace.schedule.actions import CODES, COMPUTE, MODULE, OP
from interlace.simulate.arrays import Simulated

MOST_GROUPS = 256

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RankGroups:
    """Groups of ranks. names: names of the groups. of_rank: int64 [ranks], group of each rank."""

    names: tuple[str, ...]
    of_rank: NDArray[np.int64]

    def ranks(self, group: int) -> NDArray[np.int64]:
        """The ranks of a group, ascending."""
        return np.flatnonzero(self.of_rank == group)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of ranks of each group, int64 [groups]."""
        return np.bincount(self.of_rank, minlength=len(self.names))

    @classmethod
    def of(cls, layout: Layout, max_groups: int = MOST_GROUPS) -> RankGroups:
        """Groups ranks by replica of the whole model if all modules have the same dp.

        Otherwise by replica of the last module of each rank. Small replicas are merged with their neighbours until a
        group is as large as the largest replica and there are about `max_groups` groups or fewer.
        """
        modules = list(layout.modules)
        one_dp = len(set(layout.data_parallel.values())) == 1
        keys: list[tuple[int, int]] = []
        for rank in range(layout.world):
            module = layout.of_rank(rank)[-1].module
            replica = layout.replica(rank, module)
            assert replica is not None
            keys.append((0 if one_dp else modules.index(module), replica))
        units, unit, count = np.unique(np.array(keys), axis=0, return_inverse=True, return_counts=True)
        target_size = max(int(count.max()), layout.world // max_groups)
        names: list[str] = []
        group_of = np.zeros(len(units), np.int64)
        for kind in np.unique(units[:, 0]).tolist():
            label = "replica" if one_dp else modules[kind]
            size, first_index = 0, 0
            members = np.flatnonzero(units[:, 0] == kind)
            for index, number in enumerate(members.tolist()):
                group_of[number] = len(names)
                size += int(count[number])
                if size >= target_size or index == len(members) - 1:
                    a, b = (int(units[members[i], 1]) for i in (first_index, index))
                    names.append(f"{label} {a}" if a == b else f"{label} {a}-{b}")
                    size, first_index = 0, index + 1
        return cls(tuple(names), group_of[unit.reshape(-1)])


@dataclass(frozen=True, eq=False)
class Utilisation:
    """Utilisation of groups of ranks in a step of `makespan` seconds.

    least, mean, most: float64 [groups], over the ranks of a group; the utilisation of a rank is the share of the step
    in which it computes, 0 to 1. over_time: float64 [groups, modules, bins], share of the ranks that compute a module
    in each of `bins` equal parts of the step.
    """

    makespan: float
    least: Floats
    mean: Floats
    most: Floats
    over_time: Floats

    @classmethod
    def of(cls, schedule: Schedule, simulated: Simulated, groups: RankGroups, bins: int = 400) -> Utilisation:
        """Utilisation in a simulated step, O(actions). Raises ValueError for no bins."""
        if bins < 1:
            raise ValueError(f"bins is {bins}: it must be at least 1")
        span, count, modules = simulated.makespan, len(groups.names), len(schedule.graph.modules)
        share = simulated.rank_busy / span if span else np.zeros(len(simulated.rank_busy))
        minimum, maximum = np.full(count, np.inf), np.zeros(count)
        np.minimum.at(minimum, groups.of_rank, share)
        np.maximum.at(maximum, groups.of_rank, share)
        mean = np.bincount(groups.of_rank, weights=share, minlength=count) / groups.sizes
        computing = compute_rows(schedule)
        rank = np.searchsorted(schedule.first, computing, side="right") - 1
        row = groups.of_rank[rank] * modules + schedule.rows[computing, MODULE]
        busy = _covered(row, simulated.start[computing], simulated.finish[computing], span, count * modules, bins)
        over_time = busy.reshape(count, modules, bins) / (groups.sizes[:, None, None] * (span / bins or 1.0))
        return cls(span, minimum, mean, maximum, over_time)


def compute_rows(schedule: Schedule) -> NDArray[np.int64]:
    """Indices of all compute actions in the rows of a schedule."""
    return np.flatnonzero(np.isin(schedule.rows[:, OP], [CODES[op] for op in COMPUTE]))


def _covered(row: NDArray[np.int64], start: Floats, finish: Floats, span: float, rows: int, bins: int) -> Floats:
    """Total seconds of each bin covered by the intervals [start, finish) of each row, float64 [rows, bins]."""
    width = span / bins if span else 1.0
    covered, covered_later = np.zeros(rows * bins), np.zeros(rows * (bins + 1))
    for moment, sign in ((start, 1.0), (finish, -1.0)):  # a start adds all later time, a finish subtracts it
        index = np.minimum((moment / width).astype(np.int64), bins - 1)
        covered += np.bincount(row * bins + index, sign * ((index + 1) * width - moment), rows * bins)
        covered_later += np.bincount(row * (bins + 1) + index + 1, np.full(len(row), sign * width), rows * (bins + 1))
    total = covered.reshape(rows, bins) + np.cumsum(covered_later.reshape(rows, bins + 1), axis=1)[:, :bins]
    return np.asarray(np.maximum(total, 0.0))  # rounding


def spread_over(values: Sequence[float] | Floats, count: int) -> list[int]:
    """Indices of `count` values, evenly spaced in rank from the largest to the smallest; all if there are fewer."""
    order = np.argsort(-np.asarray(values), kind="stable")
    if count >= len(order):
        return [int(i) for i in order]
    return [int(order[round(k * (len(order) - 1) / max(count - 1, 1))]) for k in range(count)]
