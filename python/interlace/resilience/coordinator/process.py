"""Coordinator process: runs outside all training nodes and decides which nodes train together.

    with Coordinator("10.0.0.1", 29600) as coordinator:
        code = coordinator.run()

Supervisors keep a connection to it. A closed connection, or silence for a heartbeat, means that the node is lost. The
process hosts the store through which ranks connect and vote, so that the store survives the loss of training nodes. It
alone decides steps and generations (`interlace.resilience.coordinator.authority`); there is no consensus protocol. With
a state file (`interlace.resilience.coordinator.state`) it can be restarted at the same address: nodes wait for it and
reconnect. Without one, the run ends with the coordinator.

Single-threaded: it reads connections, polls its store for votes some hundred times per second and for everything else
fifty times, and sleeps in between.
"""

from __future__ import annotations

import json
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from interlace.comm.process.store import listen_on, tcp_store
from interlace.resilience.coordinator.authority import Authority
from interlace.resilience.coordinator.hangs import Removal
from interlace.resilience.coordinator.state import StateFile
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Node, Noticed
from interlace.resilience.link import SERVES
from interlace.resilience.settings import Settings
from interlace.resilience.supervisor.watch import Stall
from interlace.resilience.wire import AHEAD, VERSION, Line, from_table

PAUSE = 0.0025  # polling interval for votes, which ranks wait for, seconds
LOOK = 0.02  # polling interval of the store for everything else, seconds
SLEPT = 0.2  # seconds of delay from which on this process counts itself as suspended
HELLO = 10.0  # seconds that a new connection has to send hello
PREEMPTED = 128 + signal.SIGTERM


class Supervised:
    """Connection of a supervisor. node: None before hello. finished: no more messages are expected from it."""

    def __init__(self, line: Line, address: str, now: float) -> None:
        self.line, self.address, self.heard = line, address, now
        self.fd = line.socket.fileno()
        self.node: Node | None = None
        self.stalls: list[Stall] = []
        self.finished = False


