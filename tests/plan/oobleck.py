"""Pipeline templates by enumeration."""

import itertools
import math

from bench.printed_oobleck import iteration_time


def stage_widths(nodes, gpus, widths):
    """Every sequence of stage widths that uses all nodes in order."""

    def fill(left):
        if left == 0:
            yield ()
        for width in widths:
            if width <= left:
                for rest in fill(left - width):
                    yield (width, *rest)

    for parts in itertools.product(list(fill(gpus)), repeat=nodes):
        yield tuple(itertools.chain(*parts))


def every_template(costs, nodes, gpus, widths, per_stage):
    layers, best = len(costs), math.inf
    for sequence in stage_widths(nodes, gpus, widths):
        for inner in itertools.combinations(range(1, layers), len(sequence) - 1):
            cuts = (0, *inner, layers)
            stages = [
                sum(costs[layer][widths.index(w)] for layer in range(cuts[s], cuts[s + 1]))
                for s, w in enumerate(sequence)
            ]
            best = min(best, iteration_time(stages, per_stage * len(stages)))
    return best
