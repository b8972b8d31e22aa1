"""`train.balance`: balance of each phase on OrchMLLM's mix of tasks, planning time, and speed-up of a step.

    python -m bench.dispatch [--measured | --keep] [--out bench/results/dispatch.json]

Balance and planning need no ranks. Lengths follow the data of OrchMLLM's section 8 (bench/papers/mllm.py: the mix of
tasks of bench/lengths.py, pictures up to 448 pixels; its statistics are not printed). Costs are those of its MLLM-10B
(table 1). A load is a replica's linear work and attention; audio is padded to its batch's longest, as in the paper.
--measured: 4 gloo ranks that have all modules, where every compute action sleeps for its profiled time, stretched (see
bench/simulated_slots.py). This shows waiting between ranks, not the speed of a model. Also 2 ranks of one thread that
compute, without a target. Both take some minutes.
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
from numpy.typing import NDArray

from bench.measure import command, free_port, join_group, machine, versions, write_json
from bench.papers.mllm import MODELS, NODE, PADDED, PHASES, drawn
from bench.simulated_slots import Slots, durations
from bench.simulated_step import MELS, PATCH, PLACEHOLDERS, build_model
from interlace.costs.step import FittedCosts
from interlace.estimate.measured_links import measure_links
from interlace.estimate.predict import predict
from interlace.estimate.predictor import Predictor
from interlace.estimate.profiling import ProfileOptions, profile_costs
from interlace.layout import Layout, ParallelSpec
from interlace.model import Media, MultimodalModel, Sample
from interlace.run import ParallelModel, parallelize, step_table
from interlace.run.tables.dispatch import BALANCES, Dispatcher, Phase
from interlace.run.tables.sizes import chunk_sizes
from interlace.run.tables.table import Lengths
from interlace.schedule import StageGraph, StepTable

EACH = 60  # samples of a rank (section 8.2)
SEEDS = 3
RANKS = 4  # that sleep
CORES = 2  # ranks that compute
ORDERS = {
    "mixed": "samples in random order",
    "by task": "those with pictures first, as files with one task each give them",
}
NARROW = 32  # width of the model of sleeping ranks, so that its own computing is a small part of their time
SMALLER = 8  # a measured sample has this fraction of its tokens
GOAL = 1.25  # target: times as fast as "none", with sleeping ranks
PLANNING = 200  # ms of one core for a step of 2,560 ranks
WITHIN = 0.1  # of the simulated step


def dispatcher_for(ranks: int, method: Any) -> Dispatcher:
    """All phases on every rank, 8 ranks to a node."""
    graph = StageGraph.build({phase: [0] for phase in PHASES}, [(p, "llm") for p in PHASES[:-1]], replicas=ranks)
    model, phases = MODELS["MLLM-10B"], {}
    for phase in PHASES:
        shape = model.shape(phase)
        ratio = shape.quadratic(phase == "llm") / shape.linear()
        phases[phase] = Phase(1.0, ratio, "padded" if PADDED[phase] == "padded" else "packed")
    return Dispatcher(method, graph.layout, phases, min(NODE, ranks))


def in_order(tokens: dict[str, NDArray[np.int64]], order: str) -> dict[str, NDArray[np.int64]]:
    """Tokens of samples in one of the `ORDERS`."""
    vision = tokens["vision"] == 0
    place = np.arange(len(vision)) if order == "mixed" else np.argsort(vision, kind="stable")
    return {phase: each[place] for phase, each in tokens.items()}


def lengths_for(ranks: int, seed: int, order: str = "mixed") -> Lengths:
    """Lengths of a step. Rows stand for tokens inside the encoders: loads are counted in rows."""
    tokens = in_order(drawn(MODELS["MLLM-10B"], ranks, EACH, seed).tokens, order)
    return Lengths(tokens["llm"], np.ones(len(tokens["llm"]), np.int64), {p: tokens[p] for p in PHASES[:-1]})


def batches_needed(costs: NDArray[np.float64], limit: float) -> int:
    """The fewest padded batches that cost at most `limit`; a batch costs its size times its costliest member.

    Greedy by falling cost: each batch takes as many members as the limit allows beside its first. This is optimal: a
    batch with the costliest item cannot hold more members, and lighter members in their place leave heavier ones for
    the other batches. Raises ValueError for an item over the limit.
    """
    falling, count, at = np.sort(costs)[::-1], 0, 0
    if len(costs) and falling[0] > limit:
        raise ValueError(f"an item costs {falling[0]:g}, more than {limit:g}")
    while at < len(falling):
        at += int(limit // falling[at])
        count += 1
    return count


def padded_least(ranks: int, seed: int) -> dict[str, Any]:
    """Tests if the padded phase could have a lower maximum cost per replica; and the total cost of padding."""
    (phase,) = [phase for phase, how in PADDED.items() if how == "padded"]
    dispatcher, lengths = dispatcher_for(ranks, "per_module"), lengths_for(ranks, seed)
    rows = lengths.rows[phase][lengths.rows[phase] > 0].astype(np.float64)
    costs = rows + dispatcher.phases[phase].quadratic * rows**2
    load = dispatcher.loads(phase, lengths, dispatcher(lengths)[phase])
    return {
        "phase": phase, "items": len(costs), "costliest_over_mean": float(load.max() / load.mean()),
        "padding": float(load.sum() / costs.sum() - 1),
        "batches_needed_at_it": batches_needed(costs, load.max() * (1 + 1e-9)),
        "batches_needed_below_it": batches_needed(costs, load.max() * (1 - 1e-9)),
    }  # fmt: skip


def balance_of(ranks: int) -> dict[str, Any]:
    """Order -> method -> phase -> costliest replica / mean: the mean over seeds and the maximum."""
    result: dict[str, Any] = {order: {} for order in ORDERS}
    for order, of_order in result.items():
        for method in ("none", "per_module"):
            ratios: dict[str, list[float]] = {phase: [] for phase in PHASES}
            for seed in range(SEEDS):
                dispatcher, lengths = dispatcher_for(ranks, method), lengths_for(ranks, seed, order)
                for phase, replicas in dispatcher(lengths).items():
                    load = dispatcher.loads(phase, lengths, replicas)
                    ratios[phase].append(float(load.max() / load.mean()))
            of_order[method] = {
                phase: {"mean": statistics.mean(each), "most": max(each)} for phase, each in ratios.items()
            }
    return result


def planning_of(ranks: int, repeats: int = 7) -> dict[str, Any]:
    """Milliseconds of planning a step on one core: its dispatch with placement, its table, and the read dependencies
    between chunks (`StepTable.links`). Wall time and processor time; the difference is due to load on the machine."""
    dispatcher, lengths = dispatcher_for(ranks, "per_module"), lengths_for(ranks, 0)
    parts = ("dispatch", "table", "links")
    times: dict[str, list[float]] = {f"{what}{of}_ms": [] for what in (*parts, "planning") for of in ("", "_cpu")}
    for _ in range(repeats):
        at = [(time.perf_counter(), time.process_time())]
        result = dispatcher(lengths)
        at.append((time.perf_counter(), time.process_time()))
        table = step_table(dispatcher.layout, lengths, microbatches=1, replicas=result)
        at.append((time.perf_counter(), time.process_time()))
        table.links  # noqa: B018 (computes them)
        at.append((time.perf_counter(), time.process_time()))
        for place, of in enumerate(("", "_cpu")):
            ends = [each[place] for each in at]
            for what, begin, end in zip(parts, ends[:-1], ends[1:], strict=True):
                times[f"{what}{of}_ms"].append(1e3 * (end - begin))
            times[f"planning{of}_ms"].append(1e3 * (ends[-1] - ends[0]))
    medians = {f"median_{name}": statistics.median(each) for name, each in times.items()}
    where = {"ranks": ranks, "samples": len(lengths), "phases": len(PHASES), "ranks_per_node": min(NODE, ranks)}
    return {**where, "goal_ms": PLANNING, **times, **medians, "load_average": os.getloadavg()[0]}


def build_samples(mllm: MultimodalModel, ranks: int, each: int, seed: int, order: str = "mixed") -> list[Sample]:
    """OrchMLLM's mix as `lengths_for` draws it, with a `SMALLER`-th of its tokens: pictures or speech, and text.

    order: see `ORDERS`."""
    tokens, generator = drawn(MODELS["MLLM-10B"], ranks, each, seed).tokens, torch.Generator().manual_seed(seed)
    tokens, samples = in_order(tokens, order), []
    for vision, audio, llm in zip(*(tokens[phase] // SMALLER for phase in PHASES), strict=True):
        ids, media, rows = [1], {}, 0
        for name, size in (("vision", vision), ("audio", audio)):
            if not size:
                continue
            shape = (3, PATCH * max(int(size) // 16, 1), PATCH * 16) if name == "vision" else (MELS, 2 * int(size))
            rows = mllm.encoders[name].tokens(shape)
            media[name] = [Media(shape, rows, torch.randn(shape, generator=generator))]
            ids += [PLACEHOLDERS[name]] * rows
        text = torch.randint(2, 400, (max(int(llm) - rows, 4),), generator=generator).tolist()
        labels = torch.tensor([-100] * len(ids) + text[1:] + [2])
        samples.append(Sample(input_ids=torch.tensor(ids + text), labels=labels, media=media, name="bench"))
    return samples


def model_of(hidden: int) -> MultimodalModel:
    """SigLIP, Whisper and Llama with room for the longest clip."""
    return build_model(hidden, frames=2 * (1500 // SMALLER))


def shared(mllm: MultimodalModel, ranks: int) -> Layout:
    """All modules on every rank."""
    return Layout.from_specs(mllm, {name: ParallelSpec(dp=ranks) for name in mllm.modules_order()}, placement="shared")


def run_slots(rank: int, port: int, options: argparse.Namespace, fits: FittedCosts, result: str) -> None:
    """One sleeping rank: every method in turn; rank 0 writes the results."""
    torch.set_num_threads(1)
    join_group(rank, RANKS, port, 300)
    slots, mllm = Slots(), model_of(NARROW)
    layout = shared(mllm, RANKS)
    batches = batches_of(mllm, RANKS, options)
    scale, links, traffic, found = 0.0, None, None, Found()
    for method in BALANCES:
        mllm = model_of(NARROW)
        parallel = parallelize(mllm, layout, balance=method, transport="distributed", timeout=240)
        links = links or measure_links(parallel.channel, mllm.modules_order())
        traffic = traffic or Predictor(mllm, fits, links).traffic(layout)
        step_seconds(parallel, batches[0][1])  # warms up
        for order, samples in batches:
            table = parallel.table(samples, 1)
            sizes = chunk_sizes(mllm, table, samples)
            alone = durations(parallel.graph, table, fits, sizes, links)
            scale = scale or options.slot / statistics.mean([seconds for seconds in alone.values() if seconds > 0])
            lines: list[Any] = [{job: seconds * scale for job, seconds in alone.items()}]
            dist.broadcast_object_list(lines, 0)  # includes the links, as each rank has measured them
            slots.jobs, slots.late = lines[0], 0.0
            seconds = step_seconds(parallel, samples)
            slots.jobs = {}
            late = torch.tensor(slots.late)
            dist.all_reduce(late, dist.ReduceOp.MAX)
            guess = predict(parallel.schedule(table), fits, sizes, links, traffic, seconds=lines[0], optimizer=False)
            found.add(
                order, method, parallel, table, samples, seconds, simulated_seconds=guess.makespan, late=float(late)
            )
    if rank == 0:
        Path(result).write_text(json.dumps(found.rows))
    dist.barrier()
    dist.destroy_process_group()


def run_real(rank: int, port: int, options: argparse.Namespace, result: str) -> None:
    """One of two computing ranks; the methods take turns, batch by batch."""
    torch.set_num_threads(1)
    join_group(rank, CORES, port, 300)
    layout, found = shared(model_of(options.hidden), CORES), Found()
    each = {
        method: parallelize(model_of(options.hidden), layout, balance=method, transport="distributed", timeout=240)
        for method in BALANCES
    }
    batches = batches_of(each["none"].mllm, CORES, options)
    for parallel in each.values():
        step_seconds(parallel, batches[0][1])  # warms up
    for order, samples in batches:
        for method, parallel in each.items():
            seconds = step_seconds(parallel, samples)
            found.add(order, method, parallel, parallel.table(samples, 1), samples, seconds)
    if rank == 0:
        Path(result).write_text(json.dumps(found.rows))
    dist.barrier()
    dist.destroy_process_group()


def batches_of(mllm: MultimodalModel, ranks: int, options: argparse.Namespace) -> list[tuple[str, list[Sample]]]:
    """(order, samples) of every measured step."""
    return [
        (order, build_samples(mllm, ranks, options.each, seed, order))
        for order in ORDERS
        for seed in range(options.batches)
    ]


def step_seconds(parallel: ParallelModel, samples: list[Sample]) -> float:
    """The makespan of the lists of one step."""
    parallel.zero_grad()
    dist.barrier()
    parallel.step(samples, 1)
    return float(parallel.timeline().makespan)


class Found:
    """Measurements: order -> method -> one entry per batch of each figure."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, dict[str, Any]]] = {order: {} for order in ORDERS}

    def add(
        self,
        order: str,
        method: str,
        parallel: ParallelModel,
        table: StepTable,
        samples: list[Sample],
        took: float,
        **more: float,
    ) -> None:
        """A batch; took: seconds."""
        assert parallel.dispatcher is not None
        loads = parallel.dispatcher.computed(table, Lengths.of(samples, parallel.mllm.modules_order()[:-1]))
        row = self.rows[order].setdefault(method, {"imbalance": {name: [] for name in loads}})
        for name, value in {"seconds": took, **more}.items():
            row.setdefault(name, []).append(value)
        for name, load in loads.items():
            row["imbalance"][name].append(float(load.max() / load.mean()))


