"""What candidates are priced with: costs of layers, links and memory, measured on this machine or assumed.

On GPUs a rank has one to itself, so one set of costs serves any number of ranks. On CPUs ranks share the cores, so a
number of ranks has its own: timed with the threads that each of them would have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from interlace import _device
from interlace.plan import LinkModel
from interlace.plan.around import Around
from interlace.plan.links import Link, Links
from interlace.plan.step_costs import Costs
from interlace.train.config import ConfigError
from interlace.train.costs import estimated, stated_links
from interlace.train.schema import Config

MOST_OF_MEMORY = 0.9
"""The part of a GPU's (or the host's) memory that a layout may fill: the rest is for what no table counts."""
MOST_CPU_RANKS = 4
_GPUS_PER_HOST = 8
ASSUMED = Links(
    host=Link(LinkModel(8e-6, 1 / 200e9), LinkModel(8e-6, 1 / 200e9)),
    network=Link(LinkModel(20e-6, 1 / 40e9), LinkModel(20e-6, 1 / 40e9)),
    ranks_per_host=_GPUS_PER_HOST,
)
"""For GPUs that are not here: hosts of 8 whose GPUs send 200 GB/s, and a network of 40 GB/s for each GPU."""
STATED = "links as parallel.links says"
_UPDATE_BYTES_PER_SECOND = 1e12 / 7  # AdamW reads and writes 7 times the weights, at a third of an H100's bandwidth
_ALL_DEGREES = 64  # up to which counted costs have every tp; beyond it powers of two and what the config states
BUDGET_SECONDS = 1.5  # of the profile of a GPU


@dataclass
class Machine:
    """costs: of so many ranks with so many threads each. links: of so many ranks. memory: bytes that each of so many
    ranks may fill. origin: how it is known. threads: numbers of threads that each of so many ranks may have; None: it
    is no matter of choice. unsure: by what part measurements of one thing differ. worlds: numbers of ranks that may
    win, where that is known. notes: what was not measured, in sentences."""

    costs: Callable[[int, int | None], Costs]
    links: Callable[[int], Links]
    memory: Callable[[int], float]
    origin: str
    kind: str = "cpu"
    threads: Callable[[int], tuple[int | None, ...]] = lambda world: (None,)
    unsure: float = 0.0
    worlds: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()

    def costs_of(self, world: int, threads: int | None = None) -> Costs:
        """Those of `world` ranks, by default with the first of the numbers of threads that they may have."""
        return self.costs(world, self.threads(world)[0] if threads is None else threads)


def counted(config: Config, model: Any, *, tflops: float, memory: float, how: str) -> Machine:
    """GPUs that are not here: FLOPs at `tflops` TFLOP/s per rank, `memory` bytes each, and the links that the config
    states, else `ASSUMED`."""
    from interlace.plan.counted import counted_costs
    from interlace.run.sample_sizes import key_bytes_of, row_bytes_of

    itemsize = 4 if config.train.precision == "fp32" else 2
    rows, keys = (each(model, itemsize=itemsize) for each in (row_bytes_of, key_bytes_of))
    update = LinkModel(0.0, 1 / _UPDATE_BYTES_PER_SECOND)

    @cache
    def costs(world: int, threads: int | None) -> Costs:
        stated = {config.parallel.module(name).tp for name in rows}
        degrees = {*range(1, min(world, _ALL_DEGREES) + 1), *_powers_of_two(world), *stated}
        tp = dict.fromkeys(rows, degrees)
        return counted_costs(model, tflops * 1e12, tp=tp, row_bytes=rows, key_bytes=keys, optimizer=update)

    links = stated_links(config)
    said = STATED
    if links is None:
        links = ASSUMED
        said = f"assumed: hosts of {_GPUS_PER_HOST} GPUs, 200 GB/s between these and 40 GB/s per GPU between hosts"
    origin = f"counted FLOPs at {tflops:.3g} TFLOP/s per rank ({how}){estimated(model)}; {said}"
    return Machine(costs, lambda world: links, lambda world: memory, origin, "cuda")


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


# ---------------------------------------------------------------------- this machine


def here(
    config: Config,
    model: Any,
    samples: list[Any],
    *,
    kind: str,
    worlds: Sequence[int],
    links: Links,
    how: str,
    worth: float,
    say: Callable[[str], None],
    around: Callable[[int, int], Around],
) -> Machine:
    """This machine: layers timed on rank 0's device with `samples`, in `links` as given (`how` they are known).

    kind: of device. worlds: numbers of ranks that are to be compared. worth, say: as in `measured.measure`. around:
    (ranks of this machine, threads of each) -> what a step has beside its lists.
    """
    from interlace.run.profiling import Profile, profile_costs
    from interlace.train.auto.measured import Setting, measure, settings_of
    from interlace.train.device import AUTOCAST
    from interlace.train.forecast import time_optimizer

    degrees = sorted({tp for world in worlds for tp in _divisors(world)})

    def cut(name: str) -> list[int]:
        return [tp for tp in degrees if tp == 1 or can_be_cut(config, model, name, tp)]

    given: dict[str, Any] = {
        "largest": max(1, len(samples)),
        "tps": {name: cut(name) for name in model.modules_order()},
        "device": kind,
        "autocast": AUTOCAST[config.train.precision],
        "sequence_parallel": config.parallel.sequence_parallel,
    }
    origin = f"layers timed on this machine ({kind}); {how}"

    def memory(world: int) -> float:
        return memory_of(config, kind, world)

    def update() -> LinkModel:
        return time_optimizer(config, model, torch.device(kind))

    if kind != "cpu":
        say("measuring (a few seconds)")
        once = profile_costs(model, samples, **given, budget=BUDGET_SECONDS, optimizer=update())
        once = replace(once, around=around(local_ranks(max(worlds)), 1))
        return Machine(lambda world, threads: once, lambda world: links, memory, origin, kind)
    found = measure(
        Profile(model, samples, **given),
        settings_of(worlds, lambda world: threads(config, world)),
        optimizer=update,
        worth=worth,
        neighbours=lambda setting: local_ranks(setting.world) - 1,
        say=say,
    )
    costs = {
        setting: replace(each, around=around(local_ranks(setting.world), setting.threads))
        for setting, each in found.costs.items()
    }
    kept = tuple(sorted({each.world for each in costs}))

    def counts(world: int) -> tuple[int, ...]:
        return tuple(each.threads for each in costs if each.world == world)

    return Machine(
        lambda world, count: costs[Setting(world, count or 1)],
        lambda world: links,
        memory,
        origin,
        kind,
        counts,
        found.unsure,
        kept,
        found.skipped,
    )


def can_be_cut(config: Config, model: Any, name: str, tp: int) -> bool:
    """Whether a module can run with so many tensor-parallel ranks."""
    from interlace.layout import Layout, ParallelSpec
    from interlace.run.traced import weights_of

    specs = {each: ParallelSpec(tp=tp if each == name else 1) for each in model.modules_order()}
    try:
        layout = Layout.from_specs(model, specs, placement="parallel")
        weights_of(model, layout, sequence_parallel=config.parallel.sequence_parallel)
    except ValueError:
        return False
    return True


def _divisors(world: int) -> list[int]:
    return [tp for tp in range(1, world + 1) if world % tp == 0]


def local_ranks(world: int) -> int:
    """How many of `world` ranks are on this machine: all of them, but for torchrun on several."""
    from interlace.train.launch import launcher

    return int(os.environ.get("LOCAL_WORLD_SIZE", world)) if launcher.under_launcher() else world


def threads(config: Config, world: int) -> tuple[int, ...]:
    """Numbers of threads that each of `world` ranks on CPUs may have: its share of the cores; and one process also one
    thread, which small models are faster with."""
    from interlace.train.launch import launcher

    if config.parallel.threads is not None:
        return (config.parallel.threads,)
    share = launcher.default_threads(local_ranks(world))
    return (share, 1) if world == 1 and share > 1 else (share,)


def memory_of(config: Config, kind: str, world: int) -> float:
    """Bytes that each of `world` ranks on this machine may fill."""
    if config.parallel.memory is not None:
        return config.parallel.memory * 1e9
    if kind != "cpu":
        return MOST_OF_MEMORY * float(torch.get_device_module(kind).get_device_properties(0).total_memory)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        raise ConfigError("how much memory this machine has is not known here: give parallel.memory [GB]") from None
    return MOST_OF_MEMORY * total / local_ranks(world)


def most_ranks(config: Config, kind: str) -> int:
    """The most ranks on this machine that may be used."""
    from interlace.train.launch import launcher

    if config.parallel.max_ranks is not None:
        return config.parallel.max_ranks
    if kind != "cpu":
        return max(1, _device.count())
    return min(MOST_CPU_RANKS, launcher.default_threads(1))
