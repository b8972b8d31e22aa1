"""UNSHARD_LAYERS: weights are gathered one layer at a time, inside the computation of a stage (ZeRO-3).

A stage's weights are those of its layers and those beside the layers (embeddings, norms, head, projector). Weights
beside the layers are gathered before a forward or backward and freed after it. A layer's weights are gathered before
the layer runs, while the previous layer still computes, and freed after it. After the backward of a layer its gradients
are summed to the owners of their rows, and accumulated there in fp32 over the chunks of the step.

    forward    gather beside, 1      backward    gather beside, n
               gather 2, run 1                   gather n - 1, layer n, sum n
               gather 3, run 2 ...               gather n - 2, layer n - 1, sum n - 1 ... sum beside

The collectives and their order depend only on the stage, not on the contents of its chunks. If a layer has not run when
a later one does, or has no gradient on this rank, its collectives still run. The checker has proved that all ranks of a
shard run equally many forwards and backwards of its stage, in one order, all at the same time.

Autograd saves views of the memory of a weight. So this memory is freed and allocated again at one address, and written
without changing autograd's version counters: between forward and backward the values are the same. Any computation with
a weight while it is not gathered gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from interlace.comm.channels.base import Channel, Pending
from interlace.comm.overlap.deferred import DeferredGradients
from interlace.model import StageModule
from interlace.run.errors import PipelineError
from interlace.run.execute.sharding import Bucket, Sharded, Weight, parts
from interlace.run.graph import users_of


class Unit(NamedTuple):
    """Weights that are gathered together: of the layer `layer`, or of those beside the layers (None).

    places: module dict, key, weight, and the placeholder Parameter while the weight is not gathered.
    """

    layer: nn.Module | None
    weights: list[Weight]
    gathered: list[Bucket]
    places: list[tuple[dict[str, nn.Parameter | None], str, Weight, nn.Parameter]]


class Layers:
    """The units of a stage: first the weights beside its layers, then each layer.

    lowest: the first layer, counted from 1, that a backward may reach; one after the last if it reaches none.
    """

    def __init__(self, sharded: Sharded, stage: StageModule, lowest: int) -> None:
        self.sharded, self.lowest = sharded, lowest
        layers = stage.layers
        users = users_of(stage, layers)
        by_layer: list[list[Weight]] = [[] for _ in range(len(layers) + 1)]
        for weight in sharded.weights.values():
            (user, *others) = users[id(weight.whole)]
            by_layer[0 if others else user].append(weight)
        places: dict[int, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
        for module in stage.modules():
            for key, each in module._parameters.items():
                places.setdefault(id(each), []).append((module._parameters, key))
        self.units = [
            Unit(
                layer,
                weights,
                sharded.in_buckets(weights),
                [
                    (parameters, key, weight, nn.Parameter(weight.placeholder(), requires_grad=False))
                    for weight in weights
                    for parameters, key in places[id(weight.whole)]
                ],
            )
            for layer, weights in zip([None, *layers], by_layer, strict=True)
        ]


@dataclass(eq=False)
class Total:
    """The gradients of a bucket, summed over the chunks so far. left: number of weights whose sum has not been read."""

    weights: list[Weight]
    width: int
    left: int
    sum: Tensor | None = None


class LayerByLayer:
    """The weights of a stage in one step, from its UNSHARD_LAYERS on."""

    def __init__(self, layers: Layers, channel: Channel, late: Collection[int] = ()) -> None:
        """late: ids of weights whose gradient is computed by a BACKWARD_WEIGHT; empty if no backward is split."""
        self._layers, self._channel, self._units = layers, channel, layers.units
        self._sharded = layers.sharded
        self._gathers: dict[int, Pending] = {}  # of units, until awaited
        self._last = 0  # the last unit of this forward whose gather was started
        self._at = 0  # the layer that this backward has reached
        self._split = False  # whether it defers gradients to a `weight_backward`
        self._scattered: list[tuple[Total, Pending]] = []  # sums in flight
        self._early: list[list[Total]] = []  # per unit, buckets summed with its backward ...
        self._late: list[list[Total]] = []  # ... and buckets summed with its BACKWARD_WEIGHT
        for unit in self._units:
            trained = [weight for weight in unit.weights if weight.whole.requires_grad]
            due = [weight for weight in trained if id(weight.whole) in late]
            early = self._sharded.in_buckets([weight for weight in trained if weight not in due])
            self._early.append([Total(*bucket, len(bucket[0])) for bucket in early])
            self._late.append([Total(*bucket, len(bucket[0])) for bucket in self._sharded.in_buckets(due)])
            for _, _, weight, placeholder in unit.places:
                placeholder.data = weight.placeholder()  # the model may have been moved, or have another dtype
            for weight in unit.weights:
                weight.appear()
                weight.vanish()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context for the stage's forward on a chunk."""
        self._gather(0)
        self._last = 0
        self._begin(1)
        self._await(0)
        undo = [
            _wrap_call(unit.layer, partial(self._run, number)) for number, unit in enumerate(self._units) if unit.layer
        ]
        with self._hidden():
            try:
                yield
            finally:
                for each in undo:
                    each()
            self._begin(len(self._units) - 1)
            for number in range(len(self._units)):
                if number in self._gathers:  # a layer that did not run
                    self._await(number)
                self._free(number)

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Context in which modules have only gathered weights: at its start, those beside the layers."""
        for number in range(1, len(self._units)):
            self._hide(number)
        try:
            yield
        finally:
            for number in range(len(self._units)):
                self._show(number)

    def _show(self, number: int) -> None:
        for parameters, key, weight, _ in self._units[number].places:
            parameters[key] = weight.whole

    def _hide(self, number: int) -> None:
        for parameters, key, _, placeholder in self._units[number].places:
            parameters[key] = placeholder

    def _begin(self, number: int) -> None:
        """Start the outstanding gathers up to layer `number`."""
        while self._last < min(number, len(self._units) - 1):
            self._last += 1
            self._gather(self._last)

    def _run(self, number: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run layer `number`: `call` with its arguments."""
        self._begin(number + 1)
        if number not in self._gathers:
            raise PipelineError(
                f"layer {number - 1} of {self._sharded.name} ran twice in one forward; shard = 'full' does not support "
                "that: use shard = 'optimizer' for this module"
            )
        self._await(number)
        output = call(*args, **kwargs)
        self._free(number)
        if torch.is_grad_enabled():
            for tensor in tree_iter(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._backward_reached, number))
        return output

    def totals(self) -> Iterator[Total]:
        """The sums of all buckets, by unit."""
        for early, late in zip(self._early, self._late, strict=True):
            yield from early + late

    @contextmanager
    def backward(self, *, split: bool = False) -> Iterator[None]:
        """Context for the stage's backward on a chunk; split: a `weight_backward` of it follows."""
        self._at, self._split = len(self._units), split
        self._gather(0)
        if self._at > self._layers.lowest:
            self._gather(self._at - 1)
        self._await(0)
        with self._hidden():
            yield
            while self._at > self._layers.lowest:
                self._previous_layer()
            if self._at < len(self._units):
                self._sum(self._at)
            self._sum(0)
            self._add()
        for unit, late in zip(self._units, self._late, strict=True):
            kept = {id(weight) for total in late for weight in total.weights} if split else ()
            if any(weight.whole.grad is not None and id(weight) not in kept for weight in unit.weights):
                raise PipelineError(
                    f"a weight of a layer of {self._sharded.name} is also used outside its layer; shard = 'full' does "
                    "not support that: use shard = 'optimizer' for this module"
                )

    def weight_backward(self, gradients: DeferredGradients) -> None:
        """Compute the deferred gradients of a chunk, a layer at a time, overlapped with the sums of another layer."""
        for number in [*range(len(self._units) - 1, self._layers.lowest - 1, -1), 0]:
            late = self._late[number]
            gradients.compute([weight.whole for total in late for weight in total.weights])
            self._add()
            self._scatter(late, f"unit {number} weights")
        self._add()
        assert not len(gradients), "a gradient was put off of a weight that no unit has"

    def _backward_reached(self, number: int, _: Tensor) -> None:
        """Autograd has reached layer `number`."""
        if number < self._layers.lowest:
            raise PipelineError(
                f"layer {number - 1} of {self._sharded.name} got a gradient, but nothing before it is trainable"
            )
        while self._at > number:
            self._previous_layer()

    def _previous_layer(self) -> None:
        """Move from the layer whose backward is done to the one before it."""
        done, self._at = self._at, self._at - 1
        if self._at > self._layers.lowest:
            self._gather(self._at - 1)
        if done < len(self._units):
            self._sum(done)
        self._await(self._at)

    def _gather(self, number: int) -> None:
        unit = self._units[number]
        key = f"{self._sharded.name} unit {number}"
        self._gathers[number] = self._sharded.start_gather(self._channel, unit.gathered, key)

    def _await(self, number: int) -> None:
        self._gathers.pop(number).wait()
        self._show(number)

    def _free(self, number: int) -> None:
        for weight in self._units[number].weights:
            weight.vanish()
        self._hide(number)

    def _sum(self, number: int) -> None:
        """Start to sum the gradients of a unit, and free its weights."""
        self._free(number)
        self._add()
        self._scatter(self._early[number] + ([] if self._split else self._late[number]), f"unit {number}")

    def _scatter(self, due: Sequence[Total], key: str) -> None:
        """Start to sum the gradients of buckets."""
        buckets = [(total.weights, total.width) for total in due]
        started = self._sharded.start_scatter(self._channel, buckets, f"{self._sharded.name} {key}")
        self._scattered = [(total, pending) for total, (_, pending) in zip(due, started, strict=True)]

    def _add(self) -> None:
        """Wait for the sums in flight and add them to those of earlier chunks."""
        for total, pending in self._scattered:
            mine = pending.wait()
            exact = mine.to(torch.promote_types(mine.dtype, torch.float32))
            total.sum = exact if total.sum is None else total.sum.add_(exact)
        self._scattered = []

    def sums(self) -> list[tuple[list[Weight], Pending]]:
        """The result of `Sharded.start_scatter` for all trained weights, over all chunks of the step.

        The buckets are those of `Sharded.summed`: other sets of ranks, with which they are summed, may have gathered
        once per step. May be read only once: sums are dropped after reading.
        """
        return [(bucket, Pending(partial(self._sum_of, bucket, width))) for bucket, width in self._sharded.summed]

    def _sum_of(self, bucket: list[Weight], width: int) -> Tensor:
        self._add()
        flat = bucket[0].whole.new_zeros(width + len(bucket))
        rows = dict(parts(bucket, self._sharded.place, flat))
        counts = dict(zip(bucket, flat[width:].unbind(), strict=True))
        for total in self.totals():
            if total.sum is None or counts.keys().isdisjoint(total.weights):  # None: no backward has reached it
                continue
            for weight, part in parts(total.weights, self._sharded.place, total.sum):
                if weight in rows:
                    rows[weight].copy_(part)
            for weight, count in zip(total.weights, total.sum[-len(total.weights) :], strict=True):
                if weight in counts:
                    counts[weight].copy_(count)
                    total.left -= 1
            if not total.left:  # else some of its weights are in another bucket that has not been read
                total.sum = None
        return flat

    def end(self) -> None:
        """End of the step, also after a failure: drops its sums, even if an error's traceback keeps this object."""
        self._early = self._late = []


def _wrap_call(layer: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Make a call of `layer` execute run(call, *args, **kwargs); returns a function that undoes it.

    Hooks would not work: compiled code (layer.compile()) includes them.
    """
    compiled = layer.__dict__.get("_compiled_call_impl")
    call = compiled or layer._call_impl
    layer.__dict__["_compiled_call_impl"] = partial(run, call)
    if compiled is None:
        return partial(layer.__dict__.pop, "_compiled_call_impl")
    return partial(layer.__dict__.__setitem__, "_compiled_call_impl", compiled)
