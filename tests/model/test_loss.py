"""The loss without whole logits: equal to that of whole logits, never larger, and used only where it is valid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel, loss
from interlace.model.loss import head_cross_entropy, head_of
from interlace.run import parallelize
from tests.model.loss import Largest
from tests.model.zoo import COMMON, VOCAB, llama, qwen2
from tests.tiny import random_sample, tiny_mllm

SIZES = {**COMMON, "hidden_size": 24, "vocab_size": VOCAB, "num_key_value_heads": 1, "head_dim": 12}


def one_rank(mllm):
    """Everything on one rank."""
    specs = {name: ParallelSpec() for name in mllm.modules_order()}
    return Layout.from_specs(mllm, specs, placement="shared")


def gradients(call, tensors, scale):
    """The loss, and the gradients of `tensors` of `scale` times the loss."""
    for x in tensors:
        x.grad = None
    total = call()
    if total.requires_grad:
        (total * scale).backward()
    return total.detach(), [x.grad for x in tensors]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 40), st.integers(1, 9), st.integers(2, 33), st.booleans(), st.integers(1, 12),
    st.tuples(st.booleans(), st.booleans()), st.integers(0, 999),
)  # fmt: skip
def test_any_chunks_give_the_loss_and_gradients_of_whole_logits(rows, width, words, bias, at_once, trained, seed):
    torch.manual_seed(seed)
    head = nn.Linear(width, words, bias=bias)
    head.requires_grad_(trained[0])
    hidden = (3 * torch.randn(rows, width)).requires_grad_(trained[1])
    targets = torch.randint(words, (rows,))
    tensors = [hidden, *head.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "LOGITS_BYTES", 4 * words * at_once)
        result = gradients(lambda: head_cross_entropy(hidden, head, targets), tensors, 0.3)
    expected = gradients(lambda: cross_entropy(head(hidden), targets, reduction="sum"), tensors, 0.3)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_chunked_loss_is_as_exact_as_whole_logits(monkeypatch, autocast):
    torch.manual_seed(0)
    rows, words = 512, 64
    exact = nn.Linear(32, words).double()
    hidden = torch.randn(rows, 32).bfloat16()
    head = nn.Linear(32, words)
    head.load_state_dict({key: value.bfloat16() for key, value in exact.state_dict().items()})
    head = head if autocast else head.bfloat16()
    exact.load_state_dict(head.state_dict())
    targets = torch.randint(words, (rows,))

    def errors(call, parameters, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = call()
        value.backward()
        assert [p.grad.dtype for p in parameters] == [p.dtype for p in parameters]
        return [p.grad.double() for p in parameters] + [x.grad.double()]

    def given():
        return hidden.detach().clone().requires_grad_()

    x = given()
    whole = errors(lambda: cross_entropy(head(x).float(), targets, reduction="sum"), list(head.parameters()), x)
    head.zero_grad()
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * words * 16)
    y = given()
    chunked = errors(lambda: head_cross_entropy(y, head, targets), list(head.parameters()), y)
    z = hidden.double().requires_grad_()
    cross_entropy(exact(z), targets, reduction="sum").backward()
    right = [p.grad for p in exact.parameters()] + [z.grad]
    for a, b, c in zip(whole, chunked, right, strict=True):
        assert (b - c).norm() <= 1.1 * (a - c).norm() + 1e-3 * c.norm()


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_never_makes_all_logits(monkeypatch, tied):
    mllm, generator = tiny_mllm(tied=tied), torch.Generator().manual_seed(3)
    samples = [random_sample(mllm, generator, images=i % 2, text=40) for i in range(12)]
    targets = sum(int((sample.labels != -100).sum()) for sample in samples)
    expected = mllm(**mllm.collate(samples))
    expected.loss.backward()
    oracle = {name: p.grad.clone() for name, p in mllm.named_parameters() if p.grad is not None}
    mllm.zero_grad()
    parallel = parallelize(mllm, one_rank(mllm))

    def largest():
        mllm.zero_grad()
        with Largest() as seen:
            value = float(parallel.step(samples, microbatches=1))
        return value, seen.elements

    _, whole = largest()
    assert whole >= targets * VOCAB
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * VOCAB * 8)
    value, chunked = largest()
    assert abs(value - float(expected.loss.detach())) <= 1e-5 and chunked < targets * VOCAB
    for name, p in mllm.named_parameters():
        if name in oracle:
            torch.testing.assert_close(p.grad, oracle[name], rtol=1e-5, atol=1e-6)


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=30.0, attn_logit_softcapping=None))


def cohere():
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.5))


def granite():
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))


@pytest.mark.parametrize(
    ("family", "ends"), [(llama, True), (qwen2, True), (gemma2, False), (cohere, False), (granite, False)]
)
def test_a_model_that_changes_its_logits_keeps_them_whole(monkeypatch, family, ends):
    torch.manual_seed(0)
    mllm = MultimodalModel(encoders={}, language_model=family())
    assert mllm.language_settings.ends_with_head is ends
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4)
    samples = [random_sample(mllm, torch.Generator().manual_seed(i), text=9) for i in range(4)]
    expected = float(mllm(**mllm.collate(samples)).loss.detach())
    parallel = parallelize(mllm, one_rank(mllm))
    assert abs(float(parallel.step(samples)) - expected) <= 1e-5


def test_a_head_that_is_more_than_a_linear_layer_is_left_alone():
    model = llama()
    assert head_of(model) is model.lm_head
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert head_of(model) is None
    hook.remove()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    assert head_of(model) is None
