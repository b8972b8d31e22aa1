"""Failure detection of an elastic run: delay until a dead or hung rank is noticed, and false alarms.

    python -m bench.resilience --detection --out bench/results/resilience_detection.json
    python -m bench.resilience --quiet-minutes 20 --out bench/results/resilience_quiet.json

Ranks are processes that vote in every step and compute nothing. Each has its own supervisor; a coordinator runs beside
them. Detection is the time from the signal (SIGKILL, SIGSTOP) to the event in the following generation; both clocks are
this machine's. Quiet minutes run beside two busy loops and count suspected ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import command, machine, versions, write_json
from interlace.resilience.coordinator.process import Coordinator
from interlace.resilience.settings import Settings

PATIENCE = 300.0  # seconds for anything to happen
RANK = """
import time
from interlace.resilience.member import Member
member = Member.from_environment(60.0)
generation = member.next_generation(0, 600.0)
step = 0
while True:
    member.progress.computing()
    time.sleep({seconds})
    answer = member.vote(generation, step)
    step += 1
    if answer != "commit":
        generation = member.next_generation(generation.number, 600.0)
        step = 0
"""
SUPERVISOR = """
import sys
from pathlib import Path
from interlace.resilience.settings import Settings
from interlace.resilience.supervisor import Supervisor
import json
address, settings, logs, rank = sys.argv[1:]
command = [sys.executable, "-c", rank]
sys.exit(Supervisor(address, command, Settings.from_table(json.loads(settings)), host="bench", logs=Path(logs)).run())
"""


class Run:
    """An elastic run of `nodes` nodes with a rank each, in this folder."""

    def __init__(self, folder: Path, nodes: int, heartbeat: float, seconds: float) -> None:
        self.folder, self.nodes = folder, nodes
        self._settings = Settings(nodes=nodes, faults=1, min_nodes=1, heartbeat=heartbeat, gather=PATIENCE)
        self.coordinator = Coordinator("127.0.0.1", 0, journal=folder / "journal")
        self._rank = RANK.format(seconds=seconds)
        self._supervisors: list[subprocess.Popen[bytes]] = []
        self._over = False
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while not self._over:
            self.coordinator.turn()

    def start(self, nodes: int) -> None:
        address, table = f"127.0.0.1:{self.coordinator.port}", json.dumps(self._settings.to_table())
        words = [sys.executable, "-c", SUPERVISOR, address, table, str(self.folder / "logs"), self._rank]
        self._supervisors += [subprocess.Popen(words) for _ in range(nodes)]

    def journal(self, what: str) -> list[dict[str, Any]]:
        path = self.folder / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["what"] == what]

    def until(self, happened: Callable[[], Any], what: str) -> Any:
        """Poll `happened` until it returns a true value, and return that. Raises TimeoutError."""
        deadline = time.monotonic() + PATIENCE
        while not (result := happened()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {PATIENCE:g} s: {self.journal('lost')[-3:]}")
            time.sleep(0.02)
        return result

    def trains(self) -> bool:
        """True if the newest generation has all nodes."""
        newest = self.journal("generation")[-1:]
        return bool(newest) and sum(map(len, newest[0]["pipelines"])) == self.nodes

    def has_lost(self, nodes: int) -> bool:
        return len(self.journal("lost")) >= nodes

    def ranks(self) -> list[int]:
        """Process ids of the ranks: the children of the running supervisors."""
        alive = [each.pid for each in self._supervisors if each.poll() is None]
        children = [Path(f"/proc/{process}/task/{process}/children").read_text().split() for process in alive]
        return [int(child) for each in children for child in each]

    def close(self) -> None:
        for each in self._supervisors:
            each.kill()  # its rank dies with it
            each.wait()
        self._over = True
        time.sleep(0.1)


def detection(nodes: int, times: int, heartbeat: float) -> dict[str, Any]:
    """Seconds from a signal to the event, for `times` deaths and as many hangs, one after the other."""
    result: dict[str, list[float]] = {"death": [], "hang": []}
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), nodes, heartbeat, 0.02)
        try:
            run.start(nodes)
            run.until(run.trains, "start")
            for place in range(2 * times):
                kind, number = (("death", signal.SIGKILL), ("hang", signal.SIGSTOP))[place % 2]
                time.sleep(1.0 + random.random())
                before, victim = len(run.journal("lost")), random.choice(run.ranks())
                signalled = time.time()
                os.kill(victim, number)
                run.until(partial(run.has_lost, before + 1), f"{kind} noticed")
                lost = run.journal("lost")[before:]
                if [each["event"] for each in lost] != [kind]:
                    raise RuntimeError(f"a {kind} was noticed as {lost}")
                result[kind].append(lost[0]["time"] - signalled)
                run.start(1)
                run.until(run.trains, "replacement that trains")
            alarms = run.coordinator.false_alarms
        finally:
            run.close()
    rows = {
        kind: {"times": len(each), "median_s": statistics.median(each), "most_s": max(each), "seconds": each}
        for kind, each in result.items()
    }
    return {"nodes": nodes, "heartbeat_s": heartbeat, "false_alarms": alarms, **rows}


def quiet(nodes: int, minutes: float, heartbeat: float) -> dict[str, Any]:
    """Events in `minutes` minutes without failures, beside two busy loops."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with tempfile.TemporaryDirectory() as name:
            run = Run(Path(name), nodes, heartbeat, 0.02)
            try:
                run.start(nodes)
                run.until(run.trains, "start")
                time.sleep(60.0 * minutes)
                alarms, lost = run.coordinator.false_alarms, run.journal("lost")
            finally:
                run.close()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return {"nodes": nodes, "minutes": minutes, "heartbeat_s": heartbeat, "false_alarms": alarms, "lost": lost}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detection", action="store_true", help="kill and stop ranks, and wait for it to be noticed")
    parser.add_argument("--quiet-minutes", type=float, metavar="N", help="do nothing, beside two busy loops")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--times", type=int, default=10, help="deaths, and as many hangs")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds (default: the config's)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if not given.detection and given.quiet_minutes is None:
        parser.error("give --detection or --quiet-minutes N, or both")
    report: dict[str, Any] = {}
    if given.detection:
        report["detection"] = result = detection(given.nodes, given.times, given.heartbeat)
        for kind in ("death", "hang"):
            row = result[kind]
            print(f"{kind:6} {row['times']:3} times: median {row['median_s']:.3f} s, most {row['most_s']:.3f} s")
    if given.quiet_minutes is not None:
        report["quiet"] = still = quiet(given.nodes, given.quiet_minutes, given.heartbeat)
        print(f"{given.quiet_minutes:g} minutes: {still['false_alarms']} false alarms, {len(still['lost'])} nodes lost")
    if given.out is not None:
        about = {"benchmark": "resilience", "command": command("resilience", arguments)}
        write_json(given.out, {**about, "machine": machine(), "versions": versions("torch"), **report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
