"""What a config's layers cost: FLOPs for a microbatch of its mixture of samples, known before any data is there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlace.train.schema import Config
from interlace.train.schema_parallel import LinkSpeed

if TYPE_CHECKING:
    from interlace.plan.links import Links


@dataclass(frozen=True)
class Load:
    """What passes through a module: tokens per microbatch, and keys that each of them sees on average."""

    tokens: float
    keys: float


def budget_loads(config: Config, model: Any) -> dict[str, Load]:
    """What passes through every module for a microbatch (of the language model) of the config's mixture of samples.

    All ranks must cut alike before they have the data. Of the digits, sizes are known: their pictures are all alike and
    their captions words. Chats fill data.max_tokens, with an item of each encoder.
    """
    samples = config.train.batch_size / config.parallel.replicas("language_model") / config.train.microbatches
    items: dict[str, list[tuple[float, float]]] = {name: [] for name in model.modules_order()}  # share, tokens
    for share, own in _kinds(config, model):
        for name, lengths in own.items():
            items[name] += [(share, length) for length in lengths]
    found = {}
    for name, each in items.items():
        tokens = sum(share * length for share, length in each)
        pairs = sum(share * length * length for share, length in each)  # of a query and a key of one item
        if name == "language_model":  # a query sees the keys up to its own
            pairs = (pairs + tokens) / 2
        found[name] = Load(samples * tokens, pairs / tokens if tokens else 0.0)
    return found


def flop_costs(config: Config, model: Any) -> Mapping[str, Any]:
    """FLOPs of every layer for that microbatch: what the trainer's own cuts go by."""
    from interlace.plan import analytic_costs

    lengths = budget_loads(config, model)
    return analytic_costs(
        model,
        tokens={name: each.tokens for name, each in lengths.items()},
        context={name: each.keys for name, each in lengths.items()},
    )


def estimated(model: Any) -> str:
    """Modules of which FLOPs are an estimate, to be added where FLOPs are said to be counted; "" if there are none."""
    from interlace.model.describe import counted

    whys = {name: counted(model, name).why for name in model.modules_order()}
    return "".join(f"; FLOPs of {name} estimated by its weights ({why})" for name, why in whys.items() if why)


def stated_links(config: Config) -> Links | None:
    """The links that the config states (``parallel.links``); None where it says nothing."""
    from interlace.plan import LinkModel
    from interlace.plan.links import Link, Links

    found = config.parallel.links
    if found is None:
        return None

    def link(speed: LinkSpeed) -> Link:
        line = LinkModel(1e-6 * speed.microseconds, 1e-9 / speed.gb_per_second)
        return Link(line, line)

    host = link(found.host)
    network = host if found.network is None else link(found.network)
    return Links(host=host, network=network, ranks_per_host=found.ranks_per_host)


def ranks_per_node(config: Config, nodes: Sequence[int]) -> int | None:
    """Ranks of a node, for dispatchers; None where all are on one, and where nodes have unequally many.

    nodes: of each rank, how many torchrun has started on its node; of a plan, whose ranks nobody has started, all.
    """
    links = config.parallel.links
    alike = nodes[0] if len(set(nodes)) == 1 else len(nodes)
    said = config.parallel.ranks_per_node or (links.ranks_per_host if links is not None else None) or alike
    return said if said < len(nodes) else None


def _kinds(config: Config, model: Any) -> Iterator[tuple[float, dict[str, list[float]]]]:
    """The kinds of samples: share of all, and the lengths of their items per module (of the language model: one)."""
    if config.data.dataset == "chats":  # nobody has looked into the files yet: an item each, and a full row
        row = config.data.max_tokens or model.max_length or 1024
        items = {name: [float(encoder.nominal_length)] for name, encoder in model.encoders.items()}
        yield 1.0, {**items, "language_model": [float(row)]}
        return
    from interlace.data.digits import WORDS

    longest = max(map(len, WORDS))
    items = {name: [] for name in model.encoders}
    for name, spec in config.model.encoders().items():  # a picture for each encoder that sees, nothing to hear
        encoder = model.encoders[name]
        if encoder.kind != "image":
            continue
        image = config.data.image_tokens(0)
        if encoder.images is not None:
            side = -(-(config.data.digit_size or 8) // encoder.images.patch[0])
            image = min(image, side * side)
        items[name] = [float(image)]
        longest += _projected(encoder, -(-image // spec.downsample))
    yield 1.0, {**items, "language_model": [float(longest)]}


def _projected(encoder: Any, features: int) -> int:
    """Tokens that the projector makes of an image of so many features, about as high as wide."""
    from interlace.model import ItemProjector

    projector = encoder.projector
    if not isinstance(projector, ItemProjector):
        return features
    side = max(1, math.isqrt(features) // projector.unit) * projector.unit
    return projector.tokens(side * side, (side, side))
