"""DistTrain's figures of whole steps: 15 to 20, with the lengths of figure 5 and the planning times of table 2."""

from __future__ import annotations

import time
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from bench.papers.disttrain_steps import (
    ASSUMED,
    FROZEN,
    LLAMA,
    LLM,
    SEQUENCE,
    Degrees,
    Model,
    Step,
    by_flops,
    describe,
    draw,
    gpus_of,
    in_order,
    megatron,
    orchestrated,
    pictures,
    reordered,
)
from bench.papers.frame import Claim, Row, Rows, Table, ahead

LARGE = (1296, 1920)  # GPUs and batch of figures 15 and 16
BATCH = {"MLLM-9B": 128, "MLLM-15B": 64, "MLLM-72B": 40}  # of figures 17 to 20 (section 8.2)
GPUS = 96  # "up to 98": the most that Megatron can use
SMALL = (96, 8)
SETTINGS = tuple(name for name in FROZEN if name != "nothing frozen")


@lru_cache(maxsize=128)
def played(name: str, arm: str, setting: str, gpus: int, batch: int) -> tuple[float, float, int, str]:
    """(samples/s, MFU, GPUs, degrees) of a step. Random order is the order in which samples were drawn."""
    model, samples = Model(name, FROZEN[setting]), draw(batch)
    degrees: Degrees
    if arm == "Megatron":
        degrees = megatron(model, gpus, batch)
    elif arm == "by FLOPs":
        degrees = by_flops(model, samples, gpus, batch)
    else:
        degrees = orchestrated(model, samples, gpus, batch)
    if arm in ("Megatron", "random order"):
        order = in_order(batch, degrees[LLM].dp)
    else:
        order = reordered(model, samples, degrees)
    step = Step(model, samples, degrees, order)
    seconds = step.seconds()
    return batch / seconds, step.mfu(seconds), gpus_of(degrees), describe(degrees)


def size_of(name: str, large: bool, small: bool) -> tuple[int, int]:
    return SMALL if small else LARGE if large else (GPUS, BATCH[name])


def compare(what: str, arms: tuple[str, ...], large: bool, case: str, small: bool) -> list[Row]:
    """Rows of one figure: MFU or throughput of each arm, and of the last against the others.

    case: a model, or "setting: model" for settings with frozen modules.
    """
    place = 1 if what == "MFU" else 0
    setting, _, model = case.rpartition(": ")
    result = {arm: played(model, arm, setting or "nothing frozen", *size_of(model, large, small)) for arm in arms}
    rows = []
    for arm, values in result.items():
        rows += [
            Row(case, f"{arm}: {what}", None, values[place], "" if place else "samples/s"),
            Row(case, f"{arm}: GPUs", None, values[2]),
            Row(case, f"{arm}: degrees", None, values[3]),
        ]
    for arm in arms[:-1]:
        rows.append(Row(case, f"{what} against {arm}", None, result[arms[-1]][place] / result[arm][place]))
    return rows


def gains(rows: Rows, what: str, arm: str) -> dict[str, float]:
    """Case -> gain over an arm."""
    return {row.case: row.ours for row in rows if row.what == f"{what} against {arm}"}


def span(values: dict[str, float]) -> str:
    return f"{min(values.values()):.2f} to {max(values.values()):.2f} x"


# ---------------------------------------------------------------------- figures 15 and 16

PRINTED_LARGE = {"MFU": ("1.7 to 2.8 x", "1.2 x"), "throughput": ("1.7 to 2.2 x", "1.3 x")}


def overall(what: str, rows: Rows) -> list[Claim]:
    result = gains(rows, what, "Megatron")
    small = {case: value for case, value in result.items() if case != "MLLM-72B"}
    large = result["MLLM-72B"]
    theirs = PRINTED_LARGE[what]
    claims = [
        Claim(f"gain in {what} of MLLM-9B and 15B", theirs[0], span(small), ahead(min(small.values()))),
        Claim(f"gain in {what} of MLLM-72B", theirs[1], f"{large:.2f} x", ahead(large)),
        Claim("it gains least for the largest model", "as above", "the same order", large == min(result.values())),
    ]
    if what == "MFU":
        ours = [rows.ours(case, f"DistTrain: {what}") for case in rows.cases()]
        base = [rows.ours(case, f"Megatron: {what}") for case in ("MLLM-9B", "MLLM-15B")]
        claims += [
            Claim("MFU of DistTrain, every model, is above Megatron's of the small ones", "51.8 % to 54.7 %",
                  f"{min(ours):.1%} to {max(ours):.1%}",
                  min(ours) > max(base),
                  "tensor parallelism's sums are not hidden here, as StepCCL hides them there, and the speed of "
                  "kernels is assumed"),
            Claim("Megatron's one layout for all keeps MLLM-9B and 15B below half of what kernels reach", "about 20 %",
                  f"{min(base):.1%} to {max(base):.1%}", max(base) < 0.3),
        ]  # fmt: skip
    return claims


