"""Pool of processes that run one function after another, each on its own process group. Starting a new process takes
seconds.

A process that dies or hangs is replaced. New processes are forked in milliseconds from a server that has imported
torch. The parent owns the store, so the end of a rank does not affect the others.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.forkserver import context
from tests.trials import share_trials


class Outcome(NamedTuple):
    """kind: "returned", "raised" (value: the traceback), "died" (the exit code) or "hung". seconds: since the start."""

    kind: str
    value: Any
    seconds: float


def _main(pipe: Connection, port: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # shared with the server: a collection would copy it
    share_trials()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    while True:
        try:
            trial, rank, world, function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            prefix = dist.PrefixStore(f"trial {trial}", store)
            dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world, timeout=timedelta(seconds=120))
            pipe.send(("ready", None))
            pipe.recv()  # all ranks are ready: from here on one may die
            result = ("returned", function(rank, *args))
        except BaseException:
            result = ("raised", traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(result)


class Pool:
    def __init__(self) -> None:
        self._context = context()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._trials = itertools.count()
        self._members: list[tuple[Any, Connection]] = []

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 240.0,
        stopped: Collection[int] = (),
    ) -> list[Outcome]:
        """function(rank, *args) on `world` ranks. Ranks that run for longer than `timeout` seconds are killed.

        stopped: ranks that are not waited for: they are killed when the others have ended.
        """
        while len(self._members) < world:
            self._members.append(self._start())
        trial, pipes = next(self._trials), [pipe for _, pipe in self._members[:world]]
        for rank, pipe in enumerate(pipes):
            pipe.send((trial, rank, world, function, args))
        answers = [pipe.recv() for pipe in pipes]
        if any(kind != "ready" for kind, _ in answers):
            self.close()
            raise RuntimeError(f"ranks could not start: {answers}")
        start = time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        outcomes: dict[int, Outcome] = {}
        awaited = set(range(world)) - set(stopped)
        while awaited - set(outcomes) and (left := start + timeout - time.monotonic()) > 0:
            for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in outcomes], left):
                rank = pipes.index(pipe)
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    kind, value = "died", self._replace(rank)
                outcomes[rank] = Outcome(kind, value, time.monotonic() - start)
        for rank in range(world):
            if rank not in outcomes:
                self._replace(rank)
        return [outcomes.get(rank, Outcome("hung", None, timeout)) for rank in range(world)]

    def returned(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Return value of each rank; fails the test with the traceback of a rank that raised."""
        outcomes = self.run(world, function, *args, timeout=timeout)
        for rank, outcome in enumerate(outcomes):
            assert outcome.kind == "returned", f"rank {rank} {outcome.kind}: {outcome.value}"
        return [outcome.value for outcome in outcomes]

    def processes(self) -> list[int]:
        return [process.pid for process, _ in self._members]

    def close(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.join(5)
            process.kill()
        self._members.clear()

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_main, args=(theirs, self._store.port), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _replace(self, rank: int) -> int | None:
        """Ends a process if necessary, starts a new one, and returns the exit code of the old one."""
        process, pipe = self._members[rank]
        pipe.close()
        if process.is_alive():
            process.join(1)
            process.kill()  # works on a stopped process too
        process.join(10)
        self._members[rank] = self._start()
        return process.exitcode
