"""A cluster of processes on this machine for elastic runs: a coordinator, nodes with their ranks, and faults on demand.

Nodes are forked from the fork server of the tests, and ranks from the supervisor of their node. So no process imports
torch anew. Only the start of processes differs from `interlace train --elastic`.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.digits import DATA
from tests.forkserver import context
from tests.resilience.hosts import Hosts, enter

MODEL = {
    "vision": {
        "architecture": "SiglipVisionModel",
        "projector": "mlp",
        "config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
    },
    "language_model": {
        "architecture": "LlamaForCausalLM",
        "config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        },
    },
}
TABLE: dict[str, Any] = {
    "run": {"name": "elastic", "device": "cpu"},
    "model": MODEL,
    "data": {**DATA, "prefetch": 1},
    "train": {
        "steps": 12, "batch_size": 12, "microbatches": 3, "warmup_steps": 2, "lr": 3e-3, "ema": 0.9,
        "validate_every": 5, "validation_samples": 8,
    },
    "parallel": {"timeout": 60.0, "threads": 1},
    "checkpoint": {"every": 0},
    "log": {"every": 1, "trackers": [], "trace_step": 0, "samples": 0, "accuracy_samples": 0, "predict": False},
    "resilience": {"nodes": 2, "faults": 1, "min_nodes": 1, "heartbeat": 20.0, "notice": 60.0},
}  # fmt: skip

HELD = 240.0  # maximum seconds that ranks are held


def table(folder: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a tiny config whose runs are written to `folder`. changes: section -> keys."""
    made = copy.deepcopy(TABLE)
    made["run"]["folder"] = str(folder)
    for section, keys in changes.items():
        made[section] |= keys
    return made


