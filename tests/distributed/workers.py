"""Runs a function on several gloo ranks, each a real process, and returns the result or exception of each."""

from __future__ import annotations

import gc
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

from interlace.comm.channels.base import Channel
from interlace.comm.channels.edges import TransportEdge
from tests.forkserver import context
from tests.trials import share_trials


def _main(
    rank: int, world: int, listening: socket.socket, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """listening: the listening socket of rank 0's store. With a port number alone, another process could take the
    port."""
    torch.set_num_threads(1)
    gc.freeze()  # shared with the server: collecting would copy it
    share_trials()
    host, port = listening.getsockname()
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    patience = timedelta(seconds=120)
    own = {"is_master": True, "master_listen_fd": listening.detach()} if rank == 0 else {"is_master": False}
    if rank:
        listening.close()
    store = dist.TCPStore(host, port, world, timeout=patience, wait_for_workers=False, multi_tenant=False, **own)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    try:
        result = ("returned", function(rank, *args))
    except Exception:
        result = ("raised", traceback.format_exc())
    path = Path(folder) / f"{rank}.pt"
    torch.save(result, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    # A peer may be dead or stopped on purpose: leave without the group's own tear-down, which would wait for it.
    os._exit(0)


def shorten(channel: Channel, seconds: float) -> None:
    """Limits every later wait of this rank's channel between processes to this time.

    For tests with lost ranks: starting and the first step take long on a busy machine.
    """
    channel.timeout = seconds
    for edge in getattr(channel, "_edges", {}).values():
        if isinstance(edge, TransportEdge):
            edge.transport.timeout = seconds
    for group in list(dist.distributed_c10d._world.pg_map):  # gloo ends a group when its operations time out
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 240.0,
    grace: float = 60.0,
    stopped: Collection[int] = (),
) -> list[tuple[str, Any]]:
    """``function(rank, *args)`` on gloo ranks -> for each ("returned", value), ("raised", text) or ("died", exit code).

    ``function`` must be importable. Ranks still running after ``timeout`` seconds, or ``grace`` seconds after the first
    one ended, are killed and reported as hung. stopped: ranks that are not waited for, as they stop themselves.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            processes = [
                context().Process(target=_main, args=(rank, world, listening, folder, function, args), daemon=True)
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