def _spawned(function: Any, ranks: int, *arguments: Any) -> dict[str, Any]:
    """The output of rank 0 of so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(function, (free_port(), *arguments, result), nprocs=ranks)
        rows: dict[str, Any] = json.loads(Path(result).read_text())
    return rows


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of 4 sleeping ranks, and of 2 computing ranks."""
    torch.set_num_threads(1)
    mllm = model_of(options.hidden)
    # Before the ranks start, and once: on two cores four ranks that time layers mostly wait for each other.
    samples = build_samples(mllm, RANKS, options.each, 0)
    fits = profile_costs(mllm, samples, ProfileOptions(largest=2 * options.each), budget=options.budget)
    slept = _spawned(run_slots, RANKS, options, fits)
    real = _spawned(run_real, CORES, options)
    told: dict[str, dict[str, float]] = {"slept": {}, "real": {}}
    for what, ranks, orders in (("slept", RANKS, slept), ("real", CORES, real)):
        for order, rows in orders.items():
            told[what][order] = sum(rows["none"]["seconds"]) / sum(rows["per_module"]["seconds"])
            for method, row in rows.items():
                mean, beside = statistics.mean(row["seconds"]), ""
                if what == "slept":
                    guess = statistics.mean(row["simulated_seconds"])
                    row["error"] = guess / mean - 1
                    beside = f", simulated {guess:.3f} s ({row['error']:+.1%}; goal: within {WITHIN:.0%})"
                print(f"{ranks} ranks, {what}, {order}: {method:10} {mean:.3f} s/step{beside}")
            goal = f" (goal: {GOAL})" if what == "slept" else ", whatever that is"
            print(f"{ranks} ranks, {what}, {order}: per_module is {told[what][order]:.2f} x as fast as none{goal}")
    sizes = f"{options.each} samples a rank in each of {options.batches} batches, with 1/{SMALLER} of their tokens"
    return {
        "goal": {"faster": GOAL, "within": WITHIN}, "faster": told, "samples": sizes, "orders": ORDERS,
        "slept": {
            "compute": f"every compute action sleeps its profiled time (hidden size {options.hidden}), stretched to "
            f"{options.slot} s on average of the first batch of none: two cores cannot show four ranks otherwise",
            "ranks": RANKS, "placement": f"shared, dp = {RANKS}", "rows": slept,
        },
        "real": {
            "compute": f"real, one thread per process, hidden size {options.hidden}", "ranks": CORES,
            "placement": f"shared, dp = {CORES}", "rows": real,
        },
    }  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the tables, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 2560], help="of which balance is counted")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--measured", action="store_true", help="time steps of 4 processes, too")
    which.add_argument("--keep", action="store_true", help="keep those that --out has, which an earlier run measured")
    parser.add_argument("--batches", type=int, default=5, help="of each order and method")
    parser.add_argument("--each", type=int, default=6, help="samples of a rank in a measured step")
    parser.add_argument("--slot", type=float, default=0.2, help="mean seconds of a compute action that sleeps")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model that is profiled, and computes")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of profiling")
    parser.add_argument("--out", type=Path, default=Path("bench/results/dispatch.json"))
    options = parser.parse_args(argv)
    report: dict[str, Any] = {
        "benchmark": "dispatch",
        "command": command("dispatch", argv),
        "machine": machine(),
        "versions": versions("torch", "numpy"),
        "balance": {str(ranks): balance_of(ranks) for ranks in options.ranks},
        "padded": {str(ranks): [padded_least(ranks, seed) for seed in range(SEEDS)] for ranks in options.ranks},
        "planning": planning_of(max(options.ranks)),
    }
    for ranks, orders in report["balance"].items():
        for order, method, phases in ((o, m, p) for o, result in orders.items() for m, p in result.items()):
            shown = ", ".join(f"{phase} {each['mean']:.4f} (most {each['most']:.4f})" for phase, each in phases.items())
            print(f"{ranks:>5} ranks, {order:7}, {method:10} costliest over mean: {shown}")
    for ranks, draws in report["padded"].items():
        shown = ", ".join(f"{each['costliest_over_mean']:.4f} ({each['batches_needed_below_it']})" for each in draws)
        print(f"{ranks:>5} ranks, padded: costliest over mean of each draw (batches that any less would need): {shown}")
    plan = report["planning"]
    shown = ", ".join(
        f"{what} {plan[f'median_{what}_ms']:.0f} ms (processor {plan[f'median_{what}_cpu_ms']:.0f})"
        for what in ("dispatch", "table", "links", "planning")
    )
    print(f"planning {plan['samples']:,} samples on {plan['ranks']:,} ranks (goal: {PLANNING} ms in all): {shown}")
    if options.measured:
        report["measured"] = {"command": report["command"], **measured(options)}
    elif options.keep:
        report["measured"] = json.loads(options.out.read_text())["measured"]
    write_json(options.out, report)
    return report


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
