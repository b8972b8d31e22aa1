"""Assignment of samples to microbatches: Entrain's parts, ours and those of other systems in one table.

    python -m bench.entrain [--seeds 8] [--out bench/results/entrain.json]
    python -m bench.entrain --measured [--steps 10]      # on 2 processes, in place of the simulation

Simulated: one replica of an encoder and a language model on `--ranks` ranks, with samples from `bench.lengths`, real
tables (`interlace.run.tables.assign`, `step_table`) and real lists, proved by `check` and run by `simulate`. Transfers
take no time. Costs are FLOPs of Qwen2.5-VL's encoder (windows in 28 of its 32 layers) or Whisper-large's, and of
Llama-3.2 1B or 3B, at 100 TFLOP/s; backwards take two forwards. Several encoders are merged into one, as in Entrain.
Figures are means over seeds:

- "spread": the standard deviation of the forwards of microbatches, in percent of their mean, and the factor by which it
  is lower than that of static microbatches.
- "at best": the factor that any assignment to the same number could reach (`least_spread`; inf if no sample is larger
  than its share).
- "held": the most chunks that a rank holds between forward and backward.

Measured: SigLIP on one rank and Llama on the other, gloo, one thread each; steps of all methods take turns. Beside each
measurement is the same step simulated from FLOPs. DIP and Optimus are simulated too; the runtime does not run them.
Figures from a machine with other load have no meaning.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray

from bench import baselines
from bench.baselines import ENCODER, LLM, Problem, Step
from bench.lengths import Drawn, draw
from bench.measure import command, free_port, join_group, machine, versions, write_json
from bench.scheduling_bounds import least_spread
from interlace import balance
from interlace.run.tables.assign import METHODS, Assigner, Method, Slots
from interlace.run.tables.table import Assignment, Lengths, step_table
from interlace.run.tables.work import ModuleWork, Work
from interlace.schedule import Options, StepTable, check, one_f_one_b
from interlace.simulate import simulate

PRINTED = ("synthchartnet", "chartqa", "cocoqa", "llava_150k")
"""The dissertation's data (4.7.1)."""
MIXES = ("llava", "video", "audio", *PRINTED)
SIZES = ((128, 32), (128, 16), (64, 8))
"""Samples and microbatches of a replica; the first pair is the dissertation's (512 samples, 4 replicas)."""
Ints = NDArray[np.int64]
SPEED = 100e12
# FLOPs per token, and per visible (token, key) pair.
ENCODERS = {"vision": (1.26e9, 20.5e3), "audio": (1.26e9, 164e3)}
WINDOWS = {"vision": 9.2e6, "audio": 0.0}  # per token, in windows of 64 patches
LANGUAGE = {"1b": (2.5e9, 131e3), "3b": (6.4e9, 344e3)}


def problem_of(drawn: Drawn, model: str, ranks: int) -> Problem:
    """Costs of the samples, in seconds."""
    encoder = np.zeros(len(drawn))
    for name, tokens in drawn.tokens.items():
        token, pair = ENCODERS[name]
        encoder += drawn.items[name] * tokens * (token + WINDOWS[name] + pair * tokens)
    token, pair = LANGUAGE[model]
    return Problem(encoder / SPEED, drawn.total * (token + pair * drawn.total / 2) / SPEED, ranks)


@dataclass(frozen=True, eq=False)
class Given(Work):
    """Work of samples with given costs: nanoseconds of forward and backward."""

    costs: Mapping[str, NDArray[np.int64]]

    @classmethod
    def of_problem(cls, problem: Problem) -> Given:
        """All layers identical and trained; one layer a stage."""
        modules = {}
        for name, stages in zip((ENCODER, LLM), problem.split(), strict=True):
            one = np.tile(np.array([[1, 0]], np.int64), (stages, 1))
            modules[name] = ModuleWork(one, 2 * one, 1.0, name == LLM, np.ones(stages, bool))
        both = {ENCODER: problem.encoder, LLM: problem.llm}
        return cls(modules, {n: np.rint(3e9 * cost).astype(np.int64) for n, cost in both.items()})

    def of_samples(self, lengths: Lengths) -> dict[str, NDArray[np.int64]]:
        return dict(self.costs)


