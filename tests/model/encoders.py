"""Helpers of test_encoders.py and of other tests."""

from __future__ import annotations

import torch
from transformers import (
    InternVLVisionConfig,
    InternVLVisionModel,
    PixtralVisionConfig,
    PixtralVisionModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    YolosConfig,
    YolosModel,
)

from tests.model.zoo import COMMON, PATCH


def siglip2(**changes):
    sizes = {**COMMON, "hidden_size": 16, "num_patches": 16, "patch_size": PATCH, "vision_use_head": False, **changes}
    return Siglip2VisionModel(Siglip2VisionConfig(**sizes))


def internvit(**changes):
    sizes = {**COMMON, "hidden_size": 16, "image_size": [16, 16], "patch_size": [PATCH, PATCH], **changes}
    return InternVLVisionModel(InternVLVisionConfig(**sizes))


def pixtral(**changes):
    return PixtralVisionModel(
        PixtralVisionConfig(**{**COMMON, "hidden_size": 16, "image_size": 16, "patch_size": PATCH, **changes})
    )


def yolos():
    """Each layer adds position embeddings of the image's own size."""
    sizes = {**COMMON, "hidden_size": 16, "image_size": [16, 16], "patch_size": PATCH, "num_detection_tokens": 2}
    return YolosModel(YolosConfig(**sizes), add_pooling_layer=False)


def plain_siglip2(module, image):
    rows, columns = image.shape[1] // PATCH, image.shape[2] // PATCH
    patches = []
    for row in range(rows):
        for column in range(columns):
            pixels = image[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            patches.append(pixels.movedim(0, -1).flatten())
    return module(
        pixel_values=torch.stack(patches)[None],
        pixel_attention_mask=torch.ones(1, rows * columns, dtype=torch.int64),
        spatial_shapes=torch.tensor([[rows, columns]]),
    ).last_hidden_state[0]
