"""Fault test: a run whose data a Ray cluster prepares, while nodes, workers and the keeper actor of that cluster are
killed. Its losses equal those of a run that decodes in its own thread, bit for bit: no sample was lost or duplicated.

The cluster has a head without CPUs, which hosts the run, and nodes of one CPU each that decode pictures, all on this
machine. A kill comes each time the run has logged a given number of further steps, so that all kills come during
training. Another node joins for each lost one. The cluster notices a dead node within seconds; with Ray's defaults it
takes some fifteen.

    python -m bench.ray_kills --out bench/results/ray_kills.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from bench.measure import command, machine, versions, write_json
from interlace.data.chats.encoding.bpe import LEAST, write_tokenizer

KINDS = ["node", "worker", "keeper", "both"]
LOSS, MOVED = "loss_metrics/global_avg_loss", "data/moved(MiB)"
RESTARTS, BLANK = "data/worker_restarts", "data/blank_items"
LONGEST = 300.0
"""Seconds without a new step after which the run counts as hung."""
MEMORY = 80_000_000
"""Bytes of a node's object store; Ray refuses a smaller one."""
# Ray's default health check probes a node every 3 s and fails after five missing answers. A killed node refuses at
# once, so more frequent probes find it sooner; a busy one still has 10 s for each answer.
HEAD = {
    "include_dashboard": False,
    "no_monitor": True,
    "include_log_monitor": False,
    "_system_config": {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500},
}

CONFIG = """
[run]
name = "ray-kills"
folder = "{folder}/{name}"

[model.vision]
architecture = "SiglipVisionModel"

[model.vision.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
image_size = 32
patch_size = 8

[model.language_model]
architecture = "LlamaForCausalLM"

[model.language_model.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 512

[data]
dataset = "chats"
train = ["{folder}/train.jsonl"]
validation = ["{folder}/validation.jsonl"]
tokenizer = "{folder}/tokenizer"
cache = "{folder}/cache"
decode_first = false
{data}

[parallel]
placement = "shared"
dp = {ranks}
threads = 1

[train]
steps = {steps}
batch_size = {batch}
validate_every = 0
validation_samples = 4

[log]
every = 1
samples = 0
accuracy_samples = 0
trackers = []
trace_step = 0
predict = false
"""


def write_chats(folder: Path, count: int, side: int) -> None:
    """`count` chats with a picture each, of `side` pixels (900: some 50 ms to decode), and a tokenizer."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    lines = []
    for number in range(count):
        name = f"pictures/{number}.png"
        Image.fromarray(draw.integers(0, 256, (side, side, 3), np.uint8)).save(folder / name, compress_level=1)
        turns = [
            {"role": "user", "content": f"<image>Which number is this? {number % 7}"},
            {"role": "assistant", "content": f"It is {number}, of course."},
        ]
        lines.append(json.dumps({"messages": turns, "images": [name]}))
    (folder / "train.jsonl").write_text("\n".join(lines[4:]))
    (folder / "validation.jsonl").write_text("\n".join(lines[:4]))
    write_tokenizer(folder / "tokenizer", lines, LEAST + 50)


class Cluster:
    """A local Ray cluster of processes on this machine, in a temporary folder. nodes: those that decode, of one CPU
    each, beside a head that does not."""

    def __init__(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster as Local

        # Not in TMPDIR: the path of a unix socket has 107 bytes at most, and Ray's own part takes 80 of them.
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        head = {"num_cpus": 0, "object_store_memory": MEMORY, **HEAD}
        with self._settings():
            self.local = Local(initialize_head=True, head_node_args=head)
        self.address = self.local.address
        for _ in range(nodes):
            self.add()

    def add(self, cpus: int = 1, **more: Any) -> Any:
        """Add a node; it decodes unless it has no CPUs."""
        with self._settings():
            return self.local.add_node(num_cpus=cpus, object_store_memory=MEMORY, **more)

    def _settings(self) -> Any:
        """Environment of nodes that start meanwhile: they write into the folder and report no usage. They do not kill
        workers when other programs fill the machine's memory. Their workers have normal priority: at Ray's own niceness
        of 15, a worker takes over a minute to start if others use every core."""
        given = {
            "TMPDIR": self.folder,
            "USAGE_STATS_ENABLED": "0",
            "memory_monitor_refresh_ms": "0",
            "worker_niceness": "0",
        }
        return mock.patch.dict(os.environ, {f"RAY_{key}": value for key, value in given.items()})

    @property
    def nodes(self) -> list[Any]:
        return [node for node in self.local.list_all_nodes() if node is not self.local.head_node]

    def kill(self, kind: str, draw: random.Random) -> bool:
        """Kills one target: a "node" with all finished and pending objects, which another node replaces; a "worker", a
        process that decodes; the "keeper", the actor that hands out tasks; or "both", the keeper and at once a node.
        False: no target is running now."""
        if kind == "both":
            return self.kill("keeper", draw) and self.kill("node", draw)
        if kind == "node":
            self.remove(draw.choice(self.nodes))
            self.add()
            return True
        name, nodes = {"keeper": "ray::Keeper", "worker": "ray::answer"}[kind], self.local.list_all_nodes()
        pids = sorted(pid for node in nodes for pid, called in children(raylet(node)) if called.startswith(name))
        try:
            os.kill(draw.choice(pids), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True

    def remove(self, node: Any) -> None:
        """Kills a node with all its processes; Ray's agents would otherwise survive it by minutes."""
        os.kill(raylet(node), signal.SIGSTOP)  # so that it starts none meanwhile
        pids = [pid for pid, _ in children(raylet(node))]
        self.local.remove_node(node, allow_graceful=False)  # draining may take minutes
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(alive(pid) for pid in pids):  # they write into the folder
            time.sleep(0.01)

    def close(self) -> None:
        for node in [*self.nodes, self.local.head_node]:
            self.remove(node)
        shutil.rmtree(self.folder)


