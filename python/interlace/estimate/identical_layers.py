"""Groups identical layers, so that memory is measured once.

Layers are in one group if they and their predecessors are of the same kinds, and if either all or none of them have
trained layers before their predecessors. Of each group only the first and the last layer are run, each with the layer
before it. The others return a tensor of the right shape, and their kept bytes are copied from the first. All layers are
run if the first and the last of a group keep different bytes, or if other layers use their internal tensors (`NotAlike`
is raised).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.probe.stand_in import kind_of
from interlace.model.stages.slice import hidden_argument


class NotAlike(Exception):
    """The bytes that a layer keeps cannot be derived from another layer: run all layers."""


class Storage:
    """A storage that is alive after a forward. layers: those that save it. between, edge: as in `Kept`. outside: kept
    by modules before or after the layers. home: the layer that made it; -1: an input of all layers."""

    def __init__(self, size: int, outside: bool = False, home: int = -1) -> None:
        self.bytes, self.outside, self.home = size, outside, home
        self.layers: set[int] = set()
        self.edge = self.between = -1

    def entering(self) -> int:
        """The layer that it enters; -1 if it is no hidden state between two layers."""
        return max(self.edge, self.between)


class Alike:
    """Groups of identical layers of a module. like: layer -> the layer of its group that represents it: keeps the same
    and follows the same kind of layer. skipped: the layers that are not run."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        """kinds: of each layer; equal for layers with the same computation, trained parameters and kept bytes."""
        count = len(kinds)
        trains = [any(kind[-1]) for kind in kinds]
        keys = [(kinds[i - 1] if i else None, kinds[i], any(trains[: max(i - 1, 0)])) for i in range(count)]
        first: dict[Any, int] = {}
        last: dict[Any, int] = {}
        for i, key in enumerate(keys):
            first.setdefault(key, i)
            if i < count - 1:  # the last layer includes the modules after the layers
                last[key] = i
        run = {0, count - 2, count - 1} | set(first.values()) | set(last.values())
        run |= {i - 1 for i in run}
        self.like = {i: first[key] for i, key in enumerate(keys) if first[key] != i}
        self.skipped = frozenset(range(count)) - run
        self._twice = [(first[key], i) for key, i in last.items() if first[key] != i]

    @classmethod
    def of(cls, mllm: Any, name: str) -> Alike:
        """The groups of a module of the model."""
        layers = mllm.layer_list(name)
        root = mllm.language_model if name == LANGUAGE_MODEL else mllm.encoders[name].module
        return cls(
            [
                (
                    kind_of(root, layer, i, len(layers)),
                    tuple(part.training for part in layer.modules()),
                    tuple(parameter.requires_grad for parameter in layer.parameters()),
                )
                for i, layer in enumerate(layers)
            ]
        )

    @classmethod
    def none(cls, count: int) -> Alike:
        """No groups: each of `count` layers is run."""
        return cls([(i, (True,)) for i in range(count)])

    def leave_out(self, layers: Sequence[nn.Module]) -> None:
        """Replace the forward of a stage's skipped layers: return a tensor like the output of their representative."""
        outputs: dict[int, Any] = {}

        def note(index: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
                outputs[index] = (hidden_argument(args, kwargs).shape, result)

            return hook

        for index in {self.like[f] for f in self.skipped}:
            layers[index].register_forward_hook(note(index), with_kwargs=True)
        for index in self.skipped:
            layers[index].__dict__["forward"] = MethodType(_handing_on(outputs, self.like[index]), layers[index])

    def filled(self, storages: Iterable[Storage]) -> list[Storage]:
        """Add the storages that the skipped layers would have kept. Raises NotAlike."""
        filled_in = list(storages)
        if not self.skipped:
            return filled_in
        entering: dict[int, list[Storage]] = {}
        inside: dict[int, list[Storage]] = {}
        shared = [each for each in filled_in if each.entering() < 0 and each.home < 0]
        for each in filled_in:
            if each.entering() >= 0:
                entering.setdefault(each.entering(), []).append(each)
            elif each.home >= 0:
                if each.layers - {each.home}:
                    raise NotAlike(f"layers {sorted(each.layers)} keep tensors made by layer {each.home}")
                inside.setdefault(each.home, []).append(each)

        def kept(layer: int) -> tuple[object, ...]:
            mine = sorted((each.bytes, each.outside, bool(each.layers)) for each in inside.get(layer, ()))
            given = [(each.bytes, each.outside, _relative(each, layer)) for each in entering.get(layer, ())]
            return mine, sorted(given), [layer in each.layers for each in shared]

        for one, other in self._twice:  # both were run
            if kept(one) != kept(other):
                raise NotAlike(f"layers {one} and {other} have the same structure but keep different bytes")
        for each in shared:
            each.layers |= {f for f in self.skipped if self.like[f] in each.layers}
        for layer, like in self.like.items():
            if layer in self.skipped:
                filled_in += [_moved(each, layer) for each in inside.get(like, ())]
            if not self.skipped.isdisjoint({layer - 1, layer}):
                _enter(entering.get(layer, []), entering.get(like, []), layer, like)
        return filled_in


def _relative(storage: Storage, layer: int) -> tuple[int, ...]:
    return tuple(sorted(each - layer for each in storage.layers))


def _moved(storage: Storage, layer: int) -> Storage:
    made = Storage(storage.bytes, storage.outside, layer)
    made.layers = {layer} if storage.layers else set()
    return made


def _enter(own: list[Storage], given: list[Storage], layer: int, like: int) -> None:
    """Copy the savers of the hidden state that enters `like` to the one that enters `layer`."""
    shapes = [[(each.bytes, each.outside, each.edge < 0) for each in both] for both in (own, given)]
    if shapes[0] != shapes[1]:
        raise NotAlike(f"the inputs of layers {layer} and {like} differ")
    for mine, its in zip(own, given, strict=True):
        if not its.layers <= {like - 1, like}:
            raise NotAlike(f"layers {sorted(its.layers)} keep inputs of layer {like}")
        mine.layers |= {each - like + layer for each in its.layers}


class _HandOn(torch.autograd.Function):
    """A tensor with the dtype of another layer's output, connected to the layer's input; saves nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, dtype: torch.dtype, *_: Tensor) -> Tensor:
        ctx.dtype, ctx.others = hidden.dtype, len(_)
        return torch.empty_like(hidden, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0].to(ctx.dtype), None, *[None] * ctx.others)


def _handing_on(made: Mapping[int, Any], like: int) -> Callable[..., Any]:
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_argument(args, kwargs)
        shape, result = made[like]
        first, *others = result if isinstance(result, tuple) else (result,)
        if not isinstance(first, Tensor) or first.shape != shape or any(isinstance(x, Tensor) for x in others):
            raise NotAlike(f"layer {like} does not return a single hidden state")
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad][:1]
        out = _HandOn.apply(hidden, first.dtype, *trained)  # type: ignore[no-untyped-call]
        return (out, *others) if isinstance(result, tuple) else out

    return forward