class Ours:
    """Our methods on the samples of a problem: whole methods, and their ingredients one by one."""

    def __init__(self, problem: Problem, tokens: Ints, rows: Ints, microbatches: int) -> None:
        """tokens, rows: of each sample, of the language model, and of all encoders."""
        self.problem, self.count = problem, microbatches
        self.work = Given.of_problem(problem)
        self.layout = problem.graph().layout
        self.lengths = Lengths(tokens, np.ones(len(tokens), np.int64), {ENCODER: rows})

    def method(self, method: Method) -> Step:
        """A method of `train.assign`."""
        result = Assigner(method, self.layout, self.work)(self.lengths, self.count)
        return self.step(step_table(self.layout, self.lengths, microbatches=self.count, assignment=result))

    def step(self, table: StepTable, *, by_cost: bool | None = None) -> Step:
        """1F1B. by_cost: order by cost; None: only if something is deferred, as in runs."""
        graph = self.problem.graph()
        durations = self.problem.durations(graph, table)
        given = durations if (len(table.deferred) > 0 if by_cost is None else by_cost) else None
        return baselines.proven(one_f_one_b(graph, table, reduce_grad=False, durations=given), durations)

    def plan(self, *, shrink: bool, as_printed: bool) -> balance.MicrobatchPlan:
        costs = self.work.costs
        return balance.assign_microbatches(costs[ENCODER], costs[LLM], self.count, shrink=shrink, as_printed=as_printed)

    def table(self, slots: Slots | tuple[Any, Any]) -> StepTable:
        replica = np.zeros(len(self.lengths), np.int64)
        return step_table(
            self.layout, self.lengths, assignment=Assignment(replica, slots[0], slots[1], self.work.costs)
        )

    def ingredients(self) -> dict[str, Callable[[], Step]]:
        """The ingredients, each added to the previous ones."""
        printed, shrunk = (self.plan(shrink=shrink, as_printed=True) for shrink in (False, True))
        own = self.table((printed.encoder_of, printed.llm_of))
        ours = self.plan(shrink=False, as_printed=False)
        costs, members = self.work.costs, range(printed.microbatches)
        even = balance.assign(costs[LLM], self.count, method="even").astype(np.int64)
        replica = Assigner("entrain", self.layout, self.work).replica
        ordered = replica.ordered(even, costs[ENCODER], costs[LLM], self.count)
        whole = [np.flatnonzero((printed.encoder_of == k) & (self.problem.encoder > 0)) for k in members]
        one_backward = baselines.table_of([each for each in whole if len(each)], printed.llm_of.astype(np.int64))
        return {
            "stratified as printed": lambda: self.step(self.table((printed.encoder_of, printed.encoder_of))),
            "  and deferral, one backward": lambda: self.step(one_backward, by_cost=True),
            "  and split backward, lists by count": lambda: self.step(own, by_cost=False),
            "  and lists by cost": lambda: self.step(own, by_cost=True),
            "  and eager forward": lambda: baselines.eager(self.problem, own, 3 * self.problem.ranks),
            "  and effective microbatches": lambda: self.step(self.table((shrunk.encoder_of, shrunk.llm_of))),
            "exchanges, no deferral": lambda: self.step(self.table((ours.encoder_of, ours.encoder_of))),
            "  and deferral": lambda: self.step(self.table((ours.encoder_of, ours.llm_of))),
            "language model even": lambda: self.step(self.table((even, even))),
            "  and in order": lambda: self.step(self.table((ordered, ordered))),
            "  and eager forward ": lambda: baselines.eager(
                self.problem, self.table((ordered, ordered)), 3 * self.problem.ranks
            ),
        }


def ways(problem: Problem, drawn: Drawn, microbatches: int) -> dict[str, Callable[[], Step]]:
    """Name -> the step, in the order of the table."""
    ours = Ours(problem, drawn.total, np.asarray(sum(drawn.rows.values())), microbatches)
    return systems(problem, microbatches) | methods(ours) | ours.ingredients()


def systems(problem: Problem, microbatches: int) -> dict[str, Callable[[], Step]]:
    """Methods of other systems."""
    return {
        "static 1F1B": lambda: baselines.static(problem, microbatches),
        "DistTrain's order": lambda: baselines.disttrain(problem, microbatches),
        "DistTrain's order, searched on": lambda: baselines.disttrain(problem, microbatches, evaluations=2000),
        "DIP": lambda: baselines.dip(problem, microbatches),
        "Optimus": lambda: baselines.optimus(problem, microbatches),
    }


