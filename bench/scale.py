"""Planning and simulating a step of 8 to 100,000 GPUs; every replica has its own lengths.

Each size runs in a separate process, timed from its imports on. The process builds the model of
configs/vlm_10240_example.toml on the meta device (SigLIP, Whisper, a 70B Llama), a layout, lengths of samples drawn
from distributions (`bench.lengths`), the step table, and the schedule with its proof. Costs come from counted FLOPs and
the config's links (gradient sums in three parts, inside hosts and between them). Every action of every rank is
simulated, and page, picture and trace are written. Only the trace is sampled: it shows some groups of ranks in full.
Seconds are wall-clock, memory is the process's peak (RSS). `interlace plan` of the same config, which lists the memory
of every rank, is timed too (`plan`), with its processor time.

    python -m bench.scale [--gpus 8 64 512 ...] [--out bench/results/scale.json] [--pictures docs/images]
    python -m bench.scale --without-seconds     # on a busy machine: simulation results and memory only
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.measure import command, machine, versions, write_json

if TYPE_CHECKING:
    from interlace.schedule import Schedule
    from interlace.simulate.arrays import Simulated

CONFIG = Path("configs/vlm_10240_example.toml")
# GPUs -> (replicas of the vision encoder, of the audio encoder, of the language model), and its (tp, pp).
SIZES = {
    8: ((3, 1, 1), (2, 2)),
    64: ((6, 2, 1), (8, 7)),
    512: ((48, 16, 7), (8, 8)),
    2048: ((48, 16, 31), (8, 8)),
    10240: ((192, 64, 156), (8, 8)),
    32768: ((576, 192, 500), (8, 8)),
    100000: ((792, 264, 1546), (8, 8)),
}
MICROBATCHES, SAMPLES = 32, 4  # of each replica of the language model, and of each microbatch
MIXES = ("llava", "video", "audio")  # a third of the samples each
TFLOPS = 400.0
LIMITS = {"seconds": 10.0, "gibibytes": 4.0}  # for 10,240 GPUs


def overrides(gpus: int) -> list[str]:
    """Config overrides for this number of GPUs."""
    (vision, audio, language), (tp, pp) = SIZES[gpus]
    return [
        f"parallel.vision.dp={vision}",
        f"parallel.audio.dp={audio}",
        f"parallel.language_model.dp={language}",
        f"parallel.language_model.tp={tp}",
        f"parallel.language_model.pp={pp}",
        f"train.microbatches={MICROBATCHES}",
        f"train.batch_size={language * MICROBATCHES * SAMPLES}",
    ]


def drawn(count: int, seed: int) -> Any:
    """`count` samples of the mixes, in random order, as input of `interlace simulate`."""
    from bench.lengths import draw
    from interlace.estimate.sample_sizes import causal_pairs
    from interlace.run import Lengths
    from interlace.train.commands.planning.large import Samples

    shares = np.diff(np.arange(len(MIXES) + 1) * count // len(MIXES))
    parts = [draw(mix, int(n), seed=seed + place) for place, (mix, n) in enumerate(zip(MIXES, shares, strict=True))]
    order = np.random.default_rng(seed).permutation(count)

    def of_all(column: str, name: str) -> np.ndarray:
        return np.concatenate([getattr(p, column).get(name, np.zeros(len(p), np.int64)) for p in parts])[order]

    text = np.concatenate([part.text for part in parts])[order]
    read = {name: of_all("rows", name) for name in ("vision", "audio")}
    tokens = text + sum(read.values())
    rows, pairs = {"language_model": tokens.astype(float)}, {"language_model": causal_pairs(tokens)}
    for name in read:
        items, each = of_all("items", name), of_all("tokens", name).astype(float)
        rows[name], pairs[name] = items * each, items * each * each
    return Samples(Lengths(tokens, np.maximum(text // 2, 1), read), rows, pairs)


def longest_sum(schedule: Schedule, found: Simulated) -> float:
    """Seconds of the longest gradient sum: from the arrival of its last rank to its end. This includes the wait for
    earlier sums of the same ranks."""
    from interlace.schedule import Op
    from interlace.schedule.actions import CODES, OP, OTHER

    at = np.flatnonzero(schedule.rows[:, OP] == CODES[Op.REDUCE_GRAD])
    _, number = np.unique(schedule.rows[at, OTHER], return_inverse=True)
    last, end = np.zeros((2, number.max(initial=-1) + 1))
    np.maximum.at(last, number, found.start[at])
    np.maximum.at(end, number, found.finish[at])
    return float((end - last).max(initial=0.0))


def one_size(gpus: int, folder: Path, seed: int) -> dict[str, Any]:
    """Plan, prove, simulate and draw one step; returns costs and results."""
    gc.disable()  # as in the command line
    laps, before = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal before
        now = time.perf_counter()
        laps[name], before = now - before, now

    from interlace.costs.counted import counted_costs
    from interlace.estimate.sample_sizes import key_bytes_of, row_bytes_of
    from interlace.schedule import check
    from interlace.train.commands.planning import large
    from interlace.train.config.load import load
    from interlace.train.data.texts import vocabulary_of
    from interlace.train.models.build import build, build_layout
    from interlace.train.models.costs import stated_links

    lap("imports")
    config = load(CONFIG, overrides(gpus))
    source = str(CONFIG)
    model = build(config, vocabulary_of(config, source=source), source=source)
    lap("model")
    layout = build_layout(config, model, source=source)
    samples = drawn(config.train.batch_size, seed)
    tp = {name: layout.spec(name).tp for name in layout.modules}
    costs = counted_costs(model, TFLOPS * 1e12, tp=tp, row_bytes=row_bytes_of(model), key_bytes=key_bytes_of(model))
    lap("layout, lengths and costs")
    links = stated_links(config)
    assert links is not None and layout.world == gpus
    schedule, result = large.play(config, model, layout, samples, costs, links, MICROBATCHES)
    lap("table, schedule, simulation")
    check(schedule)
    lap("proof")
    busy = large.write(schedule, result, folder, f"{gpus:,} GPUs, {config.parallel.schedule}, simulated")
    lap("page, picture, trace")
    return {
        "gpus": gpus,
        "lanes": len(layout.lanes()),
        "chunks": len(schedule.table.chunks),
        "samples": len(samples.lengths),
        "tokens": int(samples.lengths.tokens.sum()),
        "actions": len(schedule.rows),
        "makespan_seconds": result.makespan,
        "bubble": result.bubble,
        "longest_gradient_sum_seconds": longest_sum(schedule, result),
        "busy": busy,
        "file_megabytes": {name: (folder / name).stat().st_size / 1e6 for name in large.FILES},
        "peak_gibibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "parts_seconds": laps,
    }


def planned(gpus: int) -> dict[str, float]:
    """Seconds and memory of `interlace plan` for the same config, from its imports on."""
    settings = [word for each in overrides(gpus) for word in ("--set", each)]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words = ["plan", str(CONFIG), "--tflops", str(TFLOPS), *settings]
    subprocess.run([sys.executable, "-m", "interlace", *words], check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor_seconds": spent}


def plot_costs(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot memory, and seconds if measured, against GPUs."""
    from interlace.simulate.pictures.style import INK, QUIET, canvas, plain

    timed = all("seconds" in row for row in rows)
    columns = [("seconds", "seconds from start to pictures")] * timed + [("peak_gibibytes", "peak memory, GiB")]
    figure = canvas(4.8 * len(columns), 3.4, 120)
    gpus = [row["gpus"] for row in rows]
    for place, (key, label) in enumerate(columns, 1):
        axes = figure.add_subplot(1, len(columns), place)
        axes.plot(gpus, [row[key] for row in rows], marker="o", color="#3b6fb6")
        limit = LIMITS["seconds" if key == "seconds" else "gibibytes"]
        axes.plot([10240], [limit], marker="v", color="#d9772b", linestyle="none", label="limit for 10,240")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.1 * max(limit, *(row[key] for row in rows)))
        axes.set_xlabel("GPUs", fontsize=9, color=QUIET)
        axes.set_title(label, fontsize=10.5, loc="left", color=INK)
        axes.legend(frameon=False, fontsize=8)
        plain(axes, 8.5)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the sizes, print the table, write JSON and pictures; returns the content of the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", choices=list(SIZES), default=list(SIZES), help="sizes")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--without-seconds", action="store_true", help="leave out what was timed")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scale.json"))
    parser.add_argument("--pictures", type=Path, help="folder for scale-cost.png, and scale.png of 10,240 GPUs")
    parser.add_argument("--keep", type=Path, help="folder for page, picture and trace of each size")
    parser.add_argument("--one", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        result = one_size(options.gpus[0], options.one, options.seed)
        print(json.dumps(result))
        return result
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for gpus in options.gpus:
            folder = (options.keep or Path(scratch)) / str(gpus)
            words = ["--gpus", str(gpus), "--seed", str(options.seed), "--one", str(folder)]
            begin = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", "bench.scale", *words], check=True, stdout=subprocess.PIPE)
            seconds = time.perf_counter() - begin
            row = {**json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}
            print(
                f"{gpus:7,} GPUs: {row['actions']:10,} actions, simulated step {row['makespan_seconds']:6.2f} s, "
                f"bubble {row['bubble']:.1%}; took {row['seconds']:6.1f} s and {row['peak_gibibytes']:.2f} GiB"
            )
            if not options.without_seconds:
                row["plan"] = planned(gpus)
                took = "interlace plan {seconds:.1f} s, {processor_seconds:.1f} s of its processor"
                print(took.format(**row["plan"]))
            else:
                row = {name: value for name, value in row.items() if name not in ("seconds", "parts_seconds")}
            rows.append(row)
            if options.pictures is not None and gpus == 10240:
                (options.pictures / "scale.png").write_bytes((folder / "timeline.png").read_bytes())
    report = {
        "benchmark": "scale",
        "command": command("scale", argv),
        "machine": machine(),
        "versions": versions("torch", "transformers"),
        "limits": LIMITS,
        "sizes": rows,
    }
    if options.pictures is not None:
        plot_costs(rows, options.pictures / "scale-cost.png")
    write_json(options.out, report)
    return report


if __name__ == "__main__":
    main()
