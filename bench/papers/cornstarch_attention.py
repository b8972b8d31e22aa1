"""Cornstarch's context parallelism, counted: work per rank and per multiprocessor, from the blocks of attention plans.

No GPU is timed. A rank's work is the blocks that its rows visit. A multiprocessor processes rows of blocks (or parts of
a row) one after the other. The next head's kernel starts when the last one has ended, as the paper observed on A40s.
Measured figures of the project's own kernel are in bench/results/context_parallel.json.
"""

from __future__ import annotations

import statistics
from functools import lru_cache

import numpy as np
from torch import Tensor

from bench.attention_masks import MASKS
from bench.context_parallel import BLOCK, METHODS, NAMES, NO_SPLIT, PRINTED, dealt, draw
from bench.papers.frame import Claim, Row, Rows, Table
from bench.subblocks import busy_times, items
from interlace import comm
from interlace.attention import AttentionPlan
from interlace.attention.plan import PARTIAL_COST
from interlace.masks import BitfieldMask

RANKS = 8
SERVERS = 84  # multiprocessors of an A40
CAP = 16  # blocks of a part of a row
THEIR_NAMES = {"contiguous": "naive ring", "zigzag": "zigzag", "random": "random", "lpt": "LPT"}

# ---------------------------------------------------------------------- 2025-03 figure 12


def ranks_of(case: str, small: bool, length: int = 65536) -> list[Row]:
    """One mask of the kind, drawn with seed 0: blocks of every rank, and the excess of the slowest over the mean."""
    length = 8192 if small else length
    plan = AttentionPlan.build(draw(case, length, np.random.default_rng(0)), block=BLOCK)
    blocks = plan.row_blocks()
    lpt, random, ring, zigzag = PRINTED[65536, case]
    printed = {"contiguous": ring / lpt, "zigzag": zigzag / lpt, "random": random / lpt, "lpt": 1.0}
    loads = {method: dealt(blocks, RANKS, method).loads for method in METHODS}
    rows = []
    for method in METHODS:
        text = " ".join(f"{load:.0f}" for load in loads[method])
        rows += [
            Row(case, f"{THEIR_NAMES[method]}: blocks of each rank", None, text),
            Row(case, f"{THEIR_NAMES[method]}: slowest rank / mean", None,
                float(loads[method].max() / loads[method].mean())),
            Row(case, f"{THEIR_NAMES[method]}: slowest rank / LPT's", printed[method],
                float(loads[method].max() / loads["lpt"].max())),
        ]  # fmt: skip
    return rows


def balanced(rows: Rows) -> list[Claim]:
    def worst(method: str) -> tuple[float, float]:
        result = [row for row in rows if row.what == f"{method}: slowest rank / LPT's"]
        return max(row.theirs for row in result), max(row.ours for row in result)

    spread = {m: [r.ours for r in rows if r.what == f"{m}: slowest rank / mean"] for m in THEIR_NAMES.values()}
    ring, zigzag, random = worst("naive ring"), worst("zigzag"), worst("random")
    return [
        Claim("LPT leaves no rank with more work than another", "flat bars",
              f"slowest {max(spread['LPT']):.3f} x of the mean", max(spread["LPT"]) < 1.01),
        Claim("zigzag does not balance what is not causal", f"up to {zigzag[0]:.2f} x the time of LPT",
              f"up to {zigzag[1]:.2f} x its work", zigzag[1] > 1.02,
              "one drawn mask of each kind against the paper's mean of 50; times hold more than the counted blocks"),
        Claim("a plain ring is worst", f"up to {ring[0]:.2f} x", f"up to {ring[1]:.2f} x",
              ring[1] >= max(zigzag[1], random[1])),
        Claim("random dealing is near LPT at 64k tokens", f"up to {random[0]:.3f} x", f"up to {random[1]:.2f} x",
              random[1] <= 1.05,
              "" if random[1] < 1.05 else "512 blocks are few: what a random deal leaves shrinks with their number"),
    ]  # fmt: skip


# ---------------------------------------------------------------------- 2025-11 figures 12 and 13