# ---------------------------------------------------------------------- figure 17


def orchestration(rows: Rows) -> list[Claim]:
    claims = []
    for what, theirs in (("MFU", "1.3 to 2.7 x"), ("throughput", "1.4 to 2.7 x")):
        over = {arm: gains(rows, what, arm) for arm in ("Megatron", "by FLOPs")}
        both = {f"{case}, {arm}": value for arm, result in over.items() for case, value in result.items()}
        lost = [case for case, value in both.items() if not ahead(value)]
        claims.append(
            Claim(f"gain in {what} over Megatron and over GPUs in proportion to FLOPs", theirs, span(both), not lost,
                  f"not ahead by 2 %: {'; '.join(lost)}. What is planned for is the time of a step, and all GPUs "
                  "serve it"
                  if lost else "")
        )  # fmt: skip
    over, under = gains(rows, "throughput", "Megatron"), gains(rows, "throughput", "by FLOPs")
    between = [case for case in over if ahead(over[case] / under[case]) and ahead(under[case])]
    claims.append(
        Claim("in throughput, GPUs in proportion to FLOPs lie between the two", "for all models",
              f"for {', '.join(between) or 'none'}", len(between) == len(over),
              "" if len(between) == len(over) else "elsewhere media have fewer GPUs by FLOPs than in Megatron, and are "
              "the slowest stages")
    )  # fmt: skip
    return claims


def both(arms: tuple[str, ...], large: bool, case: str, small: bool) -> list[Row]:
    """MFU and throughput of each arm."""
    rows = compare("MFU", arms, large, case, small)
    return rows + [r for r in compare("throughput", arms, large, case, small) if "throughput" in r.what]


# ---------------------------------------------------------------------- figure 18


def reordering(rows: Rows) -> list[Claim]:
    result = gains(rows, "throughput", "random order")
    return [
        Claim("reordering samples and microbatches gains", "1.03 to 1.11 x",
              f"{min(result.values()):.3f} to {max(result.values()):.3f} x", ahead(min(result.values())),
              "it gains where media are the slowest stage of some microbatch; sequences that are full vary little"),
        Claim("it gains more for smaller models", "largest for MLLM-9B", ", ".join(
            f"{case} {value:.3f} x" for case, value in result.items()),
            result["MLLM-9B"] >= result["MLLM-15B"] >= result["MLLM-72B"],
            "the gain follows how much slack orchestration leaves to media, which does not grow with the size"),
    ]  # fmt: skip


# ---------------------------------------------------------------------- figures 19 and 20


def frozen_gains(what: str, theirs: str, rows: Rows) -> list[Claim]:
    result = gains(rows, what, "Megatron")
    claims = []
    for name in LLAMA:
        of_model = {case: value for case, value in result.items() if name in case}
        claims.append(
            Claim(f"gain in {what} in every setting, {name}", f"{theirs} over all models", span(of_model),
                  ahead(min(of_model.values())),
                  "one replica of 96 GPUs: hardly another choice of degrees fits" if name == "MLLM-72B" else "")
        )  # fmt: skip
    return claims


# ---------------------------------------------------------------------- figure 5


def lengths(case: str, small: bool) -> list[Row]:
    samples = draw(64 if small else 4096)
    values: NDArray[np.int64] = {
        "tokens of an image": lambda: pictures(samples.tokens),
        "images of a sequence": lambda: samples.images,
        "tokens of text of a sequence": lambda: samples.text,
    }[case]()
    middle, mean, high = float(np.median(values)), float(values.mean()), float(np.quantile(values, 0.95))
    skew = float(((values - mean) ** 3).mean() / values.std() ** 3)
    return [
        Row(case, "median", None, middle), Row(case, "mean", None, mean), Row(case, "95th percentile", None, high),
        Row(case, "skewness", None, skew),
    ]  # fmt: skip


def skewed(rows: Rows) -> list[Claim]:
    return [
        Claim(f"{case} are skewed to the right", "a long tail",
              f"skewness {rows.ours(case, 'skewness'):.1f}, 95 % below "
              f"{rows.ours(case, '95th percentile') / rows.ours(case, 'median'):.1f} x the median",
              rows.ours(case, "skewness") > 0,
              "sequences are full, so that many small images stand against few large ones" if "images of" in case
              else "")
        for case in rows.cases()
    ]  # fmt: skip


