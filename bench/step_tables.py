"""Time of a step besides its computing: table, routes, schedule, proof; and the executor, per action.

    python -m bench.step_tables [--repeats 20] [--out bench/results/step_tables.json]

Tables: 1,024 samples of random lengths for 16 lanes (4 replicas of an encoder in 2 stages, 2 of a language model in 4)
with 128 chunks per replica of the language model, and fewer or more of the encoder. Executor: stages that only pass
tensors on, on one rank and on two that are threads, against the same calls of the stages without it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.measure import command, machine, versions, write_json
from interlace.comm.channels.local import LocalChannel, LocalNetwork
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.parallel.route import Routes
from interlace.run.comparison import Comparison
from interlace.run.execute.collectives import Collectives
from interlace.run.execute.executor import Executor
from interlace.run.execute.step import StageRuntime, Step
from interlace.run.lanes import Place
from interlace.run.process import run_threads
from interlace.run.tables.table import Lengths, step_table
from interlace.schedule import Schedule, StageGraph, StepTable, check, one_f_one_b

LINKS = (("vision", "language_model"),)
SAMPLES, MICROBATCHES = 1024, 128


def graph_of(vision: tuple[int, int], language: tuple[int, int], ranks: int | None = None) -> StageGraph:
    """(dp, pp) of each; every stage on its own rank, or stage i of all on rank i modulo `ranks`."""
    modules: dict[str, Any] = {}
    first = 0
    for name, (dp, pp) in (("vision", vision), ("language_model", language)):
        pipelines = []
        for replica in range(dp):
            places = [first + i if ranks is None else (first + i) % ranks for i in range(pp)]
            first += pp
            stages = tuple(Stage(name, i, i, i + 1, Lane((place,))) for i, place in enumerate(places))
            pipelines.append(Pipeline(name, replica, stages))
        modules[name] = (ParallelSpec(dp=dp, pp=pp), tuple(pipelines))
    flags = {"vision": (True,) * vision[1], "language_model": (True,) * language[1]}
    return StageGraph(Layout(modules, first if ranks is None else ranks, "parallel"), LINKS, flags)


def random_lengths(samples: int, seed: int = 0) -> Lengths:
    """Half of the samples have an image."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 2, samples) * rng.integers(16, 300, samples)
    return Lengths(rng.integers(20, 600, samples), rng.integers(1, 40, samples), {"vision": images})


def tables(repeats: int, chunks: int | None) -> dict[str, Any]:
    """Median milliseconds of each part."""
    graph = graph_of((4, 2), (2, 4))
    graph.arrays  # noqa: B018 (made once per run)
    spent: dict[str, list[float]] = {}
    for repeat in range(repeats):
        lengths = random_lengths(SAMPLES, repeat)
        begin = time.perf_counter()
        marks = {}
        table = step_table(
            graph.layout, lengths, microbatches=MICROBATCHES, chunks=None if chunks is None else {"vision": chunks}
        )
        assert table.digest
        marks["table"] = time.perf_counter()
        routes = Routes(table)
        for source, reader in table.links.tolist():
            routes.between(source, reader)
        marks["routes"] = time.perf_counter()
        schedule = one_f_one_b(graph, table)
        marks["schedule"] = time.perf_counter()
        check(schedule)
        marks["proof"] = time.perf_counter()
        spent.setdefault("all", []).append(1e3 * (marks["proof"] - begin))
        for name, mark in marks.items():
            spent.setdefault(name, []).append(1e3 * (mark - begin))
            begin = mark
    result: dict[str, Any] = {name: statistics.median(times) for name, times in spent.items()}
    return result | {"encoder_chunks": chunks, "actions": len(schedule.rows), "chunks": len(table.chunks)}


