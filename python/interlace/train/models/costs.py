"""Costs of a config's layers: FLOPs per microbatch of its mixture of samples, computed before any data is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlace.train.config.parallel import LinkSpeed
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.costs.links import Links
    from interlace.costs.modules import ModuleCosts
    from interlace.model import ModalityModule, MultimodalModel


@dataclass(frozen=True)
class Load:
    """Load of a module: tokens per microbatch, and the average number of keys that each of them attends to."""

    tokens: float
    keys: float


def budget_loads(config: Config, model: MultimodalModel) -> dict[str, Load]:
    """Load of every module per microbatch (of the language model) of the config's mixture of samples.

    All ranks must cut the model equally before they have the data. Sizes of the digits are known: all pictures have one
    size and the captions are words. Other data fill data.max_tokens, with an item of each encoder.
    """
    samples = config.train.batch_size / config.parallel.replicas("language_model") / config.train.microbatches
    loads = {}
    for name, lengths in _lengths(config, model).items():
        tokens = sum(lengths)
        pairs = sum(length * length for length in lengths)  # (query, key) pairs within one item
        if name == "language_model":  # causal: a query sees the keys up to its own position
            pairs = (pairs + tokens) / 2
        loads[name] = Load(samples * tokens, pairs / tokens if tokens else 0.0)
    return loads


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
    said = config.parallel.ranks_per_node or (links.ranks_per_host if links is not None else None) or alike
    return said if said < len(nodes) else None


def _lengths(config: Config, model: MultimodalModel) -> dict[str, list[float]]:
    """Lengths of the items of a sample, per module (for the language model: one)."""
    longest = config.data.kind.caption_tokens
    if longest is None:  # nothing is read yet: assume an item each, and a full row
        row = config.data.max_tokens or model.max_length or 1024
        items = {name: [float(model.encoders[name].nominal_length)] for name in model.encoders}
        return items | {"language_model": [float(row)]}
    from interlace.modalities import IMAGE

    items = {name: [] for name in model.encoders}
    for name, spec in config.model.encoders().items():  # a picture for each image encoder, nothing for audio encoders
        encoder = model.encoders[name]
        if encoder.kind != IMAGE.name:
            continue
        image = config.data.image_tokens(0)
        if encoder.images is not None:
            side = -(-(config.data.digit_size or 8) // encoder.images.patch[0])
            image = min(image, side * side)
        items[name] = [float(image)]
        longest += _projected(encoder, -(-image // spec.downsample))
    return items | {"language_model": [float(longest)]}


def _projected(encoder: ModalityModule, features: int) -> int:
    """Tokens of the projector for an image of `features` features, assumed to be about square."""
    from interlace.model import ItemProjector

    projector = encoder.projector
    if not isinstance(projector, ItemProjector):
        return features
    side = max(1, math.isqrt(features) // projector.unit) * projector.unit
    return projector.tokens(side * side, (side, side))
