"""``interlace plan`` and ``interlace simulate``: where a config's model is cut, and how long a step would take.

``plan`` shows the config's own layout and the memory of its ranks first: see layout.py.

Layer costs are counted (FLOPs over a rank's speed, for a microbatch of the config's mixture of samples whose images,
clips and captions fill their budgets) or, with ``--profile``, timed on this machine with a batch of the config's data.
The model is never allocated unless it is timed, so a config for a thousand GPUs can be planned on a laptop. Where all
modules have one dp, figures are those of one replica of the whole model; else of the whole run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.train.config import ConfigError, load
from interlace.train.costs import budget_loads, flop_costs
from interlace.train.schema import Config


@dataclass
class Costs:
    """Layer costs in seconds, and one line on where they come from."""

    modules: Mapping[str, Any]
    origin: str


def plan(options: argparse.Namespace) -> int:
    """Prints the config's layout with the memory of its ranks, and the cuts with and without frozen awareness."""
    from rich.console import Console
    from rich.table import Table

    from interlace.train.commands import layout as layouts
    from interlace.train.tuning import rates, summary

    config, model, costs = _load(options)
    microbatches = options.microbatches or config.train.microbatches
    own = _own(config, model, str(options.config))
    ranks = options.ranks or own.world
    candidates = _chains(config, model, costs, ranks, str(options.config), needed=options.ranks is not None)
    if own.world == ranks and config.parallel.placement == "chain" and not options.profile:
        candidates["frozen-aware"] = own  # the same but for how ties are cut
    elif own.world == ranks:
        candidates[f"config ({config.parallel.placement})"] = own
    found = layouts.of_config(config, model, costs, microbatches, str(options.config))
    if options.picture is not None:
        layouts.draw(found, options.picture)
    if options.json:
        print(found.to_json())
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    layouts.show(found, console)
    if options.picture is not None:
        console.print(f"wrote {options.picture}")
    for line in summary(model, rates(config, model)):
        console.print(line)
    console.print()
    table = Table(
        title=f"{config.run.name}: {_count(ranks, 'rank')}, {_count(microbatches, 'microbatch')}", title_justify="left"
    )
    for column in ("cut", "rank", "stages", "parameters", "1F+1B ms", "of the step"):
        table.add_column(column, justify="right" if column not in ("cut", "stages") else "left", overflow="fold")
    timelines, verdicts = {}, []
    for name, candidate in candidates.items():
        timeline = _simulated(config, model, candidate, costs, microbatches)
        timelines[name] = timeline
        verdicts.append(f"{name}: iteration {1e3 * timeline.makespan:,.1f} ms, bubble {100 * timeline.bubble:.0f} %")
        busy, rounds = timeline.busy_per_rank, _chunks(config, candidate, microbatches)["language_model"]
        for rank in range(candidate.world):
            stages = candidate.of_rank(rank)
            table.add_row(
                name if rank == 0 else "",
                str(rank),
                ", ".join(f"{stage.module}[{stage.start}:{stage.stop}]" for stage in stages),
                f"{sum(_parameters(model, stage) for stage in stages) / 1e6:,.2f} M",
                f"{1e3 * busy[rank] / rounds:,.2f}",
                f"{100 * busy[rank] / timeline.makespan:.0f} %",
            )
        table.add_section()
    console.print(table)
    for verdict in verdicts:
        console.print(verdict)
    console.print(costs.origin)
    if own is candidates.get("frozen-aware"):
        console.print("the config's own placement, a chain, is the frozen-aware cut")
    if "frozen-aware" in candidates:
        rounds = _chunks(config, candidates["frozen-aware"], microbatches)["language_model"]
        console.print(_comparison(model, candidates, timelines, rounds))
    return 0


def _own(config: Config, model: Any, source: str) -> Any:
    """The config's own layout; of one replica of the whole model, where there are such."""
    from interlace.train.build import build_layout

    return build_layout(config, model, source=source, replicas=1 if config.uniform() else None)


def _chains(config: Config, model: Any, costs: Costs, ranks: int, source: str, *, needed: bool) -> dict[str, Any]:
    """The chain of all layers cut into `ranks` with and without frozen awareness.

    There may be more ranks than layers, as lanes have several: then none, unless they are `needed`.
    """
    from interlace.layout import Layout

    recompute = config.train.recompute
    try:
        return {
            name: Layout.balanced(model, ranks, costs=costs.modules, frozen_aware=aware, recompute=recompute)
            for name, aware in (("frozen-aware", True), ("frozen-unaware", False))
        }
    except ValueError as error:
        if not needed:
            return {}
        raise ConfigError(f"{source}: {error}") from None


