"""Balance of context parallelism over ranks: counted, modelled and measured.

    python -m bench.context_parallel [--preset cpu|gpu|smoke] [--parts counted random ablation ranks processes]
                                     [--out JSON] [--chart PNG]

Every method gives every rank the same number of tokens (Cornstarch's own gives the number that balances the work).
"contiguous" is therefore also ring attention: equal runs. The work of a row is its number of non-empty blocks of
128 x 128.

    counted     slowest rank / mean, in blocks, for Cornstarch's masks EP, EE and MP by length and number of ranks
    random      slowest rank / slowest rank of LPT, in blocks, for masks drawn at random as in table 4 of Cornstarch
                2025-03 (8 ranks, 50 draws), beside the ratios of the times printed there
    ablation    Cornstarch 2025-11's two steps, {zigzag, LPT} x {rows whole, long rows in subblocks}: the makespan of
                one launch on the multiprocessors of each rank, modelled by list scheduling in units of a FULL block.
                A PARTIAL block costs PARTIAL_COST of it; launching and merging are assumed to cost nothing
    ranks       the same four and the other methods measured: each rank's attention, forward and backward, alone on
                this device, one after the other (on a CPU subblocks are never made: one core does not profit)
    processes   context_parallel_attention on two processes of one CPU thread: each rank's attention, and the whole
                with its gathers and reductions, over the transport that `interlace.comm` selects. If there are only as
                many cores as processes, the copying threads compete with attention; see `bench.overlap` for hiding

The papers print up to 1.27x over ring and 1.11x over zigzag (2025-03, table 4), and 0.93-0.98x for balance between GPUs
without subblocks (2025-11, table 3 and figure 12).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bench.attention_masks import MASKS, Run, cut
from bench.context_parallel_report import chart, lines
from bench.measure import (
    Clock,
    command,
    device,
    free_port,
    join_group,
    machine,
    parse_heads,
    versions,
    write_json,
)
from bench.subblocks import busy_times, items
from interlace import comm
from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention.plan import PARTIAL_COST
from interlace.balance import TokenShards, distribute_tokens
from interlace.masks import BitfieldMask

BLOCK = 128
NO_SPLIT = 1 << 30
METHODS = ("contiguous", "zigzag", "random", "lpt")
NAMES = {"EP": "cornstarch_ep", "EE": "cornstarch_ee", "MP": "cornstarch_mp"}
SCHEDULERS = {os.SCHED_OTHER: "fair", os.SCHED_FIFO: "first in, first out", os.SCHED_RR: "round robin"}
PARTS = ("counted", "random", "ablation", "ranks", "processes")

# Cornstarch 2025-03, table 4: milliseconds of one attention layer on 8 ranks with LPT, random, ring and zigzag.
PRINTED = {
    (16384, "EP"): (3.92, 3.93, 4.24, 3.96), (16384, "EE"): (4.31, 4.32, 4.86, 4.37),
    (16384, "MP"): (3.00, 2.99, 3.12, 3.08), (32768, "EP"): (10.01, 10.07, 11.76, 10.21),
    (32768, "EE"): (11.12, 11.12, 13.43, 11.60), (32768, "MP"): (6.09, 6.18, 6.76, 6.57),
    (65536, "EP"): (25.43, 25.48, 32.24, 28.17), (65536, "EE"): (36.99, 37.12, 46.67, 37.36),
    (65536, "MP"): (14.18, 14.15, 16.56, 15.33),
}  # fmt: skip


class Preset(NamedTuple):
    lengths: list[int]  # of "counted"
    ranks: list[int]
    draws: int  # of "random", at the lengths of table 4 up to the longest of `lengths`
    modelled: int  # tokens of "ablation"
    multiprocessors: int
    measured: int  # tokens of "ranks"
    measured_ranks: int
    processed: int  # tokens of "processes", which compute on the CPU
    heads: list[str]  # query heads : key heads of one launch
    dtype: str
    head_dim: int
    repeats: int


LONG = [16384, 65536, 262144, 1048576]
PRESETS = {
    "cpu": Preset(LONG, [2, 8, 16, 64], 50, 65536, 132, 8192, 8, 8192, ["1:1"], "float32", 64, 5),
    "gpu": Preset(LONG, [2, 8, 16, 64], 50, 65536, 132, 65536, 8, 8192, ["1:1", "8:1"], "bfloat16", 128, 11),
    "smoke": Preset([2048], [2], 2, 2048, 4, 700, 2, 700, ["2:2"], "float32", 8, 1),
}


# ---------------------------------------------------------------------- counted


def dealt(blocks: Tensor, ranks: int, method: str) -> TokenShards:
    return distribute_tokens(blocks, ranks, block=BLOCK, method=method)


def spread(loads: Any) -> float:
    """Slowest rank / mean."""
    return float(np.max(loads) / np.mean(loads))


def counted(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for length in options.lengths:
        for name, mask in NAMES.items():
            plan = AttentionPlan.build(MASKS[mask](length), block=BLOCK)
            blocks, density = plan.row_blocks(), plan.stats().density
            del plan
            for ranks in options.ranks:
                start = time.perf_counter()
                shards = {method: dealt(blocks, ranks, method) for method in METHODS}
                rows.append({
                    "mask": name, "length": length, "ranks": ranks, "density": density,
                    "slowest_over_mean": {method: spread(result.loads) for method, result in shards.items()},
                    "lpt_above_bound": shards["lpt"].gap,
                    "deal_ms": (time.perf_counter() - start) * 1e3,
                })  # fmt: skip
    return rows


# ---------------------------------------------------------------------- masks drawn at random


def draw(kind: str, length: int, rng: np.random.Generator) -> BitfieldMask:
    """EP: image, audio, text; EE: the same pieces in any order between runs of text; MP: such samples, packed."""
    if kind == "MP":
        parts = cut(length, (rng.integers(1, 9, rng.integers(4, 17))).tolist())
        return BitfieldMask.pack([draw(str(rng.choice(["EP", "EE"])), part, rng) for part in parts])
    media, shares = ["image", "audio"], rng.integers(1, 9, 3).tolist()
    if kind == "EP":
        runs = list(zip([*media, "text"], cut(length, shares)))
    else:
        pieces = rng.permutation(media * int(rng.integers(1, 4))).tolist()
        weights = rng.integers(1, 9, 2 * len(pieces) + 1).tolist()
        kinds = ["text", *(kind for piece in pieces for kind in (piece, "text"))]
        runs = list(zip(kinds, cut(length, weights)))
    return cornstarch(runs)


def cornstarch(runs: list[Run]) -> BitfieldMask:
    words = {"text": 0b111, "image": 0b010, "audio": 0b100}
    field = torch.cat([torch.full((n,), words[kind], dtype=torch.int64) for kind, n in runs])
    return BitfieldMask.from_cornstarch(field[None], dialect="text_bit")


def drawn(options: argparse.Namespace, ranks: int = 8) -> list[dict[str, Any]]:
    rows = []
    for (length, name), (lpt, random, ring, zigzag) in PRINTED.items():
        if length > max(options.lengths):
            continue
        rng = np.random.default_rng(0)
        slowest: dict[str, list[float]] = {method: [] for method in METHODS}
        for _ in range(options.draws):
            blocks = AttentionPlan.build(draw(name, length, rng), block=BLOCK).row_blocks()
            for method in METHODS:
                slowest[method].append(float(dealt(blocks, ranks, method).loads.max()))
        ratios = {method: np.array(result) / np.array(slowest["lpt"]) for method, result in slowest.items()}
        rows.append({
            "mask": name, "length": length, "ranks": ranks, "draws": options.draws,
            "slowest_over_lpt": {method: float(result.mean()) for method, result in ratios.items()},
            "most_over_lpt": {method: float(result.max()) for method, result in ratios.items()},
            "printed_time_over_lpt": {"contiguous": ring / lpt, "zigzag": zigzag / lpt, "random": random / lpt},
        })  # fmt: skip
    return rows


# ---------------------------------------------------------------------- two steps of balance, modelled


def makespan(plan: AttentionPlan, heads: int, servers: int) -> float:
    costs = [full + PARTIAL_COST * partial for full, partial in items(plan)]
    return max(busy_times([cost for cost in costs for _ in range(heads)], servers))


def ablation(options: argparse.Namespace, ranks: int = 8) -> list[dict[str, Any]]:
    rows = []
    for name in NAMES:
        mask = MASKS[NAMES[name]](options.modelled)
        blocks = AttentionPlan.build(mask, block=BLOCK).row_blocks()
        for text in ("1:1", "8:1"):
            heads, kv_heads = parse_heads(text)
            result: dict[str, float] = {}
            for method in ("zigzag", "lpt"):
                shards = dealt(blocks, ranks, method)
                for split, cap in (("whole", NO_SPLIT), ("subblocks", 16)):
                    plans = (
                        comm.ContextParallelPlan.build(mask, shards, rank, cap=cap, heads=heads, kv_heads=kv_heads).plan
                        for rank in range(ranks)
                    )
                    result[f"{method}, {split}"] = max(makespan(p, heads, options.multiprocessors) for p in plans)
            base = result["zigzag, whole"]
            rows.append({
                "mask": name, "length": options.modelled, "ranks": ranks, "heads": text, "cap": 16,
                "multiprocessors": options.multiprocessors, "slowest_rank_blocks": result,
                "speedup_over_zigzag_whole": {arm: base / blocks for arm, blocks in result.items()},
            })  # fmt: skip
    return rows


# ---------------------------------------------------------------------- measured, rank after rank


def tensors(shards: TokenShards, heads: tuple[int, int], options: argparse.Namespace, at: torch.device) -> list[Tensor]:
    """q and dout of one rank, k and v of all ranks."""
    generator = torch.Generator(at).manual_seed(0)
    lengths = (shards.tokens_per_rank, shards.tokens_per_rank, shards.padded_length, shards.padded_length)
    counts = (heads[0], heads[0], heads[1], heads[1])
    return [
        torch.randn((1, count, length, options.head_dim), generator=generator, device=at)
        .to(getattr(torch, options.dtype))
        .requires_grad_(number != 1)
        for number, (count, length) in enumerate(zip(counts, lengths))
    ]


def rank_after_rank(options: argparse.Namespace, at: torch.device) -> list[dict[str, Any]]:
    clock, rows, ranks = Clock(at), [], options.measured_ranks
    for name in NAMES:
        mask = MASKS[NAMES[name]](options.measured).to(at)  # on that device, so that cap=None splits for it
        blocks = AttentionPlan.build(mask, block=BLOCK).row_blocks().cpu()
        for text in options.heads:
            heads = parse_heads(text)
            arms: dict[str, list[AttentionPlan]] = {}
            shards = {method: dealt(blocks, ranks, method) for method in METHODS}
            q, dout, k, v = tensors(shards["lpt"], heads, options, at)
            for method in METHODS:
                for split, cap in (("whole", NO_SPLIT), ("subblocks", None)):
                    if split == "whole" or (at.type == "cuda" and method in ("zigzag", "lpt")):
                        arms[f"{method}, {split}"] = [
                            comm.ContextParallelPlan.build(
                                mask, shards[method], rank, cap=cap, heads=heads[0], kv_heads=heads[1]
                            ).plan
                            for rank in range(ranks)
                        ]
            samples: dict[str, list[list[float]]] = {arm: [[] for _ in range(ranks)] for arm in arms}
            for repeat in range(options.repeats + 1):  # the first one warms up
                for arm, plans in arms.items():
                    for rank, plan in enumerate(plans):
                        ms = both_passes(clock, q, k, v, dout, plan)
                        if repeat:
                            samples[arm][rank].append(ms)
            times = {arm: [statistics.median(result) for result in each] for arm, each in samples.items()}
            base = max(times["zigzag, whole"])
            rows.append({
                "mask": name, "length": options.measured, "ranks": ranks, "heads": text, "rank_ms": times,
                "slowest_ms": {arm: max(each) for arm, each in times.items()},
                "slowest_over_mean": {arm: spread(each) for arm, each in times.items()},
                "speedup_over_zigzag_whole": {arm: base / max(each) for arm, each in times.items()},
                "counted_slowest_over_mean": {method: spread(shards[method].loads) for method in METHODS},
            })  # fmt: skip
    return rows


def both_passes(clock: Clock, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: AttentionPlan) -> float:
    out, forward = clock(lambda: bitfield_attention(q, k, v, plan))
    assert isinstance(out, Tensor)
    return forward + clock(lambda: torch.autograd.grad(out, (q, k, v), dout))[1]


# ---------------------------------------------------------------------- measured, two processes


def on_process(rank: int, port: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    join_group(rank, 2, port, 300)
    torch.save(process(comm.resolve(None), options), f"{folder}/{rank}.pt")
    comm.disconnect()
    dist.destroy_process_group()


def process(group: comm.Transport, options: argparse.Namespace) -> dict[str, Any]:
    """For each mask and method, by round: milliseconds of this rank's attention, and until all ranks have finished."""
    result: dict[str, Any] = {"transport": group.name, "times": {}}
    for name in NAMES:
        mask = MASKS[NAMES[name]](options.processed)
        blocks = AttentionPlan.build(mask, block=BLOCK).row_blocks()
        cases: dict[str, Callable[[], None]] = {}
        for method in METHODS:
            shards = dealt(blocks, group.world, method)
            plan = comm.ContextParallelPlan.build(mask, shards, group.rank)
            generator = torch.Generator().manual_seed(group.rank)
            q, k, v = (
                torch.randn(1, 2, shards.tokens_per_rank, options.head_dim, generator=generator).requires_grad_()
                for _ in range(3)
            )

            def run(q=q, k=k, v=v, plan=plan, shards=shards) -> None:  # type: ignore[no-untyped-def]
                out = comm.context_parallel_attention(q, k, v, plan, shards, group=group, heads_per_chunk=1)
                torch.autograd.grad(out, (q, k, v), out.detach())

            cases[method] = run
        times: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
        for repeat in range(options.repeats + 1):
            for method, run in cases.items():
                group.barrier()
                start = time.perf_counter()
                with comm.traced(group) as trace:
                    run()
                group.barrier()
                whole = time.perf_counter() - start
                attention = sum(event.finish - event.start for event in trace.of("compute"))
                if repeat:
                    times[method].append((attention * 1e3, whole * 1e3))
        result["times"][name] = times
    return result


