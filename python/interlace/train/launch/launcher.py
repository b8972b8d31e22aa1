"""Launcher: starts the local ranks of a run, monitors them, and reports the cause when one dies.

The ranks are processes with torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so the same
command line works under this launcher and under torchrun. Rank 0 shares the terminal. The stderr of every rank goes to
``logs/rank-N.log`` (rank 0's to the terminal as well).

When a rank dies, the others detect it through their transport and exit by themselves. Ranks that have not exited when
the grace period ends are killed. The launcher then names the rank that died first, its signal or exit code, and its
last words. The first SIGTERM or SIGINT is passed on: the ranks finish their step, save and exit with 128 + the signal,
and so does the launcher. A repeated SIGTERM does not interrupt that save (see `StopSignals`); a second Ctrl-C does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from interlace._cores import usable_cores

LAUNCHER = "INTERLACE_LAUNCHER"  # process id of the launcher, in a rank's environment
RUN_FOLDER = "INTERLACE_RUN_FOLDER"  # the run folder that the launcher made
LOCK = "INTERLACE_RUN_LOCK"  # the nonce of the launcher's lock on it
CONFIG = "INTERLACE_CONFIG_TOML"  # the resolved config; unlike a file, it disappears with the processes
SOURCE = "INTERLACE_CONFIG"  # the user's name for the config, for a rank's messages
STOPPED = {128 + number: number for number in (signal.SIGTERM, signal.SIGINT)}  # exit codes of a rank that has saved
USER_ERROR = 2  # exit code of "the user's input is wrong"
POLL_SECONDS = 0.05
COPY_SECONDS = 10.0  # for the rest of rank 0's stderr, which a child process may hold open for longer
PATIENCE_SECONDS = 600.0  # after the first signal; then a repeated SIGTERM treats the last save as hung


class StopSignals:
    """Interpretation of SIGTERM and SIGINT, for the launcher and for a rank.

    The first signal requests a last save. Process managers repeat SIGTERM without regard to the save, so repeats are
    ignored for `PATIENCE_SECONDS`. Only a second Ctrl-C, from a person at the keyboard, aborts the save.
    """

    def __init__(self) -> None:
        self.number = 0  # the first signal; 0: none yet
        self.since = 0.0
        self.interrupts = 0

    def insists(self, number: int) -> bool:
        """Records a signal. Returns True if it requires an immediate exit instead of the last save."""
        now = time.monotonic()
        self.interrupts += number == signal.SIGINT
        if not self.number:
            self.number, self.since = number, now
            again = "once more" if number == signal.SIGINT else "twice"
            if LAUNCHER not in os.environ:  # not print: the signal may have interrupted a print
                with contextlib.suppress(OSError):
                    os.write(2, f"interlace: saving after this step; Ctrl-C {again} stops at once\n".encode())
            return False
        if number == signal.SIGINT:
            return self.interrupts > 1
        return now - self.since > PATIENCE_SECONDS


@dataclass(frozen=True)
class RankFailure:
    """Rank that ended a run: its number, how it ended and its last words."""

    rank: int
    code: int
    words: str
    user_error: bool = False
    hung: tuple[int, ...] = ()  # ranks that did not exit by themselves and were killed

    def __str__(self) -> str:
        how = f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"exited with code {self.code}"
        return f"rank {self.rank} {how}" + (f"; its last output: {self.words}" if self.words else "")


class RankProcesses:
    """Processes of one run.

    `command` is the command of every rank, `count` the number of ranks, and `folder` the parent of ``logs/``. `timeout`
    is the grace period in seconds for the other ranks once one has died. `threads` is per rank (default: cores //
    ranks, at least 1).
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        folder: Path,
        timeout: float,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.timeout = folder, timeout
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        for old in self.logs.glob("rank-*"):
            old.unlink()
        base = {**os.environ, **(environment or {}), **rendezvous(count), LAUNCHER: str(os.getpid())}
        if loopback := next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), ""):
            base.setdefault("GLOO_SOCKET_IFNAME", loopback)  # all ranks are local: none has to listen to the network
        base["OMP_NUM_THREADS"] = str(threads or default_threads(count))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.stop = StopSignals()
        for rank in range(count):
            log = (self.logs / f"rank-{rank}.log").open("wb")
            process = subprocess.Popen(
                list(command),
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=subprocess.PIPE if rank == 0 else log,
                start_new_session=True,  # only the launcher receives Ctrl-C and forwards it once
            )
            self.processes.append(process)
            if process.stderr is not None:
                self.copying = threading.Thread(target=_tee, args=(process.stderr, log), daemon=True)
                self.copying.start()
            else:
                log.close()

    def run(self, resume: Callable[[], str] = lambda: "", say: Callable[[str], None] | None = None) -> int:
        """Waits for the ranks and returns the launcher's exit code.

        The code is 0 for a finished run, 128 + the signal for one that was asked to stop and has saved, else the code
        of the failure. `resume` returns the command line to resume from the last checkpoint ("" if there is no
        checkpoint). It is shown to the user if a rank has died.
        """
        say = say or say_error
        with handling(self.forward):
            try:
                failure = self.wait()
            except BaseException:
                self._send(signal.SIGKILL)
                raise
        if failure is None:
            codes = [process.returncode for process in self.processes]
            return next((128 + (self.stop.number or STOPPED[code]) for code in codes if code in STOPPED), 0)
        if failure.user_error:
            say(f"interlace: {failure.words}")
            return USER_ERROR
        if self.stop.number:
            say(f"interlace: stopped on request before it could save everything ({failure})")
        else:
            say(f"interlace: {failure}")
            for rank in failure.hung:
                say(f"interlace: rank {rank} hung: it did not exit by itself and was killed")
            others = [str(rank) for rank in range(len(self.processes)) if rank != failure.rank]
            if others:
                say(f"interlace: stopped the other ranks ({', '.join(others)}); logs in {self.logs}")
        again = resume()
        how = f"continue from the last checkpoint with: {again}" if again else "no checkpoint was saved yet"
        say(f"interlace: {how}")
        return 1

    def forward(self, number: int) -> None:
        """Forwards the first signal to all ranks as SIGTERM (they save and exit); kills them if a later one insists."""
        first = not self.stop.number
        if self.stop.insists(number):
            self._send(signal.SIGKILL)
        elif first:
            self._send(signal.SIGTERM)

    def wait(self) -> RankFailure | None:
        """Waits until all ranks have ended. Returns None if all finished or saved, else the failure that ended
        the run."""
        while True:
            codes = [process.poll() for process in self.processes]
            if any(code not in (None, 0, *STOPPED) for code in codes):
                return self._failure()
            if None not in codes:
                self.copying.join(COPY_SECONDS)
                return None
            time.sleep(POLL_SECONDS)

    def _failure(self) -> RankFailure:
        """After the death of a rank: waits up to the timeout for the others, kills the rest, finds the first cause."""
        at_once = {rank for rank, process in enumerate(self.processes) if (process.poll() or 0) < 0}
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline and any(
            process.poll() is None and not _is_stopped(process.pid) for process in self.processes
        ):
            time.sleep(POLL_SECONDS)
        killed = {rank for rank, process in enumerate(self.processes) if process.poll() is None}
        self._send(signal.SIGKILL)
        codes = [process.wait() for process in self.processes]
        self.copying.join(COPY_SECONDS)
        reports = {rank: self._report(rank) for rank in range(len(codes))}
        dead = [rank for rank, code in enumerate(codes) if code not in (0, *STOPPED) and rank not in killed]

        def suspicion(rank: int) -> tuple[bool, float]:
            """Sort key: a signal from outside before any exception; of exceptions, the earliest; ranks without a report
            last."""
            return rank not in at_once and codes[rank] >= 0, reports[rank].get("time", float("inf"))

        first = min(dead, key=suspicion)
        words = str(reports[first].get("error") or self._tail(first))
        return RankFailure(first, codes[first], words, codes[first] == USER_ERROR, tuple(sorted(killed)))

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _report(self, rank: int) -> dict[str, Any]:
        try:
            return dict(json.loads((self.logs / f"rank-{rank}.error.json").read_text()))
        except (OSError, ValueError):
            return {}

    def _tail(self, rank: int) -> str:
        text = (self.logs / f"rank-{rank}.log").read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-3:])