ARMS = {  # their name -> (assignment of tokens, True if rows are cut into parts)
    "causal CP": ("zigzag", False), "inter-GPU only": ("lpt", False), "intra-GPU only": ("zigzag", True),
    "Cornstarch": ("lpt", True),
}  # fmt: skip
# ms of one attention layer for causal, inter, intra, Cornstarch; figure 12 and, at 64k, table 3.
ATTENTION = {
    16384: {"S": (23.54, 24.26, 17.61, 18.23), "M": (40.01, 40.72, 35.35, 34.47), "L": (48.02, 50.77, 44.74, 41.41)},
    32768: {"S": (66.00, 74.44, 57.65, 57.32), "M": (113.37, 127.46, 111.17, 105.16),
            "L": (148.75, 159.39, 141.85, 143.28)},
    65536: {"S": (243.44, 255.59, 225.73, 204.95), "M": (460.13, 487.44, 440.86, 417.31),
            "L": (568.18, 610.67, 558.56, 551.60)},
}  # fmt: skip
STREAMS = {"S": (5541.25, 5294.12, 4856.60), "M": (24534.50, 23794.29, 22815.79), "L": (77378.44, 76457.72, 74864.71)}
LENGTHS = {f"{length // 1024}k": length for length in ATTENTION}
SMALL_LENGTH, SMALL_RANKS = 8192, 2


@lru_cache(maxsize=4)
def embedded(length: int) -> tuple[BitfieldMask, Tensor]:
    """The mask of encoder outputs embedded in text, and the work of its rows of blocks."""
    mask = MASKS[NAMES["EE"]](length)
    return mask, AttentionPlan.build(mask, block=BLOCK).row_blocks()


@lru_cache(maxsize=32)
def parts(length: int, ranks: int, method: str, split: bool) -> tuple[tuple[float, ...], ...]:
    """Per rank, the blocks of each of its work items for one head; PARTIAL blocks are weighted as in the plan."""
    mask, blocks = embedded(length)
    shards = dealt(blocks, ranks, method)
    result = []
    for rank in range(ranks):
        plan = comm.ContextParallelPlan.build(mask, shards, rank, cap=CAP if split else NO_SPLIT, heads=1, kv_heads=1)
        result.append(tuple(full + PARTIAL_COST * partial for full, partial in items(plan.plan)))
    return tuple(result)


def slowest(length: int, ranks: int, method: str, split: bool, together: int = 1) -> tuple[float, float]:
    """(blocks per head on the busiest multiprocessor of the slowest rank, utilisation of that rank's multiprocessors).

    together: heads whose kernels run at once, as with that many streams.
    """
    worst = (0.0, 1.0)
    for costs in parts(length, ranks, method, split):
        busy = busy_times([cost for _ in range(together) for cost in costs], SERVERS)
        result = (max(busy) / together, statistics.fmean(busy) / max(busy))
        worst = max(worst, result)
    return worst


def policies(case: str, small: bool) -> list[Row]:
    length, ranks = (SMALL_LENGTH, SMALL_RANKS) if small else (LENGTHS[case], RANKS)
    made = {name: slowest(length, ranks, *arm)[0] for name, arm in ARMS.items()}
    rows = [Row(case, f"{name}: blocks on the busiest multiprocessor", None, made[name]) for name in ARMS]
    for number, name in enumerate(ARMS):
        if number:
            for size, printed in ATTENTION[LENGTHS[case]].items():
                rows.append(Row(case, f"LLM-{size}: {name}, x faster than causal CP", printed[0] / printed[number],
                                made["causal CP"] / made[name]))  # fmt: skip
    return rows


