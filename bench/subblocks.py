"""Subblock ablation: effect of splitting long rows of blocks on time and on the balance of SMs.

    python -m bench.subblocks [--preset cpu|gpu|smoke] [--masks ...] [--heads 1:1 8:1] [--ranks 1 8] [--out JSON]

Cornstarch 2025-11 (sections 5.2 and 6.4, figure 9) splits the keys of a block of queries into subblocks that other
SMs take. Variants, measured in alternation:

    none              one work item per row, of any length
    fixed_16          pieces of at most 16 key blocks: the paper finds "16-32 subblocks" good, and its figure reads so
    fixed_32          pieces of at most 32 key blocks
    fixed_4096_keys   pieces of at most 4,096 keys, as in Cornstarch's code; with blocks of 128 that is fixed_32
    automatic         AttentionPlan.build without a cap: chosen from the work and the number of SMs (on a CPU: none)

`--ranks 8` gives each launch the queries of one of 8 context-parallel ranks (every 8th block) against all keys, and
`--heads 1:1` one head per launch. This is the paper's setting, where a launch has too few rows to fill the GPU.

Times are measured, forward and backward, merge of partial results included. Busy time per SM (on a CPU: per core) is
modelled, not measured. The forward's work items, in launch order, are list-scheduled on as many servers. Costs per
item, per FULL and per PARTIAL block are measured in the same run on plans that contain nothing else. `model_ms` beside
the measured time shows the accuracy of the model. The CPU backend may ignore splits: its measured times then differ
only by noise.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.attention_masks import MASKS
from bench.attention_report import subblock_lines
from bench.measure import Clock, command, device, machine, parse_heads, versions, write_json
from interlace.attention import AttentionPlan, bitfield_attention
from interlace.masks import BitfieldMask, word

BLOCK = 128
CAPS: dict[str, int | None] = {
    "none": 1 << 30,
    "fixed_16": 16,
    "fixed_32": 32,
    "fixed_4096_keys": 4096 // BLOCK,
    "automatic": None,
}
WAVES = 8  # work items per server in a calibration, so that its tail does not matter


class Preset(NamedTuple):
    masks: list[str]
    length: int
    heads: list[str]
    ranks: list[int]
    dtype: str
    head_dim: int
    repeats: int
    calibration: int  # tokens


PRESETS = {
    "cpu": Preset(["causal", "packed_images", "cornstarch_ee"], 4096, ["1:1", "8:8"], [1], "float32", 64, 7, 2048),
    "gpu": Preset(
        ["causal", "cornstarch_ee", "cornstarch_mp", "gemma3_images", "lambda"],
        65536,
        ["1:1", "8:1"],
        [8, 1],
        "bfloat16",
        128,
        11,
        8192,
    ),
    "smoke": Preset(["causal"], 2100, ["1:1"], [1, 2], "float32", 8, 2, 256),
}


class Costs(NamedTuple):
    """Milliseconds of one server, measured: per work item and per FULL and PARTIAL block of it."""

    item: float
    full: float
    partial: float


class Tensors(NamedTuple):
    """q, dout [1, Hq, Tq, D]; k, v [1, Hkv, Tk, D]; q, k and v require gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def tensors(q_len: int, k_len: int, heads: tuple[int, int], options: argparse.Namespace, at: torch.device) -> Tensors:
    generator = torch.Generator(at).manual_seed(0)

    def tensor(heads: int, length: int) -> Tensor:
        shape = (1, heads, length, options.head_dim)
        return torch.randn(shape, generator=generator, device=at).to(getattr(torch, options.dtype))

    q, k, v = tensor(heads[0], q_len), tensor(heads[1], k_len), tensor(heads[1], k_len)
    return Tensors(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), tensor(heads[0], q_len))


def forward(x: Tensors, plan: AttentionPlan, backend: str | None) -> Tensor:
    out = bitfield_attention(x.q, x.k, x.v, plan, backend=backend)
    assert isinstance(out, Tensor)
    return out


# ---------------------------------------------------------------------- the model


def servers(at: torch.device) -> int:
    """SMs of the GPU, or threads of the CPU."""
    if at.type == "cuda":
        return torch.cuda.get_device_properties(at).multi_processor_count
    return torch.get_num_threads()


