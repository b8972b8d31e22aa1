"""The coordinator: one process outside all training nodes that says who trains together.

    with Coordinator("10.0.0.1", 29600) as coordinator:
        code = coordinator.run()

Supervisors keep a connection to it. A closed one is the node's death, seen at once; silence for a heartbeat is, too: a
link may be cut without a word. It hosts the store through which ranks meet and vote, so that no lost training node
takes it along. This process decides steps and generations (`interlace.resilience.authority`), alone: there is no
agreement among several. With a file for its state (`interlace.resilience.state`) it may be killed and started again,
at the same address: nodes wait for it and come back. Without, a run does not outlive it.

One thread: it reads connections, looks for votes in its store some hundred times a second, for all else fifty times,
and otherwise sleeps.
"""

from __future__ import annotations

import json
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from interlace.comm.store import listen_on, tcp_store
from interlace.resilience.authority import Authority, Removal
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Node, Noticed
from interlace.resilience.link import SERVES
from interlace.resilience.settings import Settings
from interlace.resilience.state import StateFile
from interlace.resilience.watch import Stall
from interlace.resilience.wire import AHEAD, VERSION, Line

PAUSE = 0.0025  # seconds between two looks for votes, which ranks wait for
LOOK = 0.02  # seconds between two looks into the store for all else
SLEPT = 0.2  # seconds that this process may be late before it says so to itself
HELLO = 10.0  # seconds for a connection to say who it is
PREEMPTED = 128 + signal.SIGTERM


class Supervised:
    """A connection of a supervisor. node: None until it has said hello. finished: nothing more is to come from it."""

    def __init__(self, line: Line, address: str, now: float) -> None:
        self.line, self.address, self.heard = line, address, now
        self.fd = line.socket.fileno()
        self.node: Node | None = None
        self.stalls: list[Stall] = []
        self.finished = False


