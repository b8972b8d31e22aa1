"""`parallel = "auto"` on this machine: its cost, and the step time of every layout of up to 2 processes.

    python -m bench.auto                  configs/digits.toml; --config FILE for another, --steps N for longer runs
    python -m bench.auto --json FILE      also written there

Each layout trains in its own processes, one layout after the other, in rounds. The result is the least of the rounds'
median step times, since other load on the machine only makes steps longer. Layouts are those of the candidate list
without shards, tensor and context parallelism, which need more ranks to pay off; `--all` includes them.

Target: auto is within 10 % of the fastest layout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.measure import command, machine, versions, write_json
from interlace.train.auto import layout_file
from interlace.train.auto.candidates import Candidate, applied, listed
from interlace.train.auto.choose import openings_of
from interlace.train.auto.machine import threads
from interlace.train.auto.resolve import choose
from interlace.train.config.load import dumps, load
from interlace.train.config.sections import Config

ROOT = Path(__file__).parents[1]
MOST_RANKS = 2
STEP = "time_metrics/end_to_end(s)"
WARM = 3  # steps that do not count
WITHIN = 1.10


def layouts_of(config: Config, everything: bool) -> dict[str, Config]:
    """Name -> the config with a layout of 1 or 2 processes; layouts that the config rejects are left out."""
    result: dict[str, Config] = {}
    for world in range(1, MOST_RANKS + 1):
        for candidate in listed(config.modules(), world, openings_of(config)):
            if not everything and not _plain(candidate):
                continue
            for count in threads(config, world):
                each = replace(candidate, threads=count)
                try:
                    result[str(each)] = applied(config, each)
                except ValueError:
                    continue
    return result


def _plain(candidate: Candidate) -> bool:
    return candidate.microbatches <= 2 and all(
        spec.tp * spec.cp == 1 and spec.shard == "none" for _, spec in candidate.specs
    )


def seconds_of(config: Config, steps: int, folder: Path) -> float:
    """The median step of a short run in separate processes."""
    quiet = {
        "train": {"steps": steps, "warmup_steps": 0, "validate_every": 0, "validation_samples": 2, "epochs": None},
        "log": {"every": 1, "trace_step": 0, "samples": 0, "accuracy_samples": 0, "trackers": []},
        "checkpoint": {"every": 0},
        "run": {"folder": str(folder)},
    }
    table: dict[str, Any] = config.model_dump()
    for section, keys in quiet.items():
        table[section] = table[section] | keys
    path = folder / "config.toml"
    path.write_text(dumps(Config.model_validate(table)))
    done = subprocess.run(
        [sys.executable, "-m", "interlace", "train", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a run failed: {done.stderr[-2000:]}")
    [lines] = [each for each in folder.rglob("metrics.jsonl") if not each.parent.is_symlink()]
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    times = [row[STEP] for row in rows if STEP in row]
    return statistics.median(times[WARM:])


def main() -> None:
    """Print a line per layout, fastest first, and the rank of auto."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "digits.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = load(options.config, [*options.set, "parallel=auto", f"parallel.max_ranks={MOST_RANKS}"])
    text, decision = choose(config, source=str(options.config), say=print)
    configs = layouts_of(config, options.all)
    auto = str(decision.best.candidate)
    configs[auto] = layout_file.with_layout(config, text, "layout.toml")
    rounds: list[dict[str, float]] = []
    predicted = {str(each.candidate): each.seconds for each in decision.outcomes}
    measured: dict[str, float] = {}
    for turn in range(options.rounds):
        rounds.append({})
        for name, each in configs.items():
            with tempfile.TemporaryDirectory(prefix="interlace-auto-") as folder:
                rounds[-1][name] = seconds_of(each, options.steps, Path(folder))
            print(f"round {turn}: {1e3 * rounds[-1][name]:8.1f} ms  {name}", flush=True)
        measured = {name: min(each[name] for each in rounds) for name in configs}
        if options.json is not None:  # after each round: rounds take minutes
            write_json(options.json, report_of(options, auto, rounds, measured, predicted))
    for name, seconds in sorted(measured.items(), key=lambda item: item[1]):
        simulated = f"{1e3 * predicted[name]:8.1f} ms simulated" if name in predicted else " " * 21
        print(f"{1e3 * seconds:8.1f} ms  {simulated}  {name}{'  <- auto' if name == auto else ''}")
    ratio = measured[auto] / min(measured.values())
    print(f"auto takes {ratio:.3f} times the fastest's time: {'well' if ratio <= WITHIN else 'NOT'} within 10 %")


def report_of(
    options: argparse.Namespace,
    auto: str,
    rounds: list[dict[str, float]],
    measured: dict[str, float],
    predicted: dict[str, float],
) -> dict[str, Any]:
    """Content of the JSON."""
    return {
        "benchmark": "auto",
        "command": command("auto", sys.argv[1:]),
        "config": str(options.config.name),
        "steps": options.steps,
        "auto": auto,
        "ratio": measured[auto] / min(measured.values()),
        "measured": measured,
        "rounds": rounds,
        "predicted": predicted,
        "machine": machine(),
        "versions": versions("torch", "transformers"),
    }


if __name__ == "__main__":
    main()
