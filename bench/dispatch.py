"""`train.balance`: how even each phase is on OrchMLLM's mix of tasks, how long planning takes, and what a step gains.

    python -m bench.dispatch [--measured] [--out bench/results/dispatch.json]

Balance and planning need no rank: lengths as OrchMLLM's section 8 describes its data (bench/papers/mllm.py: the mix of
tasks of bench/lengths.py, pictures up to 448 pixels; its statistics are not printed), costs of its MLLM-10B (table 1).
A load is a replica's linear work and attention; audio is padded to the longest of its batch, as in the paper.
--measured: 4 gloo ranks that have all modules, where every compute action sleeps the time that its profile gives it,
stretched (see bench/simulated_slots.py): no speed of a model, but who waits for whom.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.measure import command, free_port, join_group, machine, versions, write_json
from bench.papers.mllm import MODELS, NODE, PADDED, PHASES, drawn
from bench.simulated_slots import Slots
from bench.simulated_step import FRAMES, MELS, PATCH, PLACEHOLDERS, build_model
from interlace.layout import Layout, ParallelSpec
from interlace.model import Media, MultimodalModel, Sample
from interlace.run import parallelize, step_table
from interlace.run.dispatch import BALANCES, Dispatcher, Phase
from interlace.run.measured_links import measure_links
from interlace.run.predict import durations, predict
from interlace.run.predictor import Predictor
from interlace.run.profiling import profile_costs
from interlace.run.sizes import chunk_sizes
from interlace.run.table import Lengths
from interlace.schedule import StageGraph

EACH = 60  # samples of a rank (section 8.2)
SEEDS = 3
RANKS = 4


def dispatcher_for(ranks: int, method: Any) -> Dispatcher:
    """All phases on every rank, 8 ranks to a node."""
    graph = StageGraph.build({phase: [0] for phase in PHASES}, [(p, "llm") for p in PHASES[:-1]], replicas=ranks)
    model, phases = MODELS["MLLM-10B"], {}
    for phase in PHASES:
        shape = model.shape(phase)
        ratio = shape.quadratic(phase == "llm") / shape.linear()
        phases[phase] = Phase(1.0, ratio, "padded" if PADDED[phase] == "padded" else "packed")
    return Dispatcher(method, graph.layout, phases, min(NODE, ranks))


def lengths_for(ranks: int, seed: int) -> Lengths:
    """Of a step. Rows stand for tokens inside the encoders: loads are counted in these."""
    tokens = drawn(MODELS["MLLM-10B"], ranks, EACH, seed).tokens
    return Lengths(tokens["llm"], np.ones(len(tokens["llm"]), np.int64), {p: tokens[p] for p in PHASES[:-1]})


def balance_of(ranks: int) -> dict[str, Any]:
    """Method -> phase -> the costliest replica over the mean, the mean over seeds and the most."""
    found: dict[str, Any] = {}
    for method in ("none", "per_module"):
        ratios: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for seed in range(SEEDS):
            loads = dispatcher_for(ranks, method)(lengths_for(ranks, seed)).loads
            for phase, load in loads.items():
                ratios[phase].append(float(load.max() / load.mean()))
        found[method] = {phase: {"mean": statistics.mean(each), "most": max(each)} for phase, each in ratios.items()}
    return found


def planning_of(ranks: int, repeats: int = 7) -> dict[str, Any]:
    """Milliseconds of a step's dispatch with placement, and of its table, on one core: by the clock, and of the
    processor, which tells what a loaded machine adds."""
    dispatcher, lengths = dispatcher_for(ranks, "per_module"), lengths_for(ranks, 0)
    times: dict[str, list[float]] = {f"{what}{of}_ms": [] for what in ("dispatch", "table") for of in ("", "_cpu")}
    for _ in range(repeats):
        clock, cpu = [time.perf_counter()], [time.process_time()]
        found = dispatcher(lengths)
        clock, cpu = [*clock, time.perf_counter()], [*cpu, time.process_time()]
        step_table(dispatcher.layout, lengths, microbatches=1, replicas=found.replica)
        clock, cpu = [*clock, time.perf_counter()], [*cpu, time.process_time()]
        for of, at in (("", clock), ("_cpu", cpu)):
            times[f"dispatch{of}_ms"].append(1e3 * (at[1] - at[0]))
            times[f"table{of}_ms"].append(1e3 * (at[2] - at[1]))
    medians = {f"median_{name}": statistics.median(each) for name, each in times.items()}
    where = {"ranks": ranks, "samples": len(lengths), "phases": len(PHASES), "ranks_per_node": min(NODE, ranks)}
    return {**where, **times, **medians, "load_average": os.getloadavg()[0]}


def build_samples(mllm: MultimodalModel, count: int) -> list[Sample]:
    """Tasks as they come: questions about pictures, speech, text alone, of many sizes."""
    rng, samples = np.random.default_rng(0), []
    for _ in range(count):
        task = rng.choice(3, p=[0.45, 0.35, 0.2])
        ids, media = [1], {}
        if task < 2:
            name = ("vision", "audio")[task]
            sides = PATCH * rng.integers(3, 17, 2)
            shape = (3, int(sides[0]), int(sides[1])) if task == 0 else (MELS, int(rng.integers(20, FRAMES)))
            tokens = mllm.encoders[name].tokens(shape)
            media[name] = [Media(shape, tokens, torch.randn(shape))]
            ids += [PLACEHOLDERS[name]] * tokens
        text = rng.integers(2, 400, int(rng.integers(10, 160))).tolist()
        labels = torch.tensor([-100] * len(ids) + text[1:] + [2])
        samples.append(Sample(input_ids=torch.tensor(ids + text), labels=labels, media=media, name="bench"))
    return samples


def run_rank(rank: int, port: int, options: argparse.Namespace, result: str) -> None:
    """One rank: every method in turn; rank 0 writes what was found."""
    torch.set_num_threads(1)
    join_group(rank, RANKS, port, 300)
    slots, mllm = Slots(), build_model(32)
    samples = build_samples(mllm, options.samples)
    fits, scale, links, rows = profile_costs(mllm, samples, largest=options.samples, budget=0.0), 0.0, None, {}
    layout = Layout.from_specs(
        mllm, {name: ParallelSpec(dp=RANKS) for name in mllm.modules_order()}, placement="shared"
    )
    for method in BALANCES:
        mllm = build_model(32)
        parallel = parallelize(mllm, layout, balance=method, transport="distributed", timeout=240)
        links = links or measure_links(parallel.channel, mllm.modules_order())
        table = parallel.table(samples, 1)
        lists = parallel.schedule(table)
        sizes = chunk_sizes(mllm, table, samples)
        alone = durations(parallel.graph, table, fits, sizes, links)
        scale = scale or options.slot / statistics.mean([seconds for seconds in alone.values() if seconds > 0])
        told: list[Any] = [{job: seconds * scale for job, seconds in alone.items()}, scale]
        dist.broadcast_object_list(told, 0)
        (slots.jobs, scale), found, slots.late = told, [], 0.0
        for _ in range(options.steps + 1):
            parallel.zero_grad()
            dist.barrier()
            parallel.step(samples, 1)
            found.append(parallel.timeline().makespan)
        slept, slots.jobs = slots.jobs, {}
        late = torch.tensor(slots.late)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        assert parallel.dispatcher is not None
        loads = parallel.dispatcher.computed(table, Lengths.of(samples, mllm.modules_order()[:-1]))
        traffic = Predictor(mllm, fits, links).traffic(layout)
        guess = predict(lists, fits, sizes, links, traffic, seconds=slept, optimizer=False)
        measured = statistics.median(found[1:])
        rows[method] = {
            "seconds": found[1:], "median_seconds": measured, "simulated_seconds": guess.makespan,
            "error": guess.makespan / measured - 1, "seconds_late": float(late),
            "imbalance": {name: float(load.max() / load.mean()) for name, load in loads.items()},
        }  # fmt: skip
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of 4 ranks that sleep what they compute."""
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(run_rank, (free_port(), options, result), nprocs=RANKS)
        rows = json.loads(Path(result).read_text())
    faster = rows["none"]["median_seconds"] / rows["per_module"]["median_seconds"]
    for method, row in rows.items():
        print(
            f"{method:10} {row['median_seconds']:.3f} s/step, simulated {row['simulated_seconds']:.3f} s "
            f"({row['error']:+.1%}); compute actions slept their profiled time"
        )
    print(f"per_module is {faster:.2f} x as fast as none")
    return {
        "compute": f"every compute action sleeps its profiled time, stretched to {options.slot} s on average of none",
        "ranks": RANKS, "placement": "shared, dp = 4", "samples": options.samples, "rows": rows, "faster": faster,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the tables, write the JSON; returns what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 2560], help="of which balance is counted")
    parser.add_argument("--measured", action="store_true", help="time steps of 4 processes, too")
    parser.add_argument("--steps", type=int, default=5, help="of each method, after one that warms up")
    parser.add_argument("--slot", type=float, default=0.15, help="mean seconds of a compute action")
    parser.add_argument("--samples", type=int, default=24, help="of a measured step")
    parser.add_argument("--out", type=Path, default=Path("bench/results/dispatch.json"))
    options = parser.parse_args(argv)
    report: dict[str, Any] = {
        "benchmark": "dispatch",
        "command": command("dispatch", argv),
        "machine": machine(),
        "versions": versions("torch", "numpy"),
        "balance": {str(ranks): balance_of(ranks) for ranks in options.ranks},
        "planning": planning_of(max(options.ranks)),
    }
    for ranks, found in report["balance"].items():
        for method, phases in found.items():
            shown = ", ".join(f"{phase} {each['mean']:.4f} (most {each['most']:.4f})" for phase, each in phases.items())
            print(f"{ranks:>5} ranks, {method:10} costliest over mean: {shown}")
    plan = report["planning"]
    print(
        f"planning {plan['samples']:,} samples on {plan['ranks']:,} ranks: dispatch "
        f"{plan['median_dispatch_ms']:.0f} ms (processor {plan['median_dispatch_cpu_ms']:.0f}), table "
        f"{plan['median_table_ms']:.0f} ms (processor {plan['median_table_cpu_ms']:.0f})"
    )
    if options.measured:
        report["measured"] = measured(options)
    write_json(options.out, report)
    return report


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
