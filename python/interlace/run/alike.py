"""Which layers of a module need not be run to know what its forwards keep, as they keep what others do.

Of layers that follow each other in the same way (a layer and the one before it are of the same kinds, and the same is
trained before them) the first and the last are run, each with the one before it. The others hand on a tensor of the
right shape; what they keep is copied from the first. Layers whose first and last do not keep the same are all run, and
so are those whose insides others use: `NotAlike` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.slice import hidden_argument
from interlace.model.standin import kind_of


class NotAlike(Exception):
    """What some layer keeps does not follow from what another one does: run them all."""


class Storage:
    """One that is alive after a forward: its layers are those that save it. between, edge: as in `Kept`. outside: kept
    by what lies before or after the layers. home: the layer that made it; -1 for what all layers are given."""

    def __init__(self, size: int, outside: bool = False, home: int = -1) -> None:
        self.bytes, self.outside, self.home = size, outside, home
        self.layers: set[int] = set()
        self.edge = self.between = -1

    def entering(self) -> int:
        """The layer that it enters; -1: it is no hidden state between two layers."""
        return max(self.edge, self.between)


class Alike:
    """What stands for what among the layers of a module. like: layer -> the one that keeps the same, and follows the
    one before it in the same way. skipped: those that are not run."""

    def __init__(self, kinds: Sequence[Any]) -> None:
        """kinds: of each layer, equal for layers that compute, train and keep alike."""
        count = len(kinds)
        trains = [any(kind[-1]) for kind in kinds]
        keys = [(kinds[i - 1] if i else None, kinds[i], any(trains[: max(i - 1, 0)])) for i in range(count)]
        first: dict[Any, int] = {}
        last: dict[Any, int] = {}
        for i, key in enumerate(keys):
            first.setdefault(key, i)
            if i < count - 1:  # the last layer comes with what lies behind it
                last[key] = i
        run = {0, count - 2, count - 1} | set(first.values()) | set(last.values())
        run |= {i - 1 for i in run}
        self.like = {i: first[key] for i, key in enumerate(keys) if first[key] != i}
        self.skipped = frozenset(range(count)) - run
        self._twice = [(first[key], i) for key, i in last.items() if first[key] != i]

    @classmethod
    def of(cls, mllm: Any, name: str) -> Alike:
        """Those of a module of the model."""
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
        """Every one of `count` layers is run."""
        return cls([(i, (True,)) for i in range(count)])

    def leave_out(self, layers: Sequence[nn.Module]) -> None:
        """Have the skipped layers of a stage hand on what they are given, as the ones in whose place they stand do."""
        made: dict[int, Any] = {}

        def note(index: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
                made[index] = (hidden_argument(args, kwargs).shape, result)

            return hook

        for index in {self.like[f] for f in self.skipped}:
            layers[index].register_forward_hook(note(index), with_kwargs=True)
        for index in self.skipped:
            layers[index].__dict__["forward"] = MethodType(_handing_on(made, self.like[index]), layers[index])

    def filled(self, storages: Iterable[Storage]) -> list[Storage]:
        """With what the skipped layers would have kept. Raises NotAlike."""
        found = list(storages)
        if not self.skipped:
            return found
        entering: dict[int, list[Storage]] = {}
        inside: dict[int, list[Storage]] = {}
        shared = [each for each in found if each.entering() < 0 and each.home < 0]
        for each in found:
            if each.entering() >= 0:
                entering.setdefault(each.entering(), []).append(each)
            elif each.home >= 0:
                if each.layers - {each.home}:
                    raise NotAlike(f"layers {sorted(each.layers)} keep what layer {each.home} made")
                inside.setdefault(each.home, []).append(each)
        for one, other in self._twice:
            self._compare(one, other, entering, inside, shared)
        for each in shared:
            each.layers |= {f for f in self.skipped if self.like[f] in each.layers}
        for layer, like in self.like.items():
            if layer in self.skipped:
                found += [_moved(each, layer) for each in inside.get(like, ())]
            if not self.skipped.isdisjoint({layer - 1, layer}):
                _enter(entering.get(layer, []), entering.get(like, []), layer, like)
        return found

    def _compare(
        self,
        one: int,
        other: int,
        entering: Mapping[int, list[Storage]],
        inside: Mapping[int, list[Storage]],
        shared: Sequence[Storage],
    ) -> None:
        """Raises NotAlike where two layers that were run, and should keep the same, do not."""

        def kept(layer: int) -> Any:
            mine = sorted((each.bytes, each.outside, bool(each.layers)) for each in inside.get(layer, ()))
            given = [(each.bytes, each.outside, _relative(each, layer)) for each in entering.get(layer, ())]
            return mine, sorted(given), [layer in each.layers for each in shared]

        if kept(one) != kept(other):
            raise NotAlike(f"layers {one} and {other}, which look the same, keep different bytes")


def _relative(storage: Storage, layer: int) -> tuple[int, ...]:
    return tuple(sorted(each - layer for each in storage.layers))


def _moved(storage: Storage, layer: int) -> Storage:
    made = Storage(storage.bytes, storage.outside, layer)
    made.layers = {layer} if storage.layers else set()
    return made


def _enter(own: list[Storage], given: list[Storage], layer: int, like: int) -> None:
    """Whoever keeps what enters `like` keeps what enters `layer`, too."""
    shapes = [[(each.bytes, each.outside, each.edge < 0) for each in both] for both in (own, given)]
    if shapes[0] != shapes[1]:
        raise NotAlike(f"what enters layer {layer} is not as what enters layer {like}")
    for mine, its in zip(own, given, strict=True):
        if not its.layers <= {like - 1, like}:
            raise NotAlike(f"layers {sorted(its.layers)} keep what enters layer {like}")
        mine.layers |= {each - like + layer for each in its.layers}


class _HandOn(torch.autograd.Function):
    """A tensor of the dtype of another layer's output, behind what a layer was given; saves nothing."""

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
            raise NotAlike(f"layer {like} gives something else than one hidden state")
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad][:1]
        out = _HandOn.apply(hidden, first.dtype, *trained)  # type: ignore[no-untyped-call]
        return (out, *others) if isinstance(result, tuple) else out

    return forward
