"""Runs a function on several gloo ranks, each a real process, and brings back what each returned or raised."""

from __future__ import annotations

import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forkserver import context


def _main(rank: int, world: int, port: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        result = ("returned", function(rank, *args))
    except Exception:
        result = ("raised", traceback.format_exc())
    path = Path(folder) / f"{rank}.pt"
    torch.save(result, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    # A peer may be dead or stopped on purpose: leave without the group's own tear-down, which would wait for it.
    os._exit(0)


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    grace: float = 20.0,
    stopped: Collection[int] = (),
) -> list[tuple[str, Any]]:
    """``function(rank, *args)`` on gloo ranks -> for each ("returned", value), ("raised", text) or ("died", exit code).

    ``function`` must be importable. Ranks still running after ``timeout`` seconds, or ``grace`` seconds after the first
    one ended, are killed and reported as hung. stopped: ranks that nobody waits for, as they stop themselves.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context().Process(target=_main, args=(rank, world, port, folder, function, args), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        awaited = [process for rank, process in enumerate(processes) if rank not in stopped]
        while any(process.is_alive() for process in awaited) and time.monotonic() < deadline:
            if not all(process.is_alive() for process in awaited):
                deadline = min(deadline, time.monotonic() + grace)
                grace = timeout
            time.sleep(0.05)
        results: list[tuple[str, Any]] = []
        for rank, process in enumerate(processes):
            path = Path(folder) / f"{rank}.pt"
            if process.is_alive():
                process.kill()
                process.join()
                results.append(("hung", None))
            elif path.exists():
                results.append(torch.load(path, weights_only=False))
            else:
                results.append(("died", process.exitcode))
        return results
