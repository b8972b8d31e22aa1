"""Cornstarch: frozen-aware and frozen-unaware cuts, from the printed times of stages.

2025-03 table 3 and 2025-11 table 2 (dissertation table 3.2). Both print the time of a stage and the time or speed of a
pipeline. A simulation of these stages can therefore be compared with the print without any model of a GPU.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from bench.papers.frame import Claim, Row, Rows, Table
from bench.reproduce_frozen_table import CLOSE, MICROBATCHES, STAGES, TABLE, llm_stage_counts, simulate_row
from bench.reproduce_frozen_table import Row as Printed

# ---------------------------------------------------------------------- 2025-03 table 3

INPUTS = 24  # microbatches of one sample
GPUS = 2  # of a stage: TP 2, no CP (table 9)


class Cut(NamedTuple):
    """Milliseconds per stage and inputs/s per GPU, as printed."""

    encoder_forward: float
    llm_forward: float
    encoder_backward: float
    llm_backward: float
    throughput: float


class Model(NamedTuple):
    """Stages (LLM, encoder) of Cornstarch's cut in table 9, and both rows of table 3."""

    stages: tuple[int, int]
    aware: Cut
    unaware: Cut


MARCH = {
    "VLM-S": Model((6, 1), Cut(49.06, 27.46, 0.12, 43.03, 6.47), Cut(26.49, 28.13, 0.16, 51.32, 5.30)),
    "VLM-M": Model((5, 2), Cut(75.04, 28.15, 0.27, 51.30, 5.15), Cut(45.90, 45.26, 0.16, 84.89, 3.73)),
    "VLM-L": Model((5, 4), Cut(101.02, 34.67, 0.20, 63.77, 3.17), Cut(70.42, 67.03, 0.15, 127.34, 2.06)),
    "ALM-S": Model((6, 1), Cut(57.25, 81.73, 0.38, 157.12, 1.94), Cut(57.79, 81.94, 0.38, 157.14, 1.94)),
    "ALM-M": Model((6, 1), Cut(176.80, 82.19, 0.64, 157.51, 1.96), Cut(93.39, 98.25, 0.34, 189.11, 1.70)),
    "ALM-L": Model((4, 2), Cut(308.16, 100.20, 0.73, 188.50, 1.98), Cut(145.97, 121.21, 0.33, 235.23, 1.69)),
}


