"""``interlace plan`` and ``interlace simulate``: cuts of a config's model, and predicted step times.

``plan`` first shows the config's own layout and the memory of its ranks: see layout.py.

Layer costs have one of three sources:

- counted (default): FLOPs over a rank's speed, for a microbatch of the config's mixture of samples whose images, clips
  and captions fill their budgets
- ``--profile``: timed on this machine with a batch of the config's data
- ``--costs``: measured by a run

With ``--costs``, or with ``parallel.links``, the simulation includes messages, sums of gradients, gathers of weights
and the optimizer, and `simulate` plays all replicas. The model is allocated only for timing, so a config for a thousand
GPUs can be planned on a laptop. If all modules have one dp, other figures are those of one replica of the whole model;
else of the whole run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from interlace.train.commands.planning import failures, large
from interlace.train.config.load import ConfigError, load, unsettled
from interlace.train.config.sections import Config
from interlace.train.models.costs import Load, budget_loads, estimated, flop_costs, stated_links
from interlace.train.models.media_specs import check_inputs
from interlace.train.scheduling import chunk_costs, chunk_counts, chunk_sizes, scaled, step_schedule

MOST_SHOWN = 64
"""Maximum ranks of a cut that `plan` prints."""

ITEMS_LEFT_OUT = (
    "left out: the items of data.reading = 'stream' that travel between ranks, as what they weigh and who reads them "
    "is known in a run alone, where log.predict = true counts them in"
)


@dataclass
class Costs:
    """Layer costs in seconds, and one line on their source.

    modules: of a microbatch, on a rank that has it whole. step: measured costs of chunks of any size, if available.
    links: links between ranks, if known; else communication is free. counted: counted costs of chunks of any size, if
    available.
    """

    modules: Mapping[str, Any]
    origin: str
    step: Any = None
    links: Any = None
    counted: Any = None


def plan(options: argparse.Namespace) -> int:
    """Prints the config's layout with the memory of its ranks, and the cuts with and without frozen awareness."""
    if options.auto:
        if options.data is not None:
            raise ConfigError("--data is for plan without --auto, of a layout that is known: leave one of them out")
        return plan_auto(options)
    for name in ("gpus", "memory", "out"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for plan --auto: add --auto, or leave --{name} out")
    from rich.console import Console
    from rich.table import Table

    from interlace.train.commands.planning import layout as layouts
    from interlace.train.models.tuning import rates, summary

    if options.data is not None and options.json:
        raise ConfigError("--data draws a picture and says what is in it: leave out --json")
    config, model, costs = _load(options)
    if options.data is not None:
        from interlace.train.commands.planning import dispatched

        for line in dispatched.show(config, options.data, str(options.config)):
            print(line)
    microbatches = options.microbatches or config.train.microbatches
    own = _own(config, model, str(options.config))
    ranks = options.ranks or own.world
    candidates = _chains(config, model, costs, ranks, str(options.config), needed=options.ranks is not None)
    if own.world == ranks and config.parallel.placed == "chain" and not options.profile:
        candidates["frozen-aware"] = own  # equal except for the cut at ties
    elif own.world == ranks:
        candidates[f"config ({config.parallel.placed})"] = own
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
        try:
            if candidate.world > large.RANKS:
                alike = all(candidate.spec(name).tp == found.layout.spec(name).tp for name in candidate.modules)
                timeline: Any = large.alike(
                    config, model, candidate, costs, microbatches, str(options.config),
                    weights=found.weights if alike else None,
                )  # fmt: skip
            else:
                timeline = _simulated(config, model, candidate, costs, microbatches)
        except ValueError as error:  # above parallel.activation_memory
            verdicts.append(f"{name}: {error}")
            continue
        timelines[name] = timeline
        verdicts.append(f"{name}: iteration {1e3 * timeline.makespan:,.1f} ms, bubble {100 * timeline.bubble:.0f} %")
        busy, rounds = timeline.busy_per_rank, chunk_counts(config, candidate, microbatches)["language_model"]
        for rank in range(min(candidate.world, MOST_SHOWN)):
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
    if ranks > MOST_SHOWN:
        console.print(f"ranks {MOST_SHOWN} to {ranks - 1}: interlace simulate draws all of them")
    for verdict in verdicts:
        console.print(verdict)
    console.print(costs.origin)
    if own is candidates.get("frozen-aware"):
        console.print("the config's own placement, a chain, is the frozen-aware cut")
    if {"frozen-aware", "frozen-unaware"} <= set(timelines):
        rounds = chunk_counts(config, candidates["frozen-aware"], microbatches)["language_model"]
        console.print(_comparison(model, candidates, timelines, rounds))
    return 0


def plan_auto(options: argparse.Namespace) -> int:
    """Chooses a layout for GPUs that need not be here. Prints it with the reasons, or the lock's content with
    ``--json``."""
    import json

    from interlace.train.auto import planlock, report
    from interlace.train.auto.resolve import plan_for
    from interlace.train.runfolder import write_whole

    source = str(options.config)
    if options.gpus is None or options.memory is None:
        raise ConfigError(f"{source}: plan --auto needs --gpus N, how many to use, and --memory GB, what each has")
    if options.gpus < 1 or not 0 < options.memory < 1e6:
        raise ConfigError(f"--gpus {options.gpus} --memory {options.memory:g}: at least 1 GPU, and more than 0 GB")
    if options.profile or options.ranks is not None or options.microbatches is not None:
        raise ConfigError(
            "plan --auto takes no --profile, --ranks or --microbatches: it is for GPUs that are not here (interlace "
            "train measures those of its machine), and chooses the others unless the config says them"
        )
    speed = _speed(options)
    config = load(options.config, options.set, auto=True)
    how = "as given" if options.tflops is not None else "measured here with a matrix product; give --tflops"
    said: list[str] = []
    text, decision, _ = plan_for(
        config, gpus=options.gpus, memory=1e9 * options.memory, tflops=speed, how=how, source=source, say=said.append
    )
    try:
        if options.out is not None:
            write_whole(options.out, text)
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot write there: {error.strerror}") from None
    if options.picture is not None:
        report.draw(decision, options.picture, f"{config.run.name}: {_count(options.gpus, 'GPU')}")
    if options.json:
        print(json.dumps(planlock.table_of(text), indent=1, sort_keys=True, allow_nan=False))
        return 0
    for line in said:
        print(line)
    for path in filter(None, (options.picture, options.out)):
        print(f"wrote {path}")
    print(planlock.section_of(text))
    return 0


def _speed(options: argparse.Namespace) -> float:
    """TFLOP/s of a rank."""
    if options.tflops is not None and options.tflops <= 0:
        raise ConfigError(f"--tflops {options.tflops:g}: more than 0")
    return float(options.tflops) if options.tflops is not None else matmul_tflops()


def _own(config: Config, model: Any, source: str, *, whole: bool = False) -> Any:
    """The config's own layout. It covers one replica of the whole model if replicas are uniform and `whole` is False.

    Raises ConfigError for a layout that training would reject.
    """
    from interlace.run.lanes import check_stages
    from interlace.train.models.build import build_layout

    layout = build_layout(config, model, source=source, replicas=1 if config.uniform() and not whole else None)
    try:
        check_stages(model, layout)
    except ValueError as error:
        raise ConfigError(f"{source}: [parallel]: {error}") from None
    return layout


def _chains(config: Config, model: Any, costs: Costs, ranks: int, source: str, *, needed: bool) -> dict[str, Any]:
    """The chain of all layers cut into `ranks` with and without frozen awareness.

    With lanes there may be more ranks than layers. Then the result is empty, or an error if `needed`.
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
    """Speedup from frozen awareness, in a sentence; if there is no speedup, the reason."""
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
    """Simulates the config's schedule with the costs; writes timeline.png and trace.json.

    For hundreds of ranks, and for samples of different lengths: see `large`. For node failures: see `failures`.
    """
    if options.make_trace is not None or options.trace is not None:
        failures.check(options)
    if options.make_trace is not None:
        return failures.make_trace(options)
    if options.config is None:
        raise ConfigError("simulate needs a config: name a TOML file (--make-trace alone needs none)")
    config, model, costs = _load(options)
    if options.trace is not None:
        return failures.simulate(config, model, costs, options)
    microbatches = options.microbatches or config.train.microbatches
    varied = options.spread is not None
    own = _own(config, model, str(options.config), whole=costs.links is not None or varied)
    if varied or own.world > large.RANKS:
        return large.simulate(config, model, own, costs, microbatches, options)
    try:
        timeline = _simulated(config, model, own, costs, microbatches)
    except ValueError as error:  # from unsupported lanes
        raise ConfigError(f"{options.config}: [parallel]: {error}") from None
    timeline.name = f"{config.run.name}, {config.parallel.schedule}, simulated"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        timeline.write_trace(options.out / "trace.json")
        timeline.plot(options.out / "timeline.png")
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot write there: {error.strerror}") from None
    layout = f"{_count(timeline.num_ranks, 'rank')}, {_count(microbatches, 'microbatch')}"
    print(f"{config.run.name}: {layout}, placement {config.parallel.placed}, schedule {config.parallel.schedule}")
    busy = ", ".join(f"{name} {100 * share:.0f} %" for name, share in timeline.utilization.items())
    print(f"iteration {1e3 * timeline.makespan:,.1f} ms, bubble {100 * timeline.bubble:.0f} %, busy: {busy}")
    print(costs.origin)
    print(f"wrote {options.out / 'timeline.png'} and {options.out / 'trace.json'} (open it in https://ui.perfetto.dev)")
    return 0


def _load(options: argparse.Namespace) -> tuple[Config, Any, Costs]:
    from interlace.train.data.texts import tokenizer_of, vocabulary_of
    from interlace.train.models.build import build

    for name in ("ranks", "microbatches"):
        if getattr(options, name, None) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: at least 1")
    if options.tflops is not None and options.tflops <= 0:
        raise ConfigError(f"--tflops {options.tflops:g}: more than 0")
    if getattr(options, "spread", None) is not None and not 0 <= options.spread <= 3:
        raise ConfigError(f"--spread {options.spread:g}: 0 or more, and at most 3")
    config = load(options.config, options.set)
    source = str(options.config)
    if options.profile and options.costs is not None:
        raise ConfigError("--profile and --costs say both what layers cost: give one of them")
    unsettled(config, source, "this command")
    if options.profile:
        tokenizer = tokenizer_of(config, source=source)
        model = build(config, tokenizer, source=source)
        costs = _profiled(config, model, tokenizer, source)
    else:
        model = build(config, vocabulary_of(config, source=source), source=source)
        check_inputs(config, model, source=source)
        measured = options.costs is not None
        costs = _measured(config, model, options.costs) if measured else _counted(config, model, options.tflops)
    if config.data.reading == "stream":
        costs.origin += f"; {ITEMS_LEFT_OUT}"
    return config, model, costs


def _simulated(config: Config, model: Any, layout: Any, costs: Costs, microbatches: int) -> Any:
    """The timeline of a step with `microbatches` on each replica of the language model in the config."""
    from interlace.run import stage_durations
    from interlace.simulate import simulate as play

    recompute, schedule = config.train.recompute, step_schedule(config, model, layout, microbatches)
    if costs.links is not None:
        return _with_everything(config, model, schedule, costs, microbatches)
    of_chunk = chunk_costs(config, layout, costs.modules, microbatches)
    return play(schedule, stage_durations(model, layout, of_chunk, recompute=recompute))


def _with_everything(config: Config, model: Any, schedule: Any, costs: Costs, microbatches: int) -> Any:
    """The timeline of a step with messages, sums, gathers and the optimizer, for chunks of the config's mixture."""
    from interlace.estimate.predict import Traffic, predict
    from interlace.train.device import AUTOCAST

    layout, loads = schedule.graph.layout, budget_loads(config, model)
    shares = chunk_sizes(config, layout, microbatches)
    sizes = [nominal_size(loads[chunk.module], shares[chunk.module]) for chunk in schedule.table.chunks]
    rows, precision = config.parallel.sequence_parallel, AUTOCAST[config.train.precision]
    traffic = Traffic.of(model, layout, sequence_parallel=rows, autocast=precision)
    features = {}  # per encoder: feature rows per row of the table
    for edge in schedule.table.edges:
        mine = sum(size.rows for size, c in zip(sizes, schedule.table.chunks, strict=True) if c.module == edge.producer)
        each = traffic.row_bytes[edge.producer][-1] / traffic.feature_bytes if traffic.feature_bytes else 0.0
        features[edge.producer] = mine * each / max(int(edge.pieces[:, 4].sum()), 1)
    found, traffic = large.of_any_size(costs, loads), replace(traffic, rows_of=features)
    return predict(schedule, found, sizes, costs.links, traffic, recompute=config.train.recompute)


def nominal_size(load: Load, share: float) -> Any:
    """The size of a chunk of `share` microbatches; all rows count as targets."""
    from interlace.costs.step import Size

    return Size(load.tokens * share, load.tokens * load.keys * share, load.tokens * share)


def _counted(config: Config, model: Any, tflops: float | None) -> Costs:
    """FLOPs of a full microbatch over the speed of a rank."""
    from interlace.costs.counted import counted_costs
    from interlace.estimate.sample_sizes import key_bytes_of, row_bytes_of

    lengths = budget_loads(config, model)
    speed = tflops if tflops is not None else matmul_tflops()
    modules = {name: scaled(cost, 1 / (speed * 1e12)) for name, cost in flop_costs(config, model).items()}
    shown = ", ".join(f"{name} {each.tokens:,.0f}" for name, each in lengths.items())
    links = stated_links(config)
    told = "what ranks tell each other taken as free" if links is None else "over the links of parallel.links"
    how = "as given" if tflops is not None else "measured here with a matrix product"
    origin = f"counted FLOPs at {speed:.3g} TFLOP/s per rank ({how}), {told}{estimated(model)}; "
    tp = {name: {1, config.parallel.module(name).tp} for name in modules}  # 1: for the chains shown beside it
    rows, keys = row_bytes_of(model), key_bytes_of(model)
    counted = counted_costs(model, speed * 1e12, tp=tp, row_bytes=rows, key_bytes=keys)
    return Costs(modules, f"{origin}tokens per microbatch: {shown}", links=links, counted=counted)


def _measured(config: Config, model: Any, path: Path) -> Costs:
    """Costs written by a run, for a microbatch of the config's mixture. Raises ConfigError."""
    from interlace.train.report import forecast

    found, links = forecast.load(path)
    loads = budget_loads(config, model)
    try:
        modules = {name: found.of(name, nominal_size(load, 1.0)) for name, load in loads.items()}
    except ValueError as error:
        raise ConfigError(f"--costs {path}: {error}") from None
    for name, cost in modules.items():
        if cost.num_layers != len(model.layer_list(name)):
            raise ConfigError(
                f"--costs {path}: it is of a model whose {name} has {cost.num_layers} layers, the config's has "
                f"{len(model.layer_list(name))}: name the file of a run of this model"
            )
    shown = ", ".join(f"{name} {100 * error:.0f} %" for name, error in found.errors.items())
    origin = f"{path}: {found.origin}; its fits are off by {shown} (each size predicted from the others)"
    return Costs(modules, origin, found, stated_links(config) or links)


def _profiled(config: Config, model: Any, tokenizer: Any, source: str) -> Costs:
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


def matmul_tflops(size: int = 768, repeats: int = 5) -> float:
    """Speed of one thread pool of this machine in fp32 matrix products, in TFLOP/s."""
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
