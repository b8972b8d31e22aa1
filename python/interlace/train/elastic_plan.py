"""What ranks propose to the coordinator: which pipelines can be made of how many nodes, and how fast each is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from interlace.plan.module_costs import ModuleCosts
from interlace.resilience import roster
from interlace.resilience.layouts import Templates
from interlace.train.auto.machine import memory_of
from interlace.train.config import ConfigError
from interlace.train.elastic_config import specs_of
from interlace.train.rank_memory import activations_of_config, held_by_ranks
from interlace.train.scheduling import chunk_loads, chunk_sizes, step_schedule
from interlace.train.schema import Config


def microbatches(config: Config) -> int:
    """Of a whole step, whatever pipelines there are: train.microbatches for each where faults + 1 of them run, or the
    packed rows of a batch. So a microbatch has as many samples in every generation, and takes as much memory."""
    if config.data.pack:
        return config.train.batch_size
    return config.train.microbatches * (config.resilience.faults + 1)


def templates_of(config: Config, model: Any, costs: Mapping[str, ModuleCosts]) -> Templates:
    """The pipeline templates of a config's model. costs: of one microbatch; any unit."""
    return Templates(model, costs, recompute=config.train.recompute, specs=specs_of(config))


def propose(config: Config, model: Any, templates: Templates, *, source: str) -> str:
    """As `Member.propose` takes it. Raises ConfigError where a template cannot be made."""
    own = config.resilience
    least = own.min_nodes
    if least is None:
        memory = memory_of(config, "cpu", own.ranks_per_node)
        least = min_nodes(config, model, templates, memory, microbatches(config), source=source)
    most = templates.most_ranks // own.ranks_per_node
    if most < least:
        raise ConfigError(
            f"{source}: a pipeline of {least} nodes of {own.ranks_per_node} ranks is too long: with a layer for each "
            f"rank, or lane of tp * cp, the model has room for {templates.most_ranks} ranks: lower "
            "resilience.ranks_per_node or min_nodes"
        )
    _check_shared(config, model, templates, [least, most], source)
    # As many as the first nodes could need; of more that come later, further pipelines are made.
    sizes = range(least, max(least, min(most, own.nodes - own.faults * least)) + 1)
    times = tuple(templates.time(size * own.ranks_per_node) for size in sizes)
    return roster.Templates(least, times, microbatches(config)).to_json()


def min_nodes(config: Config, model: Any, templates: Templates, memory: float, total: int, *, source: str) -> int:
    """Fewest nodes of a pipeline whose ranks, of `memory` bytes each, hold the model, its optimizer state and the
    activations of a step, which all pipelines cut into `total` microbatches. Raises ConfigError where no number
    does."""
    from interlace.run.traced import weights_of

    per_node = config.resilience.ranks_per_node
    for nodes in count(1):
        ranks = nodes * per_node
        if ranks > templates.most_ranks:
            break
        layout = templates.layout([ranks])
        try:
            weights = weights_of(model, layout, sequence_parallel=config.parallel.sequence_parallel)
            activations = activations_of_config(config, model, layout)
            loads = chunk_loads(config, model, activations, chunk_sizes(config, layout, total))
            schedule = step_schedule(config, model, layout, config.train.microbatches)
            if held_by_ranks(config, model, schedule, weights, activations, loads).peak <= memory:
                return nodes
        except ValueError as error:
            raise ConfigError(
                f"{source}: what a pipeline of {nodes} nodes would hold is not known ({error}): give "
                "resilience.min_nodes"
            ) from None
    raise ConfigError(
        f"{source}: no pipeline of up to {templates.most_ranks} ranks holds the model in {memory / 2**30:.3g} GiB "
        "each: take machines with more memory, or lower train.batch_size"
    )


def _check_shared(config: Config, model: Any, templates: Templates, sizes: list[int], source: str) -> None:
    """Raises ConfigError for a model that pipelines of different numbers of nodes cannot train together: one with a
    weight in two modules, or a tied one that the ranks of a lane use in part, or share out."""
    from interlace.run import stage_graph
    from interlace.run.graph import parameter_layers
    from interlace.run.lanes import with_lanes

    homes = parameter_layers(model)
    for names in model.tied_parameters():
        module, _ = homes[names[0]]
        if (shard := templates.specs[module].shard) != "none":
            raise ConfigError(
                f"{source}: parallel.{module}.shard = {shard!r}, but with --elastic the tied weight {names[0]} is on "
                "one rank of some pipelines and on two of others, which would keep other slices of it: untie it "
                "(tie_word_embeddings = false in the module's config), or set shard = 'none'"
            )
    ranks = sorted({size * config.resilience.ranks_per_node for size in range(sizes[0], sizes[1] + 1)})
    try:
        graph = stage_graph(model, templates.layout(ranks))
        with_lanes(graph, model, sequence_parallel=config.parallel.sequence_parallel)
    except ValueError as error:
        raise ConfigError(
            f"{source}: with --elastic pipelines of different numbers of nodes cannot share this model: {error}"
        ) from None