# ---------------------------------------------------------------------- table 2

PLANNING = {  # GPUs and batch -> seconds, MLLM-72B
    "1,296 GPUs, batch 1,920": (1296, 1920, 0.922), "648 GPUs, batch 960": (648, 960, 0.641),
    "324 GPUs, batch 480": (324, 480, 0.441), "112 GPUs, batch 240": (112, 240, 0.133),
}  # fmt: skip


def planning_time(case: str, small: bool) -> list[Row]:
    gpus, batch, printed = PLANNING[case]
    model, samples = Model("MLLM-72B"), draw(64)
    best = np.inf
    for _ in range(2 if small else 5):
        start = time.perf_counter()
        degrees = orchestrated(model, samples, gpus, batch)
        best = min(best, time.perf_counter() - start)
    return [
        Row(case, "orchestration", printed * 1e3, best * 1e3, "ms"),
        Row(case, "degrees", None, describe(degrees)),
        Row(case, "GPUs", None, gpus_of(degrees)),
    ]


def planned_faster(rows: Rows) -> list[Claim]:
    pairs = {row.case: (row.theirs, row.ours) for row in rows if row.what == "orchestration"}
    ratios = [theirs / ours for theirs, ours in pairs.values()]
    return [
        Claim("orchestration takes less than a second", f"{max(t for t, _ in pairs.values()):.0f} ms at most",
              f"{max(o for _, o in pairs.values()):.1f} ms at most", max(o for _, o in pairs.values()) < 1000),
        Claim("the exact search is faster than the convex solver at every size", "cvx",
              f"{min(ratios):.0f} to {max(ratios):.0f} times faster", min(ratios) > 1),
    ]  # fmt: skip


NO_NUMBERS = "the bars: the figure has no numbers; the ranges in the text are compared"
CASES = tuple(LLAMA)
FROZEN_CASES = tuple(f"{setting}: {name}" for setting in SETTINGS for name in LLAMA)
DISTTRAIN = ("Megatron", "DistTrain")
TABLES = (
    Table("disttrain-figure-5", "DistTrain figure 5, section 2.3",
          f"How images and text fill sequences of {SEQUENCE:,} tokens.",
          ("tokens of an image", "images of a sequence", "tokens of text of a sequence"), lengths, skewed,
          assumed=(ASSUMED[2],), missing=("the curves: no number is printed with them",)),
    Table("disttrain-figure-15", "DistTrain figure 15, section 8.1", "MFU on up to 1,296 GPUs, batch 1,920.", CASES,
          partial(compare, "MFU", DISTTRAIN, True), partial(overall, "MFU"), ASSUMED, (NO_NUMBERS,)),
    Table("disttrain-figure-16", "DistTrain figure 16, section 8.1", "Throughput on up to 1,296 GPUs, batch 1,920.",
          CASES, partial(compare, "throughput", DISTTRAIN, True), partial(overall, "throughput"),
          ASSUMED, (NO_NUMBERS,)),
    Table("disttrain-figure-17", "DistTrain figure 17, section 8.2.1",
          "Ways to share out 96 GPUs: Megatron's, in proportion to FLOPs, orchestrated.", CASES,
          partial(both, ("Megatron", "by FLOPs", "DistTrain"), False), orchestration, ASSUMED, (NO_NUMBERS,)),
    Table("disttrain-table-2", "DistTrain table 2, section 8.2.1", "Time to orchestrate MLLM-72B.", tuple(PLANNING),
          planning_time, planned_faster, ASSUMED, ("the paper's machine: its times are quoted",), timed=True),
    Table("disttrain-figure-18", "DistTrain figure 18, section 8.2.2",
          "Reordered samples and microbatches against random order, orchestrated degrees.", CASES,
          partial(both, ("random order", "DistTrain"), False), reordering, ASSUMED, (NO_NUMBERS,)),
    Table("disttrain-figure-19", "DistTrain figure 19, section 8.3.1", "MFU with frozen modules, 96 GPUs.",
          FROZEN_CASES, partial(compare, "MFU", DISTTRAIN, False),
          partial(frozen_gains, "MFU", "1.4 to 2.9 x"), ASSUMED, (NO_NUMBERS,)),
    Table("disttrain-figure-20", "DistTrain figure 20, section 8.3.1", "Throughput with frozen modules, 96 GPUs.",
          FROZEN_CASES, partial(compare, "throughput", DISTTRAIN, False),
          partial(frozen_gains, "throughput", "1.2 to 2.9 x"), ASSUMED,
          (NO_NUMBERS,)),
)  # fmt: skip
