"""Worker pool: processes that prepare data for a rank and are replaced when a decoder kills them.

Workers come from a fork server (a fork after threads have started may hang) and have one thread each. PyTorch's
DataLoader fails with its first lost worker: all of its workers write into one queue, and a killed worker leaves the
lock of that queue taken. Here each worker has its own pipe, and items are files that appear atomically
(`decode_cache.Decoded`). So a worker that is killed, runs out of memory or crashes in a decoder is replaced, and its
tasks are sent again. A sample that costs DEATHS workers is marked broken.

A thread of the trainer sends tasks and receives answers. It has no influence on the contents of a batch.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import logging
import multiprocessing as mp
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from interlace._cores import usable_cores
from interlace.data.workers.decode_cache import Decoded, Place
from interlace.data.workers.process import READY, STOP, work
from interlace.data.workers.tasks import DEATHS, Loaded, OfStream, Task, sample_key

if TYPE_CHECKING:
    from interlace.data.loader import Loader

AHEAD = 2  # tasks queued per worker, so that it never waits for the trainer
SMALL = 1 << 12  # bytes that fit into a pipe while the worker does not read; a larger task waits for an idle worker
STARTS = 3  # consecutive workers that may die before one becomes ready
PATIENCE = 120.0  # seconds per task; a worker that takes longer is hung and is killed
PAUSE = 0.02  # seconds before asking again for a sample that another rank's worker decodes
CLOSING = 2.0  # seconds for workers to exit by themselves
log = logging.getLogger("interlace.data")


class WorkersError(RuntimeError):
    """Worker processes cannot be started; the message has the reason and the remedy."""


@dataclass(order=True)
class _Job:
    """A pending task. first: priority; 0 for tasks whose answers lead to further tasks."""

    first: int
    number: int
    task: Task = field(compare=False)
    future: Future[Any] = field(compare=False)
    deaths: int = field(default=0, compare=False)
    begun: bool = field(default=False, compare=False)


class _Worker:
    """One process. jobs: its queued tasks; it has worked on the first since `began`."""

    def __init__(self, context: Any, loader: bytes, where: Place | None, name: str) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, loader, where), name=name, daemon=True)
        self.process.start()
        theirs.close()
        self.jobs: list[_Job] = []
        self.ready = False
        self.began = time.monotonic()

    def end(self) -> None:
        """Kills the process and releases its resources."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class WorkerPool:
    """`count` worker processes with copies of `loader`.

    where: location of the node's cache of decoded items. Raises WorkersError for a dataset that cannot be sent to
    another process.
    """

    def __init__(
        self,
        loader: Loader | OfStream,
        count: int,
        *,
        where: Place | None = None,
        deaths: int = DEATHS,
        patience: float = PATIENCE,
    ) -> None:
        self.dataset, self.count, self.where = loader.dataset, count, where
        self.deaths, self.patience = deaths, patience
        self.restarts = 0
        """Number of workers that died and were replaced."""
        try:
            self._loader = pickle.dumps(loader)
        except Exception as error:  # user classes may raise anything
            raise WorkersError(
                f"the data cannot be handed to worker processes ({type(error).__name__}: {error}); set data.workers = 0"
            ) from None
        self.decoded = None if where is None else Decoded(where)
        self._context: Any = mp.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":  # starts the fork server early, so that workers start fast
            self._context.set_forkserver_preload(["interlace.data.workers.process", *_modules_of(self.dataset)])
        self._numbers = itertools.count()
        self._pending: list[_Job] = []
        self._later: list[tuple[float, _Job]] = []
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._wake, self._woken = mp.Pipe()
        self._signalled = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="interlace-workers", daemon=True)
        self._thread.start()
        # Runs before multiprocessing's own exit handler, whose signal the workers ignore and which would wait for them.
        atexit.register(self.close)

    def ask(self, task: Task) -> Future[Any]:
        """Future of the task's answer. It fails with the error of the dataset."""
        future: Future[Any] = Future()
        with self._lock:
            if self._error is not None or self._closing:
                future.set_exception(self._error or WorkersError("the workers are closed"))
                return future
            heapq.heappush(self._pending, _Job(int(task.kind == "load"), next(self._numbers), task, future))
            self._signal()
        return future

    def _signal(self) -> None:
        """Wakes the thread. Called with the lock held: at most one signal is in flight, so the write never blocks."""
        if not self._signalled:
            self._signalled = True
            self._wake.send_bytes(b"!")

    def kept(self, task: Task, place: tuple[str, int]) -> Any:
        """A task's item from the cache of decoded items; None if it was evicted."""
        return None if self.decoded is None else self.decoded.get((*sample_key(self.dataset, task), *place))

    def pids(self) -> list[int]:
        """Process ids of the workers that are ready."""
        workers = [worker for worker in list(self._workers) if worker.ready]
        return [worker.process.pid for worker in workers if worker.process.pid is not None]

    def waiting_for(self) -> str:
        """Current task of each worker, for messages."""
        at = [
            f"worker {worker.process.pid} is at {worker.jobs[0].task} for {time.monotonic() - worker.began:.0f} s"
            for worker in list(self._workers)
            if worker.jobs
        ]
        starting = not any(worker.ready for worker in list(self._workers))
        why = "the workers are starting" if starting else "no worker is at it"
        if later := list(self._later):
            why = f"a worker of another rank is at {later[0][1].task}"
        return "; ".join(at) or f"{why}, {len(self._pending)} tasks wait"

    def close(self) -> None:
        """Stops the workers, waits for them, and removes the cache if no other process uses it."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._signal()
        atexit.unregister(self.close)
        self._thread.join()
        for end in (self._wake, self._woken):
            end.close()
        if self.decoded is not None:
            self.decoded.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
        except BaseException as error:  # passed to those that wait for answers
            self._fail(error)
        finally:
            self._end_all()

    def _step(self) -> None:
        """One round: starts workers, sends tasks, receives answers."""
        while len(self._workers) < self.count:
            name = f"interlace-worker-{len(self._workers)}"
            try:
                self._workers.append(_Worker(self._context, self._loader, self.where, name))
            except OSError as error:
                raise WorkersError(
                    f"no worker process can be started ({error.strerror or error}); lower data.workers, or free memory"
                ) from None
        now = time.monotonic()
        with self._lock:
            for entry in [entry for entry in self._later if entry[0] <= now]:
                self._later.remove(entry)
                heapq.heappush(self._pending, entry[1])
        for worker in sorted(self._workers, key=lambda one: len(one.jobs)):
            self._hand_out(worker)
        pipes = {worker.pipe: worker for worker in self._workers}
        ends = {worker.process.sentinel: worker for worker in self._workers}
        for ready in wait([self._woken, *pipes, *ends], timeout=PAUSE if self._later else 0.5):
            if ready is self._woken:
                with self._lock:
                    self._woken.recv_bytes()
                    self._signalled = False
            elif isinstance(ready, Connection) and pipes[ready] in self._workers:
                self._take(pipes[ready])
            elif isinstance(ready, int) and ends[ready] in self._workers:
                while ends[ready] in self._workers and ends[ready].pipe.poll():  # answers sent before it died
                    self._take(ends[ready])
                if ends[ready] in self._workers:
                    self._lost(ends[ready])
        for worker in list(self._workers):
            if worker.jobs and time.monotonic() - worker.began > self.patience:
                self._lost(worker, f"took longer than {self.patience:g} s and was ended")

    def _hand_out(self, worker: _Worker) -> None:
        while worker.ready and len(worker.jobs) < AHEAD:
            with self._lock:
                if not self._pending or (worker.jobs and self._for_idle_workers(self._pending[0].task)):
                    return
                job = heapq.heappop(self._pending)
            if not job.begun and not job.future.set_running_or_notify_cancel():
                continue  # cancelled
            job.begun = True
            if not worker.jobs:
                worker.began = time.monotonic()
            worker.jobs.append(job)
            try:
                worker.pipe.send((job.number, job.task))
            except OSError:
                return  # dead: its sentinel reports that

    def _for_idle_workers(self, task: Task) -> bool:
        """True for the last tasks, and for large ones: sent to a worker that is sending a large answer, one would
        block both."""
        return len(self._pending) < len(self._workers) or len(task.loads) > SMALL

    def _take(self, worker: _Worker) -> None:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._lost(worker)
            return
        except Exception as broken:  # truncated answer
            self._lost(worker, f"said what cannot be read ({broken})")
            return
        if message == READY:
            worker.ready, self._failed_starts = True, 0
            return
        number, answer, failed = message
        job = next(job for job in worker.jobs if job.number == number)
        worker.jobs.remove(job)
        worker.began = time.monotonic()
        if failed is not None:
            job.future.set_exception(failed)
        elif isinstance(answer, Loaded) and answer.busy:
            # Retried a little later, outside the worker: waiting there would count against its time limit.
            self._later.append((time.monotonic() + PAUSE, job))
        else:
            job.future.set_result(answer)

    def _lost(self, worker: _Worker, why: str = "") -> None:
        """Replaces a dead or hung worker; the new one gets its tasks."""
        self._workers.remove(worker)
        process = worker.process
        if not why:
            process.join(1.0)  # the pipe may close shortly before the process exits
            why = _how_it_ended(process.exitcode)
        worker.end()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise WorkersError(
                    f"{STARTS} worker processes in a row {why} before they could begin; their own words are above. "
                    "A script that trains needs `if __name__ == '__main__':` around what it does; data.workers = 0 "
                    "does without processes"
                )
        self.restarts += 1
        at = f" at {worker.jobs[0].task}" if worker.jobs else ""
        log.warning("worker process %d %s%s; another one takes its place", process.pid, why, at)
        if worker.jobs:
            worker.jobs[0].deaths += 1
        for job in worker.jobs:
            if job.deaths < self.deaths:
                with self._lock:
                    heapq.heappush(self._pending, job)
            else:
                self._give_up(job, why)

    def _give_up(self, job: _Job, why: str) -> None:
        """Ends a task that has cost too many workers: its sample is marked broken; any other task fails."""
        reason = f"{job.deaths} worker processes were lost at {job.task}, the last one {why}"
        if job.task.kind not in ("load", "decode"):
            job.future.set_exception(WorkersError(f"{reason}; set data.workers = 0 to see what happens there"))
            return
        if self.decoded is not None:
            self.decoded.mark_broken(sample_key(self.dataset, job.task), reason)
        job.future.set_result(Loaded(broken=reason))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            jobs = [*self._pending, *(job for _, job in self._later)]
        for job in [*jobs, *(job for worker in self._workers for job in worker.jobs)]:
            if not job.future.done():
                job.future.set_exception(error)

    def _end_all(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it is dead
                worker.pipe.send(STOP)
            worker.pipe.close()  # a worker that is sending an answer stops
        deadline = time.monotonic() + CLOSING
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._fail(self._error or WorkersError("the workers are closed"))


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


def _modules_of(dataset: object) -> list[str]:
    module = type(dataset).__module__
    return [module] if module.startswith("interlace.") else []


def sensible(local_ranks: int) -> int:
    """Default number of worker processes of a rank: half of its cores, at most 4; 0 with fewer than 4 cores."""
    each = usable_cores() // max(1, local_ranks)
    return 0 if each < 4 else min(4, each // 2)