class Cluster:
    """`with Cluster(folder, table) as cluster`: a coordinator; nodes are started by name.

    All files are in `folder`: journal.jsonl of the coordinator, NAME.pids, NAME.log, the run folder, and PID.steps of
    each rank process. PID.steps lists the steps that counted there, with the samples of each.
    """

    def __init__(
        self,
        folder: Path,
        table: Mapping[str, Any],
        *,
        hold: int | None = None,
        resume: str | None = None,
        hosts: Hosts | None = None,
        own: Path | None = None,
        state: bool = False,
    ) -> None:
        """hold: see `hold`.
        resume: the value of --resume, or None.
        hosts: nodes are placed on these hosts in turn, then the coordinator (default: all on this host).
        own: a folder; each host of nodes has a copy on its own disk.
        state: the coordinator keeps a state file and may be killed and restarted.
        """
        self._state = folder / "state" if state else None
        self.folder, self.table, self.resume, self.hosts, self.own = folder, table, resume, hosts, own
        self.places: dict[str, int] = {}  # node -> its host
        folder.mkdir(exist_ok=True)
        self.nodes: dict[str, Any] = {}
        self.journal = folder / "journal.jsonl"
        self.hold(hold)
        self.slow(0.0)

    def hold(self, step: int | None) -> None:
        """Holds ranks after this step has counted, until `hold` names a later step. None: releases them."""
        self._tell_ranks("gate", sys.maxsize if step is None else step)

    def slow(self, pace: float) -> None:
        """Adds this many seconds to every further step, for faults at random moments of steps."""
        self._tell_ranks("pace", pace)

    def _tell_ranks(self, what: str, value: float) -> None:
        draft = self.folder / f"{what}.draft"
        draft.write_text(str(value))
        draft.rename(self.folder / what)

    def __enter__(self) -> Cluster:
        self.address = "127.0.0.1:0" if self.hosts is None else f"{self.hosts.addresses[-1]}:0"
        self.start_coordinator()
        return self

    def start_coordinator(self) -> None:
        """Starts the coordinator, or restarts it at the same address."""
        ports = self.folder / "ports"
        ports.unlink(missing_ok=True)
        network = None if self.hosts is None else self.hosts.names[-1]
        arguments = (str(self.folder), self.address, network, self._state)
        self._coordinator = context().Process(target=_coordinate, args=arguments)
        self._coordinator.start()
        self.wait_for(ports.exists, "the coordinator")
        self.address = f"{self.address.rpartition(':')[0]}:{ports.read_text()}"

    def kill_coordinator(self) -> None:
        self._coordinator.kill()
        self._coordinator.join()

    def __exit__(self, *error: object) -> None:
        for process in (*self.nodes.values(), self._coordinator):
            if process.is_alive():
                process.kill()
            process.join()

    def start(self, *names: str, on: int | None = None) -> None:
        """Starts nodes. on: the host of a single node; by default each node gets the next host."""
        for name in names:
            host = None
            if self.hosts is not None:
                place = self.places[name] = len(self.places) if on is None else on
                host = self.hosts.names[place], self._disk(place), self.own
            process = context().Process(
                target=_node, args=(name, str(self.folder), self.address, dict(self.table), self.resume, host)
            )
            process.start()
            self.nodes[name] = process

    def _disk(self, place: int) -> Path | None:
        """The host's own copy of `own`, made for the first node of the host."""
        disk = None if self.own is None else self.folder / f"disk-{place}"
        if disk is not None and not disk.exists():
            shutil.copytree(str(self.own), disk)
        return disk

    def ranks(self, name: str) -> list[int]:
        """The process ids of a node's ranks."""
        path = self.folder / f"{name}.pids"
        return list(map(int, path.read_text().split())) if path.exists() else []

    def kill(self, name: str) -> None:
        """Kills a node: its supervisor and its ranks."""
        self.nodes[name].kill()

    def stop(self, name: str) -> None:
        """Hangs the first rank of a node."""
        os.kill(self.ranks(name)[0], signal.SIGSTOP)

    def kill_before_line(self, step: int) -> None:
        """Kills the rank that is to write the line of a step, after the other ranks have measured it."""
        (self.folder / "dies").write_text(str(step))

    def preempt(self, name: str) -> None:
        """Announces preemption to a node."""
        os.kill(self.nodes[name].pid, signal.SIGTERM)

    def events(self, what: str | None = None) -> list[dict[str, Any]]:
        """The coordinator's journal."""
        result = []
        for line in self.journal.read_text().splitlines() if self.journal.exists() else ():
            event = json.loads(line)
            if what is None or event["what"] == what:
                result.append(event)
        return result

    def steps(self) -> list[dict[str, Any]]:
        """Steps that counted, as written by every rank process that saw them."""
        return [each for path in self.folder.glob("*.steps") for each in _lines(path)]

    def voting(self, step: int) -> int:
        """Number of rank processes that have begun to vote on a step."""
        return sum(str(step) in path.read_text().split() for path in self.folder.glob("*.votes"))

    def ready(self, name: str) -> Callable[[], bool]:
        """True if a node waits to join a generation."""
        return lambda: any(event["node"].startswith(f"{name}-") for event in self.events("ready"))

    def received(self) -> Counter[int]:
        """Generation -> bytes of layers received by its ranks, as counted by the ranks."""
        result = Counter[int]()
        for path in self.folder.glob("*.copied"):
            for line in path.read_text().splitlines():
                generation, count = map(int, line.split())
                result[generation] += count
        return result

    def reached(self, step: int, generation: int = 0, ranks: int = 1) -> Callable[[], bool]:
        """True if this many rank processes have seen a step count, in that generation or a later one."""

        def seen(path: Path) -> bool:
            return any(each["step"] >= step and each["generation"] >= generation for each in _lines(path))

        return lambda: sum(map(seen, self.folder.glob("*.steps"))) >= ranks

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            over = self.nodes and not any(process.is_alive() for process in self.nodes.values())
            if (over and not condition()) or time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come\n{self.told()}")
            time.sleep(0.01)

    def end(self, seconds: float = 240.0) -> dict[str, int | None]:
        """Waits for all nodes; returns their exit codes."""
        for name, process in self.nodes.items():
            process.join(seconds)
            if process.is_alive():
                raise TimeoutError(f"node {name} does not end\n{self.told()}")
        return {name: process.exitcode for name, process in self.nodes.items()}

    def said(self) -> str:
        """Output of all ranks."""
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def told(self) -> str:
        """Output of all processes, for a failing test."""
        texts = [self.journal.read_text()[-3000:]] if self.journal.exists() else []
        return "\n".join([*texts, *(f"{p.name}:\n{p.read_text()[-2000:]}" for p in self.folder.glob("*.log"))])

    def run_folder(self) -> Path:
        """The run's own folder."""
        runs = Path(self.table["run"]["folder"]) / self.table["run"]["name"]
        (path,) = (path for path in runs.iterdir() if not path.is_symlink() and (path / "run.json").exists())
        return path

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints."""
        return sorted(Path(self.table["run"]["folder"]).glob("elastic/*Z*/checkpoints/step-*[0-9]"))


def _coordinate(folder: str, address: str, network: str | None, state: Path | None) -> None:
    from interlace.resilience.coordinator.process import Coordinator

    if network is not None:
        enter(network)
    host, _, port = address.rpartition(":")
    with Coordinator(host, int(port), journal=Path(folder) / "journal.jsonl", state=state) as serving:
        draft = Path(folder) / "ports.draft"
        draft.write_text(str(serving.port))
        draft.rename(Path(folder) / "ports")
        serving.run()


def _node(
    name: str, folder: str, address: str, made: dict[str, Any], resume: str | None, host: tuple[Any, ...] | None
) -> None:
    if host is not None:
        enter(*host)
    import interlace.train.elastic.rank  # noqa: F401 (here, so that ranks have it)
    from interlace.resilience.supervisor.process import Supervisor
    from interlace.train.config.load import from_table
    from interlace.train.elastic.config import settings_of

    made["resilience"]["coordinator"] = address
    config = from_table(made)

    class Forking(Supervisor):
        """A supervisor whose ranks are forked."""

        def _start(self, pages: list[Path], store: str) -> None:
            place = Path(folder)
            for environment in self._rank_environments(pages, store):
                log = place / f"{name}.log"
                self.processes.append(_Forked(partial(_rank, config, environment, log, place, resume)))
            (place / f"{name}.pids").write_text(" ".join(str(process.pid) for process in self.processes))

    supervisor = Forking(
        address, [], settings_of(config), host=name, logs=Path(folder), notice=config.resilience.notice
    )
    sys.exit(supervisor.run())


def _rank(config: Any, environment: Mapping[str, str], log: Path, folder: Path, resume: str | None) -> int:
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(environment)
    from interlace.train.elastic import rank as elastic
    from interlace.train.report.metrics import Metrics

    real, write, dies = elastic.Voting.commit, Metrics.write, folder / "dies"

    def die_or_write(self: Any, step: int, values: Any) -> None:
        if dies.exists() and step == int(dies.read_text()):
            time.sleep(0.5)  # the other ranks go on to the next step
            dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, step, values)

    Metrics.write = die_or_write  # type: ignore[method-assign]
    steps, copied, votes = (
        (folder / f"{os.getpid()}.{what}").open("w", buffering=1) for what in ("steps", "copied", "votes")
    )
    gate, pace = folder / "gate", folder / "pace"

    def commit(self: Any, step: int) -> None:
        votes.write(f"{step}\n")
        real(self, step)
        owner, member = self.owner, self.owner.member
        samples = owner.job.feed.loader.indices(*owner.job.trainer.place)
        line = {"step": step, "generation": self.meeting.generation.number, "samples": samples, "pid": os.getpid()}
        steps.write(json.dumps(line) + "\n")
        if step >= int(gate.read_text()):
            member.progress.idle("held by the test", HELD)
        while step >= int(gate.read_text()):
            time.sleep(0.01)
        member.progress.computing()
        time.sleep(float(pace.read_text()))

    take_over = elastic.Turn._take_over

    def take(self: Any, before: Any, recovery: Any) -> None:
        take_over(self, before, recovery)
        copied.write(f"{self.meeting.generation.number} {recovery.received}\n")

    elastic.Turn._take_over = take  # type: ignore[method-assign]
    elastic.Voting.commit = commit  # type: ignore[method-assign]
    return elastic.run(config, source="test", resume=resume)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


class _Forked:
    """A fork of this process with the part of the `subprocess.Popen` interface that a supervisor uses."""

    def __init__(self, work: Callable[[], int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                _die_with_parent()
                code = work()
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, of a run folder with one line for every step."""
    from interlace.train.report.metrics import LOSS, read_metrics

    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    return {int(line["step"]): line[LOSS] for line in lines}