def rank_command(config: Path, *, debug: bool, resume: str | None) -> list[str]:
    """Command line of a rank. Its config is passed in the environment."""
    command = [sys.executable, "-m", "interlace", "train", str(config)]
    command += ["--debug"] if debug else []
    return command if resume is None else [*command, "--resume", resume]


@contextlib.contextmanager
def handling(handle: Callable[[int], object], *numbers: int) -> Iterator[None]:
    """Calls `handle` with each of these signals that arrives in the block. Default: SIGTERM and SIGINT."""
    wanted = numbers or (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, lambda number, _frame: handle(number)) for number in wanted}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leaving_on_sigterm() -> contextlib.AbstractContextManager[None]:
    """While there is nothing to save yet, SIGTERM ends the process like an exception, so that open resources are
    closed."""
    return handling(lambda number: sys.exit(128 + number), signal.SIGTERM)


def under_launcher() -> bool:
    """True if this process is a rank that torchrun or this launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_ranks(world: int) -> int:
    """Number of the `world` ranks on this machine: all of them, except for torchrun on several machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) if under_launcher() else world


def rendezvous(count: int) -> dict[str, str]:
    """Variables of torchrun for `count` local ranks, with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def default_threads(ranks: int) -> int:
    """Threads of one rank: the cores this process may use, divided among the local ranks."""
    cores = usable_cores()
    return max(1, cores // ranks)


def report_error(error: BaseException, *, user_error: bool, known: bool = False) -> None:
    """In a rank: writes its last words to the place that the launcher reads (torchrun's logs show them, too).

    `user_error`: the user can correct it. `known`: one line is enough; else the traceback is printed.
    """
    rank, folder = os.environ.get("RANK", "0"), os.environ.get(RUN_FOLDER)
    if not (user_error or known):
        traceback.print_exception(error, file=sys.stderr)
    if folder and LAUNCHER in os.environ:
        text = str(error) if user_error or known else f"{type(error).__name__}: {error}"
        words = {"time": time.time(), "error": text.strip(), "traceback": traceback.format_exception(error)}
        path = Path(folder) / "logs" / f"rank-{rank}.error.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(words))
    elif user_error or known:
        print(f"interlace: rank {rank}: {error}", file=sys.stderr)


def follow_launcher(timeout: float) -> None:
    """In a rank: if the launcher has exited, makes this rank save and stop, and kills it after `timeout` seconds."""
    parent = os.environ.get(LAUNCHER)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        folder = os.environ.get(RUN_FOLDER)
        log = Path(folder) / "logs" / f"rank-{os.environ.get('RANK', '0')}.log" if folder else Path(os.devnull)
        with log.open("ab") as file:  # stderr may be a closed pipe
            os.dup2(file.fileno(), 2)
        print("the launcher has exited; stopping", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(timeout)
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


def say(line: str) -> None:
    """Prints a line of a run; ignores a closed stdout."""
    try:
        print(line, flush=True)
    except OSError:
        mute()


def note(line: str) -> None:
    """Prints a line of additional information for the user; else as `say`."""
    say(f"interlace: {line}")


def say_error(line: str) -> None:
    """As `say`, on stderr."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def mute() -> None:
    """Redirects stdout to the null device: text in its buffer would fail again when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _tee(pipe: IO[bytes], log: IO[bytes]) -> None:
    with pipe, log:
        for line in iter(pipe.readline, b""):
            log.write(line)
            log.flush()
            with contextlib.suppress(OSError):  # stdout may be closed: the buffer must still be flushed
                sys.stderr.buffer.write(line)
                sys.stderr.flush()


def _is_stopped(process: int) -> bool:
    """True if a process is suspended (SIGSTOP, a debugger): it cannot exit by itself."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except (OSError, IndexError):
        return False  # exited, or a system without /proc


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
