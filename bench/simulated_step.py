"""Simulator against measurement: layouts and schedules of a small model on 2 gloo ranks with 1 thread each.

Two predictions of each step are compared with its measured time:

- `error`: from the step's own actions. Steps alternate: every other one is profiled, and the prediction is compared
  with the steps in between. Each profiled step is simulated with the costs of its own actions, and the prediction is
  the median of these simulations. Medians of single costs would be too low: slow actions differ from step to step, and
  a step that waits for the slower of two ranks takes longer than the slower of two medians. Costs are of

    FORWARD, BACKWARD   each (op, module, stage, chunk); the mean of both if copies run one twice
    SEND                posting it
    RECV                from when both sides are ready (receiver arrived, sender posted) to its end
    REDUCE_GRAD         alone: a sum of the same bytes over the same ranks while nothing else runs

- `fitted_error`: from data available before the first step, as in a run with log.predict: layers timed one by one and
  fitted (`interlace.estimate.profiling`), links measured (`interlace.estimate.measured_links`), the chunks' sizes.

A round runs all cases and profiles each again. A rank that shares its core with other programs is slower in bursts,
which medians do not show. So the number of cores that others kept busy is recorded, and the quietest half of a case's
rounds counts. The simulator uses the same lists that the ranks ran. Whole steps are compared, from the call to its
return on the slower rank. Work outside of the lists (making the table, comparing the ranks, gathering the loss) is
measured in the profiled steps and added to both predictions. The report also compares the lists alone. For more ranks
than cores: bench/simulated_slots.py.

    python -m bench.simulated_step [--steps 12] [--rounds 8] [--out bench/results/simulated_step.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from bench.measure import command, free_port, join_group, machine, versions, write_json
from interlace.estimate.measured_links import measure_links
from interlace.estimate.predictor import Predictor
from interlace.estimate.profiling import ProfileOptions, profile_costs
from interlace.layout import Layout, ParallelSpec
from interlace.model import Media, ModalityModule, MultimodalModel, Sample
from interlace.run import ParallelModel, parallelize
from interlace.schedule import GENERATORS, Op, Schedule
from interlace.schedule.actions import COMPUTE
from interlace.simulate import Timeline, simulate_arrays

PLACEHOLDERS = {"vision": 500, "audio": 501}
PATCH, MELS, FRAMES = 16, 40, 200
Cost = tuple[Any, ...]


def build_model(hidden: int = 256, layers: tuple[int, int, int] = (4, 2, 5), frames: int = FRAMES) -> MultimodalModel:
    """SigLIP, Whisper and Llama of one width, all of it trained; layers: of each. frames: of the longest clip."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "intermediate_size": 4 * hidden, "attn_implementation": "interlace"}
    vision, audio, language = layers
    return MultimodalModel(
        encoders={
            "vision": ModalityModule(
                SiglipVisionModel(
                    SiglipVisionConfig(
                        hidden_size=hidden, num_hidden_layers=vision, image_size=16 * PATCH, patch_size=PATCH,
                        vision_use_head=False, **heads,
                    )
                ),
                projector="mlp",
            ),
            "audio": ModalityModule(
                WhisperEncoder(
                    WhisperConfig(
                        d_model=hidden, encoder_layers=audio, encoder_attention_heads=4, encoder_ffn_dim=4 * hidden,
                        num_mel_bins=MELS, max_source_positions=frames // 2, attn_implementation="interlace",
                    )
                ),
                projector="linear",
                downsample=2,
            ),
        },
        language_model=LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512, hidden_size=hidden, num_hidden_layers=language, num_key_value_heads=4,
                **heads | {"intermediate_size": 3 * hidden},
            )
        ),
        placeholders=PLACEHOLDERS,
    ).train()  # fmt: skip