class Coordinator:
    """Serves one run.

    Args:
        host, port: where supervisors connect; port 0: any that is free (the attribute `port` says which).
        store_port: of the store on the same address, which ranks connect to; 0: any (the attribute `store_port`).
        say: prints a line. journal: a file for what happened, as JSON lines. state: a file with which a coordinator
            that is started again takes up the run, at the ports that it had.

    Raises:
        OSError: the address is not of this machine, or a port is taken, or a file cannot be written.
        ResilienceError: there is no run to be taken up in what `state` holds.
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
        self._say = say
        self._state = StateFile(state) if state is not None else None
        kept = self._state
        if kept is not None and kept.store_port and store_port not in (0, kept.store_port):
            raise ResilienceError(
                f"ranks of the run in {kept.path} know port {kept.store_port} of its store, not {store_port}"
            )
        self._journal: IO[str] | None = journal.open("a") if journal is not None else None
        self._listening = listen_on(host, port)
        self._listening.setblocking(False)
        self.port = int(self._listening.getsockname()[1])
        self._store: Any = tcp_store(host, store_port or (kept.store_port if kept else 0), 0, 1, 60.0, wait=False)
        self.store_port = int(self._store.port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._supervised: dict[int, Supervised] = {}
        self._authority: Authority | None = None  # with the first node, which says how many there are to be
        self._looked = self._pinged = self._decided = time.monotonic()
        self._slept = 0.0
        if kept is not None:
            self._take_up(kept)
        serves = "anew 1" if kept is None else f"{kept.run} {kept.starts}"
        self._store.set(SERVES, serves)  # last: who finds it finds all else

    def _take_up(self, kept: StateFile) -> None:
        """Goes on with the run of a coordinator before this one, if there is one."""
        if kept.table is not None and kept.table.get("over"):
            why = kept.table.get("ended") or "it has trained to the end"
            raise ResilienceError(f"the run of {kept.path} is over ({why}): remove the file, or give another")
        kept.store_port = self.store_port
        kept.save(kept.table)  # by which the next start has another number, whatever becomes of this one
        if kept.table is None:
            return
        found = Authority.resumed(kept, self._store, self._tell, time.monotonic())
        self._authority = found
        nodes, number = len(found.roster.nodes), found.generation.number if found.generation is not None else 0
        self._tell("taken up", run=kept.run, starts=kept.starts, nodes=nodes, generation=number)

    @property
    def false_alarms(self) -> int:
        """Ranks that were suspected to hang and moved again before anything was done."""
        return self._authority.false_alarms if self._authority is not None else 0

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        ends = self._state is None or (self._authority is not None and self._authority.over)
        for each in list(self._supervised.values()):
            if ends:  # else nodes wait until it is started again
                each.line.say("goodbye", why="the coordinator has ended")
            each.line.close()
        self._listening.close()
        self._selector.close()
        if self._journal is not None:
            self._journal.close()
        if self._state is not None:
            self._state.close()

    def run(self, abandoned: Callable[[], bool] = lambda: False) -> int | None:
        """Serves until the run is over: 0 when its nodes have trained to the end, 143 when it was saved as so many were
        asked to go that too few are left, else 1. None when nobody is here and none will come, as `abandoned` says."""
        while self._authority is None or not self._authority.over:
            self.turn()
            if self._authority is None and abandoned():
                return None
        why = self._authority.ended
        for each in list(self._supervised.values()):
            each.finished = True  # it need not be counted among the lost
            self._dismiss(each, why or "the run has trained to the end", well=not why)
        self._tell("end", why=why or "trained to the end", false_alarms=self.false_alarms)
        if self._authority.preempted:
            return PREEMPTED
        return 1 if why else 0

    def turn(self) -> None:
        """One round: what has come, what the store says, and what follows."""
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
            self._authority = None  # all have gone before anything began: others may come, with another config
            if self._state is not None:
                self._state.save(None)

    def _accept(self) -> None:
        try:
            connection, address = self._listening.accept()
        except OSError:
            return  # it has gone again
        each = Supervised(Line(connection), str(address[0]), time.monotonic())
        self._supervised[each.fd] = each
        self._selector.register(connection, selectors.EVENT_READ, each)

    def _hear(self, each: Supervised) -> None:
        each.heard = time.monotonic()
        for table in each.line.hear():
            try:
                self._take(each, table)
            except (ValueError, KeyError, TypeError) as error:
                self._dismiss(each, f"what it says cannot be read: {error}")
        if each.line.closed:
            self._drop(each, "death", f"its supervisor is gone: {each.line.closed}")

    def _take(self, each: Supervised, table: dict[str, Any]) -> None:
        kind, node, authority = table["kind"], each.node, self._authority
        if kind == "hello":
            self._welcome(each, table)
        elif node is None or authority is None:
            raise ValueError(f"{kind!r} before hello")
        elif kind == "exited":
            why = f"rank {int(table['local_rank'])} of the node {str(table['how'])[:500]}"
            self._drop(each, "death", why, failed=int(table["code"]) > 0)
        elif kind == "done":
            each.finished = True
            authority.finish(node.id)
            each.line.say("goodbye", why="it has ended", well=True)
        elif kind == "leaving":
            if authority.leaves(node.id, float(table["seconds"])):
                self._dismiss(each, "it may go: it does not train", well=True)
        elif kind == "stalled":
            each.stalls = [Stall.from_table(stall) for stall in table["ranks"]]

    def _welcome(self, each: Supervised, table: dict[str, Any]) -> None:
        if table["version"] != VERSION:
            self._dismiss(
                each, f"it speaks version {table['version']!r:.20}, the coordinator {VERSION}: run one of Interlace"
            )
            return
        settings = Settings.from_table(table["settings"])
        node = Node(str(table["id"])[:200], int(table["ranks"]), str(table["host"])[:200])
        authority, again = self._authority, str(table["again"])
        known = authority.roster if authority is not None else None
        is_away = authority is not None and authority.is_away(node.id)  # also where it was not told that it has come
        run = self._state.run if self._state is not None else ""
        if known is not None and settings != known.settings:
            problem = f"its [resilience] is {settings}, the run's {known.settings}: start all nodes with one config"
        elif node.ranks != settings.ranks_per_node:
            problem = f"it has {node.ranks} ranks, not resilience.ranks_per_node = {settings.ranks_per_node}"
        elif again and again != run:
            problem = (
                f"it is of run {again}, of which this coordinator knows nothing: was it started without its --state?"
            )
        elif again and not is_away:
            problem = "it was taken for lost while it had no connection"
        elif not is_away and known is not None and node.id in known.nodes:
            problem = f"a node {node.id!r} is here already"
        else:
            problem = ""
        if problem:
            self._dismiss(each, problem)
            return
        if self._authority is None:
            self._authority = Authority(settings, self._store, self._tell, time.monotonic(), self._state)
        each.node = node
        if is_away:
            self._authority.is_back(node.id)
        else:
            self._authority.came(node)
        starts = self._state.starts if self._state is not None else 0
        each.line.say("welcome", store_port=self.store_port, run=run, starts=starts)

    def _listen_for_life(self, now: float, slept: float) -> None:
        """Takes for lost who has said nothing for a heartbeat, of which what this process slept does not count."""
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

    def _dismiss(self, each: Supervised, why: str, well: bool = False) -> None:
        """Tells a supervisor to end its ranks, if it has any, and itself; `well`: this is no failure."""
        if each.node is None:
            self._say(f"a connection from {each.address} was refused: {why}")
        each.line.say("goodbye", why=why, well=well)
        self._drop(each, "leave", why)

    def _drop(self, each: Supervised, kind: Noticed, why: str, failed: bool = False) -> None:
        """Ends with a supervisor, and with its node if that has not ended well; `failed`: by an error of its own."""
        if self._supervised.pop(each.fd, None) is None:
            return
        self._selector.unregister(each.line.socket)
        lost = each.node if not each.finished else None
        if lost is not None and self._authority is not None:
            self._authority.lose(Removal(lost.id, kind, why, failed), time.monotonic())
        if lost is not None:
            each.line.say("goodbye", why=why)
        each.line.close()

    def _tell(self, what: str, **values: Any) -> None:
        words = ", ".join(f"{key} {value}" for key, value in values.items())
        self._say(f"{what}: {words}")
        if self._journal is not None:
            self._journal.write(json.dumps({"time": time.time(), "what": what, **values}) + "\n")
            self._journal.flush()
