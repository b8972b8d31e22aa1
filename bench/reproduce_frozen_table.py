"""Cornstarch's frozen-aware table (dissertation table 3.2, cornstarch-2025-11 table 2), simulated from its own numbers.

The table prints forward and backward time per stage and the iteration time. A pipeline of those stages with 48 / 4 = 12
microbatches under 1F1B should take the printed iteration time. The stage counts of each row are not printed. The 12
stages of 24 GPUs at TP 2 (an assumption) are split between encoder and language model by the backward times: all rows
with the same language model share its whole backward, so stage counts are inversely proportional to the printed time
per stage. No counts fit all rows of the small language model. They are shown with the nearest split, which is not a
reproduction.

    python -m bench.reproduce_frozen_table [--out FILE]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.measure import command, versions, write_json
from interlace.schedule import Op, StageGraph, StepTable, one_f_one_b
from interlace.simulate import simulate

MICROBATCHES = 12
STAGES = 12
CLOSE = 0.15  # a row is reproduced if its relative error is at most this


@dataclass(frozen=True)
class Row:
    """Milliseconds per stage, seconds per iteration, as printed."""

    model: str
    aware: bool
    encoder_forward: float
    llm_forward: float
    encoder_backward: float
    llm_backward: float
    printed: float


TABLE = [
    Row("SSS", True, 301.61, 149.40, 1.04, 518.43, 21.81),
    Row("SSS", False, 207.13, 296.25, 0.86, 1032.63, 25.67),
    Row("MMS", True, 903.86, 102.61, 2.72, 346.54, 40.34),
    Row("MMS", False, 635.56, 297.62, 1.19, 1032.12, 41.21),
    Row("LLS", True, 1240.50, 298.37, 1.41, 1029.98, 66.14),
    Row("LLS", False, 1259.13, 297.92, 1.15, 1030.14, 66.20),
    Row("SSM", True, 464.98, 331.43, 3.53, 3017.01, 66.56),
    Row("SSM", False, 388.33, 388.73, 2.30, 4030.74, 73.94),
    Row("MMM", True, 2330.90, 273.89, 2.09, 2418.27, 70.37),
    Row("MMM", False, 712.72, 1159.76, 1.60, 12113.67, 173.01),
    Row("LLM", True, 2199.91, 376.11, 4.15, 4023.22, 87.43),
    Row("LLM", False, 1403.97, 1161.76, 1.56, 12109.73, 177.39),
    Row("SSL", True, 773.10, 741.17, 3.55, 6309.11, 138.45),
    Row("SSL", False, 774.19, 708.62, 3.84, 6306.18, 137.62),
    Row("MML", True, 2280.58, 705.73, 3.11, 6311.23, 138.97),
    Row("MML", False, 1015.60, 1154.85, 2.78, 10546.34, 180.28),
    Row("LLL", True, 5316.08, 736.05, 4.00, 6315.46, 143.76),
    Row("LLL", False, 1597.36, 1686.28, 3.06, 15878.58, 247.79),
]


@dataclass(frozen=True)
class Simulated:
    """One row with its assumed stages and the resulting iteration time."""

    row: Row
    encoder_stages: int
    llm_stages: int
    seconds: float
    inferred: bool  # the stages follow from ratios; otherwise they are the split nearest to the print

    @property
    def error(self) -> float:
        """Relative error of the simulated against the printed time."""
        return self.seconds / self.row.printed - 1

    @property
    def reproduced(self) -> bool:
        return self.inferred and abs(self.error) <= CLOSE


def simulate_row(row: Row, encoder_stages: int, llm_stages: int, microbatches: int = MICROBATCHES) -> float:
    """Seconds of a 1F1B iteration with the row's stage times, transfers free."""
    ranks = range(encoder_stages + llm_stages)
    graph = StageGraph.build(
        {"encoder": list(ranks[:encoder_stages]), "llm": list(ranks[encoder_stages:])}, [("encoder", "llm")]
    )
    durations = {
        (Op.FORWARD, "encoder"): row.encoder_forward / 1000,
        (Op.BACKWARD, "encoder"): row.encoder_backward / 1000,
        (Op.FORWARD, "llm"): row.llm_forward / 1000,
        (Op.BACKWARD, "llm"): row.llm_backward / 1000,
    }
    table = StepTable.aligned(graph.links, [graph.modules] * microbatches)
    return float(simulate(one_f_one_b(graph, table), durations).makespan)


