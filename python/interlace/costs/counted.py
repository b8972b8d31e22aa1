"""Costs of chunks of any size from counted FLOPs, for models and clusters that cannot be measured yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from interlace.costs.fitted import FREE, LinkModel
from interlace.costs.modules import analytic_costs
from interlace.costs.step import NO_TRAFFIC, Fit, FittedCosts, LaneTraffic, LayerFit, ModuleFits

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


def counted_costs(
    mllm: MultimodalModel,
    flops: float,
    *,
    tp: Mapping[str, int | Collection[int]] | None = None,
    row_bytes: Mapping[str, float] | None = None,
    key_bytes: Mapping[str, float] | None = None,
    optimizer: LinkModel = FREE,
) -> FittedCosts:
    """Costs of every module on ranks that compute `flops` FLOP/s, for chunks of any size.

    A forward takes the FLOPs of the layer's linear maps for each row and those of attention for each pair of a query
    and a key. Gradients of inputs and of weights take those of the linear maps once each (cornstarch-2025-03 section
    4.2), the gradient of attention twice its own.

    tp: module -> its degree, or all degrees of interest (default 1). The ranks of a lane have equal parts of the FLOPs.
    In each layer they gather the rows and reduce-scatter them again, around attention and around the feed-forward block
    (sequence parallelism): 4 rings of tp - 1 messages forward, 4 backward and one more gather for the gradients of
    weights.
    row_bytes: module -> bytes of a row between its layers, for these messages (default: no traffic). key_bytes: module
    -> bytes of a row's keys and values in one layer, which context-parallel ranks exchange (default: no traffic).
    optimizer: see `FittedCosts`.

    Raises ValueError for a speed that is not above 0.
    """
    if not flops > 0:
        raise ValueError(f"flops is {flops}: it must be above 0 (FLOP/s of a rank)")
    ones = dict.fromkeys(mllm.modules_order(), 1.0)
    # FLOPs are linear in the keys that a row attends to, so two counts give both terms.
    flat = analytic_costs(mllm, tokens=ones, context=dict.fromkeys(ones, 0.0))
    seeing = analytic_costs(mllm, tokens=ones, context=ones)
    modules = {}
    for name, cost in flat.items():
        degrees = (tp or {}).get(name, 1)
        linear = cost.times.forward / flops
        trained = np.where(cost.trainable, linear, 0.0)
        pairs = (seeing[name].times.forward - cost.times.forward) / flops
        columns = [np.bincount(cost.layer, part, cost.num_layers).tolist() for part in (linear, pairs, trained)]
        terms = list(zip(*columns, strict=True))
        layers = tuple(f"{row:.17g} {pair:.17g} {weight:.17g}" for row, pair, weight in terms)
        width, by_kind = (row_bytes or {}).get(name, 0.0), dict(zip(layers, terms, strict=True))
        kinds = {
            degree: {kind: _on_lane(degree, width, *terms_of) for kind, terms_of in by_kind.items()}
            for degree in sorted({degrees} if isinstance(degrees, int) else {*degrees})
        }
        flags = np.bincount(cost.layer, cost.trainable, cost.num_layers) > 0
        keys = (key_bytes or {}).get(name, 0.0)
        modules[name] = ModuleFits(layers, tuple(flags.tolist()), kinds, key_bytes=keys)
    return FittedCosts(modules, optimizer, f"counted FLOPs at {flops / 1e12:.3g} TFLOP/s per rank")


def _on_lane(tp: int, row_bytes: float, row: float, pair: float, weight: float) -> LayerFit:
    """A layer on one rank of `tp`. row, pair, weight: seconds per row, per pair, and per row for weight gradients, on a
    rank that holds the whole layer."""
    row, pair, weight = row / tp, pair / tp, weight / tp
    peers, ring = tp - 1, row_bytes / tp * (tp - 1)
    traffic = LaneTraffic(4 * peers, 4 * ring, 5 * peers, 5 * ring) if peers else NO_TRAFFIC
    return LayerFit(Fit(pair, row), Fit(2 * pair, row), Fit(0.0, weight), Fit(0.0, weight), traffic)