def uninterrupted(made: Mapping[str, Any], folder: Path) -> tuple[dict[int, float], dict[int, Sequence[int]]]:
    """Losses and samples of the same run in one process."""
    from interlace.layout import Layout
    from interlace.run import parallelize
    from interlace.train.config.load import from_table
    from interlace.train.data.feed import Feed, datasets
    from interlace.train.data.texts import tokenizer_of
    from interlace.train.models.build import build, initialize
    from interlace.train.observers.base import Outputs
    from interlace.train.trainer import Trainer

    config = from_table(copy.deepcopy(dict(made)))
    tokenizer = tokenizer_of(config, source="test")
    model = build(config, tokenizer)
    parallel = parallelize(model, Layout.balanced(model, 1), transport="local", device="cpu")
    initialize(parallel, seed=config.run.seed)
    feed = Feed.of_config(config, *datasets(config, model, tokenizer), None)
    folder.mkdir(parents=True)
    trainer = Trainer(config, model, parallel, feed, Outputs(folder, quiet=True))
    samples: dict[int, Sequence[int]] = {}

    def note(step: int) -> None:
        samples[step] = feed.loader.indices(*trainer.place)

    trainer.membership.commit = note  # type: ignore[method-assign]
    trainer.run()
    feed.close()
    return losses(folder), samples
