"""BACKWARD_WEIGHT: which gradients of a stage wait for it, and how the stage's layers come to put them off.

Those of weights of linear layers: nn.Linear (with an adapter beside it, too), transformers' Conv1D, and the layers that
tensor parallelism has cut. All others are made by BACKWARD_INPUT: of biases, norms, embeddings, convolutions, experts;
and of these linear layers:

    one weight in several places (tied embeddings)     a step must sum it in one order, whether it is split or not
    compiled (layer.compile())                         code that is traced cannot keep anything for later
    a forward of its own, or weights of another kind   it may not be the product of its weight
    a head that is cut, or makes few logits at a time  its gradient is made with them (`interlace.model.loss`)

Nothing in the model changes: layers have another forward only as long as a chunk whose backward is split runs forward
or backward on the stage (there they are recomputed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from transformers.pytorch_utils import Conv1D

from interlace.comm.deferred import Deferral, DeferredForward, DeferredGradients
from interlace.parallel.linear import ParallelLinear
from interlace.run.step import Key, StageRuntime


class LinearLayers:
    """The layers of a stage that put gradients off. weights: ids of their weights, as far as these are trained."""

    def __init__(self, stage: nn.Module, shared: Collection[int]) -> None:
        """shared: ids of weights that are in several places."""
        self.weights: set[int] = set()
        self._deferral = Deferral(self.weights)  # column layers share one product, and not all of them need wait
        self._cut: list[ParallelLinear] = []
        self._forwards: list[tuple[nn.Module, DeferredForward]] = []
        for layer in _interpreted(stage):
            weight = layer._parameters.get("weight")
            if weight is None or not weight.requires_grad or id(weight) in shared or "forward" in vars(layer):
                continue
            if isinstance(layer, ParallelLinear):
                self._cut.append(layer)
            elif type(layer).forward is nn.Linear.forward:
                self._forwards.append((layer, DeferredForward(layer, self._deferral, "out")))
            elif type(layer).forward is Conv1D.forward:
                self._forwards.append((layer, DeferredForward(layer, self._deferral, "in")))
            else:
                continue
            self.weights.add(id(weight))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, a chunk whose backward is split runs forward on the stage."""
        for layer, forward in self._forwards:
            layer.__dict__["forward"] = forward
        for cut in self._cut:
            cut.deferral = self._deferral
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del layer.__dict__["forward"]
            for cut in self._cut:
                del cut.deferral

    @contextmanager
    def backward(self) -> Iterator[DeferredGradients]:
        """Inside, it runs backward; what it leaves to BACKWARD_WEIGHT is in the result."""
        with self.forward(), self._deferral.begin() as gradients:
            yield gradients


def linear_layers(stages: Mapping[Key, StageRuntime], split: Collection[Key]) -> dict[Key, LinearLayers]:
    """Of the stages `split`. stages: all of a rank."""
    places: Counter[int] = Counter()
    for runtime in stages.values():
        for module in runtime.module.modules():
            places.update(id(parameter) for parameter in module._parameters.values() if parameter is not None)
    shared = {parameter for parameter, count in places.items() if count > 1}
    return {key: LinearLayers(stages[key].module, shared) for key in split}


def _interpreted(stage: nn.Module) -> Iterator[nn.Module]:
    """The modules of a stage, but for what was compiled and what is inside of that."""
    found, seen = [stage], set()
    while found:
        module = found.pop()
        compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules  # in place, or around it
        if id(module) in seen or compiled:
            continue
        seen.add(id(module))
        found += reversed(list(module.children()))
        yield module
