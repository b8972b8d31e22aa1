"""Fault injection in runs whose lanes have several ranks: one rank dies, stops or is late at any moment of a step.

    python -m tests.distributed.lane_faults --out tests/distributed/lane_faults.json

A fault happens at an event of the second step of one rank: at the start of an entry of its flight recorder, or at a
step of a batch in one of its lanes. A run without a fault lists the events; the schedule is the same each time, so the
n-th event is too. After the fault each other rank must end in time, name the lost rank, and leave nothing behind. With
"late", a delay below the timeout, all ranks must reach the loss of the run without a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from interlace.layout import Layout, ParallelSpec
from interlace.run import PipelineError, parallelize
from tests.comm.jobs import grown, used
from tests.distributed.workers import run_ranks, shorten
from tests.tiny import random_microbatches, tiny_mllm

WORLD = 4
TIMEOUT = 3.0  # seconds of each wait in the second step
STARTING = 60.0  # timeout before it: starting processes share their cores with many others
SLACK = 60.0  # extra seconds for a busy machine, besides the waits
LAYOUTS = {
    "tp2 pp2": {"vision": ParallelSpec(tp=2, dp=2), "language_model": ParallelSpec(tp=2, pp=2)},
    "tp2 cp2": {"vision": ParallelSpec(dp=4), "language_model": ParallelSpec(tp=2, cp=2)},
    "pp2 cp2": {"vision": ParallelSpec(cp=2, dp=2), "language_model": ParallelSpec(cp=2, pp=2)},
}
KINDS = ("kill", "stop", "slow", "late")


class Fault(NamedTuple):
    """kind: of `KINDS`. point: the number of the victim's event in the second step at which it happens."""

    layout: str
    kind: str
    victim: int
    point: int


class Outcome(NamedTuple):
    """Outcome of a fault. event: the victim's next action. trouble: the deviation from the expected outcome, or "".
    seconds: from the fault to the end of the last survivor."""

    event: str
    trouble: str
    seconds: float
    words: dict[int, str]


def _steps(rank: int, layout: str, fault: Fault | None, folder: str) -> dict[str, Any]:
    """Two steps on one rank: the reported error, its time, and leftovers of the run in its process."""
    before = used()
    mllm = tiny_mllm(layers=2, encoders=("vision",), kv_heads=2)
    made = Layout.from_specs(mllm, LAYOUTS[layout], placement="shared")
    batch = [sample for group in random_microbatches(mllm, "all") for sample in group]
    parallel = parallelize(mllm, made, transport="distributed", timeout=STARTING)
    channel, events = parallel.channel, []
    assert channel is not None
    parallel.step(batch, microbatches=4)
    dist.barrier()
    mine = fault is not None and rank == fault.victim

    def reached(event: str) -> None:
        events.append(event)
        if fault is not None and mine and len(events) == fault.point + 1:
            (Path(folder) / "fault").write_text(json.dumps([time.monotonic(), event]))
            _break(fault.kind)

    begin, lanes = channel.recorder.begin, channel.connect(())
    # Others wait for the late rank; the other kinds test how long they wait.
    patience = STARTING if fault is not None and fault.kind == "late" else TIMEOUT

    def begun(kind: str, what: object, ranks: Any = ()) -> int:
        reached(kind)
        return begin(kind, what, ranks)

    channel.recorder.begin = begun  # type: ignore[method-assign]
    shorten(channel, patience)
    for transport in lanes.values():
        transport.timeout = patience
        transport.before = lambda _, step: reached(f"lane: {step}")  # type: ignore[attr-defined]
    loss, text = 0.0, "was told nothing"
    try:
        loss = parallel.step(batch, microbatches=4).loss
    except PipelineError as error:
        text = str(error)
    told = time.monotonic()
    if fault is None or fault.kind == "late":
        dist.barrier()
    channel.close()
    dist.destroy_process_group()
    del parallel, channel, lanes, transport
    return {"loss": loss, "text": text, "told": told, "events": events, "grown": grown(before)}


