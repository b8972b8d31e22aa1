"""The HuggingFace drop-in against each family's own eager attention: logits at unpadded positions, all gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import masking_utils

from interlace.attention import AttentionPlan, hf
from interlace.attention.hf.plans import MOST_PLANS
from interlace.masks import BitfieldMask
from tests.attention.hf_models import FIVE, IMAGE_TOKENS, batch, make, random, text_ids
from tests.attention.hf_pairs import MULTIMODAL, ROWS, TEXT, Watch, assert_same, assert_same_generation, packed, pair

VISION_IN_ONE_CALL = {"text_config": hf.NAME, "vision_config": hf.FLASH_NAME}


@pytest.fixture(autouse=True)
def no_surprise_fallbacks():
    """A fall-back to a dense mask is an error unless a test expects it."""
    hf._warned.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="interlace:")
        yield


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", TEXT + MULTIMODAL)
def test_padding_and_two_images_in_a_sample(name, side, watch):
    model, other = pair(name)
    inputs = batch(name, ROWS[name], side=side)
    assert_same(model, other, inputs, inputs["attention_mask"].bool())
    # transformers 4.57 builds PaliGemma's prefix mask itself, as a dense tensor.
    assert (watch.sparse > 0 and watch.dense == 0) != (name == "paligemma" and not FIVE)


@pytest.mark.parametrize("name", [name for name in TEXT + MULTIMODAL if name != "paligemma"])
def test_packing_by_position_ids(name, watch):
    model, other = pair(name)
    inputs, _ = packed(name)
    assert_same(model, other, inputs)
    assert watch.sparse > 0 and watch.dense == 0


def test_packed_documents_do_not_see_each_other():
    model, _ = pair("mistral")
    inputs, alone = packed("mistral")
    wanted = torch.cat([model(**one).logits for one in alone], dim=1)
    torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    not hasattr(masking_utils, "blockwise_overlay"), reason="this transformers composes PaliGemma's mask in another way"
)
def test_blocks_of_packed_documents_do_as_eager_does(watch):
    """
    A packed PaliGemma row has one block number for all prefixes. Before transformers 5.24 prefixes see each other,
    which stays a dense mask with one warning. From 5.24 on, documents are separated behind the blocks.
    """
    model, other = pair("paligemma")
    inputs, _ = packed("paligemma")
    if not hasattr(masking_utils, "packed_sequence_compatibility_function"):
        assert_same(model, other, inputs)
        assert watch.sparse > 0
        return
    with pytest.warns(UserWarning, match=r"or\(and\(.*is run as a dense mask.*span several packed documents") as caught:
        assert_same(model, other, inputs)
        model(**inputs)
    assert len([w for w in caught if "interlace:" in str(w.message)]) == 1
    assert watch.dense > 0


@pytest.mark.parametrize("window", [2, 6])
def test_gemmas_images_longer_than_its_window(window):
    """In 4.57 an image is exempt from the window, in 5 the window cuts it."""
    model, other = pair("gemma3", window=window)
    inputs = batch("gemma3", ROWS["gemma3"])
    assert_same(model, other, inputs, inputs["attention_mask"].bool())


def test_encoders():
    pixels = random(2, 3, 16, 16)
    assert_same(*pair("siglip"), {"pixel_values": pixels})
    assert_same(*pair("whisper"), {"input_features": random(2, 8, 32)})
    ids, mask = text_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    assert_same(*pair("siglip_text"), {"input_ids": ids, "attention_mask": mask}, mask.bool())


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_vision_towers_take_their_images_in_one_call(name, monkeypatch):
    model, other = pair(name, VISION_IN_ONE_CALL)
    calls, lengths = [], []
    original = hf.packed_plan

    def counted(*args, **kwargs):
        calls.append(original(*args, **kwargs))
        lengths.append(args[2])
        return calls[-1]

    monkeypatch.setattr(hf, "packed_plan", counted)
    inputs = batch(name, ROWS[name])
    assert_same(model, other, inputs, inputs["attention_mask"].bool())
    if FIVE:  # in 4.57 only "flash_attention_2" gets the single call; its loop gives the same numbers
        assert len(calls) == 2 and set(lengths) == {3 * 16}  # two layers, three images of 16 patches
        assert name != "qwen2_vl" or calls[0] is calls[1]  # one plan for the whole tower


def test_boundaries_that_are_written_anew():
    """Each call uses a plan of the current values, and the tensor does not keep a plan for every earlier batch."""
    ends = torch.tensor([0, 1, 10], dtype=torch.int32)
    for step in range(40):
        ends[1] = 1 + step % 9
        plan = hf.packed_plan(ends, ends, 10, 10, causal=True)
        assert plan.q_doc.tolist() == [[0] * int(ends[1]) + [1] * (10 - int(ends[1]))]
    assert len(ends.__dict__["_interlace_plans"]) <= MOST_PLANS


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", TEXT + MULTIMODAL)
def test_generation_with_a_cache(name, cache):
    assert_same_generation(*pair(name), batch(name, ROWS[name], side="left"), cache)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_the_second_name_serves_whole_models_too(name):
    model, other = pair(name, hf.FLASH_NAME)
    inputs = batch(name, ROWS[name], side="left")
    assert_same(model, other, inputs, inputs["attention_mask"].bool())
    assert_same_generation(model, other, inputs)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_several_tokens_after_a_cached_prefix(name):
    """Also beyond the window, where a sliding cache has dropped its oldest keys."""
    model, other = pair(name)
    ids = text_ids(2, 15)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    results = []
    for m in (model, other):
        out = m(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
        results.append(m(ids[:, 9:], attention_mask=mask, past_key_values=out.past_key_values).logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_and_compilation():
    model, other = pair("mistral")
    inputs = batch("mistral", ROWS["mistral"])
    valid = inputs["attention_mask"].bool()
    wanted = model(**inputs).logits
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**inputs).logits[valid], wanted[valid], rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    for m in (model, other):
        m.train()
        m.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(model, other, {**inputs, "use_cache": False}, valid)


@pytest.mark.slow
def test_models_of_different_scale_compile_without_a_break():
    """Values that differ between two modules become symbols the second time: the head size, the scale, the cap."""
    ids = text_ids(1, 9)
    mask = hf.carrier(AttentionPlan.build(BitfieldMask.causal(1, 9)))
    for changes in ({}, {"head_dim": 16, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 3.0}):
        model = make("gemma2", **changes)
        model.set_attn_implementation(hf.NAME)
        given = {"attention_mask": {"full_attention": mask, "sliding_attention": mask}, "use_cache": False}
        wanted = model(ids, **given).logits  # also makes the windowed plan, which a compiled model then finds
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids, **given).logits, wanted, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_image_token_counts_are_what_the_inputs_assume():
    for name, count in IMAGE_TOKENS.items():
        inputs = batch(name, [["image", 1]])
        kinds = inputs["input_ids"] == 50
        assert int(kinds.sum()) == count
