"""Oobleck's planning procedures as printed in the dissertation (section 2.4), for comparison; not for use.

The divide and conquer (eqs. 2.1-2.4) keeps one solution per sub-problem: the one whose own T1 + T2 + T3 is least.
`combinations` lists the combinations of templates (eq. 2.5).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any


def iteration_time(stages: list[float], microbatches: int) -> float:
    """T1 + T2 + T3 of a pipeline with these 1F + 1B times per stage; k* is the first slowest stage."""
    slow = max(range(len(stages)), key=lambda k: (stages[k], -k))
    t1 = sum(stages)
    t2 = (microbatches - len(stages) + slow - 1) * stages[slow]
    return t1 + t2 + sum(stages[slow:])


def divide_and_conquer(costs: Any, nodes: int, gpus_per_node: int) -> float:
    """T1 + T2 + T3 of the template that eqs. 2.1-2.4 find, with N_b = 4 S'. costs [layers, gpus_per_node]."""
    layers = len(costs)

    @functools.cache
    def solve(stages: int, u: int, v: int, nodes: int, gpus: int) -> tuple[float, tuple[float, ...]]:
        best: tuple[float, tuple[float, ...]] = (math.inf, ())
        if stages == 1:
            if nodes > 1 or gpus > len(costs[0]):
                return best
            time = float(sum(costs[layer][gpus - 1] for layer in range(u, v)))
            return 4 * time, (time,)
        # Nodes are divided first; GPUs within a node once only one node is left.
        halves = [((n, gpus), (nodes - n, gpus)) for n in range(1, nodes)] if nodes > 1 else []
        halves += [((1, m), (1, gpus - m)) for m in range(1, gpus)] if nodes == 1 else []
        for left, right in halves:
            for s in range(1, stages):
                for k in range(u + s, v - (stages - s) + 1):
                    first = solve(s, u, k, *left)[1]
                    second = solve(stages - s, k, v, *right)[1] if first else ()
                    if first and second:
                        time = iteration_time([*first, *second], 4 * stages)
                        if time < best[0]:
                            best = (time, first + second)
        return best

    return min(solve(stages, 0, layers, nodes, gpus_per_node)[0] for stages in range(nodes, layers + 1))


def combinations(node_counts: Sequence[int], nodes: int, pipelines: int = 1) -> Iterator[tuple[int, ...]]:
    """All combinations of templates that use all nodes with at least `pipelines` pipelines (eq. 2.5).

    Yields tuples [p], the number of pipelines per template, in descending lexicographic order. Their number is
    exponential, so this is for small cases; `instantiate` does not list them.
    """

    def rest(index: int, remaining: int, needed_pipelines: int) -> Iterator[tuple[int, ...]]:
        if index == len(node_counts) - 1:
            count, over = divmod(remaining, node_counts[index])
            if not over and count >= needed_pipelines:
                yield (count,)
            return
        for count in range(remaining // node_counts[index], -1, -1):
            for tail in rest(index + 1, remaining - count * node_counts[index], needed_pipelines - count):
                yield (count, *tail)

    return rest(0, nodes, pipelines) if len(node_counts) else iter(())