def raylet(node: Any) -> int:
    """The raylet, which starts a node's processes."""
    return int(node.all_processes["raylet"][0].process.pid)


def children(parent: int) -> Iterator[tuple[int, str]]:
    """The children of a process, with their command names."""
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            of = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            name = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if of == parent:
            yield int(place.name), name


def alive(pid: int) -> bool:
    """True if it runs; a zombie does not count."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Logged steps of a run."""
    files = list(folder.glob("*/latest/metrics.jsonl"))
    return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []


def trained(
    folder: Path, name: str, data: str, given: Any, kill: Callable[[], bool] = lambda: False
) -> tuple[list[dict[str, Any]], float, int]:
    """The logged steps of a run, its seconds, and the number of kills: one each time that it has logged a given number
    of further steps, chosen so that all kills fit."""
    path = folder / f"{name}.toml"
    more = {"steps": given.steps, "batch": given.batch, "ranks": given.ranks}
    path.write_text(CONFIG.format(folder=folder, name=name, data=f'reading = "{given.reading}"\n{data}', **more))
    log = folder / f"{name}.log"
    began = moved = time.monotonic()
    every, killed = max(1, (given.steps - 8) // max(1, given.kills)), 0
    with open(log, "w") as said:
        process = subprocess.Popen([sys.executable, "-m", "interlace", "train", str(path)], stdout=said, stderr=said)
        try:
            seen = 0
            while process.poll() is None:
                time.sleep(0.05)
                steps = len(steps_of(folder / name))
                moved = time.monotonic() if steps > seen else moved
                seen = steps
                if time.monotonic() - moved > LONGEST:
                    raise RuntimeError(
                        f"{name}: no step for {LONGEST:g} s after step {seen}: {log.read_text()[-2000:]}"
                    )
                if seen > every * killed and killed < given.kills and kill():
                    killed += 1
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return steps_of(folder / name), time.monotonic() - began, killed


def compared(folder: Path, given: Any) -> dict[str, Any]:
    """A run of each kind of kills beside one that decodes in its thread."""
    write_chats(folder, given.samples + 4, given.side)
    thread, seconds, _ = trained(folder, "thread", "workers = 0", given)
    expected, moved = [line[LOSS] for line in thread], [line.get(MOVED, 0.0) for line in thread]
    rows = [{"data": "thread", "steps": len(expected), "seconds": seconds, "kills": 0, "MiB_moved": sum(moved)}]
    for kind in given.kind:
        cluster = Cluster(given.nodes)
        try:
            kill = partial(cluster.kill, kind, random.Random(given.seed))
            data = f'workers = "ray"\nray_address = "{cluster.address}"'
            if given.reading == "random":
                data += f"\ncache_gb = {given.cache_gb}"
            lines, seconds, killed = trained(folder, f"ray-{kind}", data, given, kill)
        finally:
            cluster.close()
        result = [line[LOSS] for line in lines]
        rows.append(
            {
                "data": "ray",
                "killed": kind,
                "kills": killed,
                "steps": len(result),
                "seconds": seconds,
                "answers_lost_and_asked_for_again": lines[-1].get(RESTARTS, 0),
                "blank_items": max(line.get(BLANK, 0) for line in lines),
                "losses_bit_equal": result == expected,
                "bytes_moved_equal": [line.get(MOVED, 0.0) for line in lines] == moved,
                "largest_difference": max(abs(a - b) for a, b in zip(result, expected, strict=True)),
            }
        )
    about = {key: getattr(given, key) for key in ("ranks", "reading", "nodes", "samples", "batch", "side")}
    return {**about, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--reading", choices=["random", "stream"], default="random", help="of a stream nothing is kept")
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--side", type=int, default=900, help="of a picture, in pixels")
    parser.add_argument("--nodes", type=int, default=2, help="that decode, of one CPU each")
    parser.add_argument("--cache-gb", type=float, default=0.001, help="of decoded items in the object store")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = compared(Path(folder), given)
    for row in report["rows"]:
        print(json.dumps(row))
    if given.out is not None:
        about = {"benchmark": "ray_kills", "command": command("ray_kills", arguments)}
        write_json(given.out, {**about, "machine": machine(), "versions": versions("torch", "ray"), **report})
    whole = all(
        row["losses_bit_equal"] and row["bytes_moved_equal"] and not row["blank_items"] and row["kills"] == given.kills
        for row in report["rows"][1:]
    )
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
