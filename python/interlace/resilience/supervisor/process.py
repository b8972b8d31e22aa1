"""Supervisor of a node: starts its ranks, detects exits and hangs, and reports to the coordinator.

    supervisor = Supervisor("10.0.0.1:29600", command, settings, host="node-3", logs=folder)
    code = supervisor.run()

It imports no torch and computes nothing, so it starts in a tenth of a second and has few ways to fail.

The other ranks of a node are killed when one of them fails, because a pipeline cannot use half of a node. They are also
killed when the coordinator is lost: a node outside the run must not write anything. If the coordinator keeps its state,
it can be restarted. The ranks then keep running without committing steps, and the supervisor tries to reconnect for the
settings' patience. Ranks also die with their supervisor.

SIGTERM or Ctrl-C is a notice that the node must leave. Its layers move to other nodes at the next step boundary, then
it exits with 128 + the signal. Ranks that remain at the end of the notice are killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from interlace.resilience.environment import AWAY, COORDINATOR, LOCAL_RANK, NODE, PATIENCE, PROGRESS, STOPPED
from interlace.resilience.errors import ResilienceError
from interlace.resilience.settings import Settings
from interlace.resilience.supervisor.ranks import exit_reason, kill, last_output, start
from interlace.resilience.supervisor.watch import Stall, Watch
from interlace.resilience.wire import AHEAD, FOREIGN, VERSION, Line

WELCOME = 30.0  # seconds for the coordinator to admit a node
ATTEMPT = 2.0  # seconds for a restarted coordinator to accept a connection


class Refused(ResilienceError):
    """The coordinator does not admit the node."""


class Supervisor:
    """One node of an elastic run.

    Args:
        coordinator: host:port of `interlace coordinator`. command: command line of each rank.
        settings: settings of the run, equal on all nodes. host: name of this node.
        logs: folder for the ranks' stderr, one file per rank. notice: seconds from SIGTERM until the node is gone.
        environment: variables for the ranks, added to those of this process. say: prints a line.
    """

    def __init__(
        self,
        coordinator: str,
        command: Sequence[str],
        settings: Settings,
        *,
        host: str,
        logs: Path,
        notice: float = 25.0,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.coordinator, self._command, self.settings, self._notice = coordinator, list(command), settings, notice
        self.id, self.host, self._logs, self._log = f"{host}-{uuid4().hex[:8]}", host, logs, say
        self._environment = {**os.environ, **(environment or {})}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pages: list[Path] = []
        self._signals: list[int] = []
        self._leave_deadline: float | None = None  # end of the notice
        self._reported: list[Stall] = []
        self._line: Line | None = None  # to the last coordinator
        self._run, self._starts = "", 0  # of the coordinator; "": it cannot be restarted

    def run(self) -> int:
        """Supervises the node's ranks until they end; returns the exit code.

        0: training has completed. 128 + the signal: the node was asked to leave and has left, or the run was saved
        then. Code of a rank: this rank failed. Else 1: the node is lost, the run was saved because too few nodes are
        left, or it ended without this node. Raises ResilienceError if no coordinator admits the node.
        """
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = {each: signal.signal(each, lambda number, _: self._signals.append(number)) for each in numbers}
        try:
            line, store_port = self._join()
            in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            with tempfile.TemporaryDirectory(dir=in_memory) as pages:
                ranks = range(self.settings.ranks_per_node)
                return self._supervise(line, store_port, [Path(pages) / str(rank) for rank in ranks])
        finally:
            kill(self.processes)
            if self._line is not None:
                self._line.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _supervise(self, line: Line, store_port: int, pages: list[Path]) -> int:
        self._pages = pages
        watch = Watch(pages, self.settings.heartbeat)
        self._start(pages, f"{line.socket.getpeername()[0]}:{store_port}")
        self._log(f"node {self.id} has joined the run of {self.coordinator}; logs of its ranks in {self._logs}")
        with contextlib.closing(watch), selectors.DefaultSelector() as selector:
            selector.register(line.socket, selectors.EVENT_READ)
            for process in self.processes:
                with contextlib.suppress(AttributeError, OSError):  # without pidfd, polling detects exits
                    selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ)
            try:
                return self._watch(line, watch, selector)
            finally:
                for key in list(selector.get_map().values()):
                    if isinstance(key.fileobj, int):
                        os.close(key.fileobj)

    def _watch(self, line: Line, watch: Watch, selector: selectors.BaseSelector) -> int:
        looked = spoke = heard = time.monotonic()
        heartbeat = self.settings.heartbeat
        while True:
            for key, _ in selector.select(watch.pause):
                if isinstance(key.fileobj, int):  # a rank has ended; reported once
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
            if (code := self._ended(line)) is not None:
                return code
            now = time.monotonic()
            for table in line.hear():
                heard = now
                if table["kind"] == "goodbye":
                    self._log(f"node {self.id} ends: {table.get('why')}")
                    return self._well(bool(self._signals)) if table.get("well") else 1
            self._leave(line, now)
            if self._leave_deadline is not None and now > self._leave_deadline:
                self._log(f"node {self.id} could not leave within {self._notice:g} s: its ranks are killed")
                return 1
            if now - looked >= watch.pause:
                slept, seconds, looked = max(0.0, now - looked - 4 * watch.pause), now - looked, now
                heard += slept
                self._report(line, watch.look([process.pid for process in self.processes], seconds))
            if now - spoke >= heartbeat / AHEAD:
                spoke = now
                line.say("alive")
            silent = f"no sign of life for {heartbeat:g} s" if now - heard > heartbeat else ""
            if line.closed or silent:
                selector.unregister(line.socket)
                try:
                    line = self._reconnect(line, line.closed or silent)
                except ResilienceError as error:
                    self._log(f"node {self.id} ends: {error}")
                    return 1
                selector.register(line.socket, selectors.EVENT_READ)
                looked = spoke = heard = time.monotonic()

    # -- the coordinator -------------------------------------------------------------------------------------

    def _join(self) -> tuple[Line, int]:
        """Joins the run; returns the connection to the coordinator and the port of its store."""
        deadline = time.monotonic() + WELCOME
        while True:
            line = self._line = Line(self._connect(deadline))
            try:
                return line, self._handshake(line, WELCOME)
            except Refused:
                raise
            except ResilienceError:
                gone, foreign = line.closed, line.closed == FOREIGN
                line.close()
                if not gone or foreign or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)  # it may be restarting

    def _connect(self, deadline: float) -> socket.socket:
        host, _, port = self.coordinator.rpartition(":")
        problem = ""
        while time.monotonic() < deadline and not self._signals:
            try:
                return socket.create_connection((host, int(port)), timeout=WELCOME)
            except ValueError as error:
                raise ResilienceError(f"resilience.coordinator is {self.coordinator!r}, not host:port") from error
            except OSError as error:
                problem = error.strerror or str(error)
                time.sleep(0.2)  # it may be starting
        raise ResilienceError(
            f"no coordinator answers at {self.coordinator} within {WELCOME:g} s ({problem}): start `interlace "
            "coordinator` on a machine that all nodes can reach, and set resilience.coordinator to its address"
        )

    def _handshake(self, line: Line, seconds: float) -> int:
        """Sends hello; returns the store's port. Raises ResilienceError if not admitted within `seconds`."""
        again, ranks, settings = self._run, self.settings.ranks_per_node, self.settings.to_table()
        line.say("hello", version=VERSION, id=self.id, host=self.host, ranks=ranks, settings=settings, again=again)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not line.closed and (again or not self._signals):
            for table in line.hear():
                if table["kind"] == "welcome":
                    self._run, self._starts = str(table["run"]), int(table["starts"])
                    return int(table["store_port"])
                if table["kind"] == "goodbye":
                    why = table.get("why")
                    raise Refused(f"the coordinator at {self.coordinator} rejected this node: {why}")
            time.sleep(0.01)
        raise ResilienceError(
            f"the server at {self.coordinator} did not admit this node ({line.closed or f'within {seconds:g} s'}): "
            "check that it is `interlace coordinator`"
        )

    def _reconnect(self, line: Line, reason: str) -> Line:
        """Reconnects to a restarted coordinator after the connection was lost.

        Raises ResilienceError if there is none within the settings' patience, or if it cannot be restarted.
        """
        line.close()
        patience = self.settings.patience if self._run else 0.0
        if patience:
            self._log(f"node {self.id}: lost the coordinator ({reason}); waiting up to {patience:g} s for its restart")
        for page in self._pages:
            draft = Path(f"{page}{AWAY}.draft")
            draft.write_text(str(self._starts))
            draft.rename(f"{page}{AWAY}")
        host, _, port = self.coordinator.rpartition(":")
        deadline = time.monotonic() + patience
        while (now := time.monotonic()) < deadline:
            self._leave(line, now)  # the notice runs also without a coordinator
            if self._leave_deadline is not None and now > self._leave_deadline:
                break
            try:
                line = self._line = Line(socket.create_connection((host, int(port)), timeout=ATTEMPT))
                self._handshake(line, ATTEMPT)
            except Refused:
                raise
            except (OSError, ResilienceError):
                line.close()
                time.sleep(0.2)
                continue
            self._log(f"node {self.id} has reconnected to the coordinator")
            if self._leave_deadline is not None:
                line.say("leaving", seconds=max(self._leave_deadline - time.monotonic(), 0.0))
            return line
        waited = (
            f", which was not restarted within {patience:g} s (resilience.coordinator_patience)" if patience else ""
        )
        raise ResilienceError(
            f"it lost the coordinator at {self.coordinator} ({reason}){waited}; training cannot continue without it: "
            "resume from the last checkpoint"
        )

    def _report(self, line: Line, stalls: list[Stall]) -> None:
        """Reports stalled ranks at every poll, and once more when none is left."""
        if stalls or self._reported:
            line.say("stalled", ranks=[asdict(stall) for stall in stalls])
        self._reported = stalls

    # -- signals ---------------------------------------------------------------------------------------------

    def _leave(self, line: Line, now: float) -> None:
        if self._signals and self._leave_deadline is None:
            self._leave_deadline = now + self._notice
            line.say("leaving", seconds=self._notice)
            self._log(
                f"node {self.id} leaves after this step, within {self._notice:g} s; press Ctrl-C again to stop at once"
            )
        elif self._signals.count(signal.SIGINT) > 1:
            self._leave_deadline = now  # process managers repeat SIGTERM; a repeated Ctrl-C is from a person

    # -- ranks -----------------------------------------------------------------------------------------------

    def _start(self, pages: list[Path], store: str) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        for rank, environment in enumerate(self._rank_environments(pages, store)):
            with self._log_of(rank).open("wb") as log:
                self.processes.append(self._start_rank({**self._environment, **environment}, log))

    def _rank_environments(self, pages: list[Path], store: str) -> list[dict[str, str]]:
        """Environment variables of each rank."""
        patience = self.settings.patience if self._run else 0.0
        base = {COORDINATOR: store, NODE: self.id, PATIENCE: str(patience), "LOCAL_WORLD_SIZE": str(len(pages))}
        return [{**base, PROGRESS: str(page), LOCAL_RANK: str(rank)} for rank, page in enumerate(pages)]

    def _start_rank(self, environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return start(self._command, environment, log)

    def _log_of(self, rank: int) -> Path:
        return self._logs / f"{self.id}-{rank}.log"

    def _ended(self, line: Line) -> int | None:
        """Exit code of this supervisor once a rank has failed or all have ended; None before."""
        codes = [process.poll() for process in self.processes]
        for rank, code in enumerate(codes):
            if code is not None and code not in (0, STOPPED):
                how = exit_reason(code) + last_output(self._pages[rank], self._log_of(rank))
                self._log(f"node {self.id} is lost: its rank {rank} {how}")
                kill(self.processes)
                self._report_end(line, "exited", local_rank=rank, code=code, how=how)
                return max(code, 1)
        if None in codes:
            return None
        self._report_end(line, "done")
        return self._well(STOPPED in codes)

    def _report_end(self, line: Line, kind: str, **values: Any) -> None:
        """Reports the end of the node until the coordinator acknowledges it, across coordinator restarts."""
        while True:
            line.say(kind, **values)
            deadline = time.monotonic() + self.settings.heartbeat
            while not line.closed and time.monotonic() < deadline:
                if any(table["kind"] == "goodbye" for table in line.hear()):
                    return
                time.sleep(0.002)
            try:
                line = self._reconnect(line, line.closed or "no answer")
            except ResilienceError:
                return  # it is gone for good, or has the report already

    def _well(self, early: bool) -> int:
        """Exit code of a node that ended without failure.

        early: whether it ended before the run's last step. The code is then not 0, so that a process manager does not
        treat the node as done.
        """
        return (128 + self._signals[0] if self._signals else 1) if early else 0
