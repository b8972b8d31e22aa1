"""What each layer of a module is and costs, for cutting it into stages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from interlace.model.slice import split_names


@dataclass(frozen=True)
class Part:
    """Something that travels with a layer: the layer itself, the beginning, the end, or the projector."""

    name: str
    parameters: int
    forward_flops: float  # per token of the module
    trainable: bool


@dataclass(frozen=True)
class LayerInfo:
    """A layer that a stage can be cut to; ``parts`` in the order of execution."""

    index: int
    name: str
    parts: tuple[Part, ...]

    @property
    def parameters(self) -> int:
        """Parameters of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def trainable(self) -> bool:
        """Whether any part trains."""
        return any(part.trainable for part in self.parts)

    @property
    def forward_flops(self) -> float:
        """FLOPs per token of the module: two per weight of a matrix product; attention scores are not counted."""
        return sum(part.forward_flops for part in self.parts)


def describe(
    module: nn.Module, path: str, prefix: str, last: tuple[str, nn.Module | None, float] | None = None
) -> list[LayerInfo]:
    """The layers of ``module`` at ``path``; what comes before goes with the first, what comes after, and ``last``
    (name, module, its tokens per token of this module), with the last."""
    before, after = split_names(module, path)
    layers = module.get_submodule(path)
    infos = []
    count = len(layers)  # type: ignore[arg-type]
    for i, layer in enumerate(layers.children()):
        parts = []
        if i == 0:
            parts += _parts(module, before, prefix)
        parts.append(_part(f"{prefix}.{path}.{i}", [layer], 1.0))
        if i == count - 1:
            parts += _parts(module, after, prefix)
            if last is not None and last[1] is not None:
                parts.append(_part(f"{prefix.removesuffix('.module')}.{last[0]}", [last[1]], last[2]))
        infos.append(LayerInfo(i, f"{prefix}.{path}.{i}", tuple(parts)))
    return infos


def _parts(module: nn.Module, names: list[str], prefix: str) -> list[Part]:
    parts = []
    for name in names:
        parent, _, leaf = name.rpartition(".")
        holder = module.get_submodule(parent)
        if leaf in holder._parameters:
            parameter = holder._parameters[leaf]
            if parameter is not None:
                parts.append(Part(f"{prefix}.{name}", parameter.numel(), 0.0, parameter.requires_grad))
        else:
            part = _part(f"{prefix}.{name}", [holder.get_submodule(leaf)], 1.0)
            if part.parameters:
                parts.append(part)
    return parts


def _part(name: str, modules: list[nn.Module], tokens: float) -> Part:
    parameters = [p for module in modules for p in module.parameters()]
    tables = {
        id(child.weight) for module in modules for child in module.modules() if isinstance(child, nn.Embedding)
    }
    # An embedding is looked up, not multiplied; vectors (norms, biases) cost next to nothing.
    flops = sum(2.0 * p.numel() for p in parameters if p.dim() >= 2 and id(p) not in tables)
    return Part(name, sum(p.numel() for p in parameters), flops * tokens, any(p.requires_grad for p in parameters))
