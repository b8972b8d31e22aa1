"""Times the forward, the input gradient and the weight gradient of each layer separately.

A frozen-aware partition (dissertation 3.3.1) needs separate times of the parts of a backward pass. Per layer and
repetition three small graphs are recorded and timed:

- parameters frozen, gradient of the input only: as in a frozen layer behind a trainable one;
- input without gradient, gradient of the parameters only: as in the first trainable layer of a model;
- both: as in a trainable layer behind a trainable one.

Each repetition covers all layers, so that a temporary slowdown of the machine affects all layers equally; the median
drops the outliers. The activations of only one layer are in memory at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from interlace import _device
from interlace.costs.layer import LayerTimes

Run = Callable[[Tensor], Tensor]


def profile_layers(
    layers: Sequence[tuple[Run, Sequence[Tensor]]], hidden: Tensor, *, repeats: int = 5, warmup: int = 2
) -> LayerTimes:
    """Times each layer on the output of the one before.

    Args:
        layers: (run, parameters) per layer. `run(hidden) -> hidden` must be repeatable; it holds its other inputs
            (masks, positions) itself. `parameters` are those whose gradient counts as the layer's weight gradient:
            requires_grad is switched on and off here, also for frozen ones, and restored. Empty: weight gradient 0.
        hidden: input of the first layer. If it is not floating point (token ids), that layer's input gradient is 0.
        repeats: measured repetitions; the result is their median.
        warmup: repetitions before these that are not counted.

    Returns:
        LayerTimes in seconds. Times hold for this device, thread count, dtype and input shape.

    Raises:
        ValueError: no layers, repeats < 1 or warmup < 0.
        TypeError: a layer returned something other than a tensor (the message names the layer).
    """
    if not layers:
        raise ValueError("no layers to profile")
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")

    samples = np.zeros((warmup + repeats, 4, len(layers)))
    for repetition in samples:
        current = hidden.detach()
        for index, (run, parameters) in enumerate(layers):
            weights = [p for p in parameters if p.is_floating_point()]
            inputs = [current] if current.is_floating_point() else []
            forward, backward, output = time_layer(run, current, inputs, weights, index)
            input_grad = time_layer(run, current, inputs, [], index, frozen=weights)[1]
            weight_only = time_layer(run, current, [], weights, index)[1]
            # Difference of two measured times of one repetition; noise may make it negative.
            repetition[:, index] = forward, input_grad, max(backward - input_grad, 0.0), weight_only
            current = output
    forward, input_grad, weight_grad, weight_only = np.median(samples[warmup:], axis=0)
    return LayerTimes(forward, input_grad, weight_grad, weight_only)


def time_layer(
    run: Run,
    hidden: Tensor,
    inputs: list[Tensor],
    weights: list[Tensor],
    index: int = 0,
    frozen: Sequence[Tensor] = (),
    *,
    accumulate: bool = False,
) -> tuple[float, float, Tensor]:
    """Seconds of a forward, seconds of a backward for the inputs (hidden or nothing) and the weights, and the output.

    frozen: weights that get no gradient here. accumulate: whether gradients are added to ``.grad``, as in a step.
    Raises TypeError, with `index`, for a layer that returns something other than a tensor.
    """
    hidden = hidden.detach().requires_grad_(bool(inputs))
    targets = [hidden] * bool(inputs) + weights
    with torch.enable_grad(), _requires_grad(weights, True), _requires_grad(frozen, False):
        start = _now(hidden)
        output = run(hidden)
        forward = _now(hidden) - start
        if not isinstance(output, Tensor):
            raise TypeError(f"layer {index} returned {type(output).__name__}: run(hidden) must return a tensor")
        if not targets or not output.requires_grad:
            return forward, 0.0, output.detach()
        gradient = torch.ones_like(output)
        start = _now(hidden)
        if accumulate:
            torch.autograd.backward(output, gradient, inputs=targets)
        else:
            torch.autograd.grad(output, targets, gradient, allow_unused=True)
        return forward, _now(hidden) - start, output.detach()


@contextmanager
def _requires_grad(tensors: Sequence[Tensor], value: bool) -> Iterator[None]:
    before = [tensor.requires_grad for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.requires_grad_(value)
        yield
    finally:
        for tensor, old in zip(tensors, before):
            tensor.requires_grad_(old)


def _now(tensor: Tensor) -> float:
    """Clock time in seconds, after a synchronization with the device."""
    if _device.on_gpu(tensor.device):
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter()
