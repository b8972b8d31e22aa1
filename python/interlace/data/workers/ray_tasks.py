"""Ray backend: tasks on a Ray cluster prepare data; CPU nodes decode, ranks on GPU nodes receive the results.

A run has one actor, the keeper. It starts the tasks and remembers their answers in the object store, the most recently
used up to a limit. So an item that several ranks need, or that comes again in the next epoch, is decoded once per
cluster. All of the keeper's state can be recomputed. When a worker or a node dies, a rank that waits for a lost answer
requests it again. A sample that costs DEATHS workers is marked broken. Ray restarts a lost keeper. If that takes longer
than RESTART seconds, a rank starts the next keeper, under a name that all ranks of the run derive in the same way.

A rank has at most IN_FLIGHT answers in flight, and its loader requests `prefetch` batches ahead, so a slow trainer does
not fill the store. (DistTrain sections 4.3 and 6: dedicated producer nodes, with lengths and order.)
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import pickle
import signal
import socket
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
import torch
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from interlace._text import one_line
from interlace.data.workers.process import portable
from interlace.data.workers.tasks import DEATHS, Loaded, Producing, Task

NAMESPACE = "interlace"
IN_FLIGHT = 64  # concurrent requests for items per rank
BATCHES = 4  # concurrent requests for batches; these are small and must not queue behind items
PATIENCE = 120.0  # seconds per task; one that takes longer is hung
ASK_AGAIN = 40  # retries for answers lost in transit: nodes come and go
BACK = 120.0  # seconds of such retries: a restarted keeper imports torch, perhaps from a slow disk
PAUSE = 0.25  # seconds between retries
REACH = 5.0  # timeout of connecting to the cluster's address, in seconds
BEGIN = 300.0  # seconds for the keeper to start: it imports torch, at Ray's low priority for workers
RESTART = 10.0  # seconds for Ray to restart a lost keeper (one import of torch) before a rank starts the next
log = logging.getLogger("interlace.data")

CRASHED = (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError)
GONE = (
    exceptions.ObjectLostError,
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.TaskUnschedulableError,
)
_PRODUCING: dict[str, Producing] = {}  # per process that runs tasks


class RayError(RuntimeError):
    """The cluster is unusable; the message has the remedy."""


class Given(NamedTuple):
    """Location of an answer. number: attempt of this task; first: True for the first request."""

    answer: list[Any]  # one reference, in a list: Ray would resolve a bare one
    number: str
    first: bool


class Known(NamedTuple):
    """A keeper as seen by a rank. number: how many keepers of this run were abandoned before it."""

    number: int
    actor: Any


class Answer(NamedTuple):
    """Result of a task, or the error of the dataset."""

    made: Any
    error: Exception | None


@ray.remote(num_cpus=1, max_retries=0)
def answer(run: str, loader: list[Any], task: Task, patience: float) -> Answer:
    """Runs a task on any node with a free CPU. Its process is killed when it takes longer than `patience` seconds.

    loader: a reference to the pickled loader, read once per process."""
    producing = _PRODUCING.get(run)
    if producing is None:
        torch.set_num_threads(1)
        producing = _PRODUCING[run] = Producing(pickle.loads(ray.get(loader[0])))
    too_long = threading.Timer(patience, os._exit, (1,))
    too_long.start()
    try:
        made = producing.answer(task)
    except Exception as error:
        return Answer(None, portable(error))
    finally:
        too_long.cancel()
    return Answer(made, None)


class _Kept(NamedTuple):
    reference: Any
    number: str


# memory=1 matters for Ray's scheduler. An actor without resources is started on a random node, whatever its scheduling
# strategy, and is forwarded by another random node, which may just have died.
@ray.remote(num_cpus=0, memory=1, max_restarts=-1)
class Keeper:
    """Starts the tasks of a run and keeps their answers. limit: bytes of answers kept for further requests."""

    def __init__(self, run: str, loader: bytes, varies: bool, limit: int, patience: float) -> None:
        self.run, self.loader, self.varies, self.limit = run, ray.put(loader), varies, limit
        self.patience = patience
        self.kept: OrderedDict[Any, _Kept] = OrderedDict()  # least recently used first
        self.sizes: dict[str, int] = {}  # sizes of answers that have arrived
        self.used = 0
        self.numbers = itertools.count()
        self.looked = 0.0  # time of the last eviction
        self.life = os.urandom(8).hex()  # a restarted keeper gives other numbers

    def give(self, task: Task, lost: str | None) -> Given:
        """Location of a task's answer, present or future. lost: number of an answer that could not be fetched."""
        if task.kind == "decode":  # of a stream, whose samples are requested once
            return Given([answer.remote(self.run, [self.loader], task, self.patience)], self._number(), True)
        of_epoch = task.epoch if self.varies or task.kind != "load" else -1
        kind = (task.kind, task.at, of_epoch, task.items, task.held_out)
        kept = self.kept.get(kind)
        if kept is not None and kept.number == lost:
            self._forget(kind)
            kept = None
        first = kept is None
        if kept is None:
            reference = answer.remote(self.run, [self.loader], task, self.patience)
            kept = _Kept(reference, self._number())
        if self.limit:
            self.kept[kind] = kept
            self.kept.move_to_end(kind)
            self._make_room()
        return Given([kept.reference], kept.number, first)

    def _number(self) -> str:
        return f"{self.life}-{next(self.numbers)}"

    def _forget(self, kind: Any) -> None:
        self.used -= self.sizes.pop(self.kept.pop(kind).number, 0)

    def _make_room(self) -> None:
        """Counts the answers that have arrived, and evicts the least recently used. Answers that ranks wait for stay.

        Runs at most once a second: with many ranks, many answers are in flight."""
        if time.monotonic() - self.looked < 1.0:
            return
        self.looked = time.monotonic()
        open_ones = {kept.reference: kept.number for kept in self.kept.values() if kept.number not in self.sizes}
        if open_ones:
            ready, _ = ray.wait(list(open_ones), num_returns=len(open_ones), timeout=0, fetch_local=False)
            for reference in ready:
                size = (ray.experimental.get_object_locations([reference]).get(reference) or {}).get("object_size")
                self.sizes[open_ones[reference]] = int(size or 0)
                self.used += int(size or 0)
        while self.used > self.limit:
            self._forget(next(iter(self.kept)))


