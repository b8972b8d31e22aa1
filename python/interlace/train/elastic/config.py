"""Config of an elastic run: supported keys, and errors for unsupported ones."""

from __future__ import annotations

from interlace.layout import ParallelSpec
from interlace.resilience.settings import Settings
from interlace.train import offload
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config


def settings_of(config: Config) -> Settings:
    """Settings that must be equal on all supervisors and the coordinator."""
    own = config.resilience
    return Settings(
        nodes=own.nodes,
        faults=own.faults,
        min_nodes=own.min_nodes or 0,
        heartbeat=own.heartbeat,
        gather=own.gather,
        ranks_per_node=own.ranks_per_node,
        patience=own.coordinator_patience,
    )


def specs_of(config: Config) -> dict[str, ParallelSpec]:
    """Degrees of each module that are the same in every set of pipelines."""
    specs = {}
    for name in config.modules():
        spec = config.parallel.module(name)
        specs[name] = ParallelSpec(tp=spec.tp, cp=spec.cp, shard=spec.shard, shard_ranks=spec.shard_ranks)
    return specs


def lane_size(config: Config) -> int:
    """Number of ranks of a lane."""
    return config.parallel.language_model.tp * config.parallel.language_model.cp


def check_lanes(config: Config, *, source: str) -> None:
    """Rejects modules whose lanes differ. Raises ConfigError."""
    parallel = config.parallel
    for name in config.modules():
        for key in ("tp", "cp"):
            degree, others = getattr(parallel.module(name), key), getattr(parallel.language_model, key)
            if degree != others:
                raise ConfigError(
                    f"{source}: parallel.{name}.{key} = {degree}, but parallel.language_model.{key} = {others}: in an "
                    "elastic run a rank may hold layers of both, so give all modules one tp and one cp"
                )


def check(config: Config, *, source: str) -> None:
    """Rejects configs that cannot be trained elastically. Raises ConfigError with the reason and the remedy."""
    parallel, own = config.parallel, config.resilience
    if parallel.auto:
        raise ConfigError(
            f"{source}: parallel.layout = 'auto' chooses one layout for a fixed number of ranks, but --elastic makes "
            "one for every set of nodes: leave out [parallel]"
        )
    given = {f"parallel.{key}": getattr(parallel, key) for key in ("placement", "ranks", "dp")}
    given |= {f"parallel.{name}.dp": parallel.module(name).dp for name in config.modules()}
    for key, value in given.items():
        if value not in (None, 1):
            raise ConfigError(
                f"{source}: {key} = {value!r}, but --elastic cuts each replica of the whole model into one chain of "
                "layers, a pipeline of nodes, and has as many as the nodes that there are make: leave it out"
            )
    if config.train.compile:
        raise ConfigError(
            f"{source}: train.compile = true would compile anew whenever a node is lost or comes, for longer than "
            "that may take: leave it out with --elastic"
        )
    if config.train.offload_optimizer:
        offload.check_device("cpu", source=source)
    for name in config.modules():
        spec = parallel.module(name)
        if spec.shard != "none" and (spec.shard_ranks is None or spec.cp % spec.shard_ranks):
            raise ConfigError(
                f"{source}: parallel.{name}.shard = {spec.shard!r} spreads a layer's state over pipelines, of which a "
                f"lost node takes a part along: with --elastic set shard_ranks to {name}.cp or a divisor of it, so "
                "that the ranks of one lane share it out, or shard = 'none'"
            )
        for key in ("pp", "virtual"):
            if getattr(spec, key) > 1:
                raise ConfigError(
                    f"{source}: parallel.{name}.{key} = {getattr(spec, key)}, but with --elastic pipelines are cut by "
                    "the nodes that there are, a range of layers to a rank or lane: leave it out"
                )
    check_lanes(config, source=source)
    if own.ranks_per_node % lane_size(config):
        raise ConfigError(
            f"{source}: resilience.ranks_per_node = {own.ranks_per_node} is no multiple of tp * cp = "
            f"{lane_size(config)}: with --elastic the ranks that share a layer are on one node, lost or kept as a whole"
        )
    _check_options(config, source=source)
    _check_sizes(config, source=source)


def _check_options(config: Config, *, source: str) -> None:
    parallel = config.parallel
    # Options that distribute samples or order actions by one replica, assuming that all replicas are identical.
    for key, value, known in (
        ("parallel.schedule", parallel.schedule, ("1f1b", "gpipe", "zb_h1", "zb_h2")),
        ("train.assign", config.train.assign, ("tokens",)),
        ("train.balance", config.train.balance, ("llm",)),
        ("parallel.activation_memory", parallel.activation_memory, (None,)),
    ):
        if value not in known:
            raise ConfigError(
                f"{source}: {key} = {value!r} goes by pipelines that are all alike, which those of --elastic are not: "
                f"{f'use {known[0]!r}' if known[0] else 'leave it out'}"
            )
    if config.data.reading == "stream":
        raise ConfigError(
            f"{source}: data.reading = 'stream' cannot go back to the samples of a step that was lost: use another "
            "reading with --elastic"
        )
    if config.data.workers == "ray":
        raise ConfigError(
            f"{source}: data.workers = 'ray' decodes by an actor that ranks of one set of nodes agree on, and has not "
            "been tried with nodes that come and go: with --elastic give a number of workers"
        )
    if config.run.device == "cuda":
        raise ConfigError(
            f"{source}: run.device = 'cuda', but --elastic has run over gloo on CPUs alone: set run.device = 'cpu'"
        )


def _check_sizes(config: Config, *, source: str) -> None:
    own = config.resilience
    pipelines, size = own.faults + 1, config.train.batch_size
    if size < pipelines * (1 if config.data.pack else config.train.microbatches):
        each = "a packed row" if config.data.pack else f"train.microbatches = {config.train.microbatches}"
        raise ConfigError(
            f"{source}: train.batch_size = {size} is too small for {each} of each of {pipelines} pipelines "
            "(resilience.faults + 1): raise it, or survive fewer faults"
        )
    least = (own.faults + 1) * (own.min_nodes or 1)
    if own.nodes < least:
        raise ConfigError(
            f"{source}: resilience.nodes = {own.nodes} cannot hold {own.faults + 1} pipelines of {own.min_nodes or 1} "
            f"nodes (resilience.faults + 1 of resilience.min_nodes): use {least} or more, or fewer faults"
        )