def build_samples(mllm: MultimodalModel, count: int) -> list[Sample]:
    """Images and clips of many sizes between texts of many lengths: chunks of unequal cost."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    samples = []
    for _ in range(count):
        ids, media = [1], {}
        shapes = {"vision": (3, PATCH * draw(4, 10), PATCH * draw(4, 10)), "audio": (MELS, draw(60, FRAMES))}
        for name, shape in shapes.items():
            tokens = mllm.encoders[name].tokens(shape)
            media[name] = [Media(shape, tokens, torch.randn(shape, generator=generator))]
            ids += [PLACEHOLDERS[name]] * tokens
        text = torch.randint(2, 400, (draw(20, 80),), generator=generator).tolist()
        labels = torch.tensor([-100] * len(ids) + text[1:] + [2])
        samples.append(Sample(input_ids=torch.tensor(ids + text), labels=labels, media=media, name="bench"))
    return samples


def layouts(mllm: MultimodalModel) -> dict[str, Layout]:
    """All layouts of 2 ranks."""
    one = dict.fromkeys(mllm.modules_order(), ParallelSpec())
    halves = one | {"language_model": ParallelSpec(pp=2)}
    twice = {name: ParallelSpec(dp=2) for name in one}
    return {
        # Placed like "parallel" on shared ranks, with the cut between encoders and language model.
        "encoders | language model": Layout.from_specs(mllm, one, placement="colocated"),
        "chain in 2": Layout.balanced(mllm, 2),
        "replicated, language model in 2": Layout.from_specs(mllm, halves, placement="replicated"),
        "2 replicas": Layout.from_specs(mllm, twice, ranks=1),
        "shared: encoders twice, language model in 2": Layout.from_specs(
            mllm, twice | {"language_model": ParallelSpec(pp=2)}, placement="shared"
        ),
    }


def cases(mllm: MultimodalModel) -> tuple[dict[str, tuple[Layout, str]], dict[str, str]]:
    """Name -> layout and schedule: all layouts under 1F1B, and every other schedule; and the reasons for left-out
    ones."""
    result = {name: (layout, "1f1b") for name, layout in layouts(mllm).items()}
    left_out = {}
    for schedule in GENERATORS:
        try:
            if schedule in ("interleaved", "zb_v"):
                order = "v" if schedule == "zb_v" else "loop"
                specs = dict.fromkeys(mllm.modules_order(), ParallelSpec(pp=2))
                specs["language_model"] = ParallelSpec(pp=2, virtual=2, order=order)
                layout = Layout.from_specs(mllm, specs, placement="shared")
            else:
                layout = Layout.balanced(mllm, 2)
        except ValueError as error:
            left_out[schedule] = str(error)
            continue
        if schedule != "1f1b":
            result[f"{schedule}: {'shared' if layout.placement == 'shared' else 'chain in 2'}"] = layout, schedule
    return result, left_out


# ---------------------------------------------------------------------- costs


def costs_of(timeline: Timeline, lanes: list[int]) -> dict[Cost, list[float]]:
    """Seconds of the actions of one step, by cost key; lanes: the rank of each."""
    result: dict[Cost, list[float]] = defaultdict(list)
    posted: dict[Cost, float] = {}
    for record in timeline.records():
        action = record.action
        if action.op is Op.SEND:
            posted[_message(action, record.rank, lanes[action.peer])] = record.finish
    for record in timeline.records():
        action = record.action
        if action.op in COMPUTE:
            result[action.op, action.module, action.stage, action.chunk].append(record.finish - record.start)
        elif action.op is Op.SEND:
            result[_message(action, record.rank, lanes[action.peer]) + (Op.SEND,)].append(record.finish - record.start)
        elif action.op is Op.RECV:
            message = _message(action, lanes[action.peer], record.rank)
            begin = max(record.start, min(posted[message], record.finish))
            result[message + (Op.RECV,)].append(record.finish - begin)
    return result


def _message(action: Any, source: int, target: int) -> Cost:
    return action.module, action.stage, action.chunk, action.other, action.grad, source, target


def seconds_of(schedule: Schedule, lanes: list[int], costs: dict[Cost, float], sums: dict[int, float]) -> np.ndarray:
    """float64 [rows]: the cost of every row of the lists."""
    seconds = []
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op in COMPUTE:
                seconds.append(costs[action.op, action.module, action.stage, action.chunk])
            elif action.op is Op.REDUCE_GRAD:
                seconds.append(sums[action.other])
            else:
                peer = lanes[action.peer]
                pair = (rank, peer) if action.op is Op.SEND else (peer, rank)
                seconds.append(costs[_message(action, *pair) + (action.op,)])
    return np.array(seconds)


def sums_alone(parallel: ParallelModel, repeats: int) -> dict[int, float]:
    """Reduction -> seconds of a sum of as many bytes, run as in the executor, alone."""
    from interlace.run.execute.gradients import Sum

    [rank] = parallel._ranks.values()
    result = {}
    for number, reduction in enumerate(parallel.graph.reductions):
        times = []
        for repeat in range(repeats):
            dist.barrier()
            begin = time.monotonic()
            if rank.number in reduction.ranks:
                assert parallel.channel is not None
                Sum(rank.parameters(reduction), reduction.ranks, parallel.channel, f"alone {number} {repeat}").wait()
            times.append(time.monotonic() - begin)
        result[number] = statistics.median(times)
    return result


# ---------------------------------------------------------------------- the ranks


class Others:
    """Number of cores that other programs keep busy, from now on. Its calls are collective."""

    def __init__(self) -> None:
        self._at = self._read()

    def cores(self) -> float:
        (busy, mine, now), (before, then, began) = self._read(), self._at
        return max(busy - before - (mine - then), 0.0) / (now - began)

    def _read(self) -> tuple[float, float, float]:
        """(seconds that all cores were busy, seconds that the ranks computed, now), as rank 0 sees it."""
        numbers = torch.tensor([time.process_time()], dtype=torch.float64)
        dist.all_reduce(numbers)
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        busy = (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for disks
        seen = torch.tensor([busy, float(numbers), time.monotonic()], dtype=torch.float64)
        dist.broadcast(seen, 0)
        return float(seen[0]), float(seen[1]), float(seen[2])


def wait_until_quiet(patience: float) -> None:
    """Wait until others use less than a twentieth of a core for a second, at most `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        others = Others()
        time.sleep(1.0)
        calm = torch.tensor([float(others.cores() < 0.05 or time.monotonic() > deadline)])
        dist.broadcast(calm, 0)
        if calm:
            return


class Case:
    """One layout and schedule in one round: profiles and measurements."""

    def __init__(self, parallel: ParallelModel, predictor: Predictor) -> None:
        self.parallel, self.predictor = parallel, predictor
        self.lanes = [lane.ranks[0] for lane in parallel.layout.lanes()]
        self.costs: list[dict[Cost, float]] = []  # of each profiled step
        self.seconds: dict[bool, list[float]] = {True: [], False: []}  # of profiled steps, and of others
        self.listed: list[float] = []  # of the lists alone, in steps without profile
        self.around: list[float] = []  # of everything but the lists, in profiled steps

    def step(self, samples: list[Sample], microbatches: int, profiled: bool) -> None:
        self.parallel.zero_grad()
        dist.barrier()
        begin = time.monotonic()
        self.parallel.step(samples, microbatches)
        mine = time.monotonic()
        both = torch.tensor([begin, mine], dtype=torch.float64)
        everyone = [torch.empty_like(both) for _ in range(2)]
        dist.all_gather(everyone, both)
        self.seconds[profiled].append(max(float(b[1]) for b in everyone) - min(float(b[0]) for b in everyone))
        timeline = self.parallel.timeline()
        if not profiled:
            self.listed.append(timeline.makespan)
            return
        self.around.append(self.seconds[profiled][-1] - timeline.makespan)
        result = costs_of(timeline, self.lanes)
        self.costs.append({key: statistics.mean(seconds) for key, seconds in result.items()})

    def report(self, samples: list[Sample], microbatches: int, repeats: int) -> dict[str, Any]:
        table = self.parallel.table(samples, microbatches)
        schedule = replace(self.parallel.schedule(table), table=table)
        sums = sums_alone(self.parallel, repeats)
        simulated = [
            simulate_arrays(schedule, seconds_of(schedule, self.lanes, costs, sums)).makespan for costs in self.costs
        ]
        lists = statistics.median(simulated)
        around = statistics.median(self.around)
        predicted = lists + around
        fitted = self.predictor.predict(schedule, samples, optimizer=False).makespan + around
        measured = statistics.median(self.seconds[False])
        compute = [seconds for costs in self.costs for key, seconds in costs.items() if key[0] in COMPUTE]
        return {
            "layout": self.parallel.layout.describe().splitlines(),
            "actions": len(schedule.rows),
            "median_compute_action_ms": statistics.median(compute) * 1e3,
            "seconds": self.seconds[False],
            "predicted_seconds": predicted,
            "median_seconds": measured,
            "error": predicted / measured - 1,
            "fitted_seconds": fitted,
            "fitted_error": fitted / measured - 1,
            "median_list_seconds": statistics.median(self.listed),
            "list_error": lists / statistics.median(self.listed) - 1,
            "around_seconds": around,
            "median_profiled_seconds": statistics.median(self.seconds[True]),
        }


def run_rank(rank: int, port: int, options: argparse.Namespace, result: str) -> None:
    """One rank: profile and measure in turns; rank 0 writes the results."""
    torch.set_num_threads(1)
    join_group(rank, 2, port, 300)
    mllm = build_model(options.hidden)
    samples = build_samples(mllm, options.samples)
    rounds: list[dict[str, Any]] = []
    chosen, left_out = cases(mllm)
    parallel = {
        name: parallelize(mllm, layout, schedule=schedule, transport="distributed", timeout=120)
        for name, (layout, schedule) in chosen.items()
        if not options.only or name in options.only
    }
    channel = next(iter(parallel.values())).channel
    for _ in range(options.rounds):
        found = {}
        wait_until_quiet(options.patience)
        dist.barrier()
        largest = -(-len(samples) // options.microbatches)
        fits = profile_costs(mllm, samples, ProfileOptions(largest=largest), budget=options.budget)
        predictor = Predictor(mllm, fits, measure_links(channel, mllm.modules_order()))
        for name, model in parallel.items():
            wait_until_quiet(options.patience)
            Case(model, predictor).step(samples, options.microbatches, True)  # warms up
            case, others = Case(model, predictor), Others()
            for step in range(options.steps):
                case.step(samples, options.microbatches, step % 2 == 0)
            busy = others.cores()
            known = {"links": predictor.links.to_table(), "fit_errors": fits.errors}
            found[name] = {"other_cores": busy, **known, **case.report(samples, options.microbatches, 7)}
        rounds.append(found)
    if rank == 0:
        parameters = sum(p.numel() for p in mllm.parameters())
        Path(result).write_text(json.dumps({"parameters": parameters, "rounds": rounds, "left_out": left_out}))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------- the report


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the table, write the JSON and return its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases to run, as the table names them")
    parser.add_argument("--steps", type=int, default=12, help="of each layout in a round, every other one profiled")
    parser.add_argument("--rounds", type=int, default=8, help="each profiles anew; the quietest half of them counts")
    parser.add_argument("--samples", type=int, default=8, help="of a step")
    parser.add_argument("--microbatches", type=int, default=4, help="of each replica of the language model")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--budget", type=float, default=6, help="seconds of timing layers, in each round")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait for a quiet machine, each time")
    parser.add_argument("--out", type=Path, default=Path("bench/results/simulated_step.json"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder) / "result.json")
        mp.spawn(run_rank, (free_port(), options, result), nprocs=2)
        found = json.loads(Path(result).read_text())

    summary = {}
    for name in found["rounds"][0]:
        rows = sorted((each[name] for each in found["rounds"]), key=lambda row: row["other_cores"])
        rows = rows[: -(-len(rows) // 2)]
        middle = {
            key: statistics.median(row[key] for row in rows)
            for key in (
                "median_seconds",
                "predicted_seconds",
                "error",
                "fitted_seconds",
                "fitted_error",
                "list_error",
                "other_cores",
            )
        }
        summary[name] = middle | {"errors": sorted(row["error"] for row in rows), "layout": rows[0]["layout"]}
    report = {
        "benchmark": "simulated_step",
        "command": command("simulated_step", argv),
        "machine": {**machine(), "ranks": 2, "threads_per_rank": 1},
        "versions": versions("torch", "transformers"),
        "model": {"parameters": found["parameters"], "samples": options.samples, "microbatches": options.microbatches},
        "layouts": summary,
        "left_out": found["left_out"],
        "largest_error": max((row["error"] for row in summary.values()), key=abs),
        "largest_fitted_error": max((row["fitted_error"] for row in summary.values()), key=abs),
        "rounds": found["rounds"],
    }
    for name, row in summary.items():
        print(
            f"{name:44} {row['median_seconds'] * 1e3:8.1f} ms/step, simulated {row['predicted_seconds'] * 1e3:8.1f} ms "
            f"({row['error']:+.1%}, {row['errors'][0]:+.1%} to {row['errors'][-1]:+.1%}), fitted "
            f"{row['fitted_seconds'] * 1e3:8.1f} ms ({row['fitted_error']:+.1%}; lists alone "
            f"{row['list_error']:+.1%}; others kept {row['other_cores']:.2f} cores busy)"
        )
    for name, why in found["left_out"].items():
        print(f"{name} is left out: {why}")
    write_json(options.out, report)
    return report


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
