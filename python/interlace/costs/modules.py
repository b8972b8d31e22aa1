"""Costs of every layer of a model: ModuleCosts, counted in FLOPs here or timed by `profile_model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from interlace.costs.layer import LayerTimes, trainable_before

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


@dataclass(frozen=True)
class ModuleCosts:
    """Cost of the parts (layers, embeddings, head, projector) of one module for one microbatch.

    All arrays have shape [parts]; the times may be FLOPs instead of seconds: only their ratio matters to a cut.
    ``layer[i]`` is the sliceable layer that part i belongs to. For c chunks at once the times are [parts, c].
    """

    layer: NDArray[np.int64]
    times: LayerTimes
    trainable: NDArray[np.bool_]

    @property
    def num_layers(self) -> int:
        """Number of layers, between which cuts are possible."""
        return int(self.layer.max()) + 1

    def per_layer(
        self, *, trainable_before: bool = False, frozen_aware: bool = True, recompute: bool = False
    ) -> NDArray[np.float64]:
        """1F+1B cost of each layer, float64 [layers], or [layers, c] for many chunks.

        ``frozen_aware=False`` charges backward = 2 x forward everywhere, as LLM partitioners assume.
        """
        if frozen_aware:
            parts = self.times.costs(~self.trainable, trainable_before=trainable_before, recompute=recompute)
        else:
            parts = (4.0 if recompute else 3.0) * self.times.forward
        return self.summed(parts)

    def summed(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums of the parts' values by layer: [parts] -> [layers], or [parts, c] -> [layers, c]."""
        totals = np.zeros((self.num_layers, *parts.shape[1:]))
        np.add.at(totals, self.layer, parts)
        return totals


def analytic_costs(
    mllm: MultimodalModel, tokens: Mapping[str, float] | None = None, *, context: Mapping[str, float] | None = None
) -> dict[str, ModuleCosts]:
    """FLOP-based costs of every module of ``mllm`` when ``tokens[module]`` tokens pass through it.

    ``context[module]``: keys that a token attends to on average, for the FLOPs of attention. Defaults are those of
    ``mllm.nominal_length(module)``: one item of the size that an encoder was configured for, and a row of up to 1,024
    tokens. If modules share ranks, these numbers decide the load of each rank: give those of your data. Input and
    weight gradient are charged one forward each, as in cornstarch-2025-03 section 4.2.
    """
    tokens, context = tokens or {}, context or {}
    for given in (tokens, context):
        unknown = [name for name in given if name not in mllm.modules_order()]
        if unknown:
            raise ValueError(f"no module {unknown[0]!r}: the model has {', '.join(mllm.modules_order())}")
    costs = {}
    for name in mllm.modules_order():
        scale = float(tokens.get(name, mllm.nominal_length(name)))
        layers = mllm.layers(name, context=context.get(name))
        parts = [(layer.index, part) for layer in layers for part in layer.parts]
        forward = np.array([part.forward_flops * scale for _, part in parts], dtype=np.float64)
        costs[name] = ModuleCosts(
            layer=np.array([index for index, _ in parts], dtype=np.int64),
            times=LayerTimes(forward, forward, forward, forward),
            trainable=np.array([part.trainable for _, part in parts], dtype=np.bool_),
        )
    return costs


def layer_costs(
    costs: Mapping[str, ModuleCosts], order: Sequence[str], *, frozen_aware: bool = True, recompute: bool = False
) -> dict[str, NDArray[np.float64]]:
    """1F+1B cost per layer of every module, with "trainable before" propagated across modules.

    ``order`` lists the encoders first and the language model last, as ``mllm.modules_order()`` does.
    """
    *encoders, language_model = order
    out = {name: costs[name].per_layer(frozen_aware=frozen_aware, recompute=recompute) for name in encoders}
    trainable = {name: bool(costs[name].trainable.any()) for name in order}
    out[language_model] = costs[language_model].per_layer(
        trainable_before=trainable_before(trainable, [(name, language_model) for name in encoders])[language_model],
        frozen_aware=frozen_aware,
        recompute=recompute,
    )
    return out