def methods(ours: Ours) -> dict[str, Callable[[], Step]]:
    """Methods of `train.assign`."""
    return {f"assign = {name!r}": partial(ours.method, name) for name in METHODS}


def figures(step: Step) -> dict[str, float]:
    """Figures of a step for the report."""
    timeline = simulate(step.schedule, step.durations)
    loads = step.llm_loads
    return {
        "seconds": timeline.makespan,
        "bubble": timeline.bubble,
        "llm_std": float(loads.std()),
        "llm_spread": float(loads.std() / loads.mean()),
        "microbatches": len(loads),
        "deferred": len(step.schedule.table.deferred),
        "held": max(check(step.schedule).peak_in_flight),
    }


def simulated(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each mix, size and method: means over seeds."""
    rows = []
    for mix in options.mixes:
        for samples, microbatches in SIZES:
            result: dict[str, list[dict[str, float]]] = {}
            least = []
            for seed in range(options.seeds):
                drawn = draw(mix, samples, seed=seed)
                problem = problem_of(drawn, options.model, options.ranks)
                least.append(least_spread(problem.llm, microbatches))
                for name, made in ways(problem, drawn, microbatches).items():
                    result.setdefault(name, []).append(figures(made()))
            static = result["static 1F1B"]
            for name, each in result.items():
                mean = {key: statistics.fmean(one[key] for one in each) for key in each[0]}
                mean["time"] = statistics.fmean(
                    one["seconds"] / s["seconds"] for one, s in zip(each, static, strict=True)
                )
                lower = statistics.fmean(s["llm_std"] for s in static) / max(mean["llm_std"], 1e-12)
                case = {"mix": mix, "samples": samples, "microbatches_asked": microbatches, "way": name}
                mean["spread_lower"] = lower
                mean["least_std"] = statistics.fmean(least)
                rows.append(case | {key: float(f"{value:.6g}") for key, value in mean.items()})
    return rows


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table."""
    at = None
    for row in rows:
        here = (row["mix"], row["samples"], row["microbatches_asked"])
        if here != at:
            print(f"\n{row['mix']}, {row['samples']} samples in {row['microbatches_asked']} microbatches")
            print(f"{'':40}{'time':>8}{'bubble':>8}{'spread':>9}{'lower by':>9}{'at best':>9}", end="")
            print(f"{'count':>7}{'deferred':>9}{'held':>6}")
            at = here
        print(
            f"{row['way']:40}{row['time']:8.1%}{row['bubble']:8.1%}{row['llm_spread']:9.2%}{row['spread_lower']:8.1f}x"
            f"{at_best(rows, row):8.1f}x"
            f"{row['microbatches']:7.1f}{row['deferred']:9.1f}{row['held']:6.0f}"
        )


def at_best(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float:
    """The largest possible factor between the deviation of static microbatches and that of a row's case."""
    case = ("mix", "samples", "microbatches_asked")
    [static] = [r for r in rows if r["way"] == "static 1F1B" and all(r[key] == row[key] for key in case)]
    return float(static["llm_std"] / row["least_std"]) if row["least_std"] else float("inf")


def spread_table(report: Mapping[str, Any]) -> str:
    """Second table of docs/who-computes-what.md: reduction of the deviation against static microbatches."""
    rows = [row for row in report["simulated"] if row["way"] == "assign = 'entrain'"]
    lines = ["| | " + " | ".join(f"{n} in {k}" for n, k in SIZES) + " |", "|---" * (len(SIZES) + 1) + "|"]
    for mix in dict.fromkeys(row["mix"] for row in rows):
        cells = []
        for samples, microbatches in SIZES:
            mine = (mix, samples, microbatches)
            [row] = [r for r in rows if (r["mix"], r["samples"], r["microbatches_asked"]) == mine]
            best = at_best(report["simulated"], row)
            lower = f"{row['spread_lower']:,.{1 if row['spread_lower'] < 100 else 0}f}"
            cells.append(lower + (f" of {best:.1f}" if best < 100 else ""))
        lines.append(f"| {mix} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def docs_table(report: Mapping[str, Any]) -> str:
    """Table of docs/who-computes-what.md: step time relative to static microbatches, mean over sizes."""
    result: dict[str, dict[str, list[float]]] = {}
    for row in report["simulated"]:
        if row["way"] != "static 1F1B":
            result.setdefault(row["way"], {}).setdefault(row["mix"], []).append(row["time"])
    mixes = list(next(iter(result.values())))
    lines = [f"| | {' | '.join(mixes)} |", "|---" * (len(mixes) + 1) + "|"]
    for way, times in result.items():
        name = ("… " if way.startswith(" ") else "") + way.strip()
        name = f"`{name}`" if name.startswith("assign") else name
        lines.append(f"| {name} | {' | '.join(f'{statistics.fmean(times[mix]):.0%}' for mix in mixes)} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- measured


def build(options: argparse.Namespace) -> tuple[Any, list[Any], Drawn]:
    """A small model, and samples with the proportions of a mix: pictures of up to 10 x 10 patches."""
    from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

    from interlace.model import Media, ModalityModule, MultimodalModel, Sample

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "attn_implementation": "interlace", "hidden_size": options.hidden}
    wide = 4 * options.hidden
    vision = SiglipVisionConfig(
        num_hidden_layers=5, image_size=256, patch_size=16, vision_use_head=False, intermediate_size=wide, **heads
    )
    language = LlamaConfig(
        vocab_size=512, num_hidden_layers=4, num_key_value_heads=4, intermediate_size=3 * options.hidden, **heads
    )
    mllm = MultimodalModel(
        encoders={"vision": ModalityModule(SiglipVisionModel(vision), projector="mlp")},
        language_model=LlamaForCausalLM(language),
        placeholders={"vision": 500},
    ).train()
    drawn = draw(options.mixes[0], options.samples)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for text, patches, items in zip(drawn.text, drawn.tokens["vision"], drawn.items["vision"], strict=True):
        ids, media = [1], {}
        if items:
            side = int(np.clip(np.rint(np.sqrt(patches * items / 64)), 2, 16))
            shape = (3, 16 * side, 16 * side)
            media["vision"] = [Media(shape, tokens := mllm.encoders["vision"].tokens(shape), torch.randn(shape))]
            ids += [500] * tokens
        words = torch.randint(2, 400, (max(2, min(int(text) // 4, 200)),), generator=generator).tolist()
        labels = torch.tensor([-100] * len(ids) + words[1:] + [2])
        samples.append(Sample(input_ids=torch.tensor(ids + words), labels=labels, media=media, name="bench"))
    return mllm, samples, drawn


def run_rank(rank: int, port: int, options: argparse.Namespace, result: str) -> None:
    """One rank of the measured part; rank 0 writes the results."""
    from interlace.layout import Layout, ParallelSpec
    from interlace.run import parallelize

    torch.set_num_threads(1)
    join_group(rank, 2, port, 300)
    mllm, samples, _ = build(options)
    layout = Layout.from_specs(mllm, {"vision": ParallelSpec(), LLM: ParallelSpec()})
    work = Work.of(mllm).of_samples(Lengths.of(samples, ["vision"]))
    count, static = options.microbatches, np.arange(len(samples)) * options.microbatches // len(samples)
    forward = np.stack([np.bincount(static, work[name], count) / 3 for name in ("vision", LLM)], axis=1)
    order = balance.reorder_microbatches(forward, 2 * forward, evaluations=0).order
    groups = [[samples[i] for i in np.flatnonzero(static == k)] for k in range(count)]
    more: dict[str, tuple[Method, str, Options]] = {
        "assign = 'as_printed', eager forward": ("as_printed", "1f1b", {"in_flight": 6}),
        "assign = 'entrain', eager forward": ("entrain", "1f1b", {"in_flight": 6}),
        "assign = 'entrain', backward in halves (ZB-H1)": ("entrain", "zb_h1", {}),
    }
    made = partial(parallelize, mllm, layout, transport="distributed", timeout=120)
    models = {method: made(assign=method) for method in METHODS}
    others = {
        name: made(assign=method, schedule=schedule, schedule_options=given)
        for name, (method, schedule, given) in more.items()
    }
    steps: dict[str, Callable[[], Any]] = {
        "static 1F1B": lambda: models["tokens"].step(groups),
        "DistTrain's order": lambda: models["tokens"].step([groups[k] for k in order]),
    }
    for method, model in models.items():
        steps[f"assign = {method!r}"] = partial(model.step, samples, count)
    steps |= {name: partial(other.step, samples, count) for name, other in others.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    deferred: dict[str, int] = {}
    for _ in range(options.steps + 1):  # the first one warms up
        for name, step in steps.items():
            for model in (*models.values(), *others.values()):
                model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            deferred[name] = len(step().table.deferred)
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
    if rank == 0:
        found = {
            name: {"seconds": times[1:], "median": statistics.median(times[1:]), "deferred": deferred[name]}
            for name, times in seconds.items()
        }
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps on 2 processes: method -> all of them, and their median. "simulated": relative to static."""
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(run_rank, (free_port(), options, result), nprocs=2)
        found: dict[str, Any] = json.loads(Path(result).read_text())
    mllm, samples, _ = build(options)
    lengths = Lengths.of(samples, ["vision"])
    work = Work.of(mllm).of_samples(lengths)
    problem = Problem(work["vision"] / 3e9, work[LLM] / 3e9, 2)
    ours = Ours(problem, lengths.tokens, lengths.rows["vision"], options.microbatches)
    every = systems(problem, options.microbatches) | methods(ours)
    spans = {name: simulate((step := make()).schedule, step.durations).makespan for name, make in every.items()}
    static = found["static 1F1B"]["median"]
    print(f"{'':48}{'measured':>12}{'of static':>10}{'simulated':>10}")
    found = {name: found.get(name, {}) for name in dict.fromkeys([*spans, *found])}
    for name, row in found.items():
        if name in spans:
            row["simulated"] = spans[name] / spans["static 1F1B"]
        took = f"{1e3 * row['median']:9.1f} ms{row['median'] / static:10.1%}" if "median" in row else ""
        print(f"{name:48}{took or '-':>22}" + (f"{row['simulated']:10.1%}" if name in spans else f"{'-':>10}"))
    return found


def measured_table(report: Mapping[str, Any]) -> str:
    """A table of docs/who-computes-what.md: steps relative to the median static one, measured and simulated."""
    lines = ["| | median | quartiles | shortest | simulated |", "|---|---|---|---|---|"]
    static = report["measured"]["static 1F1B"]["median"]
    for name, row in report["measured"].items():
        took = "- | - | -"
        if "median" in row:
            low, high = np.quantile(row["seconds"], (0.25, 0.75)) / static
            median = f"{row['median'] / static:.0%}" + (f", {1e3 * static:.0f} ms" if name == "static 1F1B" else "")
            took = f"{median} | {low:.0%} to {high:.0%} | {min(row['seconds']) / static:.0%}"
        guess = f"{row['simulated']:.0%}" if "simulated" in row else "-"
        what, _, how = name.partition(", ")
        said = (f"`{what}`" if what.startswith("assign") else what) + (f", {how}" if how else "")
        lines.append(f"| {said} | {took} | {guess} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print its table, write the JSON to `--out`; returns the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), help="of bench.lengths; the first one is measured")
    parser.add_argument("--model", choices=sorted(LANGUAGE), default="3b", help="the language model's costs")
    parser.add_argument("--ranks", type=int, default=8, help="of the replica")
    parser.add_argument("--seeds", type=int, default=8, help="steps that are simulated, each of other samples")
    parser.add_argument("--measured", action="store_true", help="run steps on 2 processes instead")
    parser.add_argument("--steps", type=int, default=10, help="of each way, measured")
    parser.add_argument("--samples", type=int, default=32, help="of a measured step")
    parser.add_argument("--microbatches", type=int, default=8, help="of a measured step")
    parser.add_argument("--hidden", type=int, default=128, help="width of the measured model")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {"benchmark": "entrain", "command": command("entrain", argv), "versions": versions()}
    if options.measured:
        report |= {"machine": machine() | {"ranks": 2, "threads_per_rank": 1}, "measured": measured(options)}
    else:
        rows = simulated(options)
        show(rows)
        report |= {"seeds": options.seeds, "simulated": rows}
        print(f"\n{docs_table(report)}")
        if set(SIZES) <= {(row["samples"], row["microbatches_asked"]) for row in rows}:
            print(spread_table(report))
    if options.out is not None:
        write_json(options.out, report)
    return report


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