class RayTasks:
    """One rank's client of the cluster (`produced.Producers`).

    run: a text that only the ranks of this run have in common; limit: bytes of answers that the object store keeps for
    all of them. Raises RayError for an unusable cluster.
    """

    def __init__(
        self,
        loader: Any,
        run: str,
        *,
        address: str | None = None,
        limit: int = 0,
        deaths: int = DEATHS,
        patience: float = PATIENCE,
    ) -> None:
        self.dataset, self.deaths = loader.dataset, deaths
        self.restarts = 0
        """Number of answers that were lost with a worker or a node, and requested again."""
        self.run = hashlib.sha256(run.encode()).hexdigest()[:16]
        self._own = not ray.is_initialized()
        try:
            sent = pickle.dumps(loader)
        except Exception as error:  # user classes may raise anything
            raise RayError(f"the data cannot be handed to tasks ({type(error).__name__}: {error})") from None
        _connect(address)
        self._given = self.run, sent, bool(getattr(self.dataset, "varies", True)), limit, patience
        self._closing = threading.Event()
        self.keeper = Known(0, None)
        try:
            self.keeper = self._start(0)
        except RayError:
            self._leave()
            raise
        self._missed = 0.0  # time since the keeper stopped answering
        self._replacing = threading.Lock()
        self._count = threading.Lock()
        self._told = 0.0  # time of the last warning about a loss
        self._waiting: dict[int, Task] = {}
        self._items = ThreadPoolExecutor(IN_FLIGHT, "interlace-ray")
        self._batches = ThreadPoolExecutor(BATCHES, "interlace-ray-batches")

    def ask(self, task: Task) -> Future[Any]:
        """Future of the task's answer. It fails with the error of the dataset."""
        return (self._items if task.kind in ("load", "decode") else self._batches).submit(self._answer, task)

    def kept(self, task: Task, place: tuple[str, int]) -> Tensor | None:
        """None: answers always include their items."""
        return None

    def waiting_for(self) -> str:
        """Pending tasks, for messages."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        cpus = sum(node["Resources"].get("CPU", 0.0) for node in alive)
        at = ", ".join(str(task) for task in list(self._waiting.values())[:3])
        return f"{len(self._waiting)} tasks ({at}, ...) are at a Ray cluster of {len(alive)} nodes with {cpus:g} CPUs"

    def close(self) -> None:
        """Drops what is in flight, and disconnects from the cluster."""
        self._closing.set()
        for pool in (self._batches, self._items):
            pool.shutdown(wait=True, cancel_futures=True)
        self._leave()

    def _leave(self) -> None:
        self.keeper = Known(0, None)  # a keeper ends when its last reference is gone
        if self._own:
            ray.shutdown()

    # ------------------------------------------------------------------ the keeper

    def _start(self, number: int) -> Known:
        """The keeper with this number; the first rank that needs it starts it. Raises RayError if that fails."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        name, until = f"interlace-{self.run}-{number}", time.monotonic() + BEGIN
        while True:
            try:
                actor = Keeper.options(  # type: ignore[attr-defined]
                    name=name, namespace=NAMESPACE, get_if_exists=True, scheduling_strategy=here
                ).remote(*self._given)
                self._get(actor.__ray_ready__.remote(), BEGIN)
                return Known(number, actor)
            except exceptions.RayError as error:
                if isinstance(error, exceptions.ActorUnavailableError) and time.monotonic() < until:
                    self._closing.wait(PAUSE)  # started by another rank, lost, and now restarting
                    continue
                why = " ".join(str(error).split())[-300:]
                raise RayError(
                    f"the keeper of the data does not start; is interlace[ray] installed on every node, in the same "
                    f"version? ({why})"
                ) from None

    def _give(self, task: Task, lost: str | None) -> Given:
        """Requests a task from the keeper. Switches to the next keeper if Ray has not restarted a lost one within
        RESTART seconds."""
        known = self.keeper
        try:
            given = Given(*self._get(known.actor.give.remote(task, lost)))
        except exceptions.RayActorError:
            with self._replacing:
                if known is self.keeper and not self._closing.is_set():
                    self._missed = self._missed or time.monotonic()
                    if time.monotonic() - self._missed > RESTART:
                        log.warning("the keeper of the data does not come back: another is made")
                        self.keeper = self._start(known.number + 1)
                        self._missed = 0.0
                        ray.kill(known.actor)  # permanently: ranks that still reach it switch too
            raise
        self._missed = 0.0
        return given

    # ------------------------------------------------------------------ one task, in a thread

    def _answer(self, task: Task) -> Any:
        me, lost, deaths, again, since = threading.get_ident(), None, 0, 0, 0.0
        self._waiting[me] = task
        try:
            while True:
                why = ""
                try:
                    given = self._give(task, lost)
                    lost = given.number
                    answer = Answer(*self._get(given.answer[0]))
                    if answer.error is not None:
                        raise answer.error
                    if isinstance(answer.made, Loaded) and not given.first:
                        answer.made.read = 0  # reads are counted once, by the first requester
                    return answer.made
                except exceptions.RayError as error:
                    cause = getattr(error, "cause", None) or error  # the cause of an error inside the task
                    why = _in_short(error)
                    if isinstance(cause, CRASHED):
                        deaths += 1
                    elif isinstance(cause, GONE):
                        again += 1
                        since = since or time.monotonic()
                    else:
                        raise RayError(
                            f"{task} cannot begin on the Ray cluster; is interlace[ray] installed on every node, in "
                            f"the same version? ({why})"
                        ) from None
                self._tell(task, why)
                if deaths >= self.deaths and task.kind in ("load", "decode"):
                    return Loaded(broken=f"{deaths} workers were lost at {task} on the Ray cluster: {why}")
                gone = again >= ASK_AGAIN and time.monotonic() - since > BACK
                if deaths >= self.deaths or gone:  # caused by the cluster, not by the sample
                    raise RayError(f"{deaths} workers and {again} answers were lost at {task}: {why}")
                self._closing.wait(PAUSE)
        finally:
            self._waiting.pop(me, None)

    def _tell(self, task: Task, why: str) -> None:
        """Counts a loss. Logs at most one line per second: a dying node loses many answers."""
        with self._count:
            self.restarts += 1
            if time.monotonic() - self._told < 1.0:
                return
            self._told = time.monotonic()
        log.warning("lost on the Ray cluster: %s (%s); asked for again, %d in all", task, why, self.restarts)

    def _get(self, reference: Any, seconds: float = math.inf) -> Any:
        """The object behind a reference. Waits for it: a task may queue long for a CPU. Raises RayError when this
        client closes, and Ray's GetTimeoutError after `seconds`."""
        until = time.monotonic() + seconds
        while True:
            try:
                return ray.get(reference, timeout=0.5)
            except exceptions.GetTimeoutError:
                if self._closing.is_set():
                    raise RayError("the data are closed") from None
                if time.monotonic() > until:
                    raise


def _connect(address: str | None) -> None:
    """Connects this process to the cluster as a driver. Raises RayError if there is no cluster."""
    if ray.is_initialized():
        return
    place = address or os.environ.get("RAY_ADDRESS") or "auto"
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
    host, colon, port = place.rpartition(":")
    try:
        if colon and port.isdigit() and "//" not in host:  # Ray would retry an unreachable address for minutes
            socket.create_connection((host, int(port)), REACH).close()
        ray.init(address=place, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, exceptions.RayError, RuntimeError, ValueError, AssertionError) as error:
        why = one_line(error)
        where = "no Ray cluster runs on this node" if place == "auto" else f"no Ray cluster answers at {place}"
        raise RayError(
            f"{where} ({why}); start one with `ray start --head`, join others with `ray start --address HEAD:6379`, "
            "or say which to take with data.ray_address"
        ) from None
    finally:
        for number, handler in handlers.items():  # Ray overrides SIGTERM, which requests a save and exit of a rank
            signal.signal(number, handler)


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


__all__ = ["RayError", "RayTasks"]
