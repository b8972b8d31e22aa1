"""Attention under multimodal masks against its peers, measured side by side in one run.

    python -m bench.attention                        the preset of this machine: gpu if it has one, else cpu
    python -m bench.attention --preset smoke         seconds: every line of the benchmark at toy sizes
    python -m bench.attention --masks video gemma3_images --lengths 8192 32768 --heads 32:8 --peers flex sdpa_dense
    python -m bench.attention --check-only           compare with the peers and the exact rows, time nothing
    python -m bench.attention --dtype bfloat16       another type, into its own JSON

Masks are in `bench.attention_masks`, contenders in `bench.attention_peers`. For each case (mask, length):

1. Our output at sampled rows is compared with dense fp32 arithmetic. The output and gradients of each peer are compared
   with ours. A peer that differs, does not fit in memory, is not installed or cannot express the mask is listed with
   the reason.
2. Calls of all contenders alternate (round robin). Forward and backward are timed separately, and medians are reported.
   Slow contenders skip later rounds, but run at least three.
3. The report gives milliseconds with and without building the plan (for one layer; all layers share a plan), TFLOP/s
   over visible pairs (4 * pairs * head_dim * heads forward, 2.5 times that backward), the share of the matmul peak
   measured in the same run, memory in addition to inputs and outputs, and ratios (peer's time / ours: above 1 we are
   faster).

The JSON is rewritten after every case, so an interrupted run loses nothing. `--budget` seconds stop the run in order.
A chart of TFLOP/s is drawn if matplotlib is installed. Exit status 1 if our op was wrong or failed in any case.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import attention_memory
from bench.attention_case import TOLERANCE, Rounds, release, run_case
from bench.attention_masks import MASKS, MULTIMODAL
from bench.attention_peers import INTERLACE, PEERS, Problem
from bench.attention_report import chart, summary, table
from bench.measure import Clock, command, device, machine, matmul_peak, parse_heads, versions, write_json
from interlace import _core

CPU_FIRST = ("packed_images", "causal")  # cases of the project's CPU targets


class Preset(NamedTuple):
    """`cases` are in order of importance, since a budget may end the run. `memory`: (mask, length), CPU only."""

    cases: list[tuple[str, int]]
    dtype: str
    heads: str
    head_dim: int
    peers: list[str]
    repeats: int
    seconds: float  # of measured calls per contender and case
    dense_limit: int
    formula_lengths: list[int] | None = None  # None = all
    memory: tuple[str, int] | None = None
    threads: int | None = None


PRESETS = {
    "cpu": Preset(
        cases=[(name, 4096) for name in dict.fromkeys([*CPU_FIRST, *MASKS])],
        dtype="float32",
        heads="8:8",
        head_dim=64,
        peers=["sdpa_dense", "sdpa_causal", "sdpa_full"],
        repeats=11,
        seconds=60.0,
        dense_limit=4096,
        memory=("packed_images", 16384),
        threads=2,
    ),
    # Full and causal 32K (absolute speed), then multimodal masks by length, every other mask at 8K in between.
    "gpu": Preset(
        cases=[
            ("full", 32768),
            ("causal", 32768),
            *((name, 8192) for name in MULTIMODAL),
            *((name, 32768) for name in MULTIMODAL),
            *((name, 16384) for name in MULTIMODAL),
            *((name, 8192) for name in MASKS if name not in MULTIMODAL),
            *((name, 65536) for name in MULTIMODAL),
        ],
        dtype="bfloat16",
        heads="64:8",
        head_dim=128,
        peers=["sdpa_dense", "sdpa_causal", "sdpa_full", "flex", "flex_formula", "flex_flash", "flash_attn"],
        repeats=15,
        seconds=0.5,
        dense_limit=16384,
        formula_lengths=[8192],  # compilation takes 10 to 20 s per mask and length; the others are requested by name
    ),
    "smoke": Preset(
        cases=[(name, 257) for name in ("packed_images", "causal", "full", "document_causal")],
        dtype="float32",
        heads="2:1",
        head_dim=16,
        peers=["sdpa_dense", "sdpa_causal", "sdpa_full", "flex_flash", "flash_attn"],
        repeats=3,
        seconds=1.0,
        dense_limit=4096,
        memory=("packed_images", 512),
        threads=1,
    ),
}  # fmt: skip


# ---------------------------------------------------------------------- the run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the tables, write the JSON and the chart; returns what was written."""
    start = time.monotonic()
    options = parse(argv)
    at = device()
    if options.threads:
        torch.set_num_threads(options.threads)
    heads, kv_heads = parse_heads(options.heads)
    dtype = getattr(torch, options.dtype)
    clock = Clock(at)
    peak = matmul_peak(clock, dtype, 256 if options.preset == "smoke" else None)
    report: dict[str, Any] = {
        "benchmark": "attention",
        "command": command("attention", argv),
        "machine": machine(at),
        "versions": versions(),
        "settings": {
            "preset": options.preset, "dtype": options.dtype, "heads": options.heads, "head_dim": options.head_dim,
            "batch": 1, "backend": options.backend or "automatic", "repeats": options.repeats,
            **({"instruction_set": _core.attention_isa()} if at.type == "cpu" else {}),
        },
        "matmul_peak": peak,
        "complete": False,
        "cases": [],
        "left_out": [],
    }  # fmt: skip
    peers = [PEERS[name] for name in options.peers]
    rounds = None if options.check_only else Rounds(options.repeats, options.seconds)
    for name, length in options.cases:
        if time.monotonic() - start > options.budget:
            report["left_out"].append({"mask": name, "length": length, "reason": f"--budget {options.budget:g} s"})
            continue
        problem = Problem.make(
            name, length, heads=heads, kv_heads=kv_heads, head_dim=options.head_dim, dtype=dtype, device=at,
            backend=options.backend,
        )  # fmt: skip
        skip = {}
        if length > options.dense_limit:
            skip["sdpa_dense"] = f"longer than --dense-limit {options.dense_limit}"
        if options.formula_lengths and length not in options.formula_lengths:
            skip["flex_formula"] = "not among --formula-lengths"
        case = run_case(problem, peers, clock, rounds, skip, peak["tflops"])
        report["cases"].append(case)
        del problem
        release(clock)
        print(table(case), flush=True)
        write_json(options.out, report)
    if options.memory and at.type == "cpu" and not options.check_only:
        report["memory"] = memory(options)
    report["complete"] = not report["left_out"]
    report["seconds"] = time.monotonic() - start
    report["summary"] = summary(report)
    write_json(options.out, report)
    if options.chart and not options.check_only and (why := chart(report, options.chart)):
        print(f"no chart: {why}")
    print("\n".join(report["summary"]))
    return report


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peak resident bytes of one step beyond inputs and outputs, ours and dense SDPA's, each in a fresh process."""
    mask, length = options.memory
    result: dict[str, Any] = {"mask": mask, "length": length}
    for name in ("interlace", "sdpa_dense"):
        result[name] = attention_memory.in_a_fresh_process(
            name, mask, length, options.heads, options.head_dim, options.dtype, torch.get_num_threads()
        )
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="default: gpu where there is one, else cpu")
    parser.add_argument("--masks", nargs="+", choices=[*MASKS, "all", "multimodal"], help="default: the preset's cases")
    parser.add_argument(
        "--lengths", nargs="+", type=int, help="tokens; with --masks or alone, in place of the preset's"
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: the preset's")
    parser.add_argument("--flex", action="store_true", help="add compiled FlexAttention (on a CPU: forward only)")
    parser.add_argument("--dtype", choices=[str(dtype).removeprefix("torch.") for dtype in TOLERANCE])
    parser.add_argument("--heads", help="query heads:key heads, such as 64:8")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--backend", help="backend of interlace; default: its own choice")
    parser.add_argument("--repeats", type=int, help="rounds of measured calls")
    parser.add_argument("--seconds", type=float, help="of measured calls per contender and case, three rounds at least")
    parser.add_argument("--dense-limit", type=int, help="longest sequence for which the dense mask is made")
    parser.add_argument(
        "--formula-lengths", nargs="+", type=int, help="lengths for flex_formula, which compiles for every mask"
    )
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case is begun")
    parser.add_argument("--check-only", action="store_true", help="compare and time nothing")
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory measurement of CPUs")
    parser.add_argument("--out", type=Path, help="JSON; default bench/results/attention_PRESET[_DTYPE].json")
    parser.add_argument("--chart", type=Path, help="picture; default: beside the JSON")
    options = parser.parse_args(argv)
    options.preset = options.preset or ("gpu" if device().type == "cuda" else "cpu")
    preset = PRESETS[options.preset]
    for name in (
        "dtype",
        "heads",
        "head_dim",
        "peers",
        "repeats",
        "seconds",
        "dense_limit",
        "formula_lengths",
        "threads",
    ):
        if getattr(options, name) is None:
            setattr(options, name, getattr(preset, name))
    if options.flex:
        options.peers = [*options.peers, *(name for name in ("flex",) if name not in options.peers)]
    options.memory = None if options.no_memory else preset.memory
    options.cases = preset.cases
    if options.masks or options.lengths:
        chosen = options.masks or list(dict.fromkeys(name for name, _ in preset.cases))
        names = {"all": list(MASKS), "multimodal": list(MULTIMODAL)}
        masks = list(dict.fromkeys(name for item in chosen for name in names.get(item, [item])))
        lengths = options.lengths or list(dict.fromkeys(length for _, length in preset.cases))
        options.cases = [(name, length) for length in lengths for name in masks]
    name = f"attention_{options.preset}" + (f"_{options.dtype}" if options.dtype != preset.dtype else "")
    options.out = options.out or Path(f"bench/results/{name}.json")
    options.chart = options.chart or options.out.with_suffix(".png")
    return options


def failures(report: dict[str, Any]) -> list[str]:
    """Cases in which our own op was wrong or failed."""
    return [
        f"{case['mask']} {case['length']}: {mine['status']}, {mine.get('reason')}"
        for case in report["cases"]
        if (mine := case["contenders"][INTERLACE.name])["status"] != "ok"
    ]


def test_attention(benchmark: Any) -> None:
    """The same under pytest-benchmark, at toy sizes."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "attention.json")
        report = benchmark.pedantic(lambda: main(["--preset", "smoke", "--out", out]), rounds=1)
    assert not failures(report)
    benchmark.extra_info["ratio"] = report["cases"][0]["ratio"]


if __name__ == "__main__":
    problems = failures(main())
    print("\n".join(problems), file=sys.stderr)
    sys.exit(1 if problems else 0)
