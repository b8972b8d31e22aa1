"""``interlace simulate failures``: cost of the failures in a trace, with three recovery methods.

The model is cut as a chain of all its layers, with one rank or lane of tp * cp ranks per stage, as in `--elastic` runs.
pp, dp and placement of [parallel] are ignored. docs/simulated-failures.md lists the assumptions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from interlace.train.blame import check_at_least, writing
from interlace.train.commands.planning.costs import Costs, Priced, load_priced
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.sections import Config
from interlace.train.elastic.config import check_lanes, lane_size

if TYPE_CHECKING:
    from interlace.model import MultimodalModel
    from interlace.simulate.elastic_job import Job
    from interlace.simulate.failure_trace import Change
    from interlace.simulate.recovery import Floats, Rates, Stretch

VERSION = 1  # of the keys of the JSON
PICTURE = "failures.png"
WINDOWS = 12  # rows of the table over time
NETWORK, DISK = 25.0, 1.0  # 10^9 bytes per second, if neither flags nor links give a value
SAVED_MOMENTS = 2  # per trained parameter, in addition to its weight


def failures(options: argparse.Namespace) -> int:
    """Replays ``--trace`` for the config, or prints a trace with ``--make-trace``."""
    check(options)
    if options.make_trace is not None:
        return make_trace(options)
    if options.config is None:
        raise ConfigError("simulate failures needs a config: name a TOML file (--make-trace alone needs none)")
    return simulate(load_priced(options), options)


def make_trace(options: argparse.Namespace) -> int:
    """Prints a generated trace of spot instances."""
    from interlace.simulate.failure_trace import SPOT, spot_trace, trace_lines

    every, warning = SPOT[options.make_trace]
    if options.config is not None:
        raise ConfigError("--make-trace prints a trace and simulates nothing: leave out the config")
    with blaming("--make-trace"):
        changes = spot_trace(options.nodes or 30, every, options.hours or 12.0, options.seed, warning=warning)
    print("\n".join(trace_lines(changes)))
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for invalid flags, before anything is built."""
    check_at_least(1, options, "nodes", "ranks_per_node", "min_nodes", "save_every")
    check_at_least(0, options, "faults")
    for name in ("hours", "network", "disk", "memory"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name} {value:g}: more than 0")
    for name in ("start", "regroup"):
        if not 0 <= getattr(options, name) < math.inf:
            raise ConfigError(f"--{name} {getattr(options, name):g}: 0 or more")


