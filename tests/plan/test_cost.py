"""Costs of frozen layers against a written-out definition and against the work of autograd."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace import plan
from tests.sampling import given_by_tier

seconds = st.floats(0, 100)


@given_by_tier(
    200,
    1000,
    st.lists(st.tuples(seconds, seconds, seconds, st.booleans()), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_rule(layers, trainable_before, recompute):
    forward, input_grad, weight_grad, frozen = (np.array(column) for column in zip(*layers))
    costs = plan.frozen_costs(
        forward, input_grad, weight_grad, frozen, trainable_before=trainable_before, recompute=recompute
    )
    assert costs.dtype == np.float64
    for i, (f, d, w, is_frozen) in enumerate(layers):
        needs_weight = not is_frozen
        needs_input = trainable_before or any(not layers[j][3] for j in range(i))
        again = f if recompute and (needs_weight or needs_input) else 0
        assert costs[i] == pytest.approx(f + w * needs_weight + d * needs_input + again)


def test_papers_cases():
    """Cornstarch-2025-03 figure 7: a frozen encoder has no backward, a frozen LLM behind a projector half of one."""
    ones = np.ones(3)
    encoder = plan.frozen_costs(ones, ones, ones, [True, True, False])  # the last layer is the projector
    assert encoder.tolist() == [1, 1, 2]
    llm = plan.frozen_costs(ones, ones, ones, [True] * 3, trainable_before=True)
    assert llm.tolist() == [2, 2, 2]
    trainable = plan.frozen_costs(ones, ones, ones, [False] * 3, trainable_before=True)
    assert trainable.tolist() == [3, 3, 3]
    again = plan.frozen_costs(ones, ones, ones, [True, False, True], recompute=True)
    assert again.tolist() == [1, 3, 3]  # the layer without backward is never recomputed


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.booleans())
def test_needs_are_what_autograd_computes(frozen, before):
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in frozen]
    for layer, is_frozen in zip(layers, frozen):
        layer.requires_grad_(not is_frozen)
    inputs = [torch.ones(1, 2, requires_grad=before)]
    for layer in layers:
        inputs.append(layer(inputs[-1]))
    weight, input_ = plan.backward_needs(frozen, trainable_before=before)
    assert weight.tolist() == [layer.weight.requires_grad for layer in layers]
    assert input_.tolist() == [x.requires_grad for x in inputs[:-1]]


def test_trainable_before_looks_across_modules():
    edges = [("vision", "llm"), ("audio", "llm"), ("llm", "generator")]
    frozen = {"vision": False, "audio": False, "llm": False, "generator": True}
    assert not any(plan.trainable_before(frozen, edges).values())
    only_vision = plan.trainable_before({**frozen, "vision": True}, edges)
    assert only_vision == {"vision": False, "audio": False, "llm": True, "generator": True}
    only_llm = plan.trainable_before({**frozen, "llm": True}, edges)
    assert only_llm == {"vision": False, "audio": False, "llm": False, "generator": True}


def test_trainable_before_refuses_bad_edges():
    with pytest.raises(ValueError, match="unknown module 'vison'"):
        plan.trainable_before({"vision": True, "llm": True}, [("vison", "llm")])
    with pytest.raises(ValueError, match="cycle through module"):
        plan.trainable_before({"a": True, "b": True}, [("a", "b"), ("b", "a")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [1, 2], [1], [True, True]), "weight_grad has 1 layers, forward has 2"),
        (([1, 2], [1], [1, 2], [True, True]), "input_grad has 1 layers, forward has 2"),
        (([1, 2], [1, 2], [1, 2], [True]), r"frozen must have shape \(2,\), got \(1,\)"),
        (([1, 2], [1, 2], [1, 2], [1, 0]), "frozen must be an array of bool, got dtype int64"),
        (([1, math.nan], [1, 2], [1, 2], [True, True]), r"forward\[1\] is nan"),
        (([1, 2], [-1, 2], [1, 2], [True, True]), r"input_grad\[0\] is -1"),
        (([], [], [], []), "forward is empty"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan.frozen_costs(*arguments)