class Coordinator:
    """Coordinator of one run.

    Args:
        host, port: address for supervisors; port 0: any free port (see the attribute `port`).
        store_port: port of the store for ranks, on the same address; 0: any free port (see the attribute `store_port`).
        say: prints a line. journal: file for events, as JSON lines. state: state file with which a restarted
            coordinator resumes the run, at its previous store port.

    Raises:
        OSError: the address is not of this machine, or a port is taken, or a file cannot be written.
        ResilienceError: `state` has no run that can be resumed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        store_port: int = 0,
        say: Callable[[str], None] = lambda line: None,
        journal: Path | None = None,
        state: Path | None = None,
    ) -> None:
        self._log = say
        self._state = StateFile(state) if state is not None else None
        kept = self._state
        if kept is not None and kept.store_port and store_port not in (0, kept.store_port):
            raise ResilienceError(f"ranks of the run in {kept.path} use store port {kept.store_port}, not {store_port}")
        self._journal: IO[str] | None = journal.open("a") if journal is not None else None
        self._listening = listen_on(host, port)
        self._listening.setblocking(False)
        self.port = int(self._listening.getsockname()[1])
        self._store = tcp_store(host, store_port or (kept.store_port if kept else 0), 0, 1, 60.0, wait=False)
        self.store_port = self._store.port
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._supervised: dict[int, Supervised] = {}
        self._authority: Authority | None = None  # created with the first node, from its settings
        self._looked = self._pinged = self._decided = time.monotonic()
        self._slept = 0.0
        if kept is not None:
            self._restore(kept)
        serves = "anew 1" if kept is None else f"{kept.run} {kept.starts}"
        self._store.set(SERVES, serves)  # last: this key marks the store as filled

    def _restore(self, state: StateFile) -> None:
        """Resumes the run of the previous coordinator, if there is one."""
        if state.table is not None and state.table.get("over"):
            why = state.table.get("ended") or "training is complete"
            raise ResilienceError(f"the run of {state.path} has ended ({why}): remove the file, or use another")
        state.store_port = self.store_port
        state.save(state.table)  # so that the next start gets a new number even if this one fails
        if state.table is None:
            return
        authority = Authority.resumed(state, self._store, self._report_event, time.monotonic())
        self._authority = authority
        nodes, number = len(authority.roster.nodes), authority.generation.number if authority.generation else 0
        self._report_event("taken up", run=state.run, starts=state.starts, nodes=nodes, generation=number)

    @property
    def false_alarms(self) -> int:
        """Number of ranks suspected of a hang that made progress before they were removed."""
        return self._authority.hangs.false_alarms if self._authority is not None else 0

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        ends = self._state is None or (self._authority is not None and self._authority.over)
        for each in list(self._supervised.values()):
            if ends:  # else nodes wait for a restart
                each.line.say("goodbye", why="the coordinator has ended")
            each.line.close()
        self._listening.close()
        self._selector.close()
        if self._journal is not None:
            self._journal.close()
        if self._state is not None:
            self._state.close()

    def run(self, abandoned: Callable[[], bool] = lambda: False) -> int | None:
        """Serves until the run is over; returns the exit code.

        0 when training has completed; 143 when the run was saved because nodes were asked to leave and too few are
        left; else 1. None when there are no nodes and `abandoned` returns True.
        """
        while self._authority is None or not self._authority.over:
            self.turn()
            if self._authority is None and abandoned():
                return None
        why = self._authority.ended
        for each in list(self._supervised.values()):
            each.finished = True  # not counted as lost
            self._dismiss(each, why or "the run has trained to the end", well=not why)
        self._report_event("end", why=why or "trained to the end", false_alarms=self.false_alarms)
        if self._authority.preempted:
            return PREEMPTED
        return 1 if why else 0

    def turn(self) -> None:
        """One iteration: reads messages, checks the store and makes decisions."""
        for key, _ in self._selector.select(PAUSE):
            if key.fileobj is self._listening:
                self._accept()
            elif key.fd in self._supervised:
                self._hear(self._supervised[key.fd])
        now = time.monotonic()
        slept, self._looked = now - self._looked, now
        slept = slept if slept > SLEPT else 0.0
        self._listen_for_life(now, slept)
        self._slept += slept
        if self._authority is None:
            return
        if now - self._decided < LOOK:
            self._authority.count_votes(now)
            return
        self._decided, slept, self._slept = now, self._slept, 0.0
        stalls = {each.node.id: each.stalls for each in self._supervised.values() if each.node is not None}
        for removal in self._authority.decide(stalls, now, slept):
            for each in [each for each in self._supervised.values() if each.node and each.node.id == removal.node]:
                self._drop(each, removal.kind, removal.why)
        if self._authority.generation is None and not self._authority.roster.nodes and not self._authority.over:
            self._authority = None  # all nodes left before the first generation: others may join with another config
            if self._state is not None:
                self._state.save(None)

    def _accept(self) -> None:
        try:
            connection, address = self._listening.accept()
        except OSError:
            return  # the connection is closed already
        each = Supervised(Line(connection), str(address[0]), time.monotonic())
        self._supervised[each.fd] = each
        self._selector.register(connection, selectors.EVENT_READ, each)

    def _hear(self, supervised: Supervised) -> None:
        supervised.heard = time.monotonic()
        for table in supervised.line.hear():
            try:
                self._handle(supervised, table)
            except (ValueError, KeyError, TypeError) as error:
                self._dismiss(supervised, f"unreadable message: {error}")
        if supervised.line.closed:
            self._drop(supervised, "death", f"its supervisor is gone: {supervised.line.closed}")

    def _handle(self, supervised: Supervised, table: dict[str, Any]) -> None:
        kind, node, authority = table["kind"], supervised.node, self._authority
        if kind == "hello":
            self._welcome(supervised, table)
        elif node is None or authority is None:
            raise ValueError(f"{kind!r} before hello")
        elif kind == "exited":
            why = f"rank {int(table['local_rank'])} of the node {str(table['how'])[:500]}"
            self._drop(supervised, "death", why, failed=int(table["code"]) > 0)
        elif kind == "done":
            supervised.finished = True
            authority.finish(node.id)
            supervised.line.say("goodbye", why="training has ended", well=True)
        elif kind == "leaving":
            if authority.leaves(node.id, float(table["seconds"])):
                self._dismiss(supervised, "it may leave: it is not training", well=True)
        elif kind == "stalled":
            supervised.stalls = [from_table(Stall, stall) for stall in table["ranks"]]

    def _welcome(self, supervised: Supervised, table: dict[str, Any]) -> None:
        if table["version"] != VERSION:
            self._dismiss(
                supervised,
                f"its protocol version is {table['version']!r:.20}, the coordinator's {VERSION}: install one version "
                "of Interlace on all nodes",
            )
            return
        settings = Settings.from_table(table["settings"])
        node = Node(str(table["id"])[:200], int(table["ranks"]), str(table["host"])[:200])
        authority, rejoins = self._authority, str(table["again"])
        roster = authority.roster if authority is not None else None
        is_away = authority is not None and authority.is_away(node.id)  # also if it never got its welcome
        run = self._state.run if self._state is not None else ""
        if roster is not None and settings != roster.settings:
            problem = (
                f"its [resilience] is {settings}, the run's {roster.settings}: start all nodes with the same config"
            )
        elif node.ranks != settings.ranks_per_node:
            problem = f"it has {node.ranks} ranks, not resilience.ranks_per_node = {settings.ranks_per_node}"
        elif rejoins and rejoins != run:
            problem = (
                f"it belongs to run {rejoins}, which this coordinator does not have: start the coordinator with the "
                "--state of that run"
            )
        elif rejoins and not is_away:
            problem = "it was counted as lost while it was disconnected"
        elif not is_away and roster is not None and node.id in roster.nodes:
            problem = f"a node {node.id!r} is connected already"
        else:
            problem = ""
        if problem:
            self._dismiss(supervised, problem)
            return
        if self._authority is None:
            self._authority = Authority(settings, self._store, self._report_event, time.monotonic(), self._state)
        supervised.node = node
        if is_away:
            self._authority.reconnected(node.id)
        else:
            self._authority.join(node)
        starts = self._state.starts if self._state is not None else 0
        supervised.line.say("welcome", store_port=self.store_port, run=run, starts=starts)

    def _listen_for_life(self, now: float, slept: float) -> None:
        """Drops supervisors that were silent for a heartbeat. Time in which this process was suspended is excluded."""
        heartbeat = self._authority.roster.settings.heartbeat if self._authority is not None else HELLO
        ping = now - self._pinged > heartbeat / AHEAD
        self._pinged = now if ping else self._pinged
        for each in list(self._supervised.values()):
            each.heard += slept
            if ping and each.node is not None:
                each.line.say("alive")
            if each.line.closed:
                self._drop(each, "death", f"its supervisor is gone: {each.line.closed}")
            elif each.node is None and now - each.heard > HELLO:
                self._dismiss(each, f"no hello within {HELLO:g} s")
            elif each.node is not None and now - each.heard > heartbeat:
                self._drop(each, "death", f"no sign of life from its supervisor for {heartbeat:g} s")

    def _dismiss(self, supervised: Supervised, reason: str, well: bool = False) -> None:
        """Makes a supervisor end its ranks, if any, and itself; `well`: this is not a failure."""
        if supervised.node is None:
            self._log(f"a connection from {supervised.address} was refused: {reason}")
        supervised.line.say("goodbye", why=reason, well=well)
        self._drop(supervised, "leave", reason)

    def _drop(self, supervised: Supervised, kind: Noticed, reason: str, failed: bool = False) -> None:
        """Closes a supervisor's connection; its node is lost unless it has finished. `failed`: by its own error."""
        if self._supervised.pop(supervised.fd, None) is None:
            return
        self._selector.unregister(supervised.line.socket)
        lost = supervised.node if not supervised.finished else None
        if lost is not None and self._authority is not None:
            self._authority.lose(Removal(lost.id, kind, reason, failed), time.monotonic())
        if lost is not None:
            supervised.line.say("goodbye", why=reason)
        supervised.line.close()

    def _report_event(self, event: str, /, **values: Any) -> None:
        words = ", ".join(f"{key} {value}" for key, value in values.items())
        self._log(f"{event}: {words}")
        if self._journal is not None:
            self._journal.write(json.dumps({"time": time.time(), "what": event, **values}) + "\n")
            self._journal.flush()
