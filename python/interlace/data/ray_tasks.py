"""Data prepared by tasks on a Ray cluster, for many nodes: CPU nodes decode, ranks on GPU nodes get what is ready.

A run has one actor, the keeper, which hands out tasks and remembers the answers that lie in the object store, the ones
used last up to a limit: what several ranks compute with, or what comes again in the next epoch, is decoded once in the
cluster. It holds nothing that cannot be made again. When a worker or a node dies, the keeper's or another, whoever
waits for an answer that is lost asks for it anew; a sample that costs DEATHS workers is broken. Ray starts a keeper
again that was lost; where that takes longer than RESTART, a rank makes the next one itself, under a name that all ranks
of the run come to in the same way.

A rank has at most IN_FLIGHT answers under way, and its loader asks for `prefetch` batches ahead: a slow trainer fills
no store. (DistTrain sections 4.3 and 6: producers on nodes of their own, lengths and order with them.)
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

from interlace.data.producing import DEATHS, Loaded, Producing, Task
from interlace.data.worker_process import portable

NAMESPACE = "interlace"
IN_FLIGHT = 64  # items' answers that a rank waits for at once
BATCHES = 4  # and batches, which are small, and not to wait behind items
PATIENCE = 120.0  # seconds that a task may take: one that takes longer hangs
ASK_AGAIN = 40  # times that an answer may be lost on the way: nodes come and go
BACK = 120.0  # and seconds that it may be so: a keeper that starts again imports torch, perhaps from a slow disk
PAUSE = 0.25  # seconds before an answer is asked for again
REACH = 5.0  # seconds in which the cluster's address has to answer
BEGIN = 300.0  # seconds that the keeper may take to start: it imports torch, at Ray's low priority for workers
RESTART = 10.0  # seconds that Ray may take to start a lost one again (one import of torch): then a rank makes the next
log = logging.getLogger("interlace.data")

CRASHED = (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError)
GONE = (
    exceptions.ObjectLostError,
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.TaskUnschedulableError,
)
_PRODUCING: dict[str, Producing] = {}  # of a process that runs tasks


class RayError(RuntimeError):
    """The cluster cannot be used; the message says what to do."""


class Given(NamedTuple):
    """Where an answer will be. number: which one of this task; first: nobody had asked before."""

    answer: list[Any]  # one reference: bare ones are fetched on the way
    number: str
    first: bool


class Known(NamedTuple):
    """A keeper as a rank knows it. number: how many of this run were given up before."""

    number: int
    actor: Any


class Answer(NamedTuple):
    """What a task made, or the error of the dataset."""

    made: Any
    error: Exception | None


@ray.remote(num_cpus=1, max_retries=0)
def answer(run: str, loader: list[Any], task: Task, patience: float) -> Answer:
    """A task, on whichever node has a CPU free; its process ends when it takes longer than `patience` seconds.

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


