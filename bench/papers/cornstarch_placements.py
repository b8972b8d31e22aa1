"""Cornstarch 2025-03: encoders in parallel, colocated and replicated (figures 2, 9, 10, tables 2, 7, 8)."""

from __future__ import annotations

import math
import statistics
from functools import partial

from bench.papers.cornstarch_shapes import LLAMA, MARCH_ASSUMED, march
from bench.papers.frame import Claim, Row, Rows, Table
from bench.papers.pipeline import LANGUAGE_MODEL, layout_of, play
from bench.papers.shapes import A40, causal_pairs
from interlace.plan import ModuleCosts
from interlace.simulate import Timeline

MICROBATCHES, SMALL = 24, 4
GPUS = 4  # of a stage: TP 2 and CP 2
REPLICATED = 6  # stages of the language model, all encoders in each (appendix B.1)

Counts = tuple[int, int, float, int, int, int, float]
# (LLM, colocated, inputs/s per GPU, LLM, vision, audio, inputs/s per GPU) of VALM with a vision and an audio encoder.
THROUGHPUT: dict[str, dict[str, Counts]] = {
    "S": {
        "SS": (3, 4, 6.31, 3, 1, 1, 8.82), "SM": (1, 3, 5.20, 3, 1, 4, 4.99), "SL": (1, 4, 4.31, 3, 1, 5, 4.61),
        "MS": (2, 4, 5.18, 3, 3, 1, 5.24), "MM": (1, 4, 3.93, 3, 2, 3, 4.66), "ML": (1, 5, 3.40, 3, 2, 4, 3.78),
        "LS": (1, 4, 3.82, 3, 5, 1, 3.96), "LM": (1, 6, 2.96, 2, 4, 3, 3.42), "LL": (1, 6, 2.76, 2, 3, 3, 3.25),
    },
    "M": {
        "SS": (6, 1, 3.09, 6, 1, 1, 2.68), "SM": (6, 2, 2.64, 6, 1, 1, 2.73), "SL": (6, 2, 2.57, 6, 1, 2, 2.25),
        "MS": (6, 2, 2.57, 6, 2, 1, 2.29), "MM": (6, 3, 2.21, 6, 1, 1, 2.22), "ML": (6, 4, 1.91, 6, 2, 2, 2.05),
        "LS": (6, 4, 1.95, 6, 3, 1, 1.92), "LM": (6, 4, 1.88, 6, 3, 1, 1.97), "LL": (6, 5, 1.74, 6, 3, 2, 1.82),
    },
    "L": {
        "SS": (5, 1, 1.57, 5, 1, 1, 1.33), "SM": (5, 2, 1.37, 5, 1, 1, 1.36), "SL": (5, 2, 1.33, 5, 1, 1, 1.37),
        "MS": (4, 1, 1.57, 5, 1, 1, 1.37), "MM": (4, 2, 1.32, 5, 1, 1, 1.37), "ML": (6, 1, 1.04, 5, 1, 1, 0.93),
        "LS": (4, 2, 1.31, 5, 1, 1, 1.36), "LM": (4, 3, 1.10, 5, 1, 1, 1.33), "LL": (4, 3, 1.09, 5, 1, 1, 1.36),
    },
}  # fmt: skip
ONE_ENCODER = {  # table 5, medium language model: (LLM, encoder) colocated, (LLM, encoder) of Cornstarch
    "VLM-S": ((3, 1), (5, 1)), "VLM-M": ((3, 2), (3, 1)), "VLM-L": ((2, 3), (3, 2)),
    "ALM-S": ((4, 2), (5, 1)), "ALM-M": ((3, 3), (4, 2)), "ALM-L": ((2, 4), (4, 2)),
}  # fmt: skip
TWO_ENCODERS = {  # table 6, medium language model: (LLM, colocated), (LLM, vision, audio)
    "SS": ((5, 2), (5, 1, 1)), "SM": ((4, 3), (5, 1, 1)), "SL": ((3, 4), (4, 1, 2)),
    "MS": ((4, 4), (4, 2, 1)), "MM": ((3, 4), (4, 1, 1)), "ML": ((2, 4), (3, 1, 1)),
    "LS": ((2, 4), (4, 2, 1)), "LM": ((2, 4), (4, 2, 2)), "LL": ((2, 5), (5, 1, 1)),
}  # fmt: skip


