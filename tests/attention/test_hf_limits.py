"""A plan in place of a model's own mask keeps the limits known only to the model: the window of each layer type."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    padding_mask_function,
    sliding_window_overlay,
)

from interlace.attention import AttentionPlan, hf
from interlace.attention.hf.limits import EVERYTHING, Limits, limits_of
from interlace.attention.hf.masks import Unknown
from interlace.attention.hf.plans import cut, narrowed
from interlace.masks import BitfieldMask, visible
from tests.attention.hf_masks import ask, blocks, dense
from tests.attention.hf_models import FIVE, TEXT


def chunks(size):
    return chunked_overlay(size, torch.zeros(2, dtype=torch.int64))


OVERLAYS = st.lists(
    st.one_of(st.integers(1, 9).map(sliding_window_overlay), st.integers(1, 7).map(chunks)), min_size=1, max_size=3
)


def under(plan, function, **kwargs):
    """Visibility in layers under `plan` if the model asks for a mask by `function`: bool [1, T, T]."""
    with hf.use_plan(plan):
        return dense(ask(function, plan.q_len, plan.k_len, **kwargs))


@settings(max_examples=60)
@given(OVERLAYS, st.lists(st.integers(1, 12), min_size=1, max_size=4), st.booleans())
def test_windows_and_chunks_are_counted_inside_each_document(overlays, lengths, causal):
    one = BitfieldMask.causal if causal else BitfieldMask.full
    mask = BitfieldMask.pack([one(1, n) for n in lengths])
    sizes = {overlay.__closure__[0].cell_contents for overlay in overlays if "chunked" in overlay.__qualname__}
    function = and_masks(*overlays, causal_mask_function)
    if len(sizes) > 1:
        with pytest.raises(ValueError, match="chunks of"):
            under(AttentionPlan.build(mask), function)
        return
    result = under(AttentionPlan.build(mask), function)
    at = torch.cat([torch.arange(n) for n in lengths])
    q, k = at[None, :, None], at[None, None, :]
    zero = torch.zeros(1, 1, 1, dtype=torch.int64)
    wanted = mask.to_dense()
    for overlay in overlays:
        wanted = wanted & overlay(zero, zero, q, k)
    assert torch.equal(result, wanted)


@st.composite
def tokens_anywhere(draw, length):
    """Full attention between tokens at any positions of documents, and in spans of them, of any numbers."""
    doc = draw(st.lists(st.sampled_from([-1, 0, 1, 2**29, 2**31 - 1]), min_size=length, max_size=length))
    spans = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    pos = draw(st.lists(st.integers(0, 20), min_size=length, max_size=length))
    doc, span, pos = (
        torch.tensor([values], dtype=torch.int32)
        for values in (doc, [d if some else -1 for d, some in zip(doc, spans)], pos)
    )
    streams = draw(st.sampled_from([BitfieldMask.full(1, length).bits, torch.zeros(1, length, dtype=torch.int64)]))
    return BitfieldMask(streams, doc=doc, span=span, pos=pos)  # without streams a token sees its own span alone


def seen_in(plan):
    return visible(plan.queries().rows(), plan.keys().columns(), plan.sinks)


@given(tokens_anywhere(9), tokens_anywhere(12), st.integers(1, 7))
def test_chunks_join_nothing(queries, keys, size):
    """For any document numbers, and any distance of queries beyond the keys."""
    plan = AttentionPlan.build(queries, keys, block=4)
    same = (queries.pos // size).unsqueeze(-1) == (keys.pos // size).unsqueeze(-2)
    assert torch.equal(seen_in(narrowed(plan, Limits(chunk=size))), seen_in(plan) & same)


@pytest.mark.parametrize(
    ("docs", "pos"),
    [
        ([0] * 4 + [1] * 4, [4, 5, 6, 7, 0, 1, 2, 3]),  # the first document's queries are past all keys
        ([0] * 4 + [2**29] * 4, [0, 1, 8, 31, 0, 1, 8, 31]),  # 8 chunks: 2**29 * 8 is 0 in an int32
    ],
)
def test_chunks_of_one_document_are_not_those_of_the_next(docs, pos):
    doc, pos = (torch.tensor([values], dtype=torch.int32) for values in (docs, pos))
    bits = BitfieldMask.causal(1, 8).bits
    keys = BitfieldMask(bits, doc=doc, pos=pos if docs[-1] > 1 else pos % 4)
    plan = AttentionPlan.build(BitfieldMask(bits, doc=doc, pos=pos), keys)
    result = seen_in(narrowed(plan, Limits(chunk=4)))[0]
    assert not result[:4, 4:].any() and not result[4:, :4].any()
    assert result.any()


@given(tokens_anywhere(12), st.sets(st.integers(1, 11)), st.integers(9, 12))
def test_boundaries_join_nothing(mask, cuts, last):
    plan = AttentionPlan.build(mask, block=4)
    ends = torch.tensor([0, *sorted(end for end in cuts if end < last), last])
    piece = torch.searchsorted(ends, torch.arange(12), right=True)
    same = (piece[:, None] == piece) & (torch.arange(12) < last)
    assert torch.equal(seen_in(cut(plan, ends, ends)), seen_in(plan) & same)


def test_a_plan_in_use_keeps_only_the_last_boundaries():
    plan = AttentionPlan.build(BitfieldMask.full(1, 6))
    kept = []
    for end in (2, 3, 4):
        ends = torch.tensor([0, end, 6])
        made = cut(plan, ends, ends)
        assert cut(plan, ends, ends) is made
        kept.append(weakref.ref(made))
    del made
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True, False]


def test_limits_are_read_whatever_else_the_function_says():
    ids = torch.tensor([[-1, 0, 0, -1]])
    window = and_masks(sliding_window_overlay(4), causal_mask_function)
    assert limits_of(causal_mask_function) == Limits(ahead=0) and not limits_of(causal_mask_function).narrow
    assert limits_of(window) == Limits(4, 0)
    assert limits_of(and_masks(window, padding_mask_function(torch.ones(1, 8, dtype=torch.bool)))) == Limits(4, 0)
    assert limits_of(and_masks(chunks(8), causal_mask_function)) == Limits(ahead=0, chunk=8)
    assert limits_of(or_masks(causal_mask_function, blocks(ids))) == Limits(ahead=0)
    assert limits_of(lambda *at: torch.tensor(True)) == EVERYTHING
    if hasattr(masking_utils, "sliding_window_bidirectional_overlay"):
        assert limits_of(masking_utils.sliding_window_bidirectional_overlay(3)) == Limits(4, 3)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda b, h, q, k: (q - k) % 3 == 0, "is unknown"),
        (or_masks(sliding_window_overlay(4), blocks(torch.tensor([[0, 0, 1]]))), "extend beyond a window"),
        (blocks(torch.tensor([[0, 0, 1]])), "only blocks, which the plan defines"),
        (
            and_masks(causal_mask_function, padding_mask_function(torch.tensor([[True, False]]))),
            "padding that is not in the plan",
        ),
    ],
)
def test_what_would_be_lost_is_refused_and_named(function, why):
    with pytest.raises(Unknown, match=why):
        limits_of(function)
    with pytest.raises(ValueError, match=f"a plan cannot replace the mask .*{why}"):
        under(AttentionPlan.build(BitfieldMask.causal(1, 6)), function)


def test_a_known_name_with_another_meaning_is_found_out():
    function = sliding_window_overlay(4)

    def other(sliding_window):
        return lambda b, h, q, k: k > q - 2 * sliding_window

    disguised = other(4)
    disguised.__qualname__ = function.__qualname__
    with pytest.raises(Unknown, match="differs from"):
        limits_of(disguised)


def test_padding_that_the_plan_does_not_know_is_refused():
    plan = AttentionPlan.build(BitfieldMask.causal(1, 6))
    seen = torch.ones(1, 6, dtype=torch.bool)
    assert torch.equal(under(plan, causal_mask_function, attention_mask=seen), BitfieldMask.causal(1, 6).to_dense())
    seen[0, 0] = False
    with pytest.raises(ValueError, match=r"hides tokens that the active plan shows: put the padding in the plan"):
        under(plan, causal_mask_function, attention_mask=seen)


def phimoe():
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4, "router_jitter_noise": 0.0}
    return transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**TEXT, **sizes))


def llama4():
    sizes = {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**TEXT, **sizes))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        pytest.param(
            phimoe,
            "sliding_window",
            marks=pytest.mark.skipif(not FIVE, reason="in transformers 4 its attention is its own"),
        ),
        (llama4, "attention_chunk_size"),
    ],
)
def test_windows_that_a_model_keeps_in_its_masks(make, setting):
    """Packed samples under use_plan equal single samples with eager attention.

    A carrier, which replaces the masks, is refused if a sample is longer than the window.
    """
    torch.manual_seed(0)
    model = make().eval()
    samples = [torch.randint(3, 64, (n,)) for n in (9, 13, 6)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.set_attn_implementation("eager")
        expected = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in samples])
        beginning = model(input_ids=samples[0][None, :4], use_cache=False).logits
        model.set_attn_implementation("interlace")
        plan = AttentionPlan.build(BitfieldMask.pack([BitfieldMask.causal(1, len(ids)) for ids in samples]))
        given = {"input_ids": torch.cat(samples)[None], "use_cache": False}
        given["position_ids"] = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
        with hf.use_plan(plan):
            torch.testing.assert_close(model(**given).logits[0], expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=rf"{setting} = 4, which a carrier does not apply: .*use_plan\(plan\)"):
            model(**given, attention_mask=hf.carrier(plan))
        short = AttentionPlan.build(BitfieldMask.causal(1, 4))
        result = model(input_ids=samples[0][None, :4], attention_mask=hf.carrier(short), use_cache=False).logits
        torch.testing.assert_close(result, beginning, rtol=1e-4, atol=1e-4)