def stages_of(case: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """(LLM, encoder) stages of both cuts of table 3.

    For one kind of input all rows share the language model, so in each of them its whole backward is stages x the
    printed time. The row with the most stages in table 9 sets the whole. By the text, both cuts of a model have equally
    many stages.
    """
    whole = max(m.stages[0] * m.aware.llm_backward for n, m in MARCH.items() if n[0] == case[0] and n[-1] == "S")
    model = MARCH[case]
    aware, unaware = (round(whole / cut.llm_backward) for cut in (model.aware, model.unaware))
    total = aware + model.stages[1]
    return (aware, model.stages[1]), (unaware, total - unaware)


def table_3(case: str, small: bool) -> list[Row]:
    model, rows, ours = MARCH[case], [], {}
    for name, cut, (llm, encoder) in zip(("aware", "unaware"), model[1:], stages_of(case)):
        assert isinstance(cut, Cut)
        row = Printed(case, name == "aware", *cut[:4], printed=0.0)
        seconds = simulate_row(row, encoder, llm, 4 if small else INPUTS)
        ours[name] = INPUTS / seconds / ((encoder + llm) * GPUS)
        rows += [
            Row(case, f"{name}: encoder + LLM stages", None, f"{encoder} + {llm}"),
            Row(case, f"{name}: throughput", cut.throughput, ours[name], "inputs/s per GPU"),
            Row(case, f"{name}: printed / simulated", None, cut.throughput / ours[name]),
        ]
    gain = model.aware.throughput / model.unaware.throughput
    return [*rows, Row(case, "aware / unaware", gain, ours["aware"] / ours["unaware"])]


def aware_is_faster(rows: Rows) -> list[Claim]:
    gains = [(row.theirs, row.ours) for row in rows if row.what == "aware / unaware"]
    units = [row.ours for row in rows if row.what.endswith("printed / simulated")]
    most = max(gains)
    return [
        Claim("a cut that knows what is frozen is never slower", f"{min(gains)[0]:.2f} x at least",
              f"{min(ours for _, ours in gains):.2f} x at least", min(ours for _, ours in gains) > 0.99),
        Claim("and gains most with a large encoder before a small part of a language model",
              f"{most[0]:.2f} x (VLM-L)", f"{most[1]:.2f} x", most[1] == max(ours for _, ours in gains)),
        Claim("throughput is inputs through the printed stages", "inputs/s per GPU",
              f"{min(units):.1f} to {max(units):.1f} times too high, {statistics.median(units):.1f} in the median",
              max(units) < 1.1,
              "the printed stages can pass 24 inputs no faster; one factor fits all rows, so the unit is another one"),
    ]  # fmt: skip


# ---------------------------------------------------------------------- 2025-11 table 2

MODELS = tuple(row.model for row in TABLE if row.aware)


def table_2(case: str, small: bool) -> list[Row]:
    """Both rows of a model with the stage counts that `bench.reproduce_frozen_table` infers from the print."""
    counts = llm_stage_counts([row for row in TABLE if row.model[-1] == case[-1]])
    pair = [row for row in TABLE if row.model == case]
    rows, seconds = [], {}
    for row in pair:
        name = "aware" if row.aware else "unaware"
        if counts is None:
            rows.append(Row(case, f"{name}: iteration", row.printed, None, "s"))
            continue
        llm = counts[row.llm_backward]
        seconds[name] = simulate_row(row, STAGES - llm, llm, 4 if small else MICROBATCHES)
        rows += [
            Row(case, f"{name}: encoder + LLM stages", None, f"{STAGES - llm} + {llm}"),
            Row(case, f"{name}: iteration", row.printed, seconds[name], "s"),
        ]
    gain = pair[1].printed / pair[0].printed
    return [*rows, Row(case, "unaware / aware", gain, seconds["unaware"] / seconds["aware"] if seconds else None)]


def iterations(rows: Rows) -> list[Claim]:
    times = [(row.theirs, row.ours) for row in rows if row.what.endswith("iteration") and row.ours is not None]
    gains = [row for row in rows if row.what == "unaware / aware" and row.ours is not None]
    near = sum(abs(ours / theirs - 1) <= CLOSE for theirs, ours in times)
    best = max(gains, key=lambda row: row.theirs)
    return [
        Claim(f"the printed stages give the printed iteration within {CLOSE:.0%} (medium and large language models)",
              f"{len(times)} rows", f"{near} of them", near == len(times)),
        Claim("a cut that knows what is frozen is never slower", "1.00 x to 2.46 x",
              f"{min(g.ours for g in gains):.2f} x to {max(g.ours for g in gains):.2f} x",
              min(g.ours for g in gains) > 0.99),
        Claim("it gains most for the same model", f"{best.case}, {best.theirs:.2f} x", f"{best.ours:.2f} x",
              best.ours == max(g.ours for g in gains)),
        Claim("mean gain of these models", f"{_mean([g.theirs for g in gains]):.2f} x",
              f"{_mean([g.ours for g in gains]):.2f} x", _mean([g.ours for g in gains]) > 1),
    ]  # fmt: skip


def _mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


TABLES = (
    Table("cornstarch-2025-03-table-3", "cornstarch-2025-03 table 3, section 6.4, stages of table 9",
          "Frozen-aware and unaware cuts, simulated from the printed times of their stages.",
          tuple(MARCH), table_3, aware_is_faster,
          assumed=("stages of the language model follow from the printed backward times, whose sum all rows of one "
                   "kind share; table 9 contradicts them for VLM-L (5, not 4) and most unaware cuts",
                   "both cuts of a model have equally many stages, as the text says",),
          missing=("inputs/s as such: see the last claim",)),
    Table("cornstarch-2025-11-table-2", "cornstarch-2025-11 table 2, section 7.3 (dissertation table 3.2)",
          "Frozen-aware and unaware cuts, simulated from the printed times of their stages.",
          MODELS, table_2, iterations,
          assumed=("12 stages of 24 GPUs at TP 2, split by the ratios of the printed backward times "
                   "(bench/reproduce_frozen_table.py)",),
          missing=("rows of the small language model: no stage counts follow from their backward times",)),
)  # fmt: skip
