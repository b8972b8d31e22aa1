"""Oobleck's planning latency (dissertation table 2.3, section 2.7.4.1)."""

from __future__ import annotations

import time

import numpy as np

from bench.papers.frame import Claim, Row, Rows, Table
from interlace import plan

LAYERS = (24, 32, 64, 96)
PRINTED = {  # table 2.3: (nodes, GPUs per node) -> seconds for 24, 32, 64 and 96 layers
    (8, 1): (0.28, 0.71, 9.65, 68.50),
    (8, 4): (0.41, 1.15, 11.58, 74.56),
    (8, 8): (0.54, 1.50, 20.98, 109.76),
    (16, 1): (3.37, 7.45, 66.35, 540.36),
    (16, 4): (4.56, 10.41, 108.10, 649.67),
    (16, 8): (4.90, 11.78, 176.04, 1213.63),
    (24, 1): (11.35, 30.11, 262.47, 1477.54),
    (24, 4): (14.78, 45.80, 472.53, 2153.84),
    (24, 8): (15.59, 49.25, 520.08, 3297.92),
}
CASES = {f"{nodes} nodes of {gpus}": (nodes, gpus) for nodes, gpus in PRINTED}


def latency(case: str, small: bool) -> list[Row]:
    """Seconds to compute one pipeline template for each number of layers, the best of three."""
    nodes, gpus = CASES[case]
    rows = []
    for layers, printed in zip(LAYERS, PRINTED[nodes, gpus]):
        if small and layers > 32:
            break
        rng = np.random.default_rng(layers)
        costs = rng.lognormal(0, 0.3, (layers, 1)) / np.arange(1, gpus + 1) ** 0.8
        best = np.inf
        for _ in range(3):
            start = time.perf_counter()
            plan.pipeline_template(costs, nodes, gpus)
            best = min(best, time.perf_counter() - start)
        rows.append(Row(case, f"{layers} layers", printed, best, "s"))
    return rows


def faster(rows: Rows) -> list[Claim]:
    longest = max(rows, key=lambda row: row.ours)
    slowest = max(rows, key=lambda row: row.theirs)
    ratios = [row.theirs / row.ours for row in rows]
    return [
        Claim(
            "planning takes less than 0.1 % of 100 days",
            f"{slowest.theirs:,.0f} s at most",
            f"{longest.ours:.3f} s at most",
            longest.ours < 0.001 * 100 * 86400,
        ),
        Claim(
            "the exact planner is faster than the printed divide and conquer at every size",
            "the paper's own seconds",
            f"{min(ratios):,.0f} to {max(ratios):,.0f} times faster",
            min(ratios) > 1,
        ),
    ]


TABLES = (
    Table(
        "oobleck-2.3",
        "dissertation table 2.3, section 2.7.4.1",
        "Seconds to plan one pipeline template.",
        tuple(CASES),
        latency,
        faster,
        assumed=(
            "costs of layers are lognormal (spread 0.3) and fall with GPUs to the power 0.8: the paper's profiles are "
            "not printed, and the time to plan hardly depends on them",
        ),
        missing=("the paper's machine: its seconds are quoted, not measured again",),
        timed=True,
    ),
)
