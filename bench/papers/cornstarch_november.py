"""Cornstarch 2025-11: whole pipelines of nine models (figure 8), and the two placements of encoders (figure 10)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from bench.papers.cornstarch_shapes import LLAMA, NOVEMBER_ASSUMED, PHI4_AUDIO, QWEN2_VISION, november
from bench.papers.frame import Claim, Row, Rows, Table
from bench.papers.pipeline import LANGUAGE_MODEL, layout_of, play
from bench.reproduce_frozen_table import TABLE
from interlace import plan
from interlace.layout import Layout
from interlace.plan import ModuleCosts

MODELS = ("SSS", "MMS", "LLS", "SSM", "MMM", "LLM", "SSL", "MML", "LLL")  # the models in table 2 of the paper
STAGES, MICROBATCHES, BATCH = 12, 12, 4
SMALL_STAGES, SMALL_MICROBATCHES = 4, 4
NETWORK = 25e9  # bytes/s into a node of 4 GPUs: one adaptor of 200 Gbit/s
NODES, SAMPLES_PER_GPU = 6, 2
SHAPES = {"vision": QWEN2_VISION, "audio": PHI4_AUDIO, LANGUAGE_MODEL: LLAMA}

Stages = dict[str, int]


def splits(placement: str, stages: int) -> Iterator[Stages]:
    """All ways to split the stages."""
    if placement == "colocated":
        for merged in range(1, stages):
            yield {"vision": merged, "audio": merged, LANGUAGE_MODEL: stages - merged}
        return
    for vision, audio in itertools.product(range(1, stages - 1), repeat=2):
        if vision + audio < stages:
            yield {"vision": vision, "audio": audio, LANGUAGE_MODEL: stages - vision - audio}


def slowest(costs: dict[str, ModuleCosts], stages: Stages, placement: str, aware: bool) -> float:
    """Seconds of the slowest stage in a planner's view; aware: the planner accounts for frozen modules."""
    per_layer = plan.layer_costs(costs, list(costs), frozen_aware=aware, recompute=True)
    worst = {}
    for name, each in per_layer.items():
        cut = plan.partition(each, stages[name])
        worst[name] = np.add.reduceat(each, cut[:-1])
    if placement == "colocated":
        worst["vision"] = worst["vision"] + worst.pop("audio")
    return max(float(times.max()) for times in worst.values())


def planned(costs: dict[str, ModuleCosts], placement: str, stages: int) -> Layout:
    """Stages of a frozen-unaware planner: minimises the slowest stage by its own estimate."""
    chosen = min(splits(placement, stages), key=lambda each: slowest(costs, each, placement, False))
    return layout_of(costs, chosen, placement, frozen_aware=False, recompute=True)


def searched(costs: dict[str, ModuleCosts], placement: str, stages: int, count: int) -> tuple[float, Layout]:
    """Seconds and layout by Cornstarch's algorithm 1: for each number of stages of the language model the best matching
    encoders; of these, the layout with the shortest iteration."""
    best: dict[int, Stages] = {}
    for each in sorted(splits(placement, stages), key=lambda each: slowest(costs, each, placement, True)):
        best.setdefault(each[LANGUAGE_MODEL], each)
    result = [layout_of(costs, each, placement, recompute=True) for each in best.values()]
    return min(
        ((play(costs, layout, count, recompute=True).makespan, layout) for layout in result), key=lambda pair: pair[0]
    )


