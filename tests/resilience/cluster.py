"""An elastic run of dummy ranks for tests: a coordinator in a thread, supervisors and ranks as forked processes.

A rank votes on each step and appends each decision to its own file, named by process id. Steps go on until a test ends
them (`Cluster.go_on`, `Cluster.finish`). So faults always find steps left, also on a slow or busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch.distributed as dist

from interlace.resilience.coordinator.process import Coordinator
from interlace.resilience.coordinator.state import StateFile
from interlace.resilience.environment import STOPPED
from interlace.resilience.generation import Decision, Generation
from interlace.resilience.member import Member
from interlace.resilience.settings import Settings
from interlace.resilience.supervisor.process import Supervisor
from tests.forkserver import context
from tests.resilience.hosts import enter

HELD = "held"  # no rank votes while this file exists
END = "end"  # file with the number of steps, overrides the number passed to ranks; empty: no end
PATIENCE = 60.0  # seconds until a missing event counts as a hang


class Forked:
    """A fork with the part of the subprocess.Popen interface that a supervisor uses. It starts in milliseconds."""

    def __init__(self, run: Callable[[], int | None], environment: Mapping[str, str], log: IO[bytes]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                os.environ.clear()
                os.environ.update(environment)
                os.dup2(log.fileno(), 2)
                code = run() or 0
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code


class ForkingSupervisor(Supervisor):
    run_rank: Callable[[], int | None]

    def _start_rank(self, environment: Mapping[str, str], log: IO[bytes]) -> Any:
        return Forked(self.run_rank, environment, log)


def vote_on_steps(folder: Path, steps: int, seconds: float, suicidal: float = 0.0) -> int:
    """A rank that only votes on `steps` steps of at most `seconds` each; returns its exit code.

    suicidal: the probability, per step, that it kills itself at a random moment: before, in or after the vote.
    """
    draw = random.Random(os.getpid())
    member = Member.from_environment(PATIENCE)
    generation = member.next_generation(0, PATIENCE)
    step = 0 if generation.number == 1 else -1  # unknown
    log = (folder / f"{member.node}-{os.getpid()}").open("a")

    def note(**what: Any) -> None:
        log.write(json.dumps(what) + "\n")
        log.flush()

    while True:
        note(generation=generation.number, kind=generation.kind, rank=member.rank(generation))
        if member.node in generation.leaving:
            if member.released(generation, PATIENCE):
                return STOPPED
            generation = member.next_generation(generation.number, PATIENCE)
            continue
        if generation.kind == "save":
            return STOPPED
        known = told_by_all(member, generation, step)
        if known is None:
            generation = member.next_generation(generation.number, PATIENCE)
            continue
        # Survivors pass the step to joining ranks. If no survivor has it, the notes serve as the checkpoint.
        step = max(known) if max(known) >= 0 else 1 + last_noted(folder)
        assert set(known) <= {-1, step}
        member.copied(generation)
        answer = "commit"
        while answer == "commit" and step < number_of_steps(folder, steps):
            if draw.random() < suicidal:
                threading.Timer(draw.random() * 1.5 * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            member.progress.computing()
            time.sleep(draw.random() * seconds)
            if (folder / HELD).exists():
                member.progress.idle("held by the test", PATIENCE)
                note(held=step)
            while (folder / HELD).exists():
                time.sleep(0.01)
            note(voting=step)
            answer = member.vote(generation, step)
            note(generation=generation.number, step=step, answer=answer)
            step += answer != "abort"
        if step >= number_of_steps(folder, steps):
            return 0
        generation = member.next_generation(generation.number, PATIENCE)


def told_by_all(member: Member, generation: Generation, step: int) -> list[int] | None:
    """The next step according to each rank of a generation, -1 if unknown. None: the generation ended first."""
    store = member.store(generation)
    try:
        store.set(f"step/{member.rank(generation)}", str(step))
        while not store.check([f"step/{rank}" for rank in range(generation.world)]):
            if member.over(generation):
                return None
            time.sleep(0.005)
        return [int(store.get(f"step/{rank}")) for rank in range(generation.world)]
    except dist.DistNetworkError:  # the coordinator is gone, with the values of the others
        return None


def number_of_steps(folder: Path, told: int) -> int:
    """Number of steps of the run. told: the number passed to the rank."""
    try:
        return int((folder / END).read_text() or sys.maxsize)
    except FileNotFoundError:
        return told


def last_noted(folder: Path) -> int:
    """The last counted step in the notes of the ranks; -1 without one."""
    notes = [note for each in noted(folder).values() for note in each if note.get("answer", "abort") != "abort"]
    return max((int(note["step"]) for note in notes), default=-1)


def noted(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Notes of each rank, by file. A line that was cut off by a kill is dropped."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        for path in folder.iterdir()
        if path.name not in (END, HELD)
    }


def supervise(
    coordinator: str, table: dict[str, Any], folder: str, rank: tuple[Any, ...], notice: float, network: str | None
) -> None:
    """Process of a supervisor, in a network namespace if one is named. Ends with the supervisor's exit code."""
    if network is not None:
        enter(network)
    place = Path(folder)
    output = os.open(place / f"supervisor-{os.getpid()}", os.O_WRONLY | os.O_CREAT)

    def say(line: str) -> None:
        os.write(output, f"{line}\n".encode())

    node = ForkingSupervisor(
        coordinator, [], Settings.from_table(table), host="host", logs=place / "logs", notice=notice, say=say
    )
    node.run_rank = lambda: rank[0](place / "ranks", *rank[1:])
    try:
        code = node.run()
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        code = 3
    os._exit(code)