def calibrate(options: argparse.Namespace, clock: Clock) -> Costs:
    """Costs from three masks with identical rows: nothing visible, all FULL blocks, all PARTIAL blocks."""
    length, at, count = options.calibration, clock.device, servers(clock.device)
    rows = -(-length // BLOCK)
    heads = max(1, -(-WAVES * count // rows))
    index = torch.arange(length)
    nothing = BitfieldMask(torch.full((1, length), word(0, [1])))
    everything = BitfieldMask.full(1, length)
    half = BitfieldMask(torch.where(index % 2 == 0, word(0, [0]), word(1, [0]))[None])  # even keys only
    x = tensors(length, length, (heads, 1), options, at)
    milliseconds = []
    for mask in (nothing, everything, half):
        plan = AttentionPlan.build(mask.to(at), block=BLOCK, cap=1 << 30)
        with torch.no_grad():
            times = [clock(lambda: forward(x, plan, options.backend))[1] for _ in range(6)][1:]  # noqa: B023
        milliseconds.append(statistics.median(times) * count / (rows * heads))
    item, full, partial = milliseconds
    return Costs(item, max(0.0, full - item) / rows, max(0.0, partial - item) / rows)


def items(plan: AttentionPlan) -> list[tuple[int, int]]:
    """(FULL, PARTIAL) blocks of each work item of the forward, in the order of launch."""
    full = plan.full_q_ptr.diff().tolist()
    work = zip(plan.work_row.tolist(), plan.work_start.tolist(), plan.work_stop.tolist())
    return [
        (max(0, min(stop, full[row]) - min(start, full[row])), max(0, stop - full[row]) - max(0, start - full[row]))
        for row, start, stop in work
        if row >= 0
    ]


def busy_times(costs: list[float], count: int) -> list[float]:
    """List scheduling: each cost in turn goes to the server that is free first. Busy time per server; the largest is
    the makespan, since no server waits."""
    free = [(0.0, server) for server in range(count)]
    for cost in costs:
        at, server = free[0]
        heapq.heapreplace(free, (at + cost, server))
    return [at for at, _ in sorted(free, key=lambda entry: entry[1])]


def model(plan: AttentionPlan, heads: int, costs: Costs, count: int) -> dict[str, float]:
    """Busy time per server in ms, its spread (max - min) / mean, and utilisation mean / max."""
    durations = [costs.item + full * costs.full + partial * costs.partial for full, partial in items(plan)]
    busy = busy_times([duration for duration in durations for _ in range(heads)], count)
    mean = statistics.fmean(busy)
    return {
        "model_ms": max(busy),
        "busy_min_ms": min(busy),
        "busy_mean_ms": mean,
        "busy_max_ms": max(busy),
        "spread": (max(busy) - min(busy)) / mean if mean else 0.0,
        "utilisation": mean / max(busy) if max(busy) else 1.0,
    }


# ---------------------------------------------------------------------- the run


def run_case(
    name: str, heads: tuple[int, int], ranks: int, costs: Costs, options: argparse.Namespace, clock: Clock
) -> dict[str, Any]:
    """Every variant on one mask, measured in alternation and modelled."""
    at = clock.device
    whole = MASKS[name](options.length).to(at)
    index = torch.arange(options.length, device=at)
    mine = whole.select(index[index // BLOCK % ranks == 0]) if ranks > 1 else whole
    x = tensors(mine.length, whole.length, heads, options, at)
    case: dict[str, Any] = {
        "mask": name,
        "queries": mine.length,
        "keys": whole.length,
        "heads": f"{heads[0]}:{heads[1]}",
    }
    variants: dict[str, dict[str, Any]] = {}
    plans: dict[str, AttentionPlan] = {}
    wanted = None
    for variant, cap in CAPS.items():
        twin = next((other for other in plans if cap is not None and CAPS[other] == cap), None)
        if twin is not None:
            variants[variant] = {"cap": cap, "same_plan_as": twin}
            continue
        plan = plans[variant] = AttentionPlan.build(mine, whole, block=BLOCK, cap=cap)
        stats = plan.stats()
        variants[variant] = {
            "cap": cap if cap is not None and cap < 1 << 30 else None,
            "work_items": stats.work_items,
            "split_rows": stats.split_rows,
            "longest_item": stats.longest_item,
            "forward_samples": [],
            "backward_samples": [],
            **model(plan, heads[0], costs, servers(at)),
        }
        out = forward(x, plan, options.backend)
        torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)
        wanted = out.detach().float() if wanted is None else wanted
        error = float((out.detach().float() - wanted).norm() / wanted.norm())
        if not error <= 2e-2:
            raise AssertionError(f"{name}: {variant} differs from the unsplit result by {error:.2g}")
    for _ in range(options.repeats):
        for variant, plan in plans.items():
            out, ms = clock(lambda: forward(x, plan, options.backend))  # noqa: B023 it is called at once
            variants[variant]["forward_samples"].append(ms)
            _, ms = clock(lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.dout))  # noqa: B023
            variants[variant]["backward_samples"].append(ms)
    for record in variants.values():
        for which in ("forward", "backward"):
            if f"{which}_samples" in record:
                record[f"{which}_ms"] = statistics.median(record[f"{which}_samples"])
    unsplit = variants["none"]
    for record in variants.values():
        if "forward_ms" in record:
            record["speedup"] = {
                which: unsplit[f"{which}_ms"] / record[f"{which}_ms"] for which in ("forward", "backward")
            }
    return case | {"variants": variants}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the ablation, print its lines, write the JSON and return its content."""
    start = time.monotonic()
    options = parse(argv)
    at = device()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = Clock(at)
    costs = calibrate(options, clock)
    report: dict[str, Any] = {
        "benchmark": "subblocks",
        "command": command("subblocks", argv),
        "machine": machine(at),
        "versions": versions(),
        "settings": {
            "preset": options.preset, "dtype": options.dtype, "head_dim": options.head_dim, "block": BLOCK,
            "length": options.length, "repeats": options.repeats, "backend": options.backend or "automatic",
        },
        "busy": "modelled: list scheduling of the forward's work items with the costs below, measured in this run",
        "servers": servers(at),
        "costs_ms": costs._asdict(),
        "complete": False,
        "cases": [],
        "left_out": [],
    }  # fmt: skip
    print(
        f"{servers(at)} servers; {costs.item * 1e3:.2f} us per item, {costs.full * 1e3:.2f} us per full block, "
        f"{costs.partial * 1e3:.2f} us per partial block"
    )
    for ranks in options.ranks:
        for heads in options.heads:
            for name in options.masks:
                if time.monotonic() - start > options.budget:
                    report["left_out"].append({"mask": name, "heads": heads, "ranks": ranks, "reason": "--budget"})
                    continue
                case = run_case(name, parse_heads(heads), ranks, costs, options, clock) | {"ranks": ranks}
                report["cases"].append(case)
                write_json(options.out, report)
                print("\n".join(subblock_lines(case)), flush=True)
    report["complete"] = not report["left_out"]
    report["seconds"] = time.monotonic() - start
    write_json(options.out, report)
    return report


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="default: gpu where there is one, else cpu")
    parser.add_argument("--masks", nargs="+", choices=MASKS)
    parser.add_argument("--length", type=int, help="keys")
    parser.add_argument("--heads", nargs="+", help="query heads:key heads of one launch")
    parser.add_argument("--ranks", nargs="+", type=int, help="context-parallel ranks that share the queries")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--calibration", type=int, help="tokens of the calibration masks")
    parser.add_argument("--backend")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case is begun")
    parser.add_argument("--out", type=Path, help="JSON; default bench/results/subblocks_PRESET.json")
    options = parser.parse_args(argv)
    options.preset = options.preset or ("gpu" if device().type == "cuda" else "cpu")
    for name, value in PRESETS[options.preset]._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.out = options.out or Path(f"bench/results/subblocks_{options.preset}.json")
    return options


def test_subblocks(benchmark: Any) -> None:
    """The same under pytest-benchmark, at toy sizes."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "subblocks.json")
        report = benchmark.pedantic(lambda: main(["--preset", "smoke", "--out", out]), rounds=1)
    benchmark.extra_info["speedup"] = report["cases"][0]["variants"]["fixed_16"]["speedup"]


if __name__ == "__main__":
    main()