def simulate(priced: Priced, options: argparse.Namespace) -> int:
    """Replays the trace; prints tables, or with ``--json`` all figures, and draws failures.png."""
    from interlace.simulate.failure_trace import nodes_at_start
    from interlace.simulate.pictures.recovery import plot_recovery
    from interlace.simulate.recovery import Checkpoints, Oobleck, Redundant, System, replay

    config, changes = priced.config, read(options)
    options = with_config(options, priced)
    rates = rates_of(priced.costs, options)
    nodes = options.nodes or max(config.world_size() // options.ranks_per_node, 1)
    with blaming(f"{options.config}, --trace {options.trace}"):
        start = nodes_at_start(changes, nodes)
        job = job_of(priced, options, nodes)
        systems: dict[str, System] = {
            "reconfigure": Oobleck(job, rates, start),
            "restart": Checkpoints(job, rates, start),
            "redundant": Redundant(job, rates, start),
        }
        until = 3600 * options.hours if options.hours else 3600.0 * math.ceil(changes[-1].time / 3600 + 1e-9)
        runs = {name: replay(system, changes, until) for name, system in systems.items()}
    there = nodes_over_time(changes, len(start), until)
    report = _report(priced, job, rates, runs, there) | {"min_nodes_assumed": options.assumed}
    if options.json:
        print(json.dumps(report, indent=1, sort_keys=True, allow_nan=False))
        return 0
    with writing("--out", options.out):
        options.out.mkdir(parents=True, exist_ok=True)
        title = f"{config.run.name}: {len(start)} nodes, {len(changes)} changes in {until / 3600:.3g} hours"
        plot_recovery(runs, there, options.out / PICTURE, title=title)
    _print(report)
    print(f"wrote {options.out / PICTURE}")
    return 0


def with_config(options: argparse.Namespace, priced: Priced) -> argparse.Namespace:
    """Flags, with [resilience] for those that were not given.

    nodes is set only if the config has it. min_nodes is computed from the model's memory if --memory gives a rank's
    memory. assumed: min_nodes has no source, so the model is assumed to fit on one node.

    Raises ConfigError for lanes that an elastic run does not support.
    """
    config, own = priced.config, priced.config.resilience
    defaults = {
        "nodes": own.nodes if "nodes" in own.model_fields_set else None,
        "ranks_per_node": own.ranks_per_node,
        "faults": own.faults,
        "min_nodes": own.min_nodes or 1,
    }
    given = {name: value for name in defaults if (value := getattr(options, name)) is not None}
    merged = argparse.Namespace(**{**vars(options), **defaults, **given})
    source = f"{options.config}, --trace"
    check_lanes(config, source=source)
    if merged.ranks_per_node % (lane := lane_size(config)):
        raise ConfigError(
            f"{source}: nodes of {merged.ranks_per_node} ranks cannot hold lanes of tp * cp = {lane}: give "
            "--ranks-per-node a multiple of it"
        )
    merged.assumed = "min_nodes" not in given and own.min_nodes is None and options.memory is None
    if "min_nodes" not in given and own.min_nodes is None and options.memory is not None:
        merged.min_nodes = _held_by(merged, priced)
    return merged


def _held_by(options: argparse.Namespace, priced: Priced) -> int:
    """Nodes of the smallest pipeline that fits the model, computed as in a run."""
    from interlace.train.elastic.proposals import min_nodes, templates_of

    config = priced.config
    own = config.resilience.model_copy(update={"ranks_per_node": options.ranks_per_node, "faults": options.faults})
    templates = templates_of(config, priced.model, priced.costs.modules)
    total = config.train.microbatches * config.parallel.replicas("language_model")
    config = config.model_copy(update={"resilience": own})
    source = f"{options.config}, --memory {options.memory:g}"
    return min_nodes(config, priced.model, templates, 1e9 * options.memory, total, source=source)


def read(options: argparse.Namespace) -> list[Change]:
    """The changes of ``--trace``. Raises ConfigError with the line number."""
    from interlace.simulate.failure_trace import TraceError, read_trace

    try:
        with open(options.trace, encoding="utf-8", newline="") as file:
            changes = read_trace(file, str(options.trace))
    except TraceError as error:
        raise ConfigError(f"--trace {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--trace {options.trace}: cannot read it: {why}") from None
    if not changes:
        raise ConfigError(f"--trace {options.trace}: nothing happens in it: give at least one line after the header")
    return changes


def rates_of(costs: Costs, options: argparse.Namespace) -> Rates:
    """Rates of network and storage: flags, else known links, else default values."""
    from interlace.simulate.recovery import Rates

    network = NETWORK if options.network is None else options.network
    if options.network is None and costs.links is not None and (line := costs.links.network.message).per_byte > 0:
        network = options.ranks_per_node * 1e-9 / line.per_byte
    disk = 1e9 * (DISK if options.disk is None else options.disk)
    return Rates(
        network=1e9 * network,
        save=disk,
        load=disk,
        start=options.start,
        regroup=options.regroup,
        every=options.save_every,
    )


def job_of(priced: Priced, options: argparse.Namespace, nodes: int) -> Job:
    """Chain of all layers of the model, and its bytes copied, saved and loaded. Raises ValueError."""
    from interlace.plan import layer_costs
    from interlace.simulate.elastic_job import Cluster, Job, StateBytes

    config, model, costs = priced.config, priced.model, priced.costs.modules
    lane = lane_size(config)
    order = list(model.modules_order())
    both = layer_costs(costs, order, recompute=config.train.recompute)
    forward = np.concatenate([costs[name].summed(costs[name].times.forward) for name in order])
    whole, saved = _bytes(config, model)
    return Job(
        forward / lane,
        (np.concatenate([both[name] for name in order]) - forward) / lane,
        batch=config.train.batch_size,
        microbatches=config.train.microbatches * config.parallel.replicas("language_model"),
        cluster=Cluster(nodes, options.ranks_per_node // lane, options.faults, options.min_nodes),
        state=StateBytes(_copied(priced, order), saved, whole),
    )


def _bytes(config: Config, model: MultimodalModel) -> tuple[float, float]:
    """(bytes of all layers with state, bytes of these in a checkpoint).

    Trained weights have two moments. Frozen weights are saved unless they are in a folder named in the config. A tied
    weight counts once.
    """
    from interlace.estimate.traced import weights_of
    from interlace.layout import Layout
    from interlace.train.models.build import stored_weights

    stored, whole, saved = stored_weights(config, model), 0.0, 0.0
    for weight in weights_of(model, Layout.balanced(model, 1)):
        size = weight.count(0) * weight.itemsize * (1 + SAVED_MOMENTS * weight.trainable)
        whole += size
        saved += size if weight.trainable or weight.name not in stored else 0.0
    return whole, saved


def _copied(priced: Priced, order: Sequence[str]) -> Floats:
    """Bytes [layers] sent to a node that lacks a layer: the parts of all ranks of a lane; a tied weight counts for its
    first layer. Raises ValueError."""
    from interlace.run.execute.ranks import held_in_lane
    from interlace.run.graph import parameter_layers
    from interlace.train.elastic.proposals import templates_of

    config, model = priced.config, priced.model
    ends = np.cumsum([0, *(len(model.layer_list(name)) for name in order)]).tolist()
    first, copied = dict(zip(order, ends)), np.zeros(ends[-1])
    layers, own = parameter_layers(model), dict(model.named_parameters())
    lane = templates_of(config, model, priced.costs.modules).layout([lane_size(config)])
    for numbers in held_in_lane(model, lane, sequence_parallel=config.parallel.sequence_parallel):
        for name, count in numbers.items():
            module, layer = layers[name]
            more = SAVED_MOMENTS * own[name].requires_grad
            copied[first[module] + layer] += count * own[name].element_size() * (1 + more)
    return copied


def nodes_over_time(changes: Sequence[Change], start: int, until: float) -> tuple[Floats, Floats]:
    """(seconds, number of nodes from then on), both [n]."""
    kept = [change for change in changes if change.time < until]
    steps = np.cumsum([start, *(1 if change.event == "join" else -1 for change in kept)])
    return np.array([0.0, *(change.time for change in kept)]), steps.astype(np.float64)


def _report(
    priced: Priced, job: Job, rates: Rates, runs: dict[str, list[Stretch]], there: tuple[Floats, Floats]
) -> dict[str, Any]:
    """Output of --json, except min_nodes_assumed: see docs/simulated-failures.md."""
    from interlace.simulate.recovery import KINDS, Spent, throughput_over_time

    until = next(iter(runs.values()))[-1].stop
    edges = np.linspace(0.0, until, WINDOWS + 1)

    def facts(run: list[Stretch]) -> dict[str, Any]:
        spent = Spent.sum(stretch.spent for stretch in run)
        return {
            "samples": spent.samples,
            "samples_per_second": spent.throughput,
            "seconds": {kind: getattr(spent, kind) for kind in KINDS},
            "over_time": throughput_over_time(run, edges).tolist(),
        }

    return {
        "version": VERSION,
        "run": priced.config.run.name,
        "costs": priced.costs.origin,
        "seconds": until,
        "nodes": int(there[1][0]),
        "ranks_per_node": job.cluster.stages_per_node * lane_size(priced.config),
        "faults": job.cluster.faults,
        "min_nodes": job.cluster.least_nodes,
        "failures": int((np.diff(there[1]) < 0).sum()),
        "joins": int((np.diff(there[1]) > 0).sum()),
        "bytes": {"model": job.state.loaded, "checkpoint": job.state.saved},
        "rates": {"network": rates.network, "disk": rates.save, "start": rates.start, "regroup": rates.regroup},
        "save_every": rates.every,
        "edges": edges.tolist(),
        "nodes_over_time": _mean_nodes(there, edges).tolist(),
        "systems": {name: facts(run) for name, run in runs.items()},
    }


def _mean_nodes(there: tuple[Floats, Floats], edges: Floats) -> Floats:
    """Mean number of nodes in each window between two edges."""
    times = np.append(there[0], edges[-1])
    area = np.concatenate([[0.0], np.cumsum(np.diff(times) * there[1])])
    averaged: Floats = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    return averaged


def _print(report: dict[str, Any]) -> None:
    from interlace.simulate.pictures.recovery import NAMES
    from interlace.train.commands.tables import console_of, table_of

    console = console_of(140)
    systems = report["systems"]
    size, rates = report["bytes"], report["rates"]
    console.print(
        f"{report['run']}: {report['nodes']} nodes of {report['ranks_per_node']}, {report['failures']} failures and "
        f"{report['joins']} joins in {report['seconds'] / 3600:.3g} hours; {report['faults']} at a time to survive, "
        f"pipelines of {report['min_nodes']} nodes or more"
    )
    if report["min_nodes_assumed"]:
        console.print(
            f"assumed: the memory of one node is enough for {size['model'] / 1e9:.3g} GB of weights and optimizer "
            "state and for activations: give --memory GB of a rank, or --min-nodes"
        )
    shown = [kind for kind in NAMES if any(each["seconds"][kind] > 0 for each in systems.values())]
    table = table_of("where the time goes", "", "samples/s", *(NAMES[kind] for kind in shown), left=("",))
    for name, each in systems.items():
        shares = (f"{each['seconds'][kind] / report['seconds']:.1%}" for kind in shown)
        table.add_row(name, f"{each['samples_per_second']:.3g}", *shares)
    console.print(table)
    table = table_of("samples per second over time", "hours", "nodes", *systems)
    edges = report["edges"]
    for window, nodes in enumerate(report["nodes_over_time"]):
        hours = f"{edges[window] / 3600:.3g} to {edges[window + 1] / 3600:.3g}"
        table.add_row(hours, f"{nodes:.1f}", *(f"{each['over_time'][window]:.3g}" for each in systems.values()))
    console.print(table)
    console.print(
        f"model {size['model'] / 1e9:.3g} GB, checkpoint {size['checkpoint'] / 1e9:.3g} GB every "
        f"{report['save_every']} iterations at {rates['disk'] / 1e9:.3g} GB/s, network "
        f"{rates['network'] / 1e9:.3g} GB/s per node, restart {rates['start']:g} s, regrouping {rates['regroup']:g} s"
    )
    console.print(report["costs"])