class Cluster:
    """A run with a coordinator in this process. rank: the function of each rank, and its arguments after the folder."""

    def __init__(self, folder: Path, settings: Settings, rank: tuple[Any, ...], host: str = "127.0.0.1") -> None:
        self.folder, self.settings, self.rank = folder, settings, rank
        (folder / "ranks").mkdir()
        self.code: int | None = None
        self.supervisors: list[Any] = []
        self._begin(host)

    def _begin(self, host: str) -> None:
        self.coordinator = Coordinator(host, 0, journal=self.folder / "journal")
        self.address = f"{host}:{self.coordinator.port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self.coordinator:
            self.code = self.coordinator.run(abandoned=lambda: self.code == -1)

    def start(self, nodes: int = 1, notice: float = PATIENCE, networks: list[str] | None = None) -> list[Any]:
        started = []
        for place in range(nodes):
            network = networks[place] if networks is not None else None
            arguments = (self.address, self.settings.to_table(), str(self.folder), self.rank, notice, network)
            started.append(context().Process(target=supervise, args=arguments))
            started[-1].start()
        self.supervisors += started
        return started

    def journal(self, what: str = "") -> list[dict[str, Any]]:
        lines = (self.folder / "journal").read_text().splitlines() if (self.folder / "journal").exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["what"] == what or not what]

    def generations(self) -> list[dict[str, Any]]:
        return self.journal("generation")

    def until(self, happened: Callable[[], Any], what: str) -> Any:
        """Waits until `happened` returns a true value, and returns it."""
        deadline = time.monotonic() + PATIENCE
        while not (result := happened()):
            if time.monotonic() > deadline:
                output = {path.name: path.read_text()[-600:] for path in self.folder.glob("supervisor-*")}
                raise AssertionError(f"no {what} in {PATIENCE} s: {self.journal()[-5:]}, {output}")
            time.sleep(0.01)
        return result

    def end(self) -> int:
        """Waits until the run is over; returns the coordinator's exit code."""
        self.until(lambda: self.code is not None, "end of the run")
        for each in self.supervisors:
            each.join(PATIENCE)
        self._thread.join(PATIENCE)
        assert self.code is not None
        return self.code

    def ranks(self) -> dict[str, list[int]]:
        """Process ids of ranks that have trained, by node."""
        result: dict[str, list[int]] = {}
        for name in noted(self.folder / "ranks"):
            node, _, process = name.rpartition("-")
            result.setdefault(node, []).append(int(process))
        return result

    def go_on(self) -> None:
        """Removes the end of the run. To be called before ranks start."""
        (self.folder / "ranks" / END).touch()

    def finish(self) -> int:
        """Ends the run a few steps from now; returns the number of steps."""
        ranks = self.folder / "ranks"
        (ranks / HELD).touch()  # from here on at most two more votes are given
        steps = last_noted(ranks) + 4
        (self.folder / END).write_text(str(steps))
        (self.folder / END).rename(ranks / END)
        (ranks / HELD).unlink()
        return steps

    @contextlib.contextmanager
    def held(self, ranks: int) -> Iterator[None]:
        """Within the block no vote ends: each of `ranks` ranks is held, or waits in a vote for one that is."""
        (self.folder / "ranks" / HELD).touch()

        def all_held() -> bool:
            last = [notes[-1] for notes in noted(self.folder / "ranks").values() if notes]
            held = sum("held" in note for note in last)
            return held > 0 and held + sum("voting" in note for note in last) == ranks

        self.until(all_held, f"{ranks} ranks that are held")
        yield
        (self.folder / "ranks" / HELD).unlink()

    def check_votes(self, steps: int | None) -> dict[int, int]:
        """Asserts that all ranks saw the same decisions, and that each of `steps` steps counts once (None: each counted
        step). Returns step -> generation in which it counted.
        """
        answers: dict[tuple[int, int], set[str]] = {}
        for notes in noted(self.folder / "ranks").values():
            for note in notes:
                if "step" in note:
                    answers.setdefault((note["generation"], note["step"]), set()).add(note["answer"])
        assert all(len(result) == 1 for result in answers.values()), answers
        counted: dict[int, int] = {}
        for (generation, step), result in answers.items():
            if result != {"abort"}:
                assert step not in counted, f"step {step} counts in generations {counted[step]} and {generation}"
                counted[step] = generation
        assert sorted(counted) == list(range(len(counted) if steps is None else steps))
        return counted


