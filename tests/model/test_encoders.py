"""Image encoders with special input formats, against each image alone with eager attention."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from transformers import (
    SamVisionConfig,
    SamVisionModel,
)

from interlace.model import Media, ModalityModule
from tests.attention.hf_models import FIVE
from tests.model.encoders import internvit, pixtral, plain_siglip2, siglip2, yolos
from tests.model.zoo import COMMON, PATCH, assert_same_gradients, build, gradients

SIZES = [(8, 12), (16, 16), (20, 8), (8, 12), (24, 4)]  # pixels; the encoders are configured for 16 x 16


ENCODERS = {
    "siglip2": (siglip2, plain_siglip2),
    "siglip2 with its head": (lambda: siglip2(vision_use_head=True), plain_siglip2),
    "internvit": (internvit, lambda module, image: module(image[None]).last_hidden_state[0, 1:]),
    "internvit, a rim of 2 pixels": (
        lambda: internvit(image_size=[18, 18]),
        lambda module, image: module(image[None]).last_hidden_state[0, 1:],
    ),
    "internvit, 6 x 4 patches": (
        lambda: internvit(image_size=[24, 16], patch_size=[6, 4], use_qk_norm=True, norm_type="rms_norm"),
        lambda module, image: module(image[None]).last_hidden_state[0, 1:],
    ),
    "yolos": (yolos, lambda module, image: module(image[None]).last_hidden_state[0, 3:]),
    "pixtral": (pixtral, lambda module, image: module(image[None]).last_hidden_state[0]),
}


def images(patch):
    g = torch.Generator().manual_seed(0)
    sizes = [(height // PATCH * patch[0], width // PATCH * patch[1]) for height, width in SIZES]
    return [torch.randn(3, *size, generator=g) for size in sizes]


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        (name, cuts)
        for name in ENCODERS
        for cuts in ([()] if name == "yolos" else [(), (1,), (1, 2)])
        if name != "pixtral" or FIVE
    ],
)
def test_features_and_gradients(name, cuts):
    """Several sizes in one batch, whole and cut into stages. Pixtral of transformers 4.57 is refused."""
    make, alone = ENCODERS[name]
    mllm = build(make, audio=None)
    encoder = mllm.encoders["vision"]
    oracle = copy.deepcopy(encoder)
    oracle.module.set_attn_implementation("eager")
    given = images(encoder.images.patch)
    wanted = oracle.projector(torch.cat([alone(oracle.module, image) for image in given]))
    items = [Media(tuple(image.shape), encoder.tokens(image.shape), image) for image in given]
    assert sum(item.tokens for item in items) == len(wanted)
    assert mllm.packing["vision"] == ("rows" if name == "yolos" else "packed")

    if cuts:
        bounds = [0, *cuts, 3]
        result = None
        for start, stop in pairwise(bounds):
            stage = mllm.slice("vision", start, stop)
            result = stage(encoder.collate(items), result)
            items = [Media(item.shape, item.tokens, None) for item in items]  # later stages get no pixels
    else:
        result = encoder(**encoder.collate(items))
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    for output in (result, wanted):
        (output * direction).sum().backward()
    assert_same_gradients(gradients(encoder), gradients(oracle))


def test_patches_as_the_image_processor_makes_them():
    """NaFlex takes images, or their patches with the number of rows and columns."""
    mllm = build(siglip2, audio=None)
    encoder = mllm.encoders["vision"]
    given = images(encoder.images.patch)
    whole = [Media(tuple(image.shape), encoder.tokens(image.shape), image) for image in given]
    patches = []
    for image in given:
        grid = (image.shape[1] // PATCH, image.shape[2] // PATCH)
        rows = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 3, 4, 0).flatten(0, 1).flatten(1)
        about = {"spatial_shapes": grid}
        patches.append(Media(tuple(rows.shape), encoder.tokens(tuple(rows.shape), about), rows, about=about))
    assert torch.equal(encoder(**encoder.collate(whole)), encoder(**encoder.collate(patches)))
    with pytest.raises(ValueError, match=r"has shape \(6, 48\), but .* takes .* \(8, 48\)"):
        encoder.tokens((6, 48), {"spatial_shapes": (2, 4)})


def test_layers_that_take_no_rows_of_tokens():
    sizes = {**COMMON, "hidden_size": 16, "image_size": 16, "patch_size": PATCH, "num_pos_feats": 8}
    with pytest.raises(ValueError, match=r"SamVisionModel .* the input of its layers is \[1, 4, 4, 16\], not tokens"):
        ModalityModule(SamVisionModel(SamVisionConfig(**sizes, global_attn_indexes=[1], window_size=2)))


def test_stages_that_lack_weights_of_the_first_layers():
    """Position embeddings that some layers add belong before or after all layers."""
    mllm = build(yolos, audio=None)
    encoder = mllm.encoders["vision"]
    image = images(encoder.images.patch)[0]
    inputs = encoder.collate([Media(tuple(image.shape), encoder.tokens(image.shape), image)])
    with pytest.raises(ValueError, match="YolosModel cannot"):
        mllm.slice("vision", 1, 3)(inputs, mllm.slice("vision", 0, 1)(inputs))
