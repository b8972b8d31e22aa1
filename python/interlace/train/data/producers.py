"""Producers of samples for [data]: the trainer's own thread, worker processes beside each rank, or tasks on Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.data import Loader
    from interlace.data.workers.produced import Producers
    from interlace.data.workers.tasks import OfStream

GIB = 1 << 30


def workers_of(config: Config, local_ranks: int) -> int:
    """Worker processes per rank, with `local_ranks` ranks on a node; 0 also if Ray prepares the data."""
    from interlace.data.workers.pool import sensible

    count = config.data.workers
    if count == "auto":
        return sensible(local_ranks)
    return 0 if count == "ray" else count


def producers_of(
    config: Config, run: Path, local_ranks: int, *, source: str = "config"
) -> Callable[[Any], Producers] | None:
    """Returns a factory of producers for a loader; None: the reading thread makes the samples itself.

    run: its folder, which all ranks share.
    local_ranks: ranks of this node.

    Raises ConfigError if Ray is not available.
    """
    from interlace.data import cache_folder

    data, limit = config.data, int(config.data.cache_gb * GIB)
    if data.workers == "ray":
        return _on_ray(config, run, limit, source)
    count = workers_of(config, local_ranks)
    if not count:
        return None

    def start(loader: Loader | OfStream) -> Producers:
        from interlace.data.workers import decode_cache as decoded
        from interlace.data.workers.pool import WorkerPool, WorkersError

        try:
            if data.reading == "stream":  # each item goes only to the rank that has read it
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


def _on_ray(config: Config, run: Path, limit: int, source: str) -> Callable[[Loader | OfStream], Producers]:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"{source}: [data] workers = 'ray', but Ray is not installed: pip install 'interlace[ray]' on every node, "
            "or give a number of worker processes"
        )

    def start(loader: Loader | OfStream) -> Producers:
        from interlace.data.workers.ray_tasks import RayError, RayTasks

        try:
            # In a stream every item goes only to the rank that has read it, so nothing is cached.
            keeps = limit if config.data.reading == "random" else 0
            return RayTasks(loader, f"{run} {loader.fingerprint()}", address=config.data.ray_address, limit=keeps)
        except RayError as error:
            raise ConfigError(f"{source}: [data] workers = 'ray': {error}") from None

    return start
