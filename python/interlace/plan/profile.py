"""Times the forward, the input gradient and the weight gradient of each layer, each by itself.

A partition that knows what is frozen (dissertation 3.3.1) needs the parts of a backward pass apart. Per layer and
repetition three small graphs are recorded and timed:

- the parameters frozen, gradient of the input only: what a frozen layer behind something trainable runs;
- the input without gradient, gradient of the parameters only: what the first trainable layer of a model runs;
- both: what a trainable layer behind something trainable runs.

Repetitions go round all layers, so that a machine that slows down for a while slows all layers alike, and the median
drops the outliers. One layer's activations are alive at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from interlace import _device
from interlace.plan.cost import LayerTimes

Run = Callable[[Tensor], Tensor]


def profile_layers(
    layers: Sequence[tuple[Run, Sequence[Tensor]]], hidden: Tensor, *, repeats: int = 5, warmup: int = 2
) -> LayerTimes:
    """Times each layer on the output of the one before.

    Args:
        layers: (run, parameters) per layer. `run(hidden) -> hidden` must be repeatable; what else it needs (masks,
            positions) it holds itself. `parameters` are those whose gradient counts as the layer's weight gradient:
            requires_grad is switched on and off here, whatever is frozen, and restored. Empty: weight gradient 0.
        hidden: input of the first layer. If it is not floating point (token ids), that layer's input gradient is 0.
        repeats: measured repetitions, of which the median counts.
        warmup: repetitions before them that do not count.

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
            # Difference of two measured times of one repetition; noise may take it below 0.
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
    """Seconds of a forward, and of a backward for the inputs (hidden or nothing) and the weights; the output.

    frozen: weights that get no gradient meanwhile. accumulate: whether gradients are added to ``.grad``, as in a step.
    Raises TypeError, with `index`, for a layer that returns something other than a tensor.
    """
    hidden = hidden.detach().requires_grad_(bool(inputs))
    wanted = [hidden] * bool(inputs) + weights
    with torch.enable_grad(), _requires_grad(weights, True), _requires_grad(frozen, False):
        start = _now(hidden)
        output = run(hidden)
        forward = _now(hidden) - start
        if not isinstance(output, Tensor):
            raise TypeError(f"layer {index} returned {type(output).__name__}: run(hidden) must return a tensor")
        if not wanted or not output.requires_grad:
            return forward, 0.0, output.detach()
        gradient = torch.ones_like(output)
        start = _now(hidden)
        if accumulate:
            torch.autograd.backward(output, gradient, inputs=wanted)
        else:
            torch.autograd.grad(output, wanted, gradient, allow_unused=True)
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
    """Seconds on a clock, after the device has done what it was given."""
    if _device.on_gpu(tensor.device):
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter()