@lru_cache(maxsize=64)
def times(model: str, small: bool) -> dict[str, tuple[float, str]]:
    """Seconds of an iteration and the stages of each arm."""
    costs = november(model)
    stages, count = (SMALL_STAGES, SMALL_MICROBATCHES) if small else (STAGES, MICROBATCHES)
    result = {}
    for placement in ("colocated", "parallel"):
        layout = planned(costs, placement, stages)
        unaware = play(costs, layout, count, recompute=True).makespan
        for name, seconds, made in (
            ("unaware", unaware, layout),
            ("aware", *searched(costs, placement, stages, count)),
        ):
            counts = " + ".join(str(made.spec(module).pp) for module in made.modules)
            result[f"{placement}, {name}"] = (seconds, counts)
    # GraphPipe's planner may place encoders either way, and takes the one that it estimates to be faster.
    looks = {
        placement: min(slowest(costs, each, placement, False) for each in splits(placement, stages))
        for placement in ("colocated", "parallel")
    }
    result["GraphPipe"] = result[f"{min(looks, key=looks.__getitem__)}, unaware"]
    result["Megatron"] = result["colocated, unaware"]
    result["Cornstarch"] = min(result["colocated, aware"], result["parallel, aware"])
    result["FSDP"] = (fully_sharded(costs, model), "")
    return result


def fully_sharded(costs: dict[str, ModuleCosts], model: str) -> float:
    """Seconds of FSDP on all GPUs: each computes 2 samples whole, and gathers every weight twice, layer by layer.

    Gathers are hidden up to the duration of computing. All data into a node pass its one adaptor.
    """
    per_layer = plan.layer_costs(costs, list(costs), recompute=True)
    size = dict(zip(costs, model))
    seconds = 0.0
    for name, both in per_layer.items():
        stack = SHAPES[name][size[name]]
        gather = 2 * 2 * stack.parameters / stack.layers * (NODES - 1) / NODES / NETWORK
        gpu = both * 2 / BATCH * SAMPLES_PER_GPU  # `costs` are of 4 samples on 2 GPUs
        seconds += float(np.maximum(gpu, gather).sum())
    return seconds


# ---------------------------------------------------------------------- figure 8

NO_BUBBLE = (
    "12 microbatches leave 12 stages idle for half of the time, and FSDP only where a gather outlasts its layer; what "
    "else slowed the paper's is in neither FLOPs nor bytes"
)
BASELINES = ("FSDP", "Megatron", "GraphPipe")


def whole(case: str, small: bool) -> list[Row]:
    model = case.removeprefix("MLLM-")
    result = times(model, small)
    rows = [Row(case, f"{name}: stages", None, result[name][1]) for name in ("Megatron", "GraphPipe", "Cornstarch")]
    rows += [Row(case, name, None, result[name][0], "s") for name in (*BASELINES, "Cornstarch")]
    printed = {row.aware: row.printed for row in TABLE if row.model == model}
    ours = result["colocated, unaware"][0] / result["colocated, aware"][0]
    rows.append(Row(case, "colocated, unaware / aware", printed[False] / printed[True], ours))
    return rows + [
        Row(case, f"{name} / Cornstarch", None, result[name][0] / result["Cornstarch"][0]) for name in BASELINES
    ]


def ahead(rows: Rows) -> list[Claim]:
    def gains(baseline: str) -> list[float]:
        return [row.ours for row in rows if row.what == f"{baseline} / Cornstarch"]

    claims = []
    for baseline, printed in (("Megatron", "1.62 x"), ("GraphPipe", "1.80 x"), ("FSDP", "3.36 x")):
        result = gains(baseline)
        mean = math.exp(statistics.fmean(map(math.log, result)))
        claims.append(
            Claim(f"mean gain over {baseline}", printed, f"{mean:.2f} x ({min(result):.2f} to {max(result):.2f})",
                  mean > 1, NO_BUBBLE if baseline == "FSDP" else "")
        )  # fmt: skip
    worst = {baseline: min(gains(baseline)) for baseline in ("Megatron", "GraphPipe")}
    claims.append(
        Claim("Cornstarch is never behind another pipeline", "the best for all models",
              ", ".join(f"{value:.2f} x of {name}" for name, value in worst.items()), min(worst.values()) > 0.99,
              "MLLM-SSS, whose stages are a layer or two: both cut for the fastest slowest stage, which is not yet the "
              "shortest iteration")
    )  # fmt: skip
    pairs = [row for row in rows if row.what == "colocated, unaware / aware"]
    theirs, ours = ([getattr(row, side) for row in pairs] for side in ("theirs", "ours"))
    claims.append(
        Claim("what knowing the frozen parts gains, colocated, from FLOPs alone (table 2 of the paper)",
              f"{min(theirs):.2f} to {max(theirs):.2f} x", f"{min(ours):.2f} to {max(ours):.2f} x", min(ours) > 0.99,
              "the printed backwards of the language model take 3 to 10 times their forwards, by FLOPs it is twice: "
              "the more there is of it, the more an unaware cut loses")
    )  # fmt: skip
    return claims


