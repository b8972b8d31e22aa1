"""BACKWARD_WEIGHT: deferred weight gradients of a stage.

Deferred are gradients of the weights of linear layers: nn.Linear (also with an adapter beside it), transformers'
Conv1D, and layers that tensor parallelism has cut. BACKWARD_INPUT computes all others: biases, norms, embeddings,
convolutions, experts, and these linear layers:

    one weight in several places (tied embeddings)     a step must sum it in one order, split or not
    compiled (layer.compile())                         traced code cannot keep anything for later
    a forward of its own, or weights of another kind   its output may not be the product with its weight
    a head that is cut, or makes few logits at a time  its gradient is computed together with them
                                                       (`interlace.model.loss`)

The model itself does not change. Layers have another forward only while a chunk with a split backward runs forward or
backward on the stage (layers may be recomputed in the backward).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from transformers.pytorch_utils import Conv1D

from interlace.comm.overlap.deferred import Deferral, DeferredForward, DeferredGradients
from interlace.parallel.linear import ParallelLinear
from interlace.run.execute.step import Key, StageRuntime


class LinearLayers:
    """The layers of a stage that defer gradients. weights: ids of their trained weights."""

    def __init__(self, stage: nn.Module, shared: Collection[int]) -> None:
        """shared: ids of weights that are used in several places."""
        self.weights: set[int] = set()
        self._deferral = Deferral(self.weights)  # column layers share one product, and not all of them are deferred
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
        """Context for the forward of a chunk whose backward is split."""
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
        """Context for its backward; yields the gradients that are deferred to BACKWARD_WEIGHT."""
        with self.forward(), self._deferral.begin() as gradients:
            yield gradients


def linear_layers(stages: Mapping[Key, StageRuntime], split: Collection[Key]) -> dict[Key, LinearLayers]:
    """The LinearLayers of the stages `split`. stages: all stages of a rank."""
    places: Counter[int] = Counter()
    for runtime in stages.values():
        for module in runtime.module.modules():
            places.update(id(parameter) for parameter in module._parameters.values() if parameter is not None)
    shared = {parameter for parameter, count in places.items() if count > 1}
    return {key: LinearLayers(stages[key].module, shared) for key in split}


def _interpreted(stage: nn.Module) -> Iterator[nn.Module]:
    """The modules of a stage, except compiled modules and their submodules."""
    pending, seen = [stage], set()
    while pending:
        module = pending.pop()
        compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules  # in place, or around it
        if id(module) in seen or compiled:
            continue
        seen.add(id(module))
        pending += reversed(list(module.children()))
        yield module