# The byte of memory is for Ray's scheduler: an actor that takes nothing is started on a node drawn at random, whatever
# its scheduling strategy says, by way of another such node, which may be one that has just died.
@ray.remote(num_cpus=0, memory=1, max_restarts=-1)
class Keeper:
    """Hands out the tasks of a run. limit: bytes of answers that are kept for whoever asks again."""

    def __init__(self, run: str, loader: bytes, varies: bool, limit: int, patience: float) -> None:
        self.run, self.loader, self.varies, self.limit = run, ray.put(loader), varies, limit
        self.patience = patience
        self.kept: OrderedDict[Any, _Kept] = OrderedDict()  # in the order of use
        self.sizes: dict[str, int] = {}  # of answers that are there
        self.used = 0
        self.numbers = itertools.count()
        self.looked = 0.0  # when room was made last
        self.life = os.urandom(8).hex()  # a keeper that was started again gives other numbers

    def give(self, task: Task, lost: str | None) -> Given:
        """Where the answer to a task is, or will be. lost: the number of one that could not be had."""
        if task.kind == "decode":  # of a stream, whose samples are asked for once
            return Given([answer.remote(self.run, [self.loader], task, self.patience)], self._number(), True)
        of_epoch = task.epoch if self.varies or task.kind != "load" else -1
        kind = (task.kind, task.at, of_epoch, task.items, task.held_out)
        found = self.kept.get(kind)
        if found is not None and found.number == lost:
            self._forget(kind)
            found = None
        first = found is None
        if found is None:
            reference = answer.remote(self.run, [self.loader], task, self.patience)
            found = _Kept(reference, self._number())
        if self.limit:
            self.kept[kind] = found
            self.kept.move_to_end(kind)
            self._make_room()
        return Given([found.reference], found.number, first)

    def _number(self) -> str:
        return f"{self.life}-{next(self.numbers)}"

    def _forget(self, kind: Any) -> None:
        self.used -= self.sizes.pop(self.kept.pop(kind).number, 0)

    def _make_room(self) -> None:
        """Counts what has arrived since, and forgets what was used longest ago. What ranks still wait for stays.

        Once a second at most: of many ranks, many answers are under way."""
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
    """The cluster as one rank asks it (`produced.Producers`).

    run: a text that all ranks of the run have, and no other; limit: bytes of answers that the object store keeps for
    all of them. Raises RayError for a cluster that cannot be used.
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
        """Answers that were lost with a worker or a node, and asked for again."""
        self.run = hashlib.sha256(run.encode()).hexdigest()[:16]
        self._own = not ray.is_initialized()
        try:
            sent = pickle.dumps(loader)
        except Exception as error:  # whatever a class of somebody's own raises
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
        self._missed = 0.0  # since when the keeper does not answer
        self._replacing = threading.Lock()
        self._count = threading.Lock()
        self._told = 0.0  # when a loss was told last
        self._waiting: dict[int, Task] = {}
        self._items = ThreadPoolExecutor(IN_FLIGHT, "interlace-ray")
        self._batches = ThreadPoolExecutor(BATCHES, "interlace-ray-batches")

    def ask(self, task: Task) -> Future[Any]:
        """The answer to a task, in time. It fails with what the dataset raised."""
        return (self._items if task.kind in ("load", "decode") else self._batches).submit(self._answer, task)

    def kept(self, task: Task, place: tuple[str, int]) -> Tensor | None:
        """Nothing: all of an answer arrives with it."""
        return None

    def waiting_for(self) -> str:
        """Who is at what, for messages."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        cpus = sum(node["Resources"].get("CPU", 0.0) for node in alive)
        at = ", ".join(str(task) for task in list(self._waiting.values())[:3])
        return f"{len(self._waiting)} tasks ({at}, ...) are at a Ray cluster of {len(alive)} nodes with {cpus:g} CPUs"

    def close(self) -> None:
        """Drops what is in flight, and leaves the cluster."""
        self._closing.set()
        for pool in (self._batches, self._items):
            pool.shutdown(wait=True, cancel_futures=True)
        self._leave()

    def _leave(self) -> None:
        self.keeper = Known(0, None)  # a keeper ends when nobody has it any more
        if self._own:
            ray.shutdown()

    # ------------------------------------------------------------------ the keeper

    def _start(self, number: int) -> Known:
        """The keeper of this number, made by the rank that comes first. Raises RayError for one that does not start."""
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
                    self._closing.wait(PAUSE)  # another rank's, which was lost meanwhile and starts again
                    continue
                why = " ".join(str(error).split())[-300:]
                raise RayError(
                    f"the keeper of the data does not start; is interlace[ray] installed on every node, in the same "
                    f"version? ({why})"
                ) from None

    def _give(self, task: Task, lost: str | None) -> Given:
        """What the keeper hands out. One that Ray has not started again within RESTART seconds is given up for the
        next."""
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
                        ray.kill(known.actor)  # for good: ranks that reach it still come to the next one, too
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
                    found = Answer(*self._get(given.answer[0]))
                    if found.error is not None:
                        raise found.error
                    if isinstance(found.made, Loaded) and not given.first:
                        found.made.read = 0  # for who asked first
                    return found.made
                except exceptions.RayError as error:
                    cause = getattr(error, "cause", None) or error  # of what failed inside of a task
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
                if deaths >= self.deaths or gone:  # the cluster's fault, and no sample's
                    raise RayError(f"{deaths} workers and {again} answers were lost at {task}: {why}")
                self._closing.wait(PAUSE)
        finally:
            self._waiting.pop(me, None)

    def _tell(self, task: Task, why: str) -> None:
        """Counts a loss; a line a second at most, as a node that dies loses many answers."""
        with self._count:
            self.restarts += 1
            if time.monotonic() - self._told < 1.0:
                return
            self._told = time.monotonic()
        log.warning("lost on the Ray cluster: %s (%s); asked for again, %d in all", task, why, self.restarts)

    def _get(self, reference: Any, seconds: float = math.inf) -> Any:
        """What lies there, once it does: a task may have to wait long for a CPU. Raises RayError when this closes, and
        Ray's GetTimeoutError after so many seconds."""
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
    """Makes this process a driver of the cluster. Raises RayError where there is none."""
    if ray.is_initialized():
        return
    place = address or os.environ.get("RAY_ADDRESS") or "auto"
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
    host, colon, port = place.rpartition(":")
    try:
        if colon and port.isdigit() and "//" not in host:  # which Ray asks for minutes before it gives up
            socket.create_connection((host, int(port)), REACH).close()
        ray.init(address=place, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, exceptions.RayError, RuntimeError, ValueError, AssertionError) as error:
        why = " ".join(str(error).split())[:200]
        where = "no Ray cluster runs on this node" if place == "auto" else f"no Ray cluster answers at {place}"
        raise RayError(
            f"{where} ({why}); start one with `ray start --head`, join others with `ray start --address HEAD:6379`, "
            "or say which to take with data.ray_address"
        ) from None
    finally:
        for number, handler in handlers.items():  # Ray takes SIGTERM, which asks a rank to save and leave
            signal.signal(number, handler)


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


__all__ = ["RayError", "RayTasks"]
