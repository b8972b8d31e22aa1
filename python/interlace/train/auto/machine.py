"""Costs of candidates: layers, links and memory, measured on this machine or assumed.

A GPU rank has a GPU of its own, so one set of costs serves any number of ranks. CPU ranks share the cores, so each
number of ranks has its own costs, timed with its number of threads per rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from interlace import _device
from interlace.costs.host_overhead import HostOverhead
from interlace.costs.links import Link, Links
from interlace.costs.step import Costs
from interlace.plan import LinkModel
from interlace.train.auto.candidates import divisors
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.launch import launcher
from interlace.train.models.costs import estimated, stated_links
from interlace.train.report.forecast import time_optimizer

if TYPE_CHECKING:
    from interlace.model import MultimodalModel, Sample

MOST_OF_MEMORY = 0.9
"""Fraction of a GPU's (or the host's) memory that a layout may fill; the rest is a reserve for uncounted memory."""
MOST_CPU_RANKS = 4
_GPUS_PER_HOST = 8
ASSUMED = Links(
    host=Link(LinkModel(8e-6, 1 / 200e9), LinkModel(8e-6, 1 / 200e9)),
    network=Link(LinkModel(20e-6, 1 / 40e9), LinkModel(20e-6, 1 / 40e9)),
    ranks_per_host=_GPUS_PER_HOST,
)
"""Links of GPUs that are not here: hosts of 8 GPUs with 200 GB/s between them, and a network of 40 GB/s per GPU."""
STATED = "links from parallel.links"
_UPDATE_BYTES_PER_SECOND = 1e12 / 7  # AdamW reads and writes 7 times the weights, at a third of an H100's bandwidth
_ALL_DEGREES = 64  # counted costs have every tp up to this; above it powers of two and the config's degrees
BUDGET_SECONDS = 1.5  # for profiling a GPU


@dataclass
class Machine:
    """Costs, links and memory of a machine.

    costs: (ranks, threads of each) -> costs. links: ranks -> links. memory: ranks -> bytes that each rank may fill.
    origin: source of the figures. threads: ranks -> possible numbers of threads of each; None: threads are not chosen.
    unsure: relative measurement noise. worlds: numbers of ranks that may win, if known. notes: sentences on what was
    not measured.
    """

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
        """Costs for `world` ranks, by default with the first of their possible numbers of threads."""
        return self.costs(world, self.threads(world)[0] if threads is None else threads)


def counted(config: Config, model: MultimodalModel, *, tflops: float, memory: float, how: str) -> Machine:
    """Machine of GPUs that are not here: FLOPs at `tflops` TFLOP/s per rank, `memory` bytes each, and the links of the
    config, else `ASSUMED`."""
    from interlace.costs.counted import counted_costs
    from interlace.estimate.sample_sizes import key_bytes_of, row_bytes_of

    itemsize = 4 if config.train.precision == "fp32" else 2
    rows, keys = (each(model, itemsize=itemsize) for each in (row_bytes_of, key_bytes_of))
    update = LinkModel(0.0, 1 / _UPDATE_BYTES_PER_SECOND)

    @cache
    def costs(world: int, threads: int | None) -> Costs:
        stated = {config.parallel.module(name).tp for name in rows}
        powers = (1 << power for power in range(world.bit_length()))
        degrees = {*range(1, min(world, _ALL_DEGREES) + 1), *powers, *stated}
        tp = dict.fromkeys(rows, degrees)
        return counted_costs(model, tflops * 1e12, tp=tp, row_bytes=rows, key_bytes=keys, optimizer=update)

    links = stated_links(config)
    source = STATED
    if links is None:
        links = ASSUMED
        source = f"assumed: hosts of {_GPUS_PER_HOST} GPUs, 200 GB/s between these and 40 GB/s per GPU between hosts"
    origin = f"counted FLOPs at {tflops:.3g} TFLOP/s per rank ({how}){estimated(model)}; {source}"
    return Machine(costs, lambda world: links, lambda world: memory, origin, "cuda")


# ---------------------------------------------------------------------- this machine


def here(
    config: Config,
    model: MultimodalModel,
    samples: list[Sample],
    *,
    kind: str,
    worlds: Sequence[int],
    links: Links,
    how: str,
    worth: float,
    say: Callable[[str], None],
    around: Callable[[int, int], HostOverhead],
) -> Machine:
    """This machine: layers timed on rank 0's device with `samples`; `links` as given.

    how: source of the links. kind: of device. worlds: numbers of ranks to compare. worth, say: as in
    `interlace.estimate.timed_layers.measure`. around: (ranks of this machine, threads of each) -> time of a step
    outside its lists.
    """
    from interlace.estimate.profiling import Profile, ProfileOptions, profile_costs
    from interlace.estimate.timed_layers import Setting, measure, settings_of
    from interlace.train.device import AUTOCAST

    degrees = sorted({tp for world in worlds for tp in divisors(world)})
    names = model.modules_order()
    options = ProfileOptions(
        largest=max(1, len(samples)),
        tps={name: [tp for tp in degrees if tp == 1 or can_be_cut(config, model, name, tp)] for name in names},
        device=kind,
        autocast=AUTOCAST[config.train.precision],
        sequence_parallel=config.parallel.sequence_parallel,
    )
    origin = f"layers timed on this machine ({kind}); {how}"
    memory = partial(memory_of, config, kind)
    update = partial(time_optimizer, config, model, torch.device(kind))
    if kind != "cpu":
        say("measuring (a few seconds)")
        once = profile_costs(model, samples, options, budget=BUDGET_SECONDS, optimizer=update())
        once = replace(once, host_overhead=around(launcher.local_ranks(max(worlds)), 1))
        return Machine(lambda world, threads: once, lambda world: links, memory, origin, kind)
    measured = measure(
        Profile(model, samples, options),
        settings_of(worlds, partial(threads, config)),
        optimizer=update,
        worth=worth,
        neighbours=lambda setting: launcher.local_ranks(setting.world) - 1,
        say=say,
    )
    costs = {
        setting: replace(each, host_overhead=around(launcher.local_ranks(setting.world), setting.threads))
        for setting, each in measured.costs.items()
    }
    return Machine(
        lambda world, count: costs[Setting(world, count or 1)],
        lambda world: links,
        memory,
        origin,
        kind,
        threads=lambda world: tuple(each.threads for each in costs if each.world == world),
        unsure=measured.unsure,
        worlds=tuple(sorted({each.world for each in costs})),
        notes=measured.skipped,
    )


def can_be_cut(config: Config, model: MultimodalModel, name: str, tp: int) -> bool:
    """True if a module can run with `tp` tensor-parallel ranks."""
    from interlace.estimate.traced import weights_of
    from interlace.layout import Layout, ParallelSpec

    specs = {each: ParallelSpec(tp=tp if each == name else 1) for each in model.modules_order()}
    try:
        layout = Layout.from_specs(model, specs, placement="parallel")
        weights_of(model, layout, sequence_parallel=config.parallel.sequence_parallel)
    except ValueError:
        return False
    return True


def threads(config: Config, world: int) -> tuple[int, ...]:
    """Possible numbers of threads for each of `world` CPU ranks: its share of the cores. One process may also use one
    thread, which is faster for small models."""
    if config.parallel.threads is not None:
        return (config.parallel.threads,)
    share = launcher.default_threads(launcher.local_ranks(world))
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
        raise ConfigError("the memory of this machine is unknown: set parallel.memory [GB]") from None
    return MOST_OF_MEMORY * total / launcher.local_ranks(world)


def most_ranks(config: Config, kind: str) -> int:
    """Maximum number of ranks on this machine."""
    if config.parallel.max_ranks is not None:
        return config.parallel.max_ranks
    if kind != "cpu":
        return max(1, _device.count())
    return min(MOST_CPU_RANKS, launcher.default_threads(1))
