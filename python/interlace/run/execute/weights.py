"""Weights of in-process ranks and of tensor-parallel ranks, which are not the model's own Parameters.

If one process runs several ranks, they accumulate gradients at the same time, and each needs its own `.grad`. The
first rank that holds a weight has the model's own Parameter; the others have views over the same storage.
Tensor-parallel ranks have pieces of weights, and views of the weights that they hold whole. Gradients of these views
may be partial sums during a step. A shard is a piece too: the rows that a rank keeps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from interlace.parallel.layer import ParallelLayer
from interlace.parallel.region import Region


class Cut(NamedTuple):
    """A piece of a weight: its layer and its key there."""

    layer: ParallelLayer
    key: str

    @property
    def region(self) -> Region:
        """Its region in the whole weight."""
        return self.layer.region(self.key)


class Held(NamedTuple):
    """A rank's parameter over values of the model's `own`. region: None for the whole weight. place: in the lane, and
    among the owners of slices; None: a view whose gradient equals that of `own` after a step."""

    own: nn.Parameter
    place: tuple[int, ...] | None
    parameter: nn.Parameter
    region: Region | None


class Pieces:
    """Pieces and views that ranks hold of a model, if all its ranks are in this process.

    The model's own parameters are trained: a step takes the pieces from them, and collects the pieces' gradients in
    their `.grad`.
    """

    def __init__(self) -> None:
        self._held: list[Held] = []

    def add(self, own: nn.Parameter, place: int | None, parameter: nn.Parameter, region: Region | None) -> None:
        """Register `parameter`, see `Held`; place: the tensor-parallel place of its rank."""
        self._held.append(Held(own, None if place is None else (place,), parameter, region))

    def spread(self, whole: nn.Parameter, part: nn.Parameter | None, place: int, lies: Region | None) -> nn.Parameter:
        """Reduce an entry added as `whole` to `part`, which the rank at `place` among the owners keeps; None: nothing.

        Returns the model's own parameter.
        """
        at = next(i for i in reversed(range(len(self._held))) if self._held[i].parameter is whole)
        held = self._held.pop(at)
        assert held.place is not None
        if part is not None:
            self._held.append(Held(held.own, (*held.place, place), part, lies))
        return held.own

    def refresh(self) -> None:
        """Take the pieces again (views if a piece is contiguous, else copies), and drop gradients of a failed step."""
        for own, _, parameter, region in self._held:
            parameter.data = own.data if region is None else region.piece(own.data).contiguous()
            parameter.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Move the pieces' gradients to those of the model's own parameters.

        Lanes that hold the same pieces have equal sums by now, so those of the first lane are used.
        """
        pieces: dict[int, dict[tuple[int, ...], Held]] = {}  # id of the model's parameter -> place -> first piece there
        for held in self._held:
            if held.place is not None:
                pieces.setdefault(id(held.own), {}).setdefault(held.place, held)
        for places in pieces.values():
            first = next(iter(places.values()))
            if first.parameter.grad is None:
                continue
            if first.region is None:
                whole = first.parameter.grad
            else:
                whole = torch.empty_like(first.own)
                for held in places.values():
                    assert held.region is not None and held.parameter.grad is not None
                    held.region.put(whole, held.parameter.grad)
            own = first.own
            own.grad = whole if own.grad is None else own.grad.add_(whole)
        for held in self._held:
            held.parameter.grad = None


def cut_weights(stage: nn.Module) -> Mapping[str, Cut]:
    """Name -> Cut, for the parameters of `stage` of which a rank holds a piece."""
    return {
        f"{path}.{key}": Cut(layer, key)
        for path, layer in stage.named_modules()
        if isinstance(layer, ParallelLayer) and layer.ranks.world > 1
        for key in layer.cut
        if getattr(layer, key) is not None
    }


class Trained:
    """The trained parameters, fixed by `parallelize`: others would silently get no gradients."""

    def __init__(self, mllm: nn.Module) -> None:
        self._parameters = list(mllm.parameters())
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def check(self, mllm: nn.Module) -> None:
        """Raises ValueError if `mllm` has other parameters now, or trains others."""
        parameters = list(mllm.parameters())
        if len(parameters) != len(self._parameters) or any(map(operator.is_not, parameters, self._parameters)):
            raise ValueError(
                "the model's parameters were replaced since parallelize(), and no step would train the new ones: add "
                "or replace parameters first, then parallelize again (to load weights, copy them into the parameters)"
            )
        if [parameter.requires_grad for parameter in parameters] != self._trainable:
            raise ValueError(
                "frozen parameters have changed since parallelize(): freeze or unfreeze first, then parallelize again"
            )