def step(costs: dict[str, ModuleCosts], placement: str, llm: int, encoders: tuple[int, ...], count: int) -> Timeline:
    """encoders: stages of each encoder; a single number applies to every encoder."""
    names = [name for name in costs if name != LANGUAGE_MODEL]
    stages = dict(zip(names, encoders * (len(names) if len(encoders) == 1 else 1))) | {LANGUAGE_MODEL: llm}
    return play(costs, layout_of(costs, stages, placement, recompute=True), count, recompute=True)


def per_gpu(timeline: Timeline, count: int) -> float:
    """Inputs per second and GPU."""
    return count / timeline.makespan / (timeline.num_ranks * GPUS)


# ---------------------------------------------------------------------- tables 2, 7 and 8


def throughput(size: str, case: str, small: bool) -> list[Row]:
    llm, merged, printed_merged, own, vision, audio, printed = THROUGHPUT[size][case.removeprefix("VALM-")]
    count = SMALL if small else MICROBATCHES
    costs = march(size, *case.removeprefix("VALM-"))
    colocated = per_gpu(step(costs, "colocated", llm, (merged,), count), count)
    parallel = per_gpu(step(costs, "parallel", own, (vision, audio), count), count)
    return [
        Row(case, "colocated", printed_merged, colocated, "inputs/s per GPU"),
        Row(case, "parallel", printed, parallel, "inputs/s per GPU"),
        Row(case, "parallel / colocated", printed / printed_merged, parallel / colocated),
    ]


def same_ratios(rows: Rows) -> list[Claim]:
    pairs = [(row.theirs, row.ours) for row in rows if row.what == "parallel / colocated"]
    clear = [(theirs, ours) for theirs, ours in pairs if abs(theirs - 1) > 0.05]
    agree = sum((theirs > 1) == (ours > 1) for theirs, ours in clear)
    gaps = [ours / theirs - 1 for theirs, ours in pairs]
    mean = [math.exp(statistics.fmean(math.log(pair[i]) for pair in pairs)) for i in (0, 1)]
    return [
        Claim("encoders in parallel give up no throughput on average", f"{mean[0]:.2f} x of colocated",
              f"{mean[1]:.2f} x", mean[1] >= 0.95),
        Claim("where one placement is more than 5 % better, it is the same one", f"{len(clear)} rows",
              f"{agree} of them", agree == len(clear)),
        Claim("the ratio of both, row by row", f"{min(p[0] for p in pairs):.2f} to {max(p[0] for p in pairs):.2f}",
              f"{statistics.median(map(abs, gaps)):.0%} off in the median, {max(gaps, key=abs):+.0%} at most",
              statistics.median(map(abs, gaps)) <= 0.05,
              "a small language model in one stage, as in most colocated rows, is not as slow in print as its FLOPs say"
              if statistics.median(gaps) > 0.05 else ""),
    ]  # fmt: skip


def needed_tflops(size: str, printed: float, tokens: int = 1000 + 4 * 256 + 1500) -> float:
    """TFLOP/s per GPU of the language model alone (forward, again, input gradient) at a printed throughput."""
    return 3 * LLAMA[size].flops(tokens, causal_pairs(tokens)) * printed / 1e12


def _throughput_table(number: int, size: str, name: str) -> Table:
    best = max(row[6] for row in THROUGHPUT[size].values())
    return Table(
        f"cornstarch-2025-03-table-{number}",
        f"cornstarch-2025-03 table {number}, section 6.3",
        f"Throughput of colocated encoders and of encoders in parallel, {name} language model, printed stages.",
        tuple(f"VALM-{case}" for case in THROUGHPUT[size]),
        partial(throughput, size),
        same_ratios,
        assumed=MARCH_ASSUMED,
        missing=(
            f"inputs/s as such: {best} per GPU would take {needed_tflops(size, best):,.0f} TFLOP/s for the language "
            f"model alone, and an A40 has {A40.peak / 1e12:.0f}; the printed unit is another one",
        ),
    )


