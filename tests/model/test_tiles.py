"""Vision models with tiles and image sizes as input, against HuggingFace's own features of each image alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlavaNextConfig, LlavaNextModel, LlavaOnevisionConfig, LlavaOnevisionModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from interlace.model import Media
from tests.model.zoo import COMMON, assert_same_gradients, build, gradients

TILE = 16
PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48]]
# height, width, tiles: one of the whole image, and those of the grid that fits it best
IMAGES = [(32, 32, 5), (16, 30, 3), (40, 20, 3), (32, 32, 5), (10, 60, 4)]
TEXT = {**COMMON, "hidden_size": 24, "vocab_size": 32, "num_key_value_heads": 2}


def onevision():
    vision = {**COMMON, "model_type": "siglip_vision_model", "hidden_size": 16, "image_size": TILE, "patch_size": 4}
    text = {**TEXT, "model_type": "qwen2"}
    return LlavaOnevisionModel(
        LlavaOnevisionConfig(
            vision_config={**vision, "vision_use_head": False}, text_config=text, image_grid_pinpoints=PINPOINTS
        )
    )


def next_one():
    vision = {**COMMON, "model_type": "clip_vision_model", "hidden_size": 16, "image_size": TILE, "patch_size": 4}
    text = {**TEXT, "model_type": "llama"}
    return LlavaNextModel(
        LlavaNextConfig(vision_config=vision, text_config=text, image_grid_pinpoints=PINPOINTS, vision_feature_layer=-1)
    )


class Side(nn.Module):
    """The whole model without its language model; its forward is get_image_features."""

    def __init__(self, whole):
        super().__init__()
        del whole.language_model
        self.whole, self.config = whole, whole.vision_tower.config

    def set_attn_implementation(self, name):
        self.whole.vision_tower.set_attn_implementation(name)

    def forward(self, pixel_values, image_sizes):
        whole = self.whole
        hidden = whole.vision_tower(pixel_values).last_hidden_state
        if whole.config.vision_feature_select_strategy == "default":
            hidden = hidden[:, 1:]
        tiles = whole.multi_modal_projector(hidden)
        counts = [counts_of(whole, size) for size in image_sizes]
        strategy = {}
        if "vision_feature_select_strategy" in whole.pack_image_features.__code__.co_varnames:
            strategy["vision_feature_select_strategy"] = whole.config.vision_feature_select_strategy
        packed, _ = whole.pack_image_features(
            list(tiles.split(counts)), image_sizes, image_newline=whole.image_newline, **strategy
        )
        return BaseModelOutput(last_hidden_state=torch.cat(list(packed))[None])


def counts_of(whole, size):
    return image_size_to_num_patches(size, whole.config.image_grid_pinpoints, TILE)


@pytest.mark.parametrize("make", [onevision, next_one], ids=["onevision", "next"])
def test_features_and_gradients(make):
    torch.manual_seed(0)
    mllm = build(lambda: Side(make()), audio=None)
    encoder = mllm.encoders["vision"]
    assert mllm.packing["vision"] == "rows"
    oracle = copy.deepcopy(encoder)
    oracle.module.set_attn_implementation("eager")
    g = torch.Generator().manual_seed(0)
    media = []
    for height, width, tiles in IMAGES:
        shape, about = (tiles, 3, TILE, TILE), {"image_sizes": (height, width)}
        media.append(Media(shape, encoder.tokens(shape, about), torch.randn(shape, generator=g), about=about))
    alone = [oracle.module(one.data, torch.tensor([one.about["image_sizes"]])).last_hidden_state[0] for one in media]
    assert [one.tokens for one in media] == [len(features) for features in alone]
    wanted = oracle.projector(torch.cat(alone))
    result = encoder(**encoder.collate(media))
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    for output in (result, wanted):
        (output * direction).sum().backward()
    assert_same_gradients(gradients(encoder), gradients(oracle))

    for start, stop in ((0, 1), (1, 3)):
        with pytest.raises(ValueError, match="Keep this module on one stage"):  # image_newline belongs to the first one
            mllm.slice("vision", start, stop)


def test_wrong_items():
    torch.manual_seed(0)
    encoder = build(lambda: Side(onevision()), audio=None).encoders["vision"]
    for shape, about, message in [
        ((3, 3, TILE, TILE), {}, "needs image_sizes of each item"),
        ((3, 3, TILE, 2 * TILE), {"image_sizes": (16, 30)}, r"takes \(tiles, \*\(3, 16, 16\)\)"),
        ((2, 3, TILE, TILE), {"image_sizes": (16, 30)}, "makes no features of an item of shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            encoder.tokens(shape, about)
