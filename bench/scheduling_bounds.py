"""Lower bounds of plans, computed in numpy independently of the planner's code, so that a gap of 0 is a proof.

- `least_spread`: standard deviation of the loads of bins, if items heavier than a share had a bin of their own
- `partition`: the dynamic program of eq. 3.5 with a bisection in place of its inner loop; exact up to empty stages
- `template`: a shortest path per interval of the slowest stage's time; intervals are halved where they decide
- `orchestration`: the best value of DistTrain's convex problem over every choice of TP and DP
- `orchestration_of_layers`: the best of all TP, DP and PP, where PP must divide the layers
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np


def least_spread(weights: np.ndarray, bins: int) -> float:
    """Lower bound on the standard deviation of the bins' loads, in the unit of the weights [n], O(n log n).

    An item heavier than an equal share determines the load of its bin. The other bins at best share the rest equally;
    the next item may be heavier than an equal share of the rest again. Sums of squares are convex, so no other loads
    have less spread. The bound is 0 if no item is heavier than an equal share, even if whole items cannot reach it.
    """
    falling = np.sort(np.asarray(weights, np.float64))[::-1]
    loads = np.zeros(bins)
    remaining, fixed = float(falling.sum()), 0
    while fixed < min(bins - 1, len(falling)) and falling[fixed] * (bins - fixed) > remaining:
        loads[fixed] = falling[fixed]
        remaining -= float(falling[fixed])
        fixed += 1
    loads[fixed:] = max(remaining, 0.0) / (bins - fixed)
    return float(loads.std()) if fixed else 0.0


def partition(
    costs: np.ndarray,
    stages: int,
    speeds: np.ndarray | None = None,
    memory: np.ndarray | None = None,
    memory_limits: np.ndarray | None = None,
) -> float:
    """The slowest stage of the best cut of a row into consecutive stages; stages may be empty.

    best[i], the slowest stage of the first i layers, rises with i, and the time of a stage j .. i falls with j. So the
    least maximum is where the two cross, or one before. O(stages * layers * log layers).
    """
    prefix = np.concatenate([[0.0], np.cumsum(costs)])
    held = np.zeros(len(prefix)) if memory is None else np.concatenate([[0.0], np.cumsum(memory)])
    pace = np.ones(stages) if speeds is None else speeds
    limits = np.full(stages, np.inf) if memory_limits is None else memory_limits
    every = np.arange(len(prefix))
    best = np.where(every == 0, 0.0, np.inf)  # without any stage
    for speed, limit in zip(pace, limits):
        # The first layer at which the stage may begin within its memory. (A sum may differ in its last digits.)
        first = np.searchsorted(held, held - limit * (1 + 1e-12))
        low, high = first.copy(), every.copy()  # at `every` the stage is empty and costs nothing
        while (low < high).any():
            middle = (low + high) // 2
            crossed = best[middle] >= (prefix - prefix[middle]) / speed
            low, high = np.where(crossed, low, middle + 1), np.where(crossed, middle, high)
        before = np.maximum(low - 1, first)
        best = np.minimum(
            np.maximum(best[low], (prefix - prefix[low]) / speed),
            np.maximum(best[before], (prefix - prefix[before]) / speed),
        )
    return float(best[-1])


def template(costs: np.ndarray, nodes: int, gpus_per_node: int, known: float, *, intervals: int = 120) -> float:
    """A lower bound on T1 + T2 + T3 over all templates, at most `known`, the value of one.

    t is the slowest stage's time and k* the first such stage. k* t plus the stages from k* on is at least the sum of
    all stages. So T >= 2 sum_k t_k + (3 S - 1) t. For t in [a, b] this is at least the shortest path over (layer, GPU)
    with stages of at most b that cost 2 t_k + 3 a each, less a. The interval with the least bound is halved next.

    costs [layers, widths]: column w - 1 is a layer's time on w GPUs; N_b = 4 S.
    """
    layers, widths = costs.shape
    prefix = np.concatenate([np.zeros((1, widths)), np.cumsum(costs, axis=0)])
    stage = np.where(np.tri(layers + 1, k=-1, dtype=bool)[..., None], prefix[:, None] - prefix[None], np.inf)

    def shortest(a: float, b: float) -> float:
        """stage[i, j, w - 1] covers layers j .. i - 1; a node's GPUs are filled before the next one's."""
        priced = np.where(stage <= b * (1 + 1e-12), 2 * stage + 3 * a, np.inf)
        reach = np.full((nodes * gpus_per_node + 1, layers + 1), np.inf)
        reach[0, 0] = 0.0
        for at in range(nodes * gpus_per_node):
            for width in range(1, min(widths, gpus_per_node - at % gpus_per_node) + 1):
                np.minimum(reach[at + width], (reach[at] + priced[..., width - 1]).min(axis=1), out=reach[at + width])
        return float(reach[-1, -1]) - a

    low = float(costs.min(axis=1).max())
    high = known / (3 * nodes - 1)  # from T >= (3 S - 1) t
    heap = [(shortest(low, high), low, high)]
    for _ in range(intervals):
        value, a, b = heap[0]
        if value >= known:
            break
        middle = (a * b) ** 0.5
        heapq.heapreplace(heap, (shortest(a, middle), a, middle))
        heapq.heappush(heap, (shortest(middle, b), middle, b))
    return min(known, heap[0][0])


def orchestration(
    forward: Sequence[Sequence[float]], language_model: int, tp: np.ndarray, gpus: int, batch: int, vpp: int = 1
) -> float:
    """The least of DistTrain's relaxed problems (5.2) over all TP and DP, with real numbers of stages and GPUs.

    For one choice, the slowest stage's time t needs width_i * max(1, warm_i / t) GPUs of module i, where warm_i is its
    time for a microbatch and width_i = tp_i dp_i. The least t that `gpus` allow is bisected for all choices at once,
    and the lower end of the interval is returned. Memory is not modelled.
    """
    best = np.inf
    for dp, size, degree in _choices(len(forward), language_model, tp, gpus, batch):
        width = tp[size] * degree
        warm = np.ceil(dp / degree) * np.array(forward)[np.arange(len(forward)), size]
        low, high = np.zeros(len(warm)), warm.max(axis=1)
        for _ in range(60):
            middle = (low + high) / 2
            with np.errstate(divide="ignore"):
                enough = (width * np.maximum(1.0, warm / middle[:, None])).sum(axis=1) <= gpus
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        best = min(best, float((warm.sum(axis=1) / vpp + (batch // dp - 1) * low).min()))
    return best


def orchestration_of_layers(
    forward: Sequence[Sequence[float]],
    layers: Sequence[int],
    memory: Sequence[Sequence[float]],
    language_model: int,
    tp: np.ndarray,
    gpus: int,
    batch: int,
    vpp: int,
    gpu_memory: float,
) -> float:
    """Least time of every TP, DP and PP that fits, enumerated. memory: (weights, states, activations) [modules]."""
    modules = len(forward)
    weights, states, activations = np.array(memory).T
    stages = np.array(list(itertools.product(*(_divisors(count // vpp) for count in layers))))
    behind = stages[:, ::-1].cumsum(axis=1)[:, ::-1]  # stages from the module's first to the end
    best = np.inf
    for dp, size, degree in _choices(modules, language_model, tp, gpus, batch):
        count = batch // dp
        # Interleaved stages warm up with more microbatches than stages, if there are enough.
        held = np.minimum(behind if vpp == 1 else ((vpp + 1) * behind - 1) / vpp, count)
        for at in range(0, len(size), 4096):
            sizes, degrees = tp[size[at : at + 4096]], degree[at : at + 4096]
            samples = np.ceil(dp / degrees)
            warm = samples * np.array(forward)[np.arange(modules), size[at : at + 4096]]
            fixed = weights / sizes + states / (sizes * degrees)
            each = samples * activations / sizes
            fits = (sizes * degrees) @ stages.T <= gpus
            slowest = np.zeros(fits.shape)
            for i in range(modules):
                slowest = np.maximum(slowest, warm[:, i, None] / stages[:, i])
                if gpu_memory < np.inf:
                    fits &= (fixed[:, i, None] + each[:, i, None] * held[:, i]) / stages[:, i] <= gpu_memory
            time = warm.sum(axis=1)[:, None] / vpp + (count - 1) * slowest
            best = min(best, float(np.where(fits, time, np.inf).min()))
    return best


def _choices(
    modules: int, language_model: int, tp: np.ndarray, gpus: int, batch: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Per DP of the language model: (DP, index of TP, dp), both [choices, modules], within the number of GPUs."""
    degrees = _divisors(batch)
    for dp in degrees:
        own = [[d for d in degrees if d <= dp] if i != language_model else [dp] for i in range(modules)]
        result = np.array(list(itertools.product(*(itertools.product(range(len(tp)), each) for each in own))))
        size, degree = result[..., 0], result[..., 1]
        fits = (tp[size] * degree).sum(axis=1) <= gpus
        if fits.any():
            yield dp, size[fits], degree[fits]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