def _comparison(model: Any, candidates: Mapping[str, Any], timelines: Mapping[str, Any], microbatches: int) -> str:
    """What frozen awareness brings, in a sentence; when it brings nothing, why."""
    aware, unaware = (timelines[name] for name in ("frozen-aware", "frozen-unaware"))
    ratio = unaware.makespan / aware.makespan
    if abs(ratio - 1) >= 0.01:
        return f"frozen-aware is predicted to be {ratio:.2f}x as fast as frozen-unaware"
    if not any(not layer.trainable for name in model.modules_order() for layer in model.layers(name)):
        return "frozen-aware and frozen-unaware are equally fast: no layer of this model is frozen"
    if candidates["frozen-aware"] == candidates["frozen-unaware"]:
        return "frozen-aware and frozen-unaware are the same cut: what is frozen would move less than one layer here"
    slowest = 1e3 * max(aware.busy_per_rank) / microbatches
    return (
        f"frozen-aware and frozen-unaware are equally fast although they cut differently: the slowest rank of both is "
        f"busy for {slowest:,.2f} ms per microbatch, and moving one more layer would not make it faster"
    )


def simulate(options: argparse.Namespace) -> int:
    """Plays the config's schedule against the costs; writes timeline.png and trace.json."""
    config, model, costs = _load(options)
    microbatches = options.microbatches or config.train.microbatches
    own = _own(config, model, str(options.config))
    try:
        timeline = _simulated(config, model, own, costs, microbatches)
    except ValueError as error:  # of lanes that cannot be
        raise ConfigError(f"{options.config}: [parallel]: {error}") from None
    timeline.name = f"{config.run.name}, {config.parallel.schedule}, simulated"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        timeline.write_trace(options.out / "trace.json")
        timeline.plot(options.out / "timeline.png")
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot write there: {error.strerror}") from None
    layout = f"{_count(timeline.num_ranks, 'rank')}, {_count(microbatches, 'microbatch')}"
    print(f"{config.run.name}: {layout}, placement {config.parallel.placement}, schedule {config.parallel.schedule}")
    busy = ", ".join(f"{name} {100 * share:.0f} %" for name, share in timeline.utilization.items())
    print(f"iteration {1e3 * timeline.makespan:,.1f} ms, bubble {100 * timeline.bubble:.0f} %, busy: {busy}")
    print(costs.origin)
    print(f"wrote {options.out / 'timeline.png'} and {options.out / 'trace.json'} (open it in https://ui.perfetto.dev)")
    return 0


def _load(options: argparse.Namespace) -> tuple[Config, Any, Costs]:
    from interlace.train.build import build
    from interlace.train.texts import tokenizer_of

    for name in ("ranks", "microbatches"):
        if getattr(options, name, None) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: at least 1")
    if options.tflops is not None and options.tflops <= 0:
        raise ConfigError(f"--tflops {options.tflops:g}: more than 0")
    config = load(options.config, options.set)
    tokenizer = tokenizer_of(config, source=str(options.config))
    model = build(config, tokenizer, source=str(options.config))
    if options.profile:
        return config, model, _profiled(config, model, tokenizer, str(options.config))
    return config, model, _counted(config, model, options.tflops)


def _simulated(config: Config, model: Any, layout: Any, costs: Costs, microbatches: int) -> Any:
    """The timeline of a step with `microbatches` on each replica of the language model that the config has."""
    from interlace.run import stage_durations
    from interlace.simulate import simulate as play

    recompute = config.train.recompute
    scaled = chunk_costs(config, layout, costs, microbatches)
    return play(
        step_schedule(config, model, layout, microbatches), stage_durations(model, layout, scaled, recompute=recompute)
    )