def _break(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(TIMEOUT / 2 if kind == "late" else 3 * TIMEOUT)


def undisturbed(layout: str) -> tuple[float, list[list[str]]]:
    """Loss of a step without a fault, and the events of each rank in it."""
    results = run_ranks(WORLD, _steps, layout, None, "")
    assert [kind for kind, _ in results] == ["returned"] * WORLD, results
    assert len({value["loss"] for _, value in results}) == 1 and all(value["loss"] > 0 for _, value in results)
    assert not any(value["grown"] for _, value in results), results
    return results[0][1]["loss"], [value["events"] for _, value in results]


def faults(layout: str, events: list[list[str]], count: int, seed: int = 0) -> list[Fault]:
    """This many faults, each kind and each rank in turn, at random events; no event twice in a kind."""
    rng = random.Random(seed)
    result: dict[Fault, None] = {}
    while len(result) < count:
        kind, victim = KINDS[len(result) % len(KINDS)], len(result) // len(KINDS) % WORLD
        result[Fault(layout, kind, victim, rng.randrange(len(events[victim])))] = None
    return list(result)


def _named() -> set[str]:
    """Shared memory objects of Interlace, by name; other programs may create and delete theirs."""
    return {name for name in os.listdir("/dev/shm") if "interlace" in name}


def lost_in(text: str) -> set[int]:
    """The ranks that a message names first as lost; the rest is the symptom or another rank's report."""
    head, _, rest = text.partition("lost rank")
    numbers = rest.removeprefix("s").partition("(")[0].replace(",", " ").split() if head != text else []
    return {int(number) for number in numbers if number.isdecimal()}


def run(fault: Fault, loss: float) -> Outcome:
    """One fault, in four separate processes."""
    with tempfile.TemporaryDirectory() as folder:
        named_before = _named()
        stopped = [fault.victim] if fault.kind == "stop" else []
        patience = 5 * TIMEOUT + SLACK  # of those that end later than the first one: the slow one
        results = run_ranks(
            WORLD, _steps, fault.layout, fault, folder, timeout=60 + patience, grace=patience, stopped=stopped
        )
        left = _named() - named_before
        note = Path(folder) / "fault"
        if not note.exists():
            return Outcome("none", f"the fault did not happen: {results}", 0.0, {})
        began, event = json.loads(note.read_text())
    troubles = [f"left in /dev/shm: {sorted(left)}"] if left else []
    words, seconds = {}, 0.0
    for rank, (kind, value) in enumerate(results):
        if rank == fault.victim and fault.kind in ("kill", "stop"):
            continue
        if kind != "returned":
            troubles.append(f"rank {rank} {kind}: {value}")
            continue
        words[rank] = value["text"]
        if value["grown"]:
            troubles.append(f"rank {rank} kept {value['grown']}")
        if fault.kind == "late":
            if (value["text"], value["loss"]) != ("was told nothing", loss):
                troubles.append(f"rank {rank} has loss {value['loss']} and not {loss}: {value['text']}")
        elif rank != fault.victim:
            seconds = max(seconds, value["told"] - began)
            if lost_in(value["text"]) != {fault.victim}:
                troubles.append(f"rank {rank} does not name rank {fault.victim}: {value['text']}")
    if seconds > 2 * TIMEOUT + SLACK:
        troubles.append(f"it took {seconds:.1f} s")
    return Outcome(event, "; ".join(troubles), seconds, words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--count", type=int, default=34, help="faults of each layout")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    troubled = 0
    for layout in options.layouts:
        loss, events = undisturbed(layout)
        print(f"{layout}, events of each rank:", [dict(Counter(mine)) for mine in events], flush=True)
        for fault in faults(layout, events, options.count):
            outcome = run(fault, loss)
            rows.append({**fault._asdict(), "event": outcome.event, "seconds": round(outcome.seconds, 2)})
            rows[-1]["trouble"] = outcome.trouble
            print(len(rows), *rows[-1].values(), flush=True)
            troubled += bool(outcome.trouble)
            if options.out:  # after each fault, since a sweep takes long
                table = {"timeout": TIMEOUT, "faults": len(rows), "troubled": troubled}
                lines = ",\n".join(json.dumps(row) for row in rows)
                options.out.write_text(json.dumps(table)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    print(f"{len(rows)} faults, {troubled} with trouble")
    return bool(troubled)


if __name__ == "__main__":
    sys.exit(main())
