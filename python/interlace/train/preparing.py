"""Who prepares the samples of a run, as [data] says: the trainer's own thread, worker processes beside each rank, or
tasks on a Ray cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interlace.train.config import ConfigError
from interlace.train.schema import Config

GIB = 1 << 30


def workers_of(config: Config, local_ranks: int) -> int:
    """Worker processes beside each of so many ranks of a node; 0 also where Ray prepares the data."""
    from interlace.data.workers import sensible

    count = config.data.workers
    if count == "auto":  # the digits are made in no time
        return sensible(local_ranks) if config.data.dataset == "chats" else 0
    return 0 if count == "ray" else count


def producers_of(config: Config, run: Path, local_ranks: int, *, source: str = "config") -> Callable[[Any], Any] | None:
    """Makes them from a loader; None: the thread that reads ahead does without.

    run: its folder, which all ranks share; local_ranks: of this node. Raises ConfigError for a Ray that is not there.
    """
    from interlace.data import cache_folder

    data, limit = config.data, int(config.data.cache_gb * GIB)
    if data.workers == "ray":
        return _on_ray(config, run, limit, source)
    count = workers_of(config, local_ranks)
    if not count:
        return None

    def start(loader: Any) -> Any:
        from interlace.data import decoded
        from interlace.data.workers import WorkerPool, WorkersError

        try:
            if data.reading == "stream":  # whose items go to the rank that has read them, and to no other
                return WorkerPool(loader, count)
            where = decoded.place(f"{run} {loader.fingerprint()}", limit, cache_folder(data.cache))
            return WorkerPool(loader, count, where=where)
        except WorkersError as error:
            raise ConfigError(f"{source}: [data] workers: {error}") from None
        except OSError as error:
            raise ConfigError(
                f"{source}: [data] cache_gb: {error.filename}: {error.strerror}; set data.cache to a folder that can "
                "be written, or data.cache_gb = 0"
            ) from None

    return start


def _on_ray(config: Config, run: Path, limit: int, source: str) -> Callable[[Any], Any]:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"{source}: [data] workers = 'ray', but Ray is not installed: pip install 'interlace[ray]' on every node, "
            "or give a number of worker processes"
        )

    def start(loader: Any) -> Any:
        from interlace.data.ray_tasks import RayError, RayTasks

        try:
            # Of a stream every item goes to the rank that has read it, and to no other: nothing is kept.
            keeps = limit if config.data.reading == "random" else 0
            return RayTasks(loader, f"{run} {loader.fingerprint()}", address=config.data.ray_address, limit=keeps)
        except RayError as error:
            raise ConfigError(f"{source}: [data] workers = 'ray': {error}") from None

    return start
