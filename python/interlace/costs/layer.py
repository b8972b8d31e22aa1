"""Cost of a layer in a pipeline, given what is frozen (dissertation 3.3.1; cornstarch-2025-03 section 4.2).

The rule: a layer computes the gradient of its weights if it is trainable, and the gradient of its input if anything
trainable lies strictly before it on any path, across modules. So a frozen encoder has no backward at all, while a
frozen LLM behind a trainable projector has half of one. (Eq. 3.3 of the dissertation as printed also charges the input
gradient to the first trainable layer; its text, and autograd, do not.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace import _core


def frozen_costs(
    forward: ArrayLike,
    input_grad: ArrayLike,
    weight_grad: ArrayLike,
    frozen: ArrayLike,
    *,
    trainable_before: bool = False,
    recompute: bool = False,
) -> NDArray[np.float64]:
    """Cost of one forward and one backward of each layer of a module, O(n).

    Args:
        forward, input_grad, weight_grad: real numbers [n], finite and not negative, in one unit (seconds, FLOPs): a
            layer's forward, the gradient of its input (B_d) and of its weights (B_w), as `profile_layers` measures
            them. Without a profile, the usual estimate is `forward` for all three.
        frozen: bool [n], the layers without trainable parameters. A layer that is trainable in part counts as
            trainable; for an exact cost give its parts as layers of their own and add up the result.
        trainable_before: whether a module that feeds this one has trainable parameters (see `trainable_before`).
        recompute: activation checkpointing: each layer that computes a gradient repeats its forward.

    Returns:
        float64 [n], in the unit of the arguments.

    Raises:
        ValueError: lengths or types differ, or the named value is NaN, infinite or negative.
    """
    return _core.frozen_costs(
        np.asarray(forward),
        np.asarray(input_grad),
        np.asarray(weight_grad),
        np.asarray(frozen),
        bool(trainable_before),
        bool(recompute),
    )


def backward_needs(frozen: ArrayLike, *, trainable_before: bool = False) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Flags of the layers of a module that compute the gradient of their weights, and of their input.

    Arguments as in `frozen_costs`. Returns (weight bool [n], input bool [n]); a layer with neither has no backward.
    """
    return _core.backward_needs(np.asarray(frozen), bool(trainable_before))


@dataclass(frozen=True)
class LayerTimes:
    """Seconds per layer, float64 [n] each; [n, c] for c chunks at once.

    `weight_grad` is the time that the parameters' gradients add to a backward pass for the input's gradient: the B_w of
    `frozen_costs`. `weight_only` is a backward pass for the parameters alone. It takes longer if the gradient has to
    pass through the layer to reach them.
    """

    forward: NDArray[np.float64]
    input_grad: NDArray[np.float64]
    weight_grad: NDArray[np.float64]
    weight_only: NDArray[np.float64]

    def costs(
        self, frozen: ArrayLike, *, trainable_before: bool = False, recompute: bool = False
    ) -> NDArray[np.float64]:
        """`frozen_costs` of these times, with the measured `weight_only` for the first trainable layer.

        Arguments and errors as in `frozen_costs`. Returns seconds, float64 [n], or [n, c] for many chunks.
        """
        weight, inputs = backward_needs(frozen, trainable_before=trainable_before)
        if len(weight) != len(self.forward):
            raise ValueError(f"frozen has {len(weight)} layers, the profile has {len(self.forward)}")
        for name, part in vars(self).items():
            if part.shape != self.forward.shape:
                raise ValueError(f"{name} has shape {part.shape}, forward has {self.forward.shape}: they must be equal")
            if not (np.isfinite(part) & (part >= 0)).all():
                raise ValueError(f"{name} has a value that is NaN, infinite or negative")
        total = self.forward.astype(np.float64)
        for grad, layers in (
            (self.weight_only, weight & ~inputs),
            (self.weight_grad, weight & inputs),
            (self.input_grad, inputs),
            (self.forward, (weight | inputs) & recompute),
        ):
            total[layers] += grad[layers]
        return total


def trainable_before(trainable: Mapping[str, bool], edges: Iterable[tuple[str, str]]) -> dict[str, bool]:
    """For each module, whether a module before it is trainable: the argument of the same name of `frozen_costs`.

    Args:
        trainable: module name -> whether any of its layers is trainable.
        edges: (producer, consumer) names, e.g. ("vision", "language_model").

    Returns:
        module name -> bool.

    Raises:
        ValueError: an edge names an unknown module, or the edges form a cycle.
    """
    producers: dict[str, list[str]] = {name: [] for name in trainable}
    for producer, consumer in edges:
        for name in (producer, consumer):
            if name not in producers:
                raise ValueError(f"edge ({producer!r}, {consumer!r}) names the unknown module {name!r}")
        producers[consumer].append(producer)

    result = dict.fromkeys(trainable, False)
    try:
        for name in TopologicalSorter(producers).static_order():
            result[name] = any(result[producer] or trainable[producer] for producer in producers[name])
    except CycleError as error:
        name = error.args[1][0]
        raise ValueError(f"the edges form a cycle through module {name!r}: data must flow one way") from None
    return result