# ---------------------------------------------------------------------- figures 2, 9 and 10

FASTER = "faster than colocated"


def against_baselines(costs: dict[str, ModuleCosts], case: str, colocated: tuple[int, int], own: tuple[int, ...],
                      count: int, theirs: float | None = None) -> list[Row]:  # fmt: skip
    """Rows of one model: three placements, and Cornstarch against both others, per GPU and in time."""
    made = {
        "colocated": step(costs, "colocated", colocated[0], colocated[1:], count),
        "replicated": step(costs, "replicated", REPLICATED, (1,), count),
        "Cornstarch": step(costs, "parallel", own[0], own[1:], count),
    }
    rows = [Row(case, name, None, per_gpu(result, count), "inputs/s per GPU") for name, result in made.items()]
    best = per_gpu(made["Cornstarch"], count)
    for name in ("colocated", "replicated"):
        printed = theirs if name == "colocated" else None
        rows.append(Row(case, f"Cornstarch / {name}, per GPU", printed, best / per_gpu(made[name], count)))
    rows.append(
        Row(case, FASTER, None, made["colocated"].makespan / made["Cornstarch"].makespan, "x time of an iteration")
    )
    for name in ("colocated", "Cornstarch"):
        busy = [seconds / count * 1e3 for seconds in made[name].busy_per_rank]
        rows.append(Row(case, f"{name}, slowest stage / fastest", None, max(busy) / min(busy)))
    return rows


def one_encoder(case: str, small: bool) -> list[Row]:
    colocated, own = ONE_ENCODER[case]
    size = case[-1]
    costs = march("M", vision=size) if case.startswith("V") else march("M", audio=size)
    return against_baselines(costs, case, colocated, own, SMALL if small else MICROBATCHES)


def two_encoders(case: str, small: bool) -> list[Row]:
    colocated, own = TWO_ENCODERS[case.removeprefix("VALM-")]
    costs = march("M", *case.removeprefix("VALM-"))
    printed = 1.44 if case == "VALM-MM" else None
    return against_baselines(costs, case, colocated, own, SMALL if small else MICROBATCHES, printed)


def _ratios(rows: Rows, baseline: str) -> dict[str, float]:
    return {row.case: row.ours for row in rows if row.what == f"Cornstarch / {baseline}, per GPU"}


def wins(rows: Rows) -> list[Claim]:
    colocated, replicated = _ratios(rows, "colocated"), _ratios(rows, "replicated")
    lost = [case for case, ratio in colocated.items() if ratio < 1]
    most = max(*colocated.values(), *replicated.values())
    cheap = [case for case, ratio in replicated.items() if ratio < 1]
    claims = [
        Claim("per GPU, Cornstarch is ahead of replicated encoders for every model", "all",
              f"{min(replicated.values()):.2f} x to {max(replicated.values()):.2f} x", not cheap,
              f"{', '.join(cheap)}: running a small encoder in every stage costs less than a stage of its own"
              if cheap else ""),
        Claim("the most that it gains", "1.57 x", f"{most:.2f} x", most > 1,
              "figures without printed numbers: only the largest gain is in the text"),
    ]  # fmt: skip
    if "VLM-S" in colocated:
        claims.append(
            Claim("per GPU, it is ahead of colocated encoders but for VLM-S", "VLM-S behind",
                  f"{', '.join(lost) or 'none'} behind", lost == ["VLM-S"],
                  "ours is ahead by little there; the text's slowest stages (131 against 88 ms, on 4 and 6 stages) "
                  "give 0.99 x")
        )  # fmt: skip
        faster = rows.ours("VLM-S", FASTER)
        claims.append(Claim("VLM-S: its iteration is faster all the same", "1.13 x", f"{faster:.2f} x", faster > 1))
    if "VALM-MM" in colocated:
        claims.append(
            Claim("per GPU, it is ahead of colocated encoders for every model", "all", f"{len(lost)} behind"
                  + (f": {', '.join(lost)}" if lost else ""), not lost)
        )  # fmt: skip
        gain = colocated["VALM-MM"]
        claims.append(Claim("VALM-MM: gain over colocated encoders", "1.44 x", f"{gain:.2f} x", gain > 1))
        spread = [rows.ours("VALM-MM", f"{name}, slowest stage / fastest") for name in ("colocated", "Cornstarch")]
        claims.append(
            Claim("VALM-MM: slowest stage against fastest is nearer to 1", "2.9 x (79 to 230 ms) to 1.4 x (124 to 174)",
                  f"{spread[0]:.1f} x to {spread[1]:.1f} x", spread[1] < spread[0])
        )  # fmt: skip
    return claims


