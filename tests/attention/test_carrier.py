"""Carriers pass through models like masks; a model that computes with one is named in an error with a workaround."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import bitfield_attention
from interlace.attention import AttentionPlan
from interlace.attention.hf import NAME, carrier, current_plan, use_plan
from interlace.masks import BitfieldMask
from tests.attention.hf_models import TEXT, text_ids

PLAN = AttentionPlan.build(BitfieldMask.causal(1, 6))


@pytest.mark.parametrize(
    "use",
    [
        *(lambda m: torch.zeros(1, 2, 6, 6) + m, lambda m: torch.zeros(1, 2, 6, 6).masked_fill(m, -1.0)),
        *(lambda m: torch.where(m, 0.0, -1.0), lambda m: m != 0, lambda m: m.bool(), lambda m: m.to(torch.float32)),
        *(lambda m: ~m, lambda m: 1 - m, lambda m: m.all(), lambda m: m[:, 0], lambda m: m[:, :, 0], lambda m: m[0]),
        *(lambda m: m.mT, lambda m: m.data, lambda m: m.new_zeros(3), lambda m: torch.cat([m, m]), lambda m: m.sum()),
        *(lambda m: m.expand(1, 2, 6, 6), lambda m: m.chunk(2, 3), lambda m: m.split(3, -1), lambda m: m.unbind()),
    ],
)
def test_a_carrier_cannot_be_computed_with(use):
    """A model that makes another mask from a carrier must get an error: zeros would hide nothing."""
    with pytest.raises(ValueError, match=r"computes with its attention mask .*use_plan\(plan\).*\"sdpa\" or \"eager\""):
        use(carrier(PLAN))


def test_a_carrier_answers_what_models_ask_of_masks():
    mask = carrier(PLAN, backend="reference")
    assert mask.shape == mask.size() == (1, 1, 6, 6) and mask.dim() == mask.ndim == 4 and mask.device.type == "cpu"
    assert not mask.is_floating_point() and mask.dtype not in (torch.bool, torch.float32) and mask.numel() == 36
    same = [mask.detach(), mask.contiguous(), mask.clone(), mask.to("cpu"), mask.cpu(), copy.deepcopy(mask)]
    same += [mask[:, :, :, :6], mask[...], mask[:, :, :10], mask.to(device=torch.device("cpu"), non_blocking=True)]
    assert all(other is mask for other in same)
    moved = mask.to("meta")
    assert moved.device.type == moved.interlace_plan[0].device.type == "meta"
    assert moved.interlace_plan[1:] == mask.interlace_plan[1:] == ("reference", True)
    assert repr(mask) == "Carrier([1, 1, 6, 6], device='cpu')"


def stored(mask):
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, lambda mask: pickle.loads(pickle.dumps(mask)), stored])
def test_copies_of_a_carrier_have_its_plan(copied):
    mask = carrier(PLAN, backend="reference")
    other = copied(mask)
    assert type(other) is type(mask) and other.shape == mask.shape
    plan, *more = other.interlace_plan
    assert more == ["reference", True]
    for result, wanted in zip(plan.tensors(), PLAN.tensors()):
        assert torch.equal(result, wanted)


def test_data_parallel_replicas_with_a_plan_are_refused():
    """Replicas run in separate threads, where the model would make masks without the plan."""
    replica = llama()
    for part in replica.modules():
        part._is_replica = True  # like torch.nn.parallel.replicate, which needs GPUs
    ids = text_ids(1, 6)

    def run():
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: replica(ids, use_cache=False).logits).result()

    with (
        use_plan(PLAN),
        pytest.raises(ValueError, match=r"use_plan does not apply to .*DataParallel: use DistributedDataParallel"),
    ):
        run()
    torch.testing.assert_close(run(), replica(ids, use_cache=False).logits)


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_sliced_carrier_holds_the_plan_of_its_queries_and_keys(data):
    length = data.draw(st.integers(2, 9))
    docs = torch.tensor([sorted(data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length)))])
    whole = BitfieldMask(BitfieldMask.causal(1, length).bits, doc=docs.int(), window=data.draw(st.integers(1, length)))
    sides = []
    for _ in range(2):
        start = data.draw(st.integers(0, length - 1))
        piece = slice(start, data.draw(st.integers(start + 1, length)))
        sides.append(torch.arange(length)[piece] if data.draw(st.booleans()) else piece)
    plan = carrier(AttentionPlan.build(whole, block=4))[:, :, sides[0], :][:, :, :, sides[1]].interlace_plan[0]
    q, k, v = torch.randn(3, 1, 1, length, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    q, k, v = q[:, :, sides[0]], k[:, :, sides[1]], v[:, :, sides[1]]
    seen = whole.to_dense()[0][sides[0]][:, sides[1]]
    scores = (q @ k.mT / 2).masked_fill(~seen, float("-inf"))
    wanted = torch.where(seen.any(-1, keepdim=True), scores.softmax(-1), 0.0).nan_to_num() @ v
    torch.testing.assert_close(bitfield_attention(q, k, v, plan), wanted)


# ---------------------------------------------------------------------- models that compute with their masks


def llama():
    made = model("Llama")
    made.set_attn_implementation(NAME)
    return made


def model(family, **changes):
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"this transformers has no {family}")
    config = getattr(transformers, f"{family}Config")
    names = {**TEXT, **changes}
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config(**names)).eval()


DOGE = {"keep_window_size": 8}
HY_V4 = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4},
}


@pytest.mark.parametrize(("family", "changes"), [("Doge", DOGE), ("HYV4", HY_V4)])
def test_models_that_make_another_mask_out_of_theirs_are_named(family, changes):
    chooser = model(family, **changes)
    chooser.set_attn_implementation(NAME)
    with pytest.raises(
        ValueError, match=rf"{family}Attention \(in {family}ForCausalLM\) computes with .* for {family}"
    ):
        chooser(text_ids(1, 9), use_cache=False)


ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_routers_count_the_tokens_of_a_plan_without_its_mask():
    """The auxiliary loss uses the attention mask: a padding mask or none, but not a plan."""
    routed = model("Mixtral", **ROUTED)
    ids = text_ids(1, 6)
    wanted = routed(ids, output_router_logits=True)
    routed.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match=r"MixtralForCausalLM computes with|too many values"):  # the latter: 4.57
        routed(ids, attention_mask=carrier(PLAN), output_router_logits=True, use_cache=False)
    with use_plan(PLAN):
        result = routed(ids, output_router_logits=True, use_cache=False)
    torch.testing.assert_close(result.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.aux_loss, wanted.aux_loss)
    padded = routed(ids, attention_mask=torch.ones_like(ids), output_router_logits=True)
    torch.testing.assert_close(padded.aux_loss, wanted.aux_loss)


ALIBI = {
    "Bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64},
    "Falcon": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64, "alibi": True},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64},
}


@pytest.mark.parametrize("family", ALIBI)
def test_models_with_unsupported_attention_reject_carriers(family):
    biased = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**ALIBI[family]))
    with pytest.raises(
        ValueError, match=rf"{family}\w* got a plan as its mask, but its attn_implementation is '(eager|sdpa)'"
    ):
        biased(text_ids(1, 6), attention_mask=carrier(PLAN), use_cache=False)


def test_a_module_around_the_model_may_have_a_config_of_its_own():
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = {"lr": 1.0}

        def forward(self, mask):
            return tuple(mask.shape)

    assert Around()(carrier(AttentionPlan.build(BitfieldMask.causal(1, 7)))) == (1, 1, 7, 7)


def test_plain_code_runs_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch then reports all threads as compiling."""
    monkeypatch.setattr("torch.compiler._is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    plan = AttentionPlan.build(BitfieldMask.causal(1, 64), block=16)
    assert carrier(plan).interlace_plan[0] is plan
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(bitfield_attention(q, k, v, plan), dense)
    with use_plan(plan):
        assert torch.equal(current_plan()[0].q_bits, plan.q_bits)