def processes(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_process, (free_port(), options, folder), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
        both = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(2)]
    rows = []
    for name in NAMES:
        blocks = AttentionPlan.build(MASKS[NAMES[name]](options.processed), block=BLOCK).row_blocks()
        ms, slowest, ratio, whole = {}, {}, {}, {}
        for method in METHODS:
            rounds = [each["times"][name][method] for each in both]
            ms[method] = [statistics.median(attention for attention, _ in each) for each in rounds]
            slowest[method], ratio[method] = max(ms[method]), spread(ms[method])
            whole[method] = statistics.median(max(pair[1] for pair in pairs) for pairs in zip(*rounds))
        rows.append({
            "mask": name, "length": options.processed, "ranks": 2, "heads": "2:2", "attention_ms": ms,
            "slowest_ms": slowest, "slowest_over_mean": ratio, "whole_ms": whole,
            "counted_slowest_over_mean": {method: spread(dealt(blocks, 2, method).loads) for method in METHODS},
        })  # fmt: skip
    return {"transport": both[0]["transport"], "threads": 1, "rows": rows}


# ---------------------------------------------------------------------- the run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the parts, print their lines, write the JSON and the chart; returns the content of the JSON."""
    options = parse(argv)
    at = device()
    if options.threads:
        torch.set_num_threads(options.threads)
    report: dict[str, Any] = {
        "benchmark": "context_parallel",
        "command": command("context_parallel", argv),
        "machine": machine(at),
        "versions": versions(),
        "settings": {
            "preset": options.preset, "block": BLOCK, "dtype": options.dtype, "head_dim": options.head_dim,
            "repeats": options.repeats, "scheduler": SCHEDULERS.get(os.sched_getscheduler(0), "other"),
        },
        "parts": {},
    }  # fmt: skip
    parts: dict[str, Callable[[], Any]] = {
        "counted": lambda: counted(options),
        "random": lambda: drawn(options),
        "ablation": lambda: ablation(options),
        "ranks": lambda: rank_after_rank(options, at),
        "processes": lambda: processes(options),
    }
    for part in options.parts:
        report["parts"][part] = parts[part]()
        write_json(options.out, report)
        print("\n".join(lines(part, report["parts"][part])), flush=True)
    if options.chart:
        chart(report, options.chart)
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="default: gpu where there is one, else cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--draws", type=int, help="random masks of each kind and length")
    parser.add_argument("--modelled", type=int, help="tokens of the ablation")
    parser.add_argument("--multiprocessors", type=int, help="of a modelled GPU")
    parser.add_argument("--measured", type=int, help="tokens of what is measured rank after rank")
    parser.add_argument("--measured-ranks", type=int)
    parser.add_argument("--processed", type=int, help="tokens of what is measured on two processes")
    parser.add_argument("--heads", nargs="+", help="query heads:key heads of one measured launch")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--threads", type=int, help="CPU threads of what is measured rank after rank")
    parser.add_argument("--out", type=Path, default=Path("bench/results/context_parallel.json"))
    parser.add_argument("--chart", type=Path, help="PNG of the counted and the measured imbalance")
    options = parser.parse_args(argv)
    options.preset = options.preset or ("gpu" if device().type == "cuda" else "cpu")
    for name, value in PRESETS[options.preset]._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def test_context_parallel(benchmark: Any) -> None:
    """The same under pytest-benchmark, at toy sizes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--preset", "smoke", "--out", os.path.join(folder, "context_parallel.json")]
        report = benchmark.pedantic(lambda: main(arguments), rounds=1)
    benchmark.extra_info["slowest_over_mean"] = report["parts"]["counted"][0]["slowest_over_mean"]


if __name__ == "__main__":
    main()
