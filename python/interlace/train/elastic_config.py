"""What of a config an elastic run takes, and what it refuses by name."""

from __future__ import annotations

from interlace.resilience.settings import Settings
from interlace.train.config import ConfigError
from interlace.train.schema import Config


def settings_of(config: Config) -> Settings:
    """What all supervisors and the coordinator have to agree on."""
    own = config.resilience
    return Settings(
        nodes=own.nodes,
        faults=own.faults,
        min_nodes=own.min_nodes or 0,
        heartbeat=own.heartbeat,
        gather=own.gather,
        ranks_per_node=own.ranks_per_node,
    )


def check(config: Config, *, source: str) -> None:
    """Refuses what cannot be trained elastically. Raises ConfigError that says why, and what to do."""
    parallel, own = config.parallel, config.resilience
    if parallel.auto:
        raise ConfigError(
            f"{source}: parallel.plan = 'auto' chooses one layout for a fixed number of ranks, but --elastic makes one "
            "for every set of nodes: leave out [parallel], or set placement = 'chain'"
        )
    if parallel.placement not in (None, "chain"):
        raise ConfigError(
            f"{source}: parallel.placement = {parallel.placement!r}, but --elastic cuts each replica of the whole "
            "model into one chain of layers, a pipeline of nodes: leave it out"
        )
    for name in config.modules():
        spec = parallel.module(name)
        if spec.shard != "none":
            raise ConfigError(
                f"{source}: parallel.{name}.shard = {spec.shard!r} spreads a layer's state over the pipelines, so that "
                "a lost node takes part of it along: --elastic needs shard = 'none'"
            )
        for key in ("tp", "cp", "pp", "virtual"):
            if getattr(spec, key) > 1:
                raise ConfigError(
                    f"{source}: parallel.{name}.{key} = {getattr(spec, key)}, but with --elastic pipelines are cut by "
                    "the nodes that there are, a range of layers to a rank: leave it out"
                )
    if config.data.reading == "stream":
        raise ConfigError(
            f"{source}: data.reading = 'stream' cannot go back to the samples of a step that was lost: use another "
            "reading with --elastic"
        )
    if config.run.device == "cuda":
        raise ConfigError(
            f"{source}: run.device = 'cuda', but --elastic has run over gloo on CPUs alone: set run.device = 'cpu'"
        )
    least = (own.faults + 1) * (own.min_nodes or 1)
    if own.nodes < least:
        raise ConfigError(
            f"{source}: resilience.nodes = {own.nodes} cannot hold {own.faults + 1} pipelines of {own.min_nodes or 1} "
            f"nodes (resilience.faults + 1 of resilience.min_nodes): use {least} or more, or fewer faults"
        )