class Mortal(Cluster):
    """A run whose coordinator is a process that may be killed and restarted, with a state file."""

    keeps = True  # its state

    def _begin(self, host: str) -> None:
        self._host, self._port, self._process = host, 0, None
        self.start_coordinator()
        self._port = int((self.folder / "port").read_text())
        self.address = f"{host}:{self._port}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start_coordinator(self, last_vote: int | None = None) -> None:
        """last_vote: the coordinator dies of the vote on this step, after writing the decision and before ranks can
        read it.
        """
        (self.folder / "port").unlink(missing_ok=True)
        arguments = (str(self.folder), self._host, self._port, self.keeps, last_vote)
        process = context().Process(target=coordinate, args=arguments)
        process.start()
        self._process = process
        self.until((self.folder / "port").exists, "coordinator")

    def kill_coordinator(self, number: int = signal.SIGKILL) -> None:
        process, self._process = self._process, None
        assert process is not None, f"it has ended: {self.journal()[-5:]}"
        os.kill(process.pid, number)
        process.join()

    def stop_coordinator(self) -> None:
        """Stops all threads of the coordinator: requests get no answer."""
        assert self._process is not None
        threads = Path(f"/proc/{self._process.pid}/task")
        os.kill(self._process.pid, signal.SIGSTOP)
        self.until(
            lambda: all((each / "stat").read_text().rpartition(") ")[2][0] == "T" for each in threads.iterdir()),
            "stop of all of the coordinator's threads",
        )

    def until_dead(self) -> None:
        """Waits until the coordinator has died by itself."""
        self.until(lambda: self._process is None, "end of the coordinator")

    def _run(self) -> None:
        while self.code is None:
            process = self._process
            if process is not None and not process.is_alive() and process is self._process:
                self._process = None
                self.code = process.exitcode if process.exitcode != -signal.SIGKILL else None
            time.sleep(0.01)
        if self._process is not None:
            self._process.kill()


class Mourned(Mortal):
    """A coordinator without a state file."""

    keeps = False


def coordinate(folder: str, host: str, port: int, keeps: bool, last_vote: int | None) -> None:
    """Process of a coordinator, started for the first time or again. Ends with its exit code."""
    place = Path(folder)
    real = StateFile.decide

    def decide(self: StateFile, decided: Decision) -> None:
        real(self, decided)
        if decided.step == last_vote:
            os.kill(os.getpid(), signal.SIGKILL)

    StateFile.decide = decide  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    state = place / "state" if keeps else None
    with Coordinator(host, port, journal=place / "journal", state=state) as serving:
        (place / "draft").write_text(str(serving.port))
        (place / "draft").rename(place / "port")
        code = serving.run()
    sys.exit(code)


C = TypeVar("C", bound=Cluster)


@contextlib.contextmanager
def cluster(
    folder: Path, settings: Settings, rank: tuple[Any, ...], nodes: int, kind: type[C] = Cluster, **more: Any
) -> Iterator[C]:
    """A run of this many nodes. All its processes are cleaned up at the end."""
    run = kind(folder, settings, rank, **more)
    try:
        if nodes:
            run.start(nodes)
        yield run
    finally:
        for each in run.supervisors:
            each.kill()  # its ranks die with it
            each.join()
        run.code = -1 if run.code is None else run.code
        run._thread.join(PATIENCE)
