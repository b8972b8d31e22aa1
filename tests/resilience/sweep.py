"""Faults at random moments of an elastic run, and the checks after them: `python -m tests.resilience.sweep`.

An episode is one run. Its faults come one after the other, each at a random moment of a random step. A new node
replaces every lost node. Faults are kills (the supervisor and its ranks; every fourth one hits the node of rank 0),
hangs (SIGSTOP) and preemptions (SIGTERM). The run trains until all faults have come, and then to its end.

`python -m tests.resilience.sweep` writes bench/results/resilience_sweep.json. Tests run short episodes of it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.measure import machine, versions
from tests.resilience.elastic_cluster import Cluster, losses, table, uninterrupted

TABLE = Path(__file__).parents[2] / "bench" / "results" / "resilience_sweep.json"
KINDS = {"kill": "death", "stop": "hang", "preempt": "leave"}  # fault -> its name at the coordinator


def play(
    folder: Path,
    faults: Sequence[str],
    *,
    seed: int,
    nodes: int,
    min_nodes: int,
    steps: int,
    lane: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs and checks one episode; returns its figures. Raises AssertionError.

    lane: see `cut`.
    """
    chance = random.Random(seed)
    made = table(
        folder / "runs",
        # A low rate: the order in which gradients are summed differs between generations. At 3e-3 the fp32 rounding
        # differences grow to 1.2e-5 of a loss within 300 steps.
        train={"steps": steps, "microbatches": 4, "batch_size": 16, "lr": 3e-4},
        resilience={"nodes": nodes, "min_nodes": min_nodes, "heartbeat": 4.0},
    )
    if lane:
        cut(made, lane)
    began = time.monotonic()
    with Cluster(folder, made) as cluster:
        cluster.slow(0.3)
        living = [f"n{i}" for i in range(nodes)]
        cluster.start(*living)
        cluster.wait_for(cluster.reached(2), "the first steps", 400)
        wants = 2
        for number, fault in enumerate(faults):
            victim = chance.choice(living)
            if fault == "kill" and number % 4 == 0:  # the node of rank 0
                first = cluster.events("generation")[-1]["pipelines"][0][0].rpartition("-")[0]
                victim = first if first in living else victim
            time.sleep(chance.uniform(0.0, 1.0))
            generation = cluster.events("generation")[-1]["number"]
            {"kill": cluster.kill, "stop": cluster.stop, "preempt": cluster.preempt}[fault](victim)
            living.remove(victim)
            fresh = f"m{number}"
            cluster.start(fresh)
            living.append(fresh)
            cluster.wait_for(
                lambda g=generation, n=fresh: any(  # type: ignore[misc]
                    event["number"] > g and any(node.startswith(f"{n}-") for p in event["pipelines"] for node in p)
                    for event in cluster.events("generation")
                ),
                f"generation with {fresh} after {fault} of {victim}",
                240,
            )
            joined = cluster.events("generation")[-1]["number"]
            wants = max(each["step"] for each in cluster.steps()) + 1
            cluster.wait_for(cluster.reached(wants, joined), f"step {wants} after {fault} of {victim}", 240)
        cluster.slow(0.0)
        codes = cluster.end(600)
        alive = {name: codes[name] for name in living}
        assert set(alive.values()) == {0}, (alive, cluster.told())
    return check(cluster, made, living) | {
        "faults": {fault: faults.count(fault) for fault in dict.fromkeys(faults)}, "seed": seed, "nodes": nodes,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def cut(made: dict[str, Any], lane: Mapping[str, Any]) -> None:
    """Cuts the modules of a table among the ranks of a node. lane: [parallel] of each module."""
    made["parallel"] |= {"vision": dict(lane), "language_model": dict(lane)}
    tp = lane.get("tp", 1)
    made["resilience"]["ranks_per_node"] = tp * lane.get("cp", 1)
    made["model"]["language_model"]["config"]["num_key_value_heads"] = tp  # one head per rank


def check(cluster: Cluster, made: dict[str, Any], living: Sequence[str]) -> dict[str, Any]:
    """Checks a run that has ended successfully; returns its figures."""
    folder = cluster.run_folder()
    expected, samples = uninterrupted(made, cluster.folder / "alone")
    result, steps = losses(folder), cluster.steps()
    assert result.keys() == expected.keys()
    worst = max(abs(result[step] - expected[step]) for step in expected)
    assert worst < 1e-5, worst
    # Every step counted once on all its ranks, with the samples of an uninterrupted run.
    assert {each["step"] for each in steps} == set(expected)
    assert all(each["samples"] == list(samples[each["step"]]) for each in steps)
    for pid in {each["pid"] for each in steps}:
        mine = [each["step"] for each in steps if each["pid"] == pid]
        assert mine == list(range(mine[0], mine[-1] + 1))
    # Nodes that live at the end still have the process with which they joined.
    last = {each["pid"] for each in steps if each["step"] == max(expected)}
    assert last == {pid for name in living for pid in cluster.ranks(name)}, (last, living)
    changes = cluster.events("generation")
    check_pipelines(changes, cluster.events("ready"), made)
    lines = [json.loads(line) for line in (folder / "recovery.jsonl").read_text().splitlines()]
    check_bytes(lines, cluster.received(), made)
    lost: dict[str, list[float]] = {}
    for line in lines[1:]:
        lost.setdefault(line["cause"][0][0] if line["cause"] else "", []).append(line["lost"])
    pipelines = [len(change["pipelines"]) for change in changes]
    counted = {each["step"]: each["generation"] for each in steps}  # once each
    depths = {each["number"]: "+".join(str(len(p)) for p in each["pipelines"]) for each in changes}
    shapes = [depths[generation] for generation in counted.values()]
    return {
        "steps": len(expected), "generations": len(changes), "worst_loss_difference": worst,
        "most_pipelines": max(pipelines), "fewest_pipelines": min(pipelines),
        # Depths of the pipelines that trained in parallel -> number of steps that counted so.
        "steps_of_depths": {shape: shapes.count(shape) for shape in dict.fromkeys(shapes)},
        "copied_mib": round(sum(line["bytes"] for line in lines) / 2**20, 2),
        "lost_seconds": {
            kind: {"count": len(each), "median": round(statistics.median(each), 2), "most": round(max(each), 2)}
            for kind, each in lost.items()
        },
        "false_alarms": len(cluster.events("false alarm")),
    }  # fmt: skip


def check_pipelines(changes: Sequence[dict[str, Any]], ready: Sequence[dict[str, Any]], made: dict[str, Any]) -> None:
    """Checks pipelines after every change: `plan.reconfigure`, then `plan.admit`, of the pipelines before."""
    from interlace import plan

    own, count = made["resilience"], made["train"]["microbatches"] * (made["resilience"]["faults"] + 1)
    most = own["nodes"] - own["faults"] * own["min_nodes"]
    sizes = list(range(own["min_nodes"], most + 1))
    order = [event["node"] for event in ready]
    for before, after in pairwise(changes):
        kinds = [cause.split(" ") for cause in after["cause"]]
        gone = {node for kind, *rest in kinds for node in rest if kind != "join"}
        inside = {node for pipeline in before["pipelines"] for node in pipeline}
        came = [node for node in order if node not in inside and any(node in p for p in after["pipelines"])]
        left = plan.reconfigure(before["pipelines"], gone, sizes, faults=own["faults"])
        expected = [list(each.nodes) for each in plan.admit([e.nodes for e in left], came, sizes, max_pipelines=count)]
        assert after["pipelines"] == expected, (before, after, expected)


def check_bytes(lines: Sequence[dict[str, Any]], received: Mapping[int, int], made: dict[str, Any]) -> None:
    """Checks bytes copied at a change: exactly what nodes hold after it and did not hold before.

    received: generation -> bytes that all ranks together received.
    """
    from interlace.resilience.coordinator.layouts import held_by
    from interlace.run.execute.ranks import held_in_lane
    from interlace.run.graph import parameter_layers
    from interlace.train.checkpoint.identity import canonical_names
    from interlace.train.config.load import from_table
    from interlace.train.data.texts import tokenizer_of
    from interlace.train.elastic.proposals import templates_of
    from interlace.train.models.build import build
    from interlace.train.models.costs import flop_costs

    config = from_table(dict(made))
    model = build(config, tokenizer_of(config, source="test"))
    templates = templates_of(config, model, flop_costs(config, model))
    layers, first = parameter_layers(model), canonical_names(model)
    # fp32 bytes per weight in each place of a lane: the weight, two moments, an average; and the step count.
    lane = held_in_lane(model, templates.layout([templates.lane_size]), sequence_parallel=True)
    size = [{name: count * 16 + 4 for name, count in each.items()} for each in lane]
    each = made["resilience"].get("ranks_per_node", 1)

    def held(line: dict[str, Any]) -> dict[tuple[str, int], set[str]]:
        order = [(node, rank) for pipeline in line["pipelines"] for node in pipeline for rank in range(each)]
        layout = templates.layout([len(pipeline) * each for pipeline in line["pipelines"]])
        return {place: set(held_by(layout, rank, layers, first)) for rank, place in enumerate(order)}

    for before, after in pairwise(lines):
        if after["generation"] == before["generation"] + 1:  # otherwise a generation between them was abandoned
            had = held(before)
            missing = [(place, name) for place, names in held(after).items() for name in names - had.get(place, set())]
            expected = sum(size[rank % len(size)].get(name, 0) for (_, rank), name in missing)
            assert after["bytes"] == expected == received[after["generation"]], (before, after, received)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hangs", type=int, default=10)
    parser.add_argument("--preemptions", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--min-nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="to the runs that the table has")
    options = parser.parse_args()
    runs = json.loads(TABLE.read_text())["runs"] if options.add else []
    faults = ["kill"] * options.kills + ["stop"] * options.hangs + ["preempt"] * options.preemptions
    random.Random(options.seed).shuffle(faults)
    rows = []
    for episode in range(options.episodes):
        folder = Path(tempfile.mkdtemp(prefix="sweep-"))
        own = faults[episode :: options.episodes]
        rows.append(
            play(
                folder, own, seed=options.seed + episode, nodes=options.nodes, min_nodes=options.min_nodes,
                steps=options.steps,
            )
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        said = " ".join(["python -m tests.resilience.sweep", *sys.argv[1:]])
        here = {"machine": machine(), "versions": versions("torch")}
        runs_now = [*runs, {"command": said, "options": vars(options), "episodes": rows}]
        TABLE.write_text(json.dumps({"benchmark": "resilience_sweep", **here, "runs": runs_now}, indent=1) + "\n")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
