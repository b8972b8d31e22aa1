"""Costs of a config's layers: FLOPs per microbatch of its mixture of samples, computed before any data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlace.train.config.parallel import LinkSpeed
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.costs.links import Links
    from interlace.costs.modules import ModuleCosts
    from interlace.model import MultimodalModel


@dataclass(frozen=True)
class Load:
    """Load of a module: tokens per microbatch, and the average number of keys that each of them attends to."""

    tokens: float
    keys: float


def budget_loads(config: Config, model: MultimodalModel) -> dict[str, Load]:
    """Load of every module per microbatch (of the language model).

    All ranks must cut the model equally before they have the data. So samples are assumed to fill data.max_tokens, with
    an item of each encoder.
    """
    samples = config.train.batch_size / config.parallel.replicas("language_model") / config.train.microbatches
    lengths = {name: model.encoders[name].nominal_length for name in model.encoders}
    loads = {name: Load(samples * length, length) for name, length in lengths.items()}
    row = config.data.max_tokens or model.max_length or 1024
    # Causal: a query sees the keys up to its own position.
    return loads | {"language_model": Load(samples * row, (row + 1) / 2)}


def flop_costs(config: Config, model: MultimodalModel) -> Mapping[str, ModuleCosts]:
    """FLOPs of every layer for that microbatch, used for the trainer's own cuts."""
    from interlace.plan import analytic_costs

    lengths = budget_loads(config, model)
    return analytic_costs(
        model,
        tokens={name: each.tokens for name, each in lengths.items()},
        context={name: each.keys for name, each in lengths.items()},
    )


def estimated(model: MultimodalModel) -> str:
    """Modules with estimated FLOPs, for messages that report counted FLOPs; "" if there are none."""
    from interlace.model.counting.layers import counted

    whys = {name: counted(model, name).why for name in model.modules_order()}
    return "".join(f"; FLOPs of {name} estimated by its weights ({why})" for name, why in whys.items() if why)


def stated_links(config: Config) -> Links | None:
    """Links given in the config (``parallel.links``); None if there are none."""
    from interlace.costs.links import Link, Links
    from interlace.plan import LinkModel

    stated = config.parallel.links
    if stated is None:
        return None

    def link(speed: LinkSpeed) -> Link:
        line = LinkModel(1e-6 * speed.microseconds, 1e-9 / speed.gb_per_second)
        return Link(line, line)

    host = link(stated.host)
    network = host if stated.network is None else link(stated.network)
    return Links(host=host, network=network, ranks_per_host=stated.ranks_per_host)


def ranks_per_node(config: Config, nodes: Sequence[int]) -> int | None:
    """Ranks of a node, for dispatchers; None if all are on one node, or if nodes have different numbers.

    nodes: for each rank, the number of ranks that torchrun has started on its node; for a layout without started
    ranks, all.
    """
    links = config.parallel.links
    alike = nodes[0] if len(set(nodes)) == 1 else len(nodes)
    count = config.parallel.ranks_per_node or (links.ranks_per_host if links is not None else None) or alike
    return count if count < len(nodes) else None