# ---------------------------------------------------------------------- figure 10


def placements(case: str, small: bool) -> list[Row]:
    result = times(case.removeprefix("MLLM-"), small)
    rows = []
    for placement in ("colocated", "parallel"):
        seconds, counts = result[f"{placement}, aware"]
        rows += [Row(case, f"{placement}: stages", None, counts), Row(case, placement, None, seconds, "s")]
    return [
        *rows,
        Row(case, "colocated / parallel", None, result["colocated, aware"][0] / result["parallel, aware"][0]),
    ]


def neither_is_best(rows: Rows) -> list[Claim]:
    ratio = {row.case: row.ours for row in rows if row.what == "colocated / parallel"}
    merged = [case for case, value in ratio.items() if value < 1]
    apart = [case for case, value in ratio.items() if value > 1]
    small_encoders = [ratio[case] for case in ratio if case in ("MLLM-SSM", "MLLM-SSL")]
    small_llm = [ratio[case] for case in ratio if case in ("MLLM-MMS", "MLLM-LLS")]
    return [
        Claim("neither placement is best for all models", "both win some",
              f"colocated wins {len(merged)}, parallel {len(apart)} of {len(ratio)}", bool(merged and apart)),
        Claim("small encoders of a larger language model are better colocated", "MLLM-SSM",
              f"{min(small_encoders):.2f} to {max(small_encoders):.2f} x the time of parallel",
              max(small_encoders) <= 1,
              "" if max(small_encoders) <= 1 else "MLLM-SSM is as fast either way: some stage has 4 of its 32 layers, "
              "whether the language model has 9, 10 or 11 stages"),
        Claim("large encoders of a small language model are better in parallel", "where the language model is small",
              f"{min(small_llm):.2f} to {max(small_llm):.2f} x the time of parallel", min(small_llm) > 1,
              "" if min(small_llm) > 1 else "with layers of one module cut evenly, a merged encoder has no loss but a "
              "whole layer; what the encoders cost each other on one GPU is not simulated"),
    ]  # fmt: skip


CASES = tuple(f"MLLM-{model}" for model in MODELS)
TABLES = (
    Table("cornstarch-2025-11-figure-8", "cornstarch-2025-11 figure 8, section 7.2",
          "Iterations of nine models: FSDP, Megatron's chain, GraphPipe's graph, Cornstarch.", CASES, whole, ahead,
          assumed=(*NOVEMBER_ASSUMED,
                   "Megatron, one chain of merged encoders, and GraphPipe take the stage counts whose slowest stage "
                   "looks fastest to them, who do not know what is frozen; Cornstarch searches by its algorithm 1",
                   "FSDP gathers 16-bit weights for forward and backward through one 25 GB/s adaptor per node"),
          missing=("the bars: the figure has no numbers; the means are of the text, over models that it does not list",
                   "FSDP's loss: it depends on how much of the gathering hides, which is not printed")),
    Table("cornstarch-2025-11-figure-10", "cornstarch-2025-11 figure 10, section 7.5",
          "Encoders colocated and in parallel, both cut by what is frozen.", CASES, placements, neither_is_best,
          assumed=NOVEMBER_ASSUMED, missing=("the bars: the figure has no numbers",)),
)  # fmt: skip