def both_balances(rows: Rows) -> list[Claim]:
    def gains(name: str) -> tuple[list[float], list[float]]:
        result = [row for row in rows if f": {name}, x faster" in row.what]
        return [row.theirs for row in result], [row.ours for row in result]

    def text(values: list[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f} x"

    inter, intra, both = gains("inter-GPU only"), gains("intra-GPU only"), gains("Cornstarch")
    return [
        Claim("balance between GPUs alone gains nothing", text(inter[0]), text(inter[1]), max(inter[1]) < 1.02,
              "the longest row of blocks ends last, whichever rank has it"),
        Claim("cutting rows within a GPU gains", text(intra[0]), text(intra[1]), min(intra[1]) > 1,
              "a rank has fewer rows of blocks than multiprocessors, and one head's kernel fills no more here; "
              "launches and memory traffic, which the paper's times hold, are not in blocks"),
        Claim("both together gain", text(both[0]), text(both[1]), min(both[1]) > 1),
        Claim("both together are no worse than either alone",
              f"in {sum(b >= i * 0.99 for b, i in zip(both[0], intra[0]))} of {len(both[0])} figures",
              f"in {sum(b >= i * 0.99 for b, i in zip(both[1], intra[1]))} of {len(both[1])}",
              all(b >= i * 0.99 for b, i in zip(both[1], intra[1]))),
    ]  # fmt: skip


def streams(case: str, small: bool, together: int = 4) -> list[Row]:
    """64k tokens: kernels of 4 heads at once, tokens assigned by LPT, against one head after the other."""
    length, ranks = (SMALL_LENGTH, SMALL_RANKS) if small else (65536, RANKS)
    causal = slowest(length, ranks, "zigzag", False)
    several = slowest(length, ranks, "lpt", False, together)
    ours = slowest(length, ranks, "lpt", True)
    printed = STREAMS[case.removeprefix("LLM-")]
    rows = [
        Row(case, f"{name}: multiprocessors busy", None, result[1])
        for name, result in (("causal CP", causal), ("inter-GPU + streams", several), ("Cornstarch", ours))
    ]
    for name, number, result in (("inter-GPU + streams", 1, several), ("Cornstarch", 2, ours)):
        rows.append(Row(case, f"{name}, x faster than causal CP", printed[0] / printed[number], causal[0] / result[0]))
    return rows


def streams_help_less(rows: Rows) -> list[Claim]:
    several = [row for row in rows if row.what.startswith("inter-GPU + streams, x")]
    ours = [row for row in rows if row.what.startswith("Cornstarch, x")]
    busy = {name: max(r.ours for r in rows if r.what == f"{name}: multiprocessors busy")
            for name in ("causal CP", "inter-GPU + streams", "Cornstarch")}  # fmt: skip
    return [
        Claim("several streams gain", f"{max(r.theirs for r in several):.2f} x at most (whole model)",
              f"{max(r.ours for r in several):.2f} x (attention alone)", min(r.ours for r in several) > 1,
              "theirs are of whole models, in which attention is a part"),
        Claim("cutting rows gains more than streams", f"{max(r.theirs for r in ours):.2f} x at most",
              f"{max(r.ours for r in ours):.2f} x",
              min(o.ours - s.ours for o, s in zip(ours, several)) > 0),
        Claim("multiprocessors idle with streams too, and least with rows cut", "lines of figures 9 and 13",
              ", ".join(f"{name} {value:.0%} busy" for name, value in busy.items()),
              busy["causal CP"] < busy["inter-GPU + streams"] < busy["Cornstarch"]),
    ]  # fmt: skip


NOT_TIMED = "milliseconds: no A40 is at hand; work is counted in blocks of the plan, ratios are compared"
NOVEMBER = (
    f"{RANKS} ranks (the degree is not printed), {SERVERS} multiprocessors each, rows cut at {CAP} blocks of {BLOCK}",
    "the mask of embedded encoder outputs (bench/attention_masks.py); theirs is a mix that is not printed",
    "one head's kernel after the other; sizes of the language model do not matter to the ratio",
)
TABLES = (
    Table("cornstarch-2025-03-figure-12", "cornstarch-2025-03 figure 12, section 6.5; ratios of table 4",
          "Work of 8 context-parallel ranks at 64k tokens under four ways to deal tokens.", tuple(NAMES), ranks_of,
          balanced, assumed=("masks drawn as bench/context_parallel.py draws them: the paper's draws are not printed",),
          missing=(NOT_TIMED,)),
    Table("cornstarch-2025-11-figure-12", "cornstarch-2025-11 figure 12 and table 3, section 7.4",
          "Balance between GPUs, within a GPU, and both, at 16k, 32k and 64k tokens.", tuple(LENGTHS), policies,
          both_balances, assumed=NOVEMBER, missing=(NOT_TIMED,)),
    Table("cornstarch-2025-11-figure-13", "cornstarch-2025-11 figure 13 and table 5, appendix E",
          "Several streams instead of cut rows, at 64k tokens.", tuple(f"LLM-{size}" for size in STREAMS), streams,
          streams_help_less, assumed=(*NOVEMBER, "4 streams (their number is not printed)"), missing=(NOT_TIMED,)),
)  # fmt: skip
