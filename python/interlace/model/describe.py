"""What the layers of a module cost: parameters and an estimate of forward FLOPs per token, for partitioning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LayerPart:
    """A piece that travels with one sliceable layer: the layer itself, what precedes the first, or follows the last.

    forward_flops: per token of the module (multiply-adds count twice). trainable: any of its parameters is.
    """

    name: str
    kind: str  # "prologue", "layer" or "epilogue"
    parameters: int
    forward_flops: float
    trainable: bool


@dataclass(frozen=True)
class LayerInfo:
    """A layer that a stage can be cut at, with all that travels with it.

    name: of the layer in the whole model. parameters, forward_flops and trainable include the parts: prologue with the
    first layer, epilogue and projector or head with the last, so a stage's numbers are sums over its layers.
    """

    index: int
    name: str
    parameters: int
    trainable: bool
    forward_flops: float
    parts: tuple[LayerPart, ...]


def describe_layers(root: nn.Module, prefix: str, path: str, context: float, downsample: int = 1) -> list[LayerInfo]:
    """LayerInfo for each layer of the ModuleList at `path` inside `root`, whose name in the whole model is `prefix`.

    context: keys that a query sees, for the attention term 4 * context * width. downsample: tokens that the projector
    takes as one.
    """
    before, after = _around(root, path)
    layers = root.get_submodule(path)
    rates: list[
        float
    ] = []  # outputs of a prologue part per token of the layers: strided convolutions after it thin them out
    rate = 1.0
    for _, part in reversed(before):
        rates.insert(0, rate)
        rate *= math.prod(math.prod(conv.stride) for conv in part.modules() if isinstance(conv, nn.Conv1d))
    infos = []
    count = len(list(layers.children()))
    for i, (key, layer) in enumerate(layers.named_children()):
        parts = []
        if i == 0:
            parts += [
                _part(f"{prefix}.{name}", "prologue", part, rate=rate)
                for (name, part), rate in zip(before, rates, strict=True)
            ]
        parts.append(_part(f"{prefix}.{path}.{key}", "layer", layer, 4.0 * context * _attention_width(layer)))
        if i == count - 1:
            for name, part in after:
                rate = 1.0 / downsample if name == "projector" else 1.0
                parts.append(_part(f"{prefix}.{name}", "epilogue", part, rate=rate))
        infos.append(
            LayerInfo(
                index=i,
                name=f"{prefix}.{path}.{key}",
                parameters=sum(part.parameters for part in parts),
                trainable=any(part.trainable for part in parts),
                forward_flops=sum(part.forward_flops for part in parts),
                parts=tuple(parts),
            )
        )
    return infos


def _around(root: nn.Module, path: str) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """Modules with parameters registered before and after the list at `path`, as carve tells them apart."""
    before: list[tuple[str, nn.Module]] = []
    after: list[tuple[str, nn.Module]] = []
    node, at = root, ""
    late: list[list[tuple[str, nn.Module]]] = []
    for step in path.split("."):
        passed = False
        here: list[tuple[str, nn.Module]] = []
        own = nn.Module()
        own._parameters = dict(node._parameters)
        if any(p is not None for p in own._parameters.values()):
            before.append((at.rstrip(".") or "own", own))
        for name, child in node.named_children():
            if name == step:
                passed = True
            elif next(child.parameters(), None) is not None:
                (here if passed else before).append((f"{at}{name}", child))
        late.append(here)
        node, at = getattr(node, step), f"{at}{step}."
    for here in reversed(late):
        after += here
    return before, after


def _part(name: str, kind: str, module: nn.Module, extra: float = 0.0, rate: float = 1.0) -> LayerPart:
    return LayerPart(
        name=name,
        kind=kind,
        parameters=sum(p.numel() for p in module.parameters()),
        forward_flops=rate * sum(_flops(module)) + extra,
        trainable=any(p.requires_grad for p in module.parameters()),
    )


def _flops(module: nn.Module) -> Iterator[float]:
    """Forward FLOPs per output token of the linear maps inside; lookups, norms and activations count as nothing."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            yield 2.0 * part.weight.numel()


def _attention_width(layer: nn.Module) -> int:
    """Query heads x head dimension of a layer, from its query projection; 0 if it has none by that name."""
    for name, part in layer.named_modules():
        name = name.removesuffix(".base_layer")  # of a layer with an adapter
        if isinstance(part, nn.Linear) and name.rsplit(".", 1)[-1] in ("q_proj", "query", "wq", "q"):
            return part.out_features
    return 0