class Nothing(nn.Module):
    """A stage that returns its input times a weight."""

    def __init__(self, sink: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.sink = sink

    def forward(self, inputs: dict[str, Any], hidden: Tensor | None) -> Tensor:
        if hidden is None:
            hidden = inputs.get("features", {}).get("vision", inputs["rows"])
        return (hidden * self.weight).sum() if self.sink else hidden * self.weight


def executor(ranks: int, repeats: int) -> dict[str, Any]:
    """Microseconds per action that the executor adds to a step of trivial stages."""
    graph = graph_of((1, 1), (1, 2 * ranks - 1), ranks)
    lengths = Lengths(np.full(64, 8), np.full(64, 1), {"vision": np.full(64, 8)})
    table = step_table(graph.layout, lengths, microbatches=64)
    schedule = one_f_one_b(graph, table)
    check(schedule)
    rows = torch.ones(8, 4)
    last = len(graph.layout.pipelines("language_model")[0].stages) - 1
    stages = {
        rank: {
            (stage.module, stage.index): StageRuntime(
                Nothing(stage.module != "vision" and stage.index == last),
                stage.module == "vision" or stage.index == last,
                stage.module != "vision" and stage.index == last,
                Place.of(rank, Lane((rank,)), 1),
            )
            for stage in graph.layout.of_rank(rank)
        }
        for rank in range(ranks)
    }
    alone = median_seconds(lambda: without(schedule, stages, rows), repeats)
    whole = median_seconds(lambda: play(schedule, table, stages, rows), repeats)
    actions = len(schedule.rows)
    return {
        "ranks": ranks, "actions": actions, "step_us": 1e6 * whole, "stages_alone_us": 1e6 * alone,
        "added_us_per_action": 1e6 * (whole - alone) / actions,
    }  # fmt: skip


class SameRows:
    """The same inputs for every chunk and place."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def of(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        return {"rows": self.rows}

    def inputs(self, _module: str, _chunk: int, _place: Place, collated: dict[str, Tensor]) -> dict[str, Tensor]:
        return collated


def play(schedule: Schedule, table: StepTable, stages: Any, rows: Tensor) -> None:
    """The step by the executors."""
    routes, graph = Routes(table), schedule.graph
    ends = {i: (c.module, len(graph.layout.pipelines(c.module)[0].stages) - 1) for i, c in enumerate(table.chunks)}
    network = LocalNetwork(len(stages), 60.0)

    def run(rank: int) -> None:
        channel = LocalChannel(rank, network)
        inputs: Any = SameRows(rows)
        step = Step(routes, ends, inputs, inputs, 1.0, Comparison(None, 0, "", ""), torch.device("cpu"))
        collectives = Collectives(channel, graph.reductions, lambda _: [], {}, {})
        Executor(rank, stages[rank], graph, channel, collectives, step).run(schedule.of_rank(rank))

    if len(stages) == 1:
        run(0)
    else:
        run_threads(list(stages), run, lambda *_: None)


def without(schedule: Schedule, stages: Any, rows: Tensor) -> None:
    """The same forwards and backwards, as plain calls one after the other."""
    for mine in stages.values():
        for stage in mine.values():
            for _ in range(64):
                hidden = rows.clone().requires_grad_()
                output = stage.module({"rows": hidden}, hidden)
                torch.autograd.backward(output, torch.ones_like(output))


def median_seconds(call: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_tables.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = {
        "benchmark": "step_tables",
        "command": command("step_tables", argv),
        "machine": machine(),
        "versions": versions(),
        "tables_ms": [tables(options.repeats, chunks) for chunks in (None, 64, 256)],
        "executor": [executor(ranks, options.repeats) for ranks in (1, 2)],
    }
    write_json(options.out, report)
    for row in report["tables_ms"]:
        parts = ", ".join(f"{name} {row[name]:.1f}" for name in ("table", "routes", "schedule", "proof"))
        print(f"encoder chunks {row['encoder_chunks'] or 'as many'}: {row['all']:.1f} ms ({parts})")
    for row in report["executor"]:
        print(f"executor, {row['ranks']} ranks: {row['added_us_per_action']:.1f} us per action of {row['actions']}")
    return report


if __name__ == "__main__":
    main()