def step_schedule(config: Config, model: Any, layout: Any, microbatches: int) -> Any:
    """The schedule of a step of alike samples."""
    from interlace.run import stage_graph
    from interlace.run.lanes import with_lanes
    from interlace.run.table import nominal_table
    from interlace.schedule import StepTable, gpipe, one_f_one_b

    graph, _ = with_lanes(stage_graph(model, layout), model, sequence_parallel=config.parallel.sequence_parallel)
    chunks, replicas = _chunks(config, layout, microbatches), layout.data_parallel
    rounds = chunks.pop("language_model")
    if all(replicas[name] == replicas["language_model"] and count == rounds for name, count in chunks.items()):
        presence = [frozenset(layout.modules)] * rounds
        table = StepTable.aligned(graph.links, presence, replicas=replicas["language_model"])
    else:
        table = nominal_table(graph.layout, rounds, chunks)
    return {"1f1b": one_f_one_b, "gpipe": gpipe}[config.parallel.schedule](graph, table)


def chunk_sizes(config: Config, layout: Any, microbatches: int) -> dict[str, float]:
    """Samples of a chunk of each module, in microbatches of the language model."""
    chunks, replicas = _chunks(config, layout, microbatches), layout.data_parallel
    samples = chunks["language_model"] * replicas["language_model"]
    return {name: samples / (count * replicas[name]) for name, count in chunks.items()}


def chunk_costs(config: Config, layout: Any, costs: Costs, microbatches: int) -> dict[str, Any]:
    """The costs of a chunk of each module, which the ranks of a lane share."""
    sizes = chunk_sizes(config, layout, microbatches)
    return {name: _times(cost, sizes[name] / layout.spec(name).lane_size) for name, cost in costs.modules.items()}


def _chunks(config: Config, layout: Any, microbatches: int) -> dict[str, int]:
    """Chunks per replica and step of each module of `layout`.

    A layout with other replicas than the config's (a chain for modules of unequal dp) cuts a step into as many in all.
    """

    def spread(name: str, count: int) -> int:
        return count if config.uniform() else max(1, count * config.parallel.replicas(name) // layout.spec(name).dp)

    rounds, own = spread("language_model", microbatches), config.chunks()
    default = 1 if layout.placement == "shared" else rounds
    encoders = config.model.encoders()
    return {name: spread(name, own[name]) if name in own else default for name in encoders} | {"language_model": rounds}


def _times(cost: Any, factor: float) -> Any:
    """The costs of a chunk of `factor` times as many samples."""
    from interlace.plan import LayerTimes, ModuleCosts

    given = (cost.times.forward, cost.times.input_grad, cost.times.weight_grad, cost.times.weight_only)
    times = LayerTimes(*(np.asarray(values, dtype=np.float64) * factor for values in given))
    return ModuleCosts(layer=cost.layer, times=times, trainable=cost.trainable)


def _counted(config: Config, model: Any, tflops: float | None) -> Costs:
    """FLOPs of a full microbatch over the speed of a rank."""
    lengths = budget_loads(config, model)
    speed = tflops if tflops is not None else matmul_tflops()
    modules = {name: _times(cost, 1 / (speed * 1e12)) for name, cost in flop_costs(config, model).items()}
    shown = ", ".join(f"{name} {each.tokens:,.0f}" for name, each in lengths.items())
    how = "as given" if tflops is not None else "measured here with a matrix product"
    origin = f"counted FLOPs at {speed:.3g} TFLOP/s per rank ({how}), what ranks tell each other taken as free; "
    return Costs(modules, f"{origin}tokens per microbatch: {shown}")


def _profiled(config: Config, model: Any, tokenizer: Any, source: str) -> Costs:
    """Layer times of one microbatch of the config's data on this machine."""
    import torch

    from interlace.plan import profile_model
    from interlace.train.build import materialize
    from interlace.train.feed import datasets
    from interlace.train.launch import launcher

    torch.set_num_threads(config.parallel.threads or launcher.default_threads(config.world_size()))
    data, _, note = datasets(config, model, tokenizer, source=source)
    materialize(model, seed=config.run.seed)
    count = max(1, config.train.batch_size // config.parallel.replicas("language_model") // config.train.microbatches)
    samples = [data.sample(i % len(data), 0) for i in range(count)]
    origin = "timed on this machine, what ranks tell each other taken as free; "
    origin += f"{torch.get_num_threads()} threads, {count} samples of {data.name} per microbatch"
    return Costs(profile_model(model, samples), origin + (f" ({note})" if note else ""))


def matmul_tflops(size: int = 768, repeats: int = 5) -> float:
    """What one thread pool of this machine reaches in fp32 matrix products, in TFLOP/s."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def _parameters(model: Any, stage: Any) -> int:
    return sum(layer.parameters for layer in model.layers(stage.module)[stage.start : stage.stop])