def llm_stage_counts(rows: list[Row]) -> dict[float, int] | None:
    """Stages per printed backward time, from the ratios within one language model; None if no count of 12 fits.

    The slowest row is assigned 2, 3, ... stages. The result is the first count for which every other row's ratio is
    near a whole number below 12, with the largest at most 10, since colocated encoders have two stages at least.
    """
    longest = max(row.llm_backward for row in rows)
    for first in range(2, STAGES - 1):
        exact = {row.llm_backward: first * longest / row.llm_backward for row in rows}
        if all(abs(value - round(value)) < 0.08 for value in exact.values()) and max(exact.values()) < STAGES - 1:
            if max(round(value) for value in exact.values()) == STAGES - 2:
                return {key: round(value) for key, value in exact.items()}
    return None


def simulate_table() -> list[Simulated]:
    """Every row with its inferred stages, or with the nearest split if none can be inferred."""
    result = []
    for row in TABLE:
        counts = llm_stage_counts([other for other in TABLE if other.model[-1] == row.model[-1]])
        splits = [counts[row.llm_backward]] if counts else list(range(1, STAGES))
        tried = [
            Simulated(row, STAGES - llm, llm, simulate_row(row, STAGES - llm, llm), counts is not None)
            for llm in splits
        ]
        result.append(min(tried, key=lambda each: abs(each.error)))
    return result


def reason(each: Simulated) -> str:
    """Reason why a row cannot match, from its numbers alone."""
    if each.reproduced:
        return ""
    row = each.row
    if abs(each.error) <= CLOSE:
        whole = each.llm_stages * row.llm_backward / 1000
        return (
            f"only the split chosen to fit comes near, and by it the language model's backward takes {whole:.1f} s, "
            "for which the other rows of this model would need more stages than there are"
        )
    slowest = max(row.encoder_forward + row.encoder_backward, row.llm_forward + row.llm_backward) / 1000
    if each.seconds < row.printed:
        needed = (row.printed - (MICROBATCHES - 1) * slowest) / slowest
        return (
            f"{MICROBATCHES} microbatches of the slowest stage take {MICROBATCHES * slowest:.1f} s; to reach the "
            f"print the pipeline would have to be {needed:.0f} such stages deep, more than {STAGES}: the printed "
            "stages leave out where the time goes"
        )
    return "the printed iteration is shorter than the printed stages allow"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    rows = simulate_table()
    print(f"{'model':6}{'aware':6}{'stages':>8}{'printed s':>11}{'simulated s':>13}{'error':>8}  speed-ups")
    for aware, unaware in zip(rows[::2], rows[1::2], strict=True):
        for each in (aware, unaware):
            row = each.row
            line = f"{row.model:6}{'yes' if row.aware else 'no':6}{each.encoder_stages:>5}+{each.llm_stages:<2}"
            line += " " if each.inferred else "*"
            line += f"{row.printed:>10.2f}{each.seconds:>13.2f}{each.error:>+8.0%}"
            if row.aware:
                line += f"  {unaware.row.printed / row.printed:.2f}, {unaware.seconds / each.seconds:.2f}"
            print(line)
    print(
        "speed-ups: printed, simulated; * no stage counts follow from the ratios, so the nearest of all splits is shown"
    )
    print(f"\nwithin {CLOSE:.0%}: {sum(each.reproduced for each in rows)} of {len(rows)} rows. The others:")
    for each in rows:
        if not each.reproduced:
            print(f"  {each.row.model} {'aware' if each.row.aware else 'unaware'}: {reason(each)}")
    if arguments.out:
        result = [{**asdict(each), "error": each.error, "reason": reason(each)} for each in rows]
        about = {"benchmark": "reproduce_frozen_table", "command": command("reproduce_frozen_table")}
        write_json(arguments.out, about | {"versions": versions("interlace"), "rows": result})


if __name__ == "__main__":
    main()
