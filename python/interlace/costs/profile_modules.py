"""Measured costs of every layer of a multimodal model, on one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from interlace.costs.layer import LayerTimes
from interlace.costs.modules import ModuleCosts
from interlace.costs.profile import profile_layers

if TYPE_CHECKING:
    from interlace.model import MultimodalModel, Sample

# Placeholder for the input of a module's first layer, which comes from the batch: integers have no gradient to time.
_NO_INPUT = torch.zeros(1, dtype=torch.int64)


def profile_model(mllm: MultimodalModel, samples: Sequence[Sample], *, repeats: int = 5) -> dict[str, ModuleCosts]:
    """Time each layer of each module of ``mllm`` on the microbatch ``samples``.

    A layer is the unit of stage cuts: the first includes the embeddings, the last includes the modules after the layers
    (projector, norm and head). If a layer mixes frozen and trainable parameters, only the trainable ones count as its
    weight gradient, so costs hold for the model's current frozen flags. Modules that no sample uses cost 0.

    Returns ModuleCosts in seconds, for `Layout.from_specs`, `Layout.balanced` and `stage_durations`.
    """
    *encoders, language_model = mllm.modules_order()
    features: dict[str, Tensor] = {}
    costs = {}
    for name in encoders:
        if any(sample.media.get(name) for sample in samples):
            inputs = mllm.collate_module(name, samples)
            costs[name], features[name] = _profile_module(mllm, name, inputs, _NO_INPUT, repeats)
        else:
            trainable = np.array([layer.trainable for layer in mllm.layers(name)])
            zero = np.zeros(len(trainable))
            costs[name] = ModuleCosts(np.arange(len(trainable)), LayerTimes(zero, zero, zero, zero), trainable)
    inputs = mllm.collate_module(language_model, samples)
    names = list(features)
    sizes = [len(features[name]) for name in names]
    # All features are passed as one tensor, so that the gradient of the first layer's input is theirs.
    together = torch.cat([features[name] for name in names]) if names else _NO_INPUT

    def with_features(hidden: Tensor) -> dict[str, Any]:
        return {**inputs, "features": dict(zip(names, torch.split(hidden, sizes), strict=True)) if names else {}}

    costs[language_model], _ = _profile_module(mllm, language_model, with_features, together, repeats)
    return costs


def _profile_module(
    mllm: MultimodalModel,
    name: str,
    inputs: dict[str, Any] | Callable[[Tensor], dict[str, Any]],
    hidden: Tensor,
    repeats: int,
) -> tuple[ModuleCosts, Tensor]:
    """Costs of a module, and its output. inputs: of its stages; may depend on the tensor that the first layer reads."""
    count = len(mllm.layers(name))
    slices = [mllm.slice(name, i, i + 1) for i in range(count)]

    def run(i: int) -> Callable[[Tensor], Tensor]:
        def forward(value: Tensor) -> Tensor:
            given = inputs(value if i == 0 else hidden) if callable(inputs) else inputs
            out: Tensor = slices[i](given, None if i == 0 else value)
            return out

        return forward

    trainable = [any(p.requires_grad for p in part.parameters()) for part in slices]
    layers = [
        (run(i), [p for p in part.parameters() if p.requires_grad or not trainable[i]]) for i, part in enumerate(slices)
    ]
    times = profile_layers(layers, hidden, repeats=repeats)
    value = hidden
    with torch.no_grad():
        for forward, _ in layers:
            value = forward(value)
    return ModuleCosts(np.arange(count), times, np.array(trainable)), value.detach()
