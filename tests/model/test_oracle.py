"""mllm(**mllm.collate(samples)) equals plain HuggingFace modules run sample by sample with eager attention."""

from __future__ import annotations

import pytest
import torch

from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask
from interlace.model import MultimodalModel
from tests.model.zoo import (
    LANGUAGE,
    VISION,
    assert_same_gradients,
    build,
    gradients,
    logits_plain,
    loss_plain,
    plain,
    qwen2,
    sample,
    samples,
)


def compare(mllm, batch, window=None):
    oracle = plain(mllm)
    expected = loss_plain(oracle, batch, window)
    expected.backward()
    output = mllm(**mllm.collate(batch))
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        alone = torch.cat([logits_plain(oracle, one, window) for one in batch])
    torch.testing.assert_close(output.logits[0], alone, rtol=1e-4, atol=1e-5)
    output.loss.backward()
    assert_same_gradients(gradients(mllm), gradients(oracle), 2e-5)


@pytest.mark.parametrize("backend", ("reference", "cpu"))
@pytest.mark.parametrize("language", LANGUAGE)
@pytest.mark.parametrize("vision", VISION)
def test_packed_batch_equals_samples_alone(vision, language, backend):
    mllm = build(VISION[vision], language=LANGUAGE[language], backend=backend)
    compare(mllm, samples(mllm))


@pytest.mark.parametrize("downsample", ((2, 1), (3, 4)))
def test_downsampling_and_tied_embeddings(downsample):
    mllm = build(downsample=downsample, tie_word_embeddings=True)
    assert mllm.tied_parameters() == [("language_model.model.embed_tokens.weight", "language_model.lm_head.weight")]
    compare(mllm, samples(mllm))


def test_sliding_window_layers_keep_their_window():
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    mllm = build(audio=None, language=lambda: qwen2(**window))
    g = torch.Generator().manual_seed(0)
    # Images shorter than the window: a span must not extend past the window.
    batch = [sample(mllm, g, 6, ("vision", 4, 8), 9), sample(mllm, g, 8)]
    compare(mllm, batch, window=5)


def test_text_only_batch_leaves_encoders_alone():
    mllm = build()
    g = torch.Generator().manual_seed(0)
    batch = mllm.collate([sample(mllm, g, 5), sample(mllm, g, 3)])
    assert "vision" not in batch and "audio" not in batch
    mllm(**batch).loss.backward()
    assert all(p.grad is None for p in mllm.encoders.parameters())
    assert mllm.language_model.lm_head.weight.grad is not None


def test_zero_items_give_zero_features_attached_to_nothing():
    mllm = build()
    for name in ("vision", "audio"):
        features = mllm.encoders[name](**mllm.collate_module(name, []))
        assert features.shape == (0, 24) and not features.requires_grad
        first = mllm.slice(name, 0, 1)
        hidden = first(mllm.collate_module(name, []))
        assert hidden.shape == (1, 0, 16)
        assert mllm.slice(name, 1, 3)(mllm.collate_module(name, []), hidden).shape == (0, 24)
    g = torch.Generator().manual_seed(0)
    text = [sample(mllm, g, 5)]
    with_empty = mllm(**mllm.collate(text), vision=mllm.collate_module("vision", []))
    torch.testing.assert_close(with_empty.loss, mllm(**mllm.collate(text)).loss)


def test_no_valid_target_gives_zero_loss_with_a_graph():
    mllm = build(None, None)
    one = sample(mllm, torch.Generator().manual_seed(0), 5)
    one.labels[:] = -100
    output = mllm(**mllm.collate([one]))
    assert output.targets == 0 and float(output.loss.detach()) == 0
    output.loss.backward()


def test_whole_clip_equals_the_encoders_own_forward():
    mllm = build(None)
    g = torch.Generator().manual_seed(0)
    one = sample(mllm, g, ("audio", 32))
    oracle = plain(mllm).encoders["audio"]
    data = one.media["audio"][0].data
    hidden = oracle.module(data[None]).last_hidden_state[0]
    expected = oracle.projector(hidden.reshape(8, 32))
    torch.testing.assert_close(
        mllm.encoders["audio"](**mllm.collate_module("audio", [one])), expected, rtol=1e-5, atol=1e-6
    )


def test_callbacks_run_in_order_and_may_change_what_passes():
    from interlace.model import ModalityModule, MultimodalModel
    from tests.model.zoo import llama, siglip

    seen = []

    def preprocess(inputs):
        seen.append("preprocess")
        return {**inputs, "pixel_values": [image * 2 for image in inputs["pixel_values"]]}

    def postprocess(inputs, output):
        seen.append("postprocess")
        assert output.shape == (6, 16) and len(inputs["pixel_values"]) == 1
        return output + 1

    def postprocess_projector(inputs, output):
        seen.append("postprocess_projector")
        return output * 3

    def merge(features, inputs):
        from interlace.model import merge_tokens

        seen.append("merge")
        return merge_tokens(features, inputs)

    torch.manual_seed(0)
    vision = ModalityModule(
        siglip(),
        preprocess=preprocess,
        postprocess=postprocess,
        postprocess_projector=postprocess_projector,
    )
    text = ModalityModule(
        llama(),
        projector=None,
        preprocess=lambda inputs: seen.append("before llm") or inputs,
        postprocess=lambda inputs, output: seen.append("after llm") or output,
    )
    mllm = MultimodalModel({"vision": vision}, text, preprocess=merge, placeholders={"vision": 46})
    one = sample(mllm, torch.Generator().manual_seed(0), ("vision", 8, 12), 3)
    features = mllm.encode({"vision": mllm.collate_module("vision", [one])})["vision"]
    image = one.media["vision"][0].data
    hidden = plain(mllm).encoders["vision"].module(image[None] * 2, interpolate_pos_encoding=True).last_hidden_state[0]
    torch.testing.assert_close(features, vision.projector(hidden + 1) * 3, rtol=1e-5, atol=1e-5)
    seen.clear()
    mllm(**mllm.collate([one]))
    assert seen == ["preprocess", "postprocess", "postprocess_projector", "before llm", "merge", "after llm"]


@pytest.mark.parametrize("given", [("mask", "plan"), ("mask",), ("plan",)])
def test_a_merge_callback_may_put_another_mask_or_plan(given):
    """It returns only the changed entries."""
    plain_model = build(None, audio=None)
    mllm = MultimodalModel(
        {}, plain_model.language_model, preprocess=lambda features, inputs: changed, backend="reference"
    )
    batch = mllm.collate([sample(plain_model, torch.Generator().manual_seed(0), 12)])
    full = BitfieldMask.full(1, batch["input_ids"].shape[1])
    whole = {"mask": full, "plan": AttentionPlan.build(full)}
    changed = {name: whole[name] for name in given}
    wanted = plain_model(**{**batch, **whole}).logits
    torch.testing.assert_close(mllm(**batch).logits, wanted)
    assert (plain_model(**batch).logits - wanted).abs().max() > 1e-3