def three_ways(case: str, small: bool) -> list[Row]:
    """Iterations of 8 microbatches of VALM-MM with the stages of table 6."""
    placement, llm, encoders = {
        "replicated": ("replicated", REPLICATED, (1,)),
        "colocated": ("colocated", 3, (4,)),
        "in parallel": ("parallel", 4, (1, 1)),
    }[case]
    timeline = step(march("M", "M", "M"), placement, llm, encoders, SMALL if small else 8)
    return [
        Row(case, "iteration", None, timeline.makespan, "s"),
        Row(case, "bubble", None, timeline.bubble),
        Row(case, "stages", None, timeline.num_ranks),
        Row(case, "stages x iteration", None, timeline.num_ranks * timeline.makespan, "s"),
    ]


def order(rows: Rows) -> list[Claim]:
    area = {case: rows.ours(case, "stages x iteration") for case in rows.cases()}
    time = {case: rows.ours(case, "iteration") for case in rows.cases()}
    return [
        Claim("replicated encoders make the slowest iteration", "1.57 x of colocated",
              f"{time['replicated'] / time['colocated']:.2f} x", time["replicated"] > time["colocated"],
              "the model of the figure is not named; ours is VALM-MM with a medium language model"),
        Claim("encoders in parallel, cut by what is frozen, make the fastest", "the shortest of three pictures",
              f"{time['colocated'] / time['in parallel']:.2f} x faster than colocated",
              time["in parallel"] == min(time.values())),
        Claim("and take least of all GPUs' time", "the smallest picture",
              f"{area['colocated'] / area['in parallel']:.2f} x less than colocated",
              area["in parallel"] == min(area.values())),
    ]  # fmt: skip


NO_NUMBERS = "the bars: the figure has no numbers, only what the text says of it is compared"
TABLES = (
    Table("cornstarch-2025-03-figure-2", "cornstarch-2025-03 figure 2, section 2.2",
          "Three pipelines of one model: encoders replicated, colocated, in parallel.",
          ("replicated", "colocated", "in parallel"), three_ways, order, assumed=MARCH_ASSUMED,
          missing=("the pictures themselves: their stages have no lengths in print",)),
    _throughput_table(2, "M", "medium"),
    Table("cornstarch-2025-03-figure-9", "cornstarch-2025-03 figure 9, section 6.2.1, stages of table 5",
          "One encoder and a medium language model: Cornstarch against both baselines.",
          tuple(ONE_ENCODER), one_encoder, wins, assumed=MARCH_ASSUMED, missing=(NO_NUMBERS,)),
    Table("cornstarch-2025-03-figure-10", "cornstarch-2025-03 figure 10, section 6.2.2, stages of table 6",
          "Two encoders and a medium language model: Cornstarch against both baselines.",
          tuple(f"VALM-{case}" for case in TWO_ENCODERS), two_encoders, wins, assumed=MARCH_ASSUMED,
          missing=(NO_NUMBERS,)),
    _throughput_table(7, "S", "small"),
    _throughput_table(8, "L", "large"),
)  # fmt: skip
