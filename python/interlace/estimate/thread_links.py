"""Links between ranks on this machine's CPUs, timed with gloo between two threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from interlace.costs.links import Link, Links
from interlace.plan import fit_link

_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)  # bytes
_REPEATS = 8
_TIMEOUT = timedelta(seconds=20)


def gloo_links() -> Links:
    """Times messages and all-reduces of two ranks on this host. Both are threads of this process, each with its own
    process group, so bytes take the same path as between processes."""
    store = dist.HashStore()
    timings: dict[int, tuple[list[float], list[float], float]] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            gloo: Any = dist.ProcessGroupGloo  # whose stub lacks most of it
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            options._timeout = _TIMEOUT
            timings[rank] = _times(gloo(store, rank, 2, options), rank)
        except BaseException as error:  # raised again in the calling thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    messages, sums, posting = timings[0]
    message = fit_link(_SIZES, messages)
    # An all-reduce of two ranks is two steps of a ring, each of half of the bytes.
    ring = fit_link([size / 2 for size in _SIZES], [seconds / 2 for seconds in sums])
    return Links(host=Link(message, ring), overhead=posting)


def _times(group: Any, rank: int) -> tuple[list[float], list[float], float]:
    """Seconds of a message and of an all-reduce of each size, and of posting one message."""
    posting = float("inf")

    def there_and_back(tensor: torch.Tensor) -> None:
        nonlocal posting
        for turn in range(2):
            if rank == turn:
                start = time.perf_counter()
                work = group.send([tensor], 1 - rank, 0)
                posting = min(posting, time.perf_counter() - start)
            else:
                work = group.recv([tensor], 1 - rank, 0)
            work.wait()

    def add_up(tensor: torch.Tensor) -> None:
        group.allreduce([tensor]).wait()

    messages, sums = [], []
    for size in _SIZES:
        tensor = torch.zeros(size // 4)
        messages.append(_median(partial(there_and_back, tensor)) / 2)
        sums.append(_median(partial(add_up, tensor)))
    return messages, sums, posting


def _median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[1:])[_REPEATS // 2]
