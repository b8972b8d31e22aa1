"""profile_layers: what it records and restores, and results derived from a clock that counts in these tests."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from interlace import plan
from interlace.costs import profile


def pairs(*modules):
    return [(module, list(module.parameters())) for module in modules]


def apply(module, hidden):
    return nn.functional.linear(hidden, module.weight, module.bias)


def test_layers_without_a_gradient_cost_none():
    torch.manual_seed(0)
    modules = [nn.Embedding(10, 16), nn.Linear(16, 16), nn.ReLU()]
    modules[1].requires_grad_(False)
    times = plan.profile_layers(pairs(*modules), torch.arange(8), repeats=3, warmup=1)
    assert (times.forward > 0).all()
    assert times.input_grad[0] == 0  # token ids have no gradient
    assert times.input_grad[1] > 0 and times.input_grad[2] > 0
    assert times.weight_only[0] > 0 and times.weight_only[1] > 0  # also where the layer is frozen now
    assert times.weight_only[2] == 0  # no parameters
    assert (times.weight_grad >= 0).all()
    assert all(p.requires_grad for p in modules[0].parameters())
    assert not any(p.requires_grad for p in modules[1].parameters())
    assert all(p.grad is None for module in modules for p in module.parameters())


def test_each_gradient_is_asked_for_by_itself(monkeypatch):
    asked = []
    original = torch.autograd.grad

    def spy(output, wanted, *args, **kwargs):
        asked.append([tensor.shape for tensor in wanted])
        return original(output, wanted, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    hidden, layer = torch.randn(3, 4), nn.Linear(4, 5, bias=False)
    plan.profile_layers(pairs(layer), hidden, repeats=1, warmup=0)
    assert asked == [[hidden.shape, layer.weight.shape], [hidden.shape], [layer.weight.shape]]


def test_medians_of_what_the_clock_says(monkeypatch):
    """A clock that only the layer advances: forward 1 s, gradient of the input 2 s, of the weight 4 s."""
    clock = [0.0]
    monkeypatch.setattr(profile, "_now", lambda tensor: clock[0])
    slow = [10.0, 1.0, 1.0, 50.0, 1.0]  # the first is warm-up, and one outlier

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            clock[0] += scale[0]
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            clock[0] += scale[0] * (2 * ctx.needs_input_grad[0] + 4 * ctx.needs_input_grad[1])
            return gradient, gradient

    scale, calls = [1.0], [0]
    weight = nn.Parameter(torch.ones(()))

    def run(x):
        scale[0] = slow[calls[0] // 3]  # three graphs per repetition
        calls[0] += 1
        return Layer.apply(x, weight)

    times = plan.profile_layers([(run, [weight])], torch.ones(()), repeats=4, warmup=1)
    assert calls[0] == 15
    assert times.forward.tolist() == [1.0] and times.input_grad.tolist() == [2.0]
    assert times.weight_grad.tolist() == [4.0] and times.weight_only.tolist() == [4.0]


def test_costs_use_measured_backward_of_first_trainable_layer():
    forward, d, w, alone = np.array([1.0, 1, 1]), np.array([2.0, 2, 2]), np.array([4.0, 4, 4]), np.array([5.0, 5, 5])
    times = plan.LayerTimes(forward, d, w, alone)
    assert times.costs([True, False, False]).tolist() == [1, 6, 7]
    assert times.costs([True, False, True], recompute=True).tolist() == [1, 7, 4]
    assert times.costs([True] * 3, trainable_before=True).tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="frozen has 2 layers, the profile has 3"):
        times.costs([True, False])
    for bad, message in (
        (np.array([2.0, -2, 2]), "input_grad has a value that is NaN, infinite or negative"),
        (np.array([2.0, np.nan, 2]), "input_grad has a value that is NaN"),
        (np.ones(2), r"input_grad has shape \(2,\), forward has \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.LayerTimes(forward, bad, w, alone).costs([True, False, False])


def test_a_wider_layer_takes_longer(monkeypatch):
    """Uses a clock that counts FLOPs, since wall time depends on the load of the machine."""
    torch.manual_seed(0)
    rows, widths = 512, [(32, 512), (512, 512), (512, 32)]
    modules = [nn.Linear(*each) for each in widths]
    # Not the modules themselves: the counter's hooks into them make torch.autograd.grad refuse.
    layers = [(partial(apply, module), list(module.parameters())) for module in modules]
    with FlopCounterMode(display=False) as counter:
        monkeypatch.setattr(profile, "_now", lambda tensor: float(counter.get_total_flops()))
        times = plan.profile_layers(layers, torch.randn(rows, 32), repeats=3, warmup=1)
    product = [2.0 * rows * a * b for a, b in widths]  # one in the forward, one for either gradient
    for part in (times.forward, times.input_grad, times.weight_grad, times.weight_only):
        assert part.tolist() == product
    assert plan.partition(times.costs([False] * 3), 3).tolist() == [0, 1, 2, 3]


def test_bad_input_is_named():
    x = torch.ones(2)
    with pytest.raises(ValueError, match="no layers"):
        plan.profile_layers([], x)
    with pytest.raises(ValueError, match="repeats must be at least 1 and warmup at least 0, got 0 and 2"):
        plan.profile_layers([(torch.relu, [])], x, repeats=0)
    with pytest.raises(TypeError, match=r"layer 1 returned tuple: run\(hidden\) must return a tensor"):
        plan.profile_layers([(torch.relu, []), (lambda h: (h,), [])], x)
