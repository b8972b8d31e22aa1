"""attn_implementation="interlace" as a drop-in for HuggingFace models: equal to their own attention."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from interlace.attention import AttentionPlan
from interlace.attention.hf import NAME, attention, carrier, current_plan, use_plan
from interlace.masks import BitfieldMask
from tests.model.zoo import LANGUAGE, llama, qwen2, siglip


def pair(model, reference="sdpa"):
    torch.manual_seed(0)
    model = model.eval()
    other = copy.deepcopy(model)
    other.set_attn_implementation(reference)
    model.set_attn_implementation(NAME)
    return model, other


IDS = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("language", LANGUAGE)
def test_causal_and_padded_batches(language):
    model, other = pair(LANGUAGE[language]())
    torch.testing.assert_close(model(IDS).logits, other(IDS).logits, rtol=1e-5, atol=1e-5)
    for side in (slice(8, 11), slice(0, 3)):  # padding right, left
        mask = torch.ones_like(IDS)
        mask[1, side] = 0
        result, wanted = (m(IDS, attention_mask=mask).logits[mask.bool()] for m in (model, other))
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_packed_positions_and_sliding_windows():
    model, other = pair(llama())
    positions = torch.tensor([[*range(4), *range(7)]])
    given = {"input_ids": IDS[:1], "position_ids": positions, "use_cache": False}
    torch.testing.assert_close(model(**given).logits, other(**given).logits, rtol=1e-5, atol=1e-5)
    model, other = pair(qwen2(use_sliding_window=True, sliding_window=3, max_window_layers=1))
    torch.testing.assert_close(model(IDS).logits, other(IDS).logits, rtol=1e-5, atol=1e-5)
    result, wanted = model(IDS), other(IDS)
    torch.testing.assert_close(result.logits, wanted.logits, rtol=1e-5, atol=1e-5)


def test_generation_with_a_cache():
    model, other = pair(llama())
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    assert torch.equal(model.generate(IDS, **options), other.generate(IDS, **options))
    result = model.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(result, other.generate(IDS, attention_mask=mask, **options))
    # A chunk of several tokens after a cached prefix.
    chunks = [
        m(IDS[:, 6:], past_key_values=m(IDS[:, :6], use_cache=True).past_key_values).logits for m in (model, other)
    ]
    torch.testing.assert_close(*chunks, rtol=1e-5, atol=1e-5)


def test_a_dense_mask_is_honoured():
    model, other = pair(llama())
    mask = (torch.rand(1, 1, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.5) | torch.eye(11).bool()
    given = {"input_ids": IDS[:1], "attention_mask": mask}
    torch.testing.assert_close(model(**given).logits, other(**given).logits, rtol=1e-5, atol=1e-5)


def test_encoders_without_a_plan_attend_everything():
    model, other = pair(siglip())
    pixels = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(pixels).last_hidden_state, other(pixels).last_hidden_state, rtol=1e-5, atol=1e-5)


def test_plans_nest_and_reach_models_that_pass_no_mask():
    plan = AttentionPlan.build(BitfieldMask.full(1, 11))
    model, _ = pair(llama())
    assert current_plan() == (None, None)
    with use_plan(plan, backend="reference"):
        assert current_plan() == (plan, "reference")
        with use_plan(None):
            causal = model(IDS[:1]).logits
        both_ways = model(IDS[:1], use_cache=False).logits
    assert current_plan() == (None, None)
    torch.testing.assert_close(causal, model(IDS[:1]).logits)
    assert not torch.allclose(both_ways[:, 0], causal[:, 0])
    torch.testing.assert_close(both_ways, model(IDS[:1], attention_mask=carrier(plan)).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_masks_of_integers_are_refused(softcap):
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"torch.int64; it must be bool"):
        attention(torch.nn.Identity(), q, q, q, torch.ones(1, 1, 5, 5, dtype=torch.int64), softcap=softcap)


def test_a_carrier_is_made_under_deterministic_algorithms():
    """Torch then fills uninitialized memory, which it cannot do for every type."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert carrier(AttentionPlan.build(BitfieldMask.causal(1, 6))).shape == (1, 1, 6, 6)
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_carrier_takes_no_memory_and_is_missed_when_lost():
    plan = AttentionPlan.build(BitfieldMask.causal(2, 300))
    mask = carrier(plan)
    assert mask.shape == (2, 1, 300, 300) and mask.untyped_storage().nbytes() == 1
    q = torch.randn(2, 1, 300, 4)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match=r"lost its plan"):
        attention(module, q, q, q, torch.zeros(2, 1, 300, 300, dtype=torch.uint8).view(mask.dtype))
    with pytest.raises(ValueError, match=r"Module has attention dropout in training \(dropout = 0\.1\)"):
        attention(module, q, q, q, mask, dropout=0.1)
    with pytest.raises(ValueError, match=r"passes 's_aux'"):
        attention(module, q, q, q, mask, s_aux=torch.zeros(1))
    with pytest.raises(ValueError, match=r"softcap needs a plan"):
        attention(module, q, q, q, None, softcap=2.0)


MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
def make():
    import torch
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="interlace"))
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 8)
"""


@pytest.mark.parametrize(
    "program",
    [
        "import interlace.attention, sys\nassert 'transformers' not in sys.modules\n" + MODEL + "make()",
        pytest.param(MODEL + "from interlace import bitfield_attention\nmake()", marks=pytest.mark.slow),
        pytest.param("import transformers, interlace.attention\n" + MODEL + "make()", marks=pytest.mark.slow),
        pytest.param("import interlace.attention.hf\n" + MODEL + "make()", marks=pytest.mark.slow),
    ],
    ids=["before", "after", "between", "hf"],
)
def test_importing_the_package_makes_the_name_known(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compiles_without_a_break():
    model, _ = pair(llama())
    plan = AttentionPlan.build(BitfieldMask.causal(1, 11))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    given = {"input_ids": IDS[:1], "attention_mask": carrier(plan), "use_cache": False}
    torch.testing.assert_close(compiled(**given).logits, model(**given).logits, rtol=1e-5, atol=1e-5)
