"""Simulator against measurement on more ranks than cores: 4 gloo ranks, with a set time for every compute action.

Ranks that share cores disturb each other's computing, which no simulation can predict. So each compute action here
takes its time from a profile, stretched so that the model's own computing is a small part, and sleeps for the rest.
Everything around computing (order, waits, messages, sums, gathers) is compared with the prediction that a run makes
before its first step. Figures are of sleeping ranks, and do not show the speed of a model.

    python -m bench.simulated_slots [--steps 5] [--slot 0.15] [--out bench/results/simulated_slots.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.measure import command, free_port, join_group, machine, versions, write_json
from bench.simulated_step import build_model, build_samples
from interlace.costs.links import Links
from interlace.costs.step import Costs, Size
from interlace.estimate.measured_links import measure_links
from interlace.estimate.predict import duration_array, predict
from interlace.estimate.predictor import Predictor
from interlace.estimate.profiling import ProfileOptions, profile_costs
from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel
from interlace.run import parallelize
from interlace.run.execute import executor
from interlace.run.tables.sizes import chunk_sizes
from interlace.schedule import GENERATORS, Op, Schedule, StageGraph, StepTable
from interlace.schedule.actions import CODES, COMPUTE, OP, OPS

RANKS = 4
Job = tuple[Op, str, int, int]
"""(op, module, stage, chunk)."""


def cases(mllm: MultimodalModel) -> tuple[dict[str, tuple[Layout, str]], dict[str, str]]:
    """Name -> layout and schedule on 4 ranks, and the reasons for left-out schedules."""
    names = mllm.modules_order()
    deep = dict.fromkeys(names, ParallelSpec()) | {"language_model": ParallelSpec(pp=2)}
    twice = {name: ParallelSpec(dp=2) for name in names} | {"language_model": ParallelSpec(pp=2, dp=2)}
    sharded = {name: ParallelSpec(dp=4, shard="full") for name in names}
    result = {
        "chain in 4": (Layout.balanced(mllm, 4), "1f1b"),
        "parallel, language model in 2": (Layout.from_specs(mllm, deep, placement="parallel"), "1f1b"),
        "2 replicas, replicated": (Layout.from_specs(mllm, twice, placement="replicated"), "1f1b"),
        "4 replicas, sharded": (Layout.from_specs(mllm, sharded, placement="shared"), "1f1b"),
    }
    left_out = {}
    for schedule in [name for name in GENERATORS if name != "1f1b"]:
        try:
            layout = Layout.balanced(mllm, 4)
            if schedule in ("interleaved", "zb_v"):
                order = "v" if schedule == "zb_v" else "loop"
                specs = {name: ParallelSpec(pp=2, dp=2) for name in names}
                specs["language_model"] = ParallelSpec(pp=2, dp=2, virtual=2, order=order)
                layout = Layout.from_specs(mllm, specs, placement="shared")
            result[f"{schedule}: {'shared' if layout.placement == 'shared' else 'chain in 4'}"] = layout, schedule
        except ValueError as error:
            left_out[schedule] = str(error)
    return result, left_out


class Slots:
    """Makes every compute action of this process take its seconds in `jobs`. late: the most by which the model's own
    computing was longer than its slot."""

    def __init__(self) -> None:
        self.jobs: dict[Job, float] = {}
        self.late = 0.0
        for name in {executor.METHODS[CODES[op]] for op in COMPUTE}:  # BACKWARD and BACKWARD_INPUT share one
            setattr(executor.Executor, name, self._taking(name, getattr(executor.Executor, name)))

    def _taking(self, name: str, real: Any) -> Any:
        ops = [op for op in COMPUTE if executor.METHODS[CODES[op]] == name]

        def act(run: executor.Executor, module: str, stage: int, chunk: int, *more: int) -> None:
            begin = time.monotonic()
            halves = Op.BACKWARD_INPUT in ops and (module, stage, chunk) in run._split
            op = Op.BACKWARD_INPUT if halves else next(each for each in ops if each is not Op.BACKWARD_INPUT)
            real(run, module, stage, chunk, *more)
            if self.jobs:
                rest = begin + self.jobs[op, module, stage, chunk] - time.monotonic()
                self.late = max(self.late, -rest)
                time.sleep(max(rest, 0.0))

        return act


def durations(
    graph: StageGraph, table: StepTable, costs: Costs, sizes: Sequence[Size], links: Links
) -> dict[Job, float]:
    """`duration_array` as a table of its entries."""
    array, chunks = duration_array(graph, table, costs, sizes, links), table.chunks
    entries = np.argwhere(~np.isnan(array)).tolist()
    return {(OPS[o], chunks[c].module, stage, c): float(array[o, stage, c]) for o, stage, c in entries}


def _layered(lists: Schedule) -> bool:
    return bool((lists.rows[:, OP] == CODES[Op.UNSHARD_LAYERS]).any())


def _in_step(jobs: dict[Job, float], table: StepTable) -> dict[Job, float]:
    """Replicas that gather their weights layer by layer run in lock step: all take as long as the slowest."""
    together: dict[tuple[Any, ...], float] = {}
    for (op, module, stage, chunk), seconds in jobs.items():
        key = op, module, stage, table.chunks[chunk].index
        together[key] = max(together.get(key, 0.0), seconds)
    return {job: together[(*job[:3], table.chunks[job[3]].index)] for job in jobs}


def busiest(lists: Schedule, jobs: dict[Job, float]) -> float:
    """Seconds of slots on the busiest rank: a lower bound of the step."""
    own = ([jobs[a.op, a.module, a.stage, a.chunk] for a in actions if a.op in COMPUTE] for actions in lists.actions)
    return max(map(sum, own))


def run_rank(rank: int, port: int, options: argparse.Namespace, result: str) -> None:
    """One rank: all cases in turn; rank 0 writes the results."""
    torch.set_num_threads(1)
    join_group(rank, RANKS, port, 300)
    slots, mllm = Slots(), build_model(options.hidden)
    samples = build_samples(mllm, options.samples)
    chosen, left_out = cases(mllm)
    fits = [profile_costs(mllm, samples, ProfileOptions(largest=options.samples // 4), budget=0.0)]
    links, rows = None, {}
    for name, (layout, schedule) in chosen.items():
        if options.only and name not in options.only:
            continue
        mllm = build_model(options.hidden)  # a new one, since shard = "full" takes over the weights of a model
        parallel = parallelize(mllm, layout, schedule=schedule, transport="distributed", timeout=240)
        links = links or measure_links(parallel.channel, mllm.modules_order())
        table = parallel.table(samples, options.microbatches)
        lists = replace(parallel.schedule(table), table=table)
        sizes = chunk_sizes(mllm, table, samples)
        alone = durations(parallel.graph, table, fits[0], sizes, links)
        used = [seconds for seconds in alone.values() if seconds > 0]
        slots.jobs = {job: seconds * options.slot / statistics.mean(used) for job, seconds in alone.items()}
        lines: list[Any] = [slots.jobs]
        dist.broadcast_object_list(lines, 0)  # each rank has timed its own layers: one rank's times are used by all
        slots.jobs, found = lines[0] if not _layered(lists) else _in_step(lines[0], table), []
        for _ in range(options.steps + 1):
            slots.late = 0.0
            parallel.zero_grad()
            dist.barrier()
            parallel.step(samples, options.microbatches)
            found.append(parallel.timeline().makespan)
        late = torch.tensor(slots.late)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        slept, slots.jobs = slots.jobs, {}
        if rank > 0:
            continue
        traffic = Predictor(mllm, fits[0], links).traffic(layout)
        guess = predict(lists, fits[0], sizes, links, traffic, seconds=slept, optimizer=False)
        measured = statistics.median(found[1:])
        rows[name] = {
            "schedule": schedule,
            "layout": layout.describe().splitlines(),
            "predicted_seconds": guess.makespan,
            "predicted_bubble": guess.bubble,
            "busiest_rank_seconds": busiest(lists, slept),
            "seconds": found[1:],
            "median_seconds": measured,
            "error": guess.makespan / measured - 1,
            "seconds_late": float(late),
        }
    if rank == 0 and links is not None:
        Path(result).write_text(json.dumps({"rows": rows, "left_out": left_out, "links": links.to_table()}))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the table, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases to run, as the table names them")
    parser.add_argument("--steps", type=int, default=5, help="of each case, after one that warms up")
    parser.add_argument("--slot", type=float, default=0.15, help="mean seconds of a compute action")
    parser.add_argument("--samples", type=int, default=16, help="of a step")
    parser.add_argument("--microbatches", type=int, default=4, help="of each replica of the language model")
    parser.add_argument("--hidden", type=int, default=32, help="width of the model")
    parser.add_argument("--out", type=Path, default=Path("bench/results/simulated_slots.json"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(run_rank, (free_port(), options, result), nprocs=RANKS)
        found = json.loads(Path(result).read_text())
    report = {
        "benchmark": "simulated_slots",
        "command": command("simulated_slots", argv),
        "machine": {**machine(), "ranks": RANKS, "threads_per_rank": 1},
        "versions": versions("torch", "transformers"),
        "compute": f"every compute action sleeps its profiled time, stretched to {options.slot} s on average",
        "largest_error": max((row["error"] for row in found["rows"].values()), key=abs),
        **found,
    }
    for name, row in found["rows"].items():
        print(
            f"{name:34} {row['median_seconds']:7.3f} s/step, predicted {row['predicted_seconds']:7.3f} s "
            f"({row['error']:+.1%}), bubble {row['predicted_bubble']:.0%}; computing slept its profiled time"
        )
    for name, why in found["left_out"].items():
        print(f"{name} is left out: {why}")
    write_json(options.out, report)
    return report


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
