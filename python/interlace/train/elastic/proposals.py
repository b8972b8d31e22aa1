"""Proposals of ranks to the coordinator: pipelines for each number of nodes, and their speed."""

from __future__ import annotations

from collections.abc import Mapping

from interlace.costs.modules import ModuleCosts
from interlace.model import MultimodalModel
from interlace.resilience.coordinator import roster
from interlace.resilience.coordinator.layouts import Templates
from interlace.train.auto.machine import memory_of
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.elastic.config import specs_of
from interlace.train.scheduling import held_by_layout


def microbatches(config: Config) -> int:
    """Microbatches of a whole step: train.microbatches * (faults + 1), or the packed rows of a batch.

    The number does not depend on the pipelines, so a microbatch has the same samples and memory in every generation.
    """
    if config.data.pack:
        return config.train.batch_size
    return config.train.microbatches * (config.resilience.faults + 1)


def templates_of(config: Config, model: MultimodalModel, costs: Mapping[str, ModuleCosts]) -> Templates:
    """Pipeline templates of a config's model. costs: of one microbatch, in any unit."""
    return Templates(model, costs, recompute=config.train.recompute, specs=specs_of(config))


def propose(config: Config, model: MultimodalModel, templates: Templates, *, source: str) -> str:
    """Proposal for `Member.propose`. Raises ConfigError if a template cannot be made."""
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
    # Sizes that the first nodes could need. Nodes that join later form further pipelines.
    sizes = range(least, max(least, min(most, own.nodes - own.faults * least)) + 1)
    times = tuple(templates.time(size * own.ranks_per_node) for size in sizes)
    return roster.Templates(least, times, microbatches(config)).to_json()


def min_nodes(
    config: Config, model: MultimodalModel, templates: Templates, memory: float, total: int, *, source: str
) -> int:
    """Fewest nodes of a pipeline that fit the model, its optimizer state and the activations of a step.

    memory: bytes of each rank. total: microbatches of a step, over all pipelines. Raises ConfigError if no number of
    nodes fits.
    """
    per_node = config.resilience.ranks_per_node
    for nodes in range(1, templates.most_ranks // per_node + 1):
        layout = templates.layout([nodes * per_node])
        try:
            if held_by_layout(config, model, layout, config.train.microbatches, total)[0].peak <= memory:
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


def _check_shared(config: Config, model: MultimodalModel, templates: Templates, sizes: list[int], source: str) -> None:
    """Rejects models that pipelines of different numbers of nodes cannot train together. Raises ConfigError.

    Such a model has a weight in two modules, or a tied weight that the ranks of a lane split or shard.
    """
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
