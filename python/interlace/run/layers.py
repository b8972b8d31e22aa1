"""UNSHARD_LAYERS: weights that are there for one layer at a time, inside of what a stage computes (ZeRO-3).

A stage's weights are those of its layers and what lies beside them (embeddings, norms, head, projector). What lies
beside is gathered before a forward or backward and given up behind it. A layer's weights are gathered before the layer
runs, while the one before still computes, and given up when it has run; behind its backward its gradients are summed to
where their rows are owned, and added up there in fp32 over the chunks of the step.

    forward    gather beside, 1      backward    gather beside, n
               gather 2, run 1                   gather n - 1, layer n, sum n
               gather 3, run 2 ...               gather n - 2, layer n - 1, sum n - 1 ... sum beside

Which collectives there are, and in which order, follows from the stage alone and not from what its chunk is or needs:
a layer that has not run when a later one does, or has no gradient on this rank, is caught up with. The checker has
proved that all ranks of a shard run as many forwards and backwards of its stage, in one order, all at the same time.

What autograd has saved of a weight is a view of its memory. So that is freed and made anew at one place, and written
behind the back of autograd's counters of versions: between forward and backward the values are the same. Who computes
with a weight while it is not there finds NaN in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interlace.comm.channel import Channel, Pending
from interlace.comm.deferred import DeferredGradients
from interlace.model import StageModule
from interlace.run.errors import PipelineError
from interlace.run.graph import users_of
from interlace.run.sharding import Bucket, Sharded, Weight, parts


class Unit(NamedTuple):
    """What is gathered together: of the layer `layer`, or beside the layers (None).

    places: where modules have the weights, each with the weight and what stands for it while that is not there.
    """

    layer: nn.Module | None
    weights: list[Weight]
    gathered: list[Bucket]
    summed: list[Bucket]
    places: list[tuple[dict[str, nn.Parameter | None], str, Weight, nn.Parameter]]


class Layers:
    """The units of a stage: first what lies beside its layers, then each layer.

    lowest: the first layer, counted from 1, that a backward may come to; behind the last where it comes to none.
    """

    def __init__(self, sharded: Sharded, stage: StageModule, lowest: int) -> None:
        self.sharded, self.lowest = sharded, lowest
        layers = stage.layers
        users = users_of(stage, layers)
        found: list[list[Weight]] = [[] for _ in range(len(layers) + 1)]
        for weight in sharded.weights.values():
            (user, *others) = users[id(weight.whole)]
            found[0 if others else user].append(weight)
        places: dict[int, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
        for module in stage.modules():
            for key, each in module._parameters.items():
                places.setdefault(id(each), []).append((module._parameters, key))
        self.units = [
            Unit(
                layer,
                weights,
                sharded.in_buckets(weights),
                sharded.in_buckets([weight for weight in weights if weight.whole.requires_grad]),
                [
                    (parameters, key, weight, nn.Parameter(weight.gone(), requires_grad=False))
                    for weight in weights
                    for parameters, key in places[id(weight.whole)]
                ],
            )
            for layer, weights in zip([None, *layers], found, strict=True)
        ]


class LayerByLayer:
    """The weights of a stage in one step, from its UNSHARD_LAYERS on."""

    def __init__(self, layers: Layers, channel: Channel, late: Collection[int] = ()) -> None:
        """late: ids of weights that get their gradient from a BACKWARD_WEIGHT; of none where no backward is split."""
        self._layers, self._channel, self._units = layers, channel, layers.units
        self._sharded = layers.sharded
        self._gathers: dict[int, Pending] = {}  # of units, as long as these are not there
        self._last = 0  # the last unit of this forward whose gather was begun
        self._at = 0  # the layer that this backward has come to
        self._split = False  # whether it leaves gradients to a `weight_backward`
        self._scattered: list[tuple[int, Pending]] = []  # sums under way: of which bucket
        self._sums: list[Tensor | None] = []  # of each bucket, what all chunks so far have
        self._left: list[int] = []  # of each bucket, how many of its weights have not been asked for
        self._first: list[int] = []  # of each unit, the place of its buckets there
        self._summed: list[list[Bucket]] = []  # of each unit, what is summed with its backward ...
        self._late: list[list[Bucket]] = []  # ... and what with its BACKWARD_WEIGHT
        for unit in self._units:
            self._summed.append(unit.summed)
            self._late.append([])
            trained = [weight for weights, _ in unit.summed for weight in weights]
            if due := [weight for weight in trained if id(weight.whole) in late]:
                self._summed[-1] = self._sharded.in_buckets([weight for weight in trained if weight not in due])
                self._late[-1] = self._sharded.in_buckets(due)
            self._first.append(len(self._sums))
            self._sums += [None] * len(self._buckets(-1))
            self._left += [len(weights) for weights, _ in self._buckets(-1)]
            for _, _, weight, gone in unit.places:
                gone.data = weight.gone()  # the model may have been moved, or have another dtype
            for weight in unit.weights:
                weight.appear()
                weight.vanish()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, the stage runs forward on a chunk."""
        self._gather(0)
        self._last = 0
        self._begin(1)
        self._await(0)
        undo = [
            _around(unit.layer, partial(self._run, number)) for number, unit in enumerate(self._units) if unit.layer
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
        """Inside, modules have only the weights that are there, now what lies beside the layers."""
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
        for parameters, key, _, gone in self._units[number].places:
            parameters[key] = gone

    def _begin(self, number: int) -> None:
        """Begin to gather what is due up to layer `number`."""
        while self._last < min(number, len(self._units) - 1):
            self._last += 1
            self._gather(self._last)

    def _run(self, number: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run layer `number`: `call` with its arguments."""
        self._begin(number + 1)
        if number not in self._gathers:
            raise PipelineError(
                f"layer {number - 1} of {self._sharded.name} ran twice in one forward, but its weights are gathered "
                "for one: use shard = 'optimizer' for this module"
            )
        self._await(number)
        output = call(*args, **kwargs)
        self._free(number)
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._reach, number))
        return output

    def _buckets(self, number: int) -> list[Bucket]:
        """All that is summed of a unit."""
        return self._summed[number] + self._late[number]

    @contextmanager
    def backward(self, *, split: bool = False) -> Iterator[None]:
        """Inside, the stage runs backward on a chunk; split: there will be a `weight_backward` of it."""
        self._at, self._split = len(self._units), split
        self._gather(0)
        if self._at > self._layers.lowest:
            self._gather(self._at - 1)
        self._await(0)
        with self._hidden():
            yield
            while self._at > self._layers.lowest:
                self._next()
            if self._at < len(self._units):
                self._sum(self._at)
            self._sum(0)
            self._add()
        for unit, late in zip(self._units, self._late, strict=True):
            kept = {id(weight) for weights, _ in late for weight in weights} if split else ()
            if any(weight.whole.grad is not None and id(weight) not in kept for weight in unit.weights):
                raise PipelineError(
                    f"a weight of a layer of {self._sharded.name} got a gradient when the backward of that layer was "
                    "over, for it is used outside of it: use shard = 'optimizer' for this module"
                )

    def weight_backward(self, gradients: DeferredGradients) -> None:
        """Compute what the backward of a chunk has put off, a layer at a time, while the sums of another travel."""
        for number in [*range(len(self._units) - 1, self._layers.lowest - 1, -1), 0]:
            late = self._late[number]
            gradients.compute([weight.whole for weights, _ in late for weight in weights])
            self._add()
            self._scatter(late, self._first[number] + len(self._summed[number]), f"unit {number} weights")
        self._add()
        assert not len(gradients), "a gradient was put off of a weight that no unit has"

    def _reach(self, number: int, _: Tensor) -> None:
        """Autograd has come to layer `number`."""
        if number < self._layers.lowest:
            raise PipelineError(
                f"a gradient came to layer {number - 1} of {self._sharded.name}, though nothing before it is trained"
            )
        while self._at > number:
            self._next()

    def _next(self) -> None:
        """From the layer whose backward is over to the one before it."""
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
        """Begin to sum the gradients of a unit, whose weights are not needed any more."""
        self._free(number)
        self._add()
        self._scatter(
            self._summed[number] if self._split else self._buckets(number), self._first[number], f"unit {number}"
        )

    def _scatter(self, summed: Sequence[Bucket], first: int, key: str) -> None:
        """Begin to sum the gradients of buckets, the first of which has the place `first`."""
        started = self._sharded.start_scatter(self._channel, summed, f"{self._sharded.name} {key}")
        self._scattered = [(first + place, pending) for place, (_, pending) in enumerate(started)]

    def _add(self) -> None:
        """Add the sums that are under way to those of earlier chunks."""
        for bucket, pending in self._scattered:
            mine, before = pending.wait(), self._sums[bucket]
            exact = mine.to(torch.promote_types(mine.dtype, torch.float32))
            self._sums[bucket] = exact if before is None else before.add_(exact)
        self._scattered = []

    def sums(self) -> list[tuple[list[Weight], Pending]]:
        """What `Sharded.start_scatter` gives for all that is trained, of all chunks of the step.

        In the same buckets: other sets of ranks, with which they are summed, may have gathered once. To be asked for
        once: what has been given is forgotten.
        """
        return [(bucket, Pending(partial(self._sum_of, bucket, width))) for bucket, width in self._sharded.summed]

    def _sum_of(self, bucket: list[Weight], width: int) -> Tensor:
        self._add()
        flat = bucket[0].whole.new_zeros(width + len(bucket))
        rows = dict(parts(bucket, self._sharded.place, flat))
        counts = dict(zip(bucket, flat[width:].unbind(), strict=True))
        for number, first in enumerate(self._first):
            for place, (weights, _) in enumerate(self._buckets(number), first):
                total = self._sums[place]
                if total is None or counts.keys().isdisjoint(weights):  # None: no backward has come to it
                    continue
                for weight, found in parts(weights, self._sharded.place, total):
                    if weight in rows:
                        rows[weight].copy_(found)
                for weight, count in zip(weights, total[-len(weights) :], strict=True):
                    if weight in counts:
                        counts[weight].copy_(count)
                        self._left[place] -= 1
                if not self._left[place]:  # else some of its weights are in another bucket
                    self._sums[place] = None
        return flat

    def end(self) -> None:
        """The step is over, or has failed: its sums are dropped, also where its error keeps what it went through."""
        self._sums = []


def _around(layer: nn.Module, run: Callable[..., Any]) -> Callable[[], None]:
    """Have run(call, *args, **kwargs) be what happens where `layer` is called; returns what undoes that.

    Not as hooks, which compiled code (layer.compile()) has inside.
    """
    compiled = layer.__dict__.get("_compiled_call_impl")
    call = compiled or layer._call_impl
    layer.__dict__["_compiled_call_impl"] = partial(run, call)
    if compiled is None:
        return partial(layer.__dict__.pop, "_compiled_call_impl")
    return partial(layer.__dict__.__setitem__, "_compiled_call_impl", compiled)


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of what a layer gives."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, Collection) and not isinstance(output, str):
        for value in output:
            yield from _tensors(value)
