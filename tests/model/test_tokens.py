"""Counting, stacking and packing of tokens, against oracles written as loops."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.masks import OWN_SHIFT
from interlace.model import Media, ModalityModule, Sample
from interlace.model.projector import stack_tokens
from tests.model.zoo import FRAMES, MELS, PLACEHOLDERS, build, clip, dense_mask, sample, samples, siglip


@given(st.lists(st.integers(0, 7), max_size=5), st.integers(1, 4))
@settings(deadline=None)
def test_stacking_never_crosses_items(lengths, k):
    features = torch.randn(sum(lengths), 2)
    rows, start = [], 0
    for n in lengths:
        for at in range(start, start + n, k):
            group = [features[i] if i < start + n else torch.zeros(2) for i in range(at, at + k)]
            rows.append(torch.cat(group))
        start += n
    expected = torch.stack(rows) if rows else torch.zeros(0, 2 * k)
    assert torch.equal(stack_tokens(features, lengths, k), expected)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, FRAMES), st.integers(1, 3))
@settings(deadline=None, max_examples=15)
def test_tokens_are_what_the_encoder_makes(rows, columns, frames, downsample):
    for module in (siglip(), clip()):
        vision = ModalityModule(module, downsample=downsample)
        vision.connect(8)
        shape = (3, 4 * rows, 4 * columns)
        assert len(vision(pixel_values=[torch.randn(shape)])) == vision.tokens(shape)
        assert vision.tokens(shape) == -(-rows * columns // downsample)
    audio = build(None, downsample=(1, downsample)).encoders["audio"]
    inputs = audio.collate([Media((MELS, frames), 1, torch.randn(MELS, frames))])
    assert len(audio(**inputs)) == audio.tokens((MELS, frames))


def test_collated_row():
    mllm = build()
    batch = samples(mllm)
    row = mllm.collate_module("language_model", batch)
    assert row["input_ids"].tolist() == [torch.cat([one.input_ids for one in batch]).tolist()]
    assert row["labels"].tolist() == [torch.cat([one.labels for one in batch]).tolist()]
    assert row["position_ids"].tolist() == [[i for one in batch for i in range(len(one))]]
    mask = row["mask"]
    assert mask.to_dense()[0].equal(torch.block_diag(*[dense_mask(one).float() for one in batch]).bool())
    own = (mask.bits[0] >> OWN_SHIFT) & 63
    ids = row["input_ids"][0]
    assert torch.equal(own, (ids == PLACEHOLDERS["vision"]) * 1 + (ids == PLACEHOLDERS["audio"]) * 2)
    inputs = mllm.collate_module("audio", batch)
    assert inputs["input_features"].shape == (2, MELS, 32) and inputs["lengths"].tolist() == [7, 32]
    assert inputs["input_features"][0, :, 7:].abs().max() == 0


def test_collating_for_some_modules_only():
    mllm = build()
    batch = samples(mllm)
    assert mllm.collate(batch, only={"vision"}).keys() == {"vision"}
    assert mllm.collate(batch, only={"language_model", "audio"}).keys() >= {"input_ids", "audio", "mask"}
    assert "vision" not in mllm.collate(batch, only={"language_model", "audio"})


def test_neighbouring_items_are_spans_of_their_own():
    mllm = build()
    tokens = [PLACEHOLDERS["vision"]] * 5
    media = [Media((3, 4, 8), 2, torch.zeros(3, 4, 8)), Media((3, 4, 12), 3, torch.zeros(3, 4, 12))]
    ids = torch.tensor([1, *tokens])
    seen = mllm.collate([Sample(ids, torch.full((6,), -100), {"vision": media})])["mask"].to_dense()[0]
    assert seen[1, 2] and not seen[2, 3] and seen[3, 5] and seen[4, 1]


def test_structure():
    mllm = build()
    assert mllm.modules_order() == ["vision", "audio", "language_model"]
    assert mllm.edges() == [("vision", "language_model"), ("audio", "language_model")]
    assert mllm.tied_parameters() == []


def test_flops_are_those_of_the_matrix_products():
    mllm = build(downsample=(2, 1))
    width, inner, keys = 16, 24, 10
    layer = 2 * (4 * width * width + 2 * width * inner) + 4 * keys * width
    first, middle, last = mllm.layers("vision", context=keys)
    assert middle.forward_flops == layer
    assert first.forward_flops == layer + 2 * width * 3 * 4 * 4
    assert last.forward_flops == layer + 2 * (2 * width * 24 + 24 * 24) / 2
    audio = mllm.layers("audio", context=keys)
    # The first convolution makes two outputs for each token, the second makes one.
    assert audio[0].forward_flops - audio[1].forward_flops == 2 * (2 * MELS * width * 3) + 2 * width * width * 3
    language = mllm.layers("language_model")
    assert language[-1].forward_flops - language[1].forward_flops == 2 * 24 * 48
    assert language[0].forward_flops == language[1].forward_flops  # a lookup has no multiplications
    assert language[0].parameters - language[1].parameters == 24 * 48


def test_image_order_is_kept_when_sizes_repeat():
    mllm = build()
    g = torch.Generator().manual_seed(0)
    one = sample(mllm, g, ("vision", 4, 8), ("vision", 8, 8), ("vision", 4, 8), ("vision", 8, 8), 2)
    encoder = mllm.encoders["vision"]
    together = encoder(**mllm.collate_module("vision", [one]))
    alone = [encoder(pixel_values=[item.data]) for item in one.media["vision"]]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
