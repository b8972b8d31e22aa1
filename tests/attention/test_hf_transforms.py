"""HuggingFace models under torch.func: masks become plans there too; derivatives equal those of eager attention."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from interlace import bitfield_attention
from interlace.attention import AttentionPlan
from interlace.attention.hf import carrier, use_plan
from interlace.masks import BitfieldMask
from tests.attention.hf_models import batch, text_ids
from tests.attention.hf_pairs import ROWS, packed, pair


@pytest.fixture(autouse=True)
def no_fallbacks():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="interlace:")
        yield


class Spy:
    """Attention that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return bitfield_attention(*args, **kwargs)


def weights(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss(model, inputs):
    """weights -> next-token loss, by functional_call; padding neither predicts nor is predicted."""
    seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    labels = inputs["input_ids"].masked_fill((seen == 0) | (seen.roll(1, -1) == 0), -100)
    return lambda given: functional_call(model, given, kwargs={**inputs, "labels": labels, "use_cache": False}).loss


def assert_close(found, wanted):
    scale = max(float(each.norm()) for each in wanted.values())
    for name, want in wanted.items():
        error = float((found[name] - want).norm()) / max(float(want.norm()), 1e-3 * scale)
        assert error < 2e-4, f"{name}: relative error {error:.1e}"


GIVEN = {
    "padding on the right": lambda name: batch(name, ROWS[name]),
    "padding on the left": lambda name: batch(name, ROWS[name], side="left"),
    "packed": lambda name: packed(name)[0],
}


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_gradients_of_weights(name, kind):
    model, eager = pair(name)
    inputs, spy = GIVEN[kind](name), Spy()
    with use_plan(None, backend=spy):
        result = grad(loss(model, inputs))(weights(model))
    assert spy.calls >= model.config.get_text_config().num_hidden_layers
    assert_close(result, grad(loss(eager, inputs))(weights(eager)))


@pytest.mark.parametrize("transform", ["vjp", "jacrev"])
def test_other_transforms(transform):
    model, eager = pair("mistral")
    inputs, spy = batch("mistral", ROWS["mistral"]), Spy()

    def run(model):
        f = loss(model, inputs)
        given = weights(model)
        return vjp(f, given)[1](torch.tensor(1.0))[0] if transform == "vjp" else jacrev(f)(given)

    with use_plan(None, backend=spy):
        result = run(model)
    assert spy.calls == 2
    assert_close(result, run(eager))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_gradients_of_each_sample(name, side):
    """vmap over a batch whose rows are padded differently."""
    model, eager = pair(name)
    inputs, spy = batch(name, ROWS[name], side=side), Spy()

    def each(model):
        def one(given, ids, seen):
            return loss(model, {"input_ids": ids[None], "attention_mask": seen[None]})(given)

        return vmap(grad(one), in_dims=(None, 0, 0))(weights(model), inputs["input_ids"], inputs["attention_mask"])

    with use_plan(None, backend=spy):
        result = each(model)
    assert spy.calls == 2
    assert_close(result, each(eager))


def test_padding_in_the_middle_of_a_mapped_row_is_refused():
    model, _ = pair("llama")
    ids, seen = text_ids(2, 6), torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"torch\.func\.vmap cannot express.*instead of vmap, run a batch"):
        vmap(lambda i, s: model(i[None], attention_mask=s[None], use_cache=False).logits)(ids, seen)


def test_a_plan_of_the_user():
    model, _ = pair("mistral")
    ids = text_ids(1, 9)
    plan = AttentionPlan.build(BitfieldMask.pack([BitfieldMask.causal(1, 4), BitfieldMask.causal(1, 5)]))
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    labels = ids.clone()
    labels[0, 4] = -100  # the first token of the second document is not a target

    def f(model, mask):
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "labels": labels}
        return lambda given: functional_call(model, given, kwargs={**inputs, "use_cache": False}).loss

    def apart(given):
        parts = [
            functional_call(model, given, args=(part,), kwargs={"use_cache": False})
            for part in (ids[:, :4], ids[:, 4:])
        ]
        logits = torch.cat([part.logits[0, :-1] for part in parts])
        return torch.nn.functional.cross_entropy(logits, torch.cat([ids[0, 1:4], ids[0, 5:]]))

    wanted = grad(apart)(weights(model))
    with use_plan(plan):
        assert_close(grad(f(model, None))(weights(model)), wanted)
    assert_close(grad(f(model, carrier(plan)))(weights(model)), wanted)


def test_carriers_that_a_transform_copies_are_refused():
    model, _ = pair("llama")
    ids, plan = text_ids(1, 6), AttentionPlan.build(BitfieldMask.causal(1, 6))

    def f(given, mask):
        return functional_call(
            model, given, args=(ids,), kwargs={"attention_mask": mask, "use_cache": False}
        ).logits.sum()

    with pytest.raises(ValueError, match=r"lost its plan.*a transform of torch\.func copied it.*use_plan\(plan\)"):
        grad(f)(weights(model), carrier(plan))
    with pytest.raises(ValueError, match="lost its plan"):
        vmap(f, in_dims=(None, 0))(weights(model), carrier(plan))


def test_forward_mode_says_what_to_do():
    """Forward mode raises an error, and the suggested workaround works."""
    model, _ = pair("llama")
    inputs, given = batch("llama", ROWS["llama"]), weights(model)
    with pytest.raises(
        RuntimeError, match=r'no forward-mode derivative.*HuggingFace model, attn_implementation="eager"'
    ):
        jvp(loss(model, inputs), (given,), (given,))
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    _, result = jvp(loss(eager, inputs), (given,), (given,))
    gradients = grad(loss(model, inputs))(given)
    torch.testing.assert_close(
        result, sum((gradients[name] * given[name]).sum() for name in given), rtol=1e-4, atol=1e-5
    )
