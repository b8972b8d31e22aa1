"""Layer costs of a config's model, for ``interlace plan`` and ``interlace simulate``.

The costs have one of three sources:

- counted (default): FLOPs over a rank's speed, for a microbatch of the config's mixture of samples whose images, clips
  and captions fill their budgets
- ``--profile``: timed on this machine with a batch of the config's data
- ``--costs``: measured by a run

The model is allocated only for timing, so a config for a thousand GPUs can be planned on a laptop.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.train.blame import check_at_least
from interlace.train.config.load import ConfigError, blaming, load, unsettled
from interlace.train.config.sections import Config
from interlace.train.models.costs import Load, budget_loads, estimated, flop_costs, stated_links
from interlace.train.models.media_specs import check_inputs
from interlace.train.scheduling import scaled

if TYPE_CHECKING:
    from interlace.costs.links import Links
    from interlace.costs.modules import ModuleCosts
    from interlace.costs.step import Costs as StepCosts
    from interlace.costs.step import Size
    from interlace.data import Tokenizer
    from interlace.model import MultimodalModel

ITEMS_LEFT_OUT = (
    "left out: the items of data.reading = 'stream' that travel between ranks, as what they weigh and who reads them "
    "is known in a run alone, where log.predict = true counts them in"
)


@dataclass
class Costs:
    """Layer costs in seconds, and one line on their source.

    modules: of a microbatch, on a rank that has it whole. step: measured or counted costs of chunks of any size, if
    available. links: links between ranks, if known; else communication is free.
    """

    modules: Mapping[str, ModuleCosts]
    origin: str
    step: StepCosts | None = None
    links: Links | None = None


@dataclass(frozen=True)
class Priced:
    """A config with its model, which has no memory for weights, and the costs of its layers.

    source: names the config in messages. microbatches: of a step.
    """

    config: Config
    model: MultimodalModel
    costs: Costs
    source: str
    microbatches: int


def load_priced(options: argparse.Namespace) -> Priced:
    """The config of a command's options, with its costs. Raises ConfigError."""
    from interlace.train.data.texts import tokenizer_of, vocabulary_of
    from interlace.train.models.build import build

    check_at_least(1, options, "ranks", "microbatches")
    _check_speed(options)
    if getattr(options, "spread", None) is not None and not 0 <= options.spread <= 3:
        raise ConfigError(f"--spread {options.spread:g}: 0 or more, and at most 3")
    config = load(options.config, options.set)
    source = str(options.config)
    if options.profile and options.costs is not None:
        raise ConfigError("--profile and --costs say both what layers cost: give one of them")
    unsettled(config, source, "this command", "a layout, such as --set 'parallel={dp=2}'")
    if options.profile:
        tokenizer = tokenizer_of(config, source=source)
        model = build(config, tokenizer, source=source)
        costs = _profiled(config, model, tokenizer, source)
    else:
        model = build(config, vocabulary_of(config, source=source), source=source)
        check_inputs(config, model, source=source)
        measured = options.costs is not None
        costs = _measured(config, model, options.costs) if measured else counted(config, model, options.tflops)
    if config.data.reading == "stream":
        costs.origin += f"; {ITEMS_LEFT_OUT}"
    return Priced(config, model, costs, source, getattr(options, "microbatches", None) or config.train.microbatches)


def nominal_size(load: Load, share: float) -> Size:
    """The size of a chunk of `share` microbatches; all rows count as targets."""
    from interlace.costs.step import Size

    return Size(load.tokens * share, load.tokens * load.keys * share, load.tokens * share)


def counted(config: Config, model: MultimodalModel, tflops: float | None) -> Costs:
    """FLOPs of a full microbatch over the speed of a rank."""
    from interlace.costs.counted import counted_costs
    from interlace.estimate.sample_sizes import key_bytes_of, row_bytes_of

    lengths = budget_loads(config, model)
    speed = tflops if tflops is not None else matmul_tflops()
    modules = {name: scaled(cost, 1 / (speed * 1e12)) for name, cost in flop_costs(config, model).items()}
    shown = ", ".join(f"{name} {each.tokens:,.0f}" for name, each in lengths.items())
    links = stated_links(config)
    links_text = "what ranks tell each other taken as free" if links is None else "over the links of parallel.links"
    how = "as given" if tflops is not None else "measured here with a matrix product"
    origin = f"counted FLOPs at {speed:.3g} TFLOP/s per rank ({how}), {links_text}{estimated(model)}; "
    tp = {name: {1, config.parallel.module(name).tp} for name in modules}  # 1: for the chains shown beside it
    rows, keys = row_bytes_of(model), key_bytes_of(model)
    step = counted_costs(model, speed * 1e12, tp=tp, row_bytes=rows, key_bytes=keys)
    return Costs(modules, f"{origin}tokens per microbatch: {shown}", step, links)


def _measured(config: Config, model: MultimodalModel, path: Path) -> Costs:
    """Costs written by a run, for a microbatch of the config's mixture. Raises ConfigError."""
    from interlace.train.report import forecast

    costs, links = forecast.load(path)
    loads = budget_loads(config, model)
    with blaming(f"--costs {path}"):
        modules = {name: costs.of(name, nominal_size(load, 1.0)) for name, load in loads.items()}
    for name, cost in modules.items():
        if cost.num_layers != len(model.layer_list(name)):
            raise ConfigError(
                f"--costs {path}: it is of a model whose {name} has {cost.num_layers} layers, the config's has "
                f"{len(model.layer_list(name))}: name the file of a run of this model"
            )
    shown = ", ".join(f"{name} {100 * error:.0f} %" for name, error in costs.errors.items())
    origin = f"{path}: {costs.origin}; its fits are off by {shown} (each size predicted from the others)"
    return Costs(modules, origin, costs, stated_links(config) or links)


def _profiled(config: Config, model: MultimodalModel, tokenizer: Tokenizer, source: str) -> Costs:
    """Layer times of one microbatch of the config's data on this machine."""
    import torch

    from interlace.plan import profile_model
    from interlace.train.data.feed import datasets, indexed
    from interlace.train.launch import launcher
    from interlace.train.models.build import materialize
    from interlace.train.report import forecast

    torch.set_num_threads(config.parallel.threads or launcher.default_threads(config.world_size()))
    data = indexed(*datasets(config, model, tokenizer, source=source))
    materialize(model, seed=config.run.seed)
    count = forecast.chunk_samples(config, data)
    samples = [data.sample(i % len(data), 0) for i in range(count)]
    origin = "timed on this machine, what ranks tell each other taken as free; "
    origin += f"{torch.get_num_threads()} threads, {count} samples of {data.name} per microbatch"
    return Costs(profile_model(model, samples), origin)


def speed_of(options: argparse.Namespace) -> float:
    """TFLOP/s of a rank."""
    _check_speed(options)
    return float(options.tflops) if options.tflops is not None else matmul_tflops()


def _check_speed(options: argparse.Namespace) -> None:
    if options.tflops is not None and options.tflops <= 0:
        raise ConfigError(f"--tflops {options.tflops:g}: more than 0")


def matmul_tflops() -> float:
    """Speed of one thread pool of this machine in fp32 matrix products, in TFLOP/s."""
    import torch

    size = 768
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / min(timeit.repeat(lambda: a @ b, number=1, repeat=5)) / 1e12
