"""Encoders with the grid of each item as input, against each item alone with HuggingFace's own eager attention."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig, VideoLlama3VisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.video_llama_3.modeling_video_llama_3 import VideoLlama3VisionModel

from interlace import Layout, ParallelSpec, parallelize
from interlace.estimate.traced import activations_of
from interlace.model import Media, ModalityModule, MultimodalModel, Sample
from tests.model.zoo import PLACEHOLDERS, assert_same_gradients, build, gradients, llama

SIZES = {"depth": 3, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 2, "intermediate_size": 24}
GRIDS = [(1, 4, 6), (2, 4, 4), (1, 8, 2), (1, 4, 6), (1, 10, 6)]


def qwen2(**changes):
    sizes = {**SIZES, "embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2, **changes}
    return Qwen2VisionTransformerPretrainedModel(Qwen2VLConfig(vision_config=sizes).vision_config)


def qwen2_5(**changes):
    """Windows of 2 x 2 features except in its second layer, so that images of GRIDS have several."""
    windows = {"window_size": 8, "fullatt_block_indexes": [1]}
    sizes = {**SIZES, "hidden_size": 16, "out_hidden_size": 24, **windows, **changes}
    return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLConfig(vision_config=sizes).vision_config)


def qwen3(**changes):
    sizes = {"out_hidden_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [], **changes}
    return Qwen3VLVisionModel(Qwen3VLConfig(vision_config={**SIZES, "hidden_size": 16, **sizes}).vision_config)


def video_llama_3(**changes):
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 2, "intermediate_size": 24}
    return VideoLlama3VisionModel(VideoLlama3VisionConfig(**{**sizes, "hidden_size": 16, **changes}))


class Shell(nn.Module):
    """A tower whose forward is wrapped by another one, as in a whole model without its language model."""

    def __init__(self, tower):
        super().__init__()
        self.visual, self.config = tower, tower.config

    def set_attn_implementation(self, name):
        self.visual.set_attn_implementation(name)

    def forward(self, pixel_values, grid_thw):
        merged = self.visual(pixel_values, grid_thw).pooler_output
        return SimpleNamespace(pooler_output=merged.split((grid_thw.prod(-1) // 4).tolist()))


ENCODERS = {
    "qwen2": qwen2,
    "qwen2.5": qwen2_5,
    "qwen3": qwen3,
    "video llama 3": video_llama_3,
    "shell": lambda: Shell(qwen2_5()),
}


def items(encoder, grids=GRIDS, seed=0):
    """An item of random patches for each grid."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for number, grid in enumerate(grids):
        about = {"grid_thw": grid}
        if "merge_sizes" in encoder.feed.item_keys:
            about["merge_sizes"] = (1 + number % 2,)
        shape = (math.prod(grid), *encoder.feed.patch)
        made.append(Media(shape, encoder.tokens(shape, about), torch.randn(shape, generator=g), about=about))
    return made


def alone(module, item):
    """[n, D] from HuggingFace's class."""
    told = {key: torch.tensor([numbers]) for key, numbers in item.about.items()}
    if "merge_sizes" in told:
        told["merge_sizes"] = told["merge_sizes"][0]
    output = module(item.data, **told)
    features = output.pooler_output
    if isinstance(features, tuple):
        return torch.cat(features)
    return output.last_hidden_state if features is None else features


def model(name, projector="mlp"):
    torch.manual_seed(0)
    mllm = build(lambda: ENCODERS[name](), audio=None)
    oracle = copy.deepcopy(mllm.encoders["vision"])
    oracle.module.set_attn_implementation("eager")
    return mllm, oracle


@pytest.mark.parametrize("cuts", [(), (1, 2)], ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_features_and_gradients(name, cuts):
    """Several images and a video in one batch, whole and cut into stages."""
    mllm, oracle = model(name)
    encoder = mllm.encoders["vision"]
    assert mllm.packing["vision"] == "packed"
    media = items(encoder)
    wanted = oracle.projector(torch.cat([alone(oracle.module, item) for item in media]))
    assert sum(item.tokens for item in media) == len(wanted)
    result = None
    for start, stop in pairwise([0, *cuts, 3]):
        stage = mllm.slice("vision", start, stop)
        result = stage(encoder.collate(media), result)
        media = [item.without_data() for item in media]  # later stages get no pixels
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    for output in (result, wanted):
        (output * direction).sum().backward()
    assert_same_gradients(gradients(encoder), gradients(oracle))


GRID = st.tuples(st.integers(1, 3), st.integers(1, 5).map(lambda n: 2 * n), st.integers(1, 5).map(lambda n: 2 * n))
MADE = {}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.sampled_from(["qwen2", "qwen2.5", "qwen3"]), st.lists(GRID, min_size=1, max_size=5))
def test_any_grids(name, grids):
    if name not in MADE:
        MADE[name] = model(name)
    mllm, oracle = MADE[name]
    media = items(mllm.encoders["vision"], grids, seed=len(grids))
    with torch.no_grad():
        result = mllm.encoders["vision"](**mllm.encoders["vision"].collate(media))
        wanted = oracle.projector(torch.cat([alone(oracle.module, item) for item in media]))
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def sample(encoder, media, text):
    ids = [1, 2]
    for item in media:
        ids += [PLACEHOLDERS["vision"]] * item.tokens + text
    return Sample.from_unshifted(torch.tensor(ids), media={"vision": media})


@pytest.mark.parametrize(
    ("name", "spec"),
    [("shell", ParallelSpec(pp=2)), ("qwen2.5", ParallelSpec(tp=2)), ("qwen3", ParallelSpec(dp=2))],
    ids=["pp", "tp", "dp"],
)
def test_cut_over_ranks(name, spec):
    """Encoder and language model on several ranks each; one sample has no item."""
    mllm, _ = model(name)
    encoder = mllm.encoders["vision"]
    first, second, third, *rest = items(encoder)
    samples = [sample(encoder, [first, second], [3, 4]), sample(encoder, [third], [5]), sample(encoder, rest, [6, 7])]
    samples.append(Sample.from_unshifted(torch.arange(9)))
    expected = copy.deepcopy(mllm)
    loss = expected(**expected.collate(samples)).loss
    loss.backward()
    layout = Layout.from_specs(mllm, {"vision": spec, "language_model": ParallelSpec(pp=2)})
    parallel = parallelize(mllm, layout, schedule="1f1b", transport="local")
    result = parallel.step(samples, microbatches=2)
    torch.testing.assert_close(torch.as_tensor(result), loss.detach(), rtol=0, atol=1e-5)
    assert_same_gradients(parallel.full_gradients(), gradients(expected))


def test_one_projector_less():
    """Features in the language model's width need no projector; others get an error."""
    encoder = ModalityModule(qwen2_5(), projector=None)
    media = items(encoder)
    encoder.connect(24)
    assert encoder(**encoder.collate(media)).shape == (sum(item.tokens for item in media), 24)
    with pytest.raises(ValueError, match=r"needs a projector.*from 24 to 32 channels"):
        encoder.connect(32)


def test_what_ranks_would_hold():
    """Without weights and data, as in `interlace plan`."""
    with torch.device("meta"):
        encoder = ModalityModule(qwen2_5(), projector="mlp")
        mllm = MultimodalModel({"vision": encoder}, llama(), placeholders={"vision": PLACEHOLDERS["vision"]})
    layout = Layout.from_specs(mllm, {"vision": ParallelSpec(pp=2), "language_model": ParallelSpec()})
    assert activations_of(mllm, layout)["vision"].edges == (64.0, 64.0, 64.0, 24.0)  # bytes per patch; last: merged


def test_wrong_items():
    encoder = ModalityModule(qwen2())
    shape = (24, 24)
    for about, message in [
        ({}, "needs grid_thw of each item"),
        ({"grid_thw": (4, 6)}, "needs grid_thw of each item"),
        ({"grid_thw": (1, 4, 4)}, r"takes patches of shape \(16, 24\)"),
        ({"grid_thw": (1, 3, 8)}, "multiples of 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            encoder.tokens(shape, about)
    assert encoder.tokens(shape, {"grid_thw": (1, 4, 6)}) == 6


def test_rows_that_cannot_be_dealt():
    mllm, _ = model("qwen2.5")
    layout = Layout.from_specs(mllm, {"vision": ParallelSpec(cp=2), "language_model": ParallelSpec()})
    with pytest.raises(ValueError, match="vision does not support cp = 2: "):
        parallelize(mllm, layout, transport="local")


def test_features_of_inner_layers_cannot_be_cut_away():
    """Qwen3-VL's deepstack reads intermediate layers; its mergers belong to the last stage."""
    mllm = build(lambda: qwen3(deepstack_visual_indexes=[0]), audio=None)
    encoder = mllm.encoders["vision"]
    media = items(encoder)
    assert encoder(**encoder.collate(media)).shape == (sum(item.tokens for item in media), 24)
    with pytest.raises(ValueError, match="cut"):
        mllm.slice("vision", 0, 1)(encoder.collate(media))


def test_checkpointing_recomputes_the_same():
    mllm, oracle = model("qwen2.5")
    mllm.set_checkpointing("full")
    encoder = mllm.encoders["vision"]
    media = items(encoder)
    result = encoder(**encoder.collate(media))
    wanted = oracle.projector(torch.cat([alone(oracle.module, item) for item in media]))
    for output in (result, wanted):
        output.square().sum().backward()
    assert_same_gradients(gradients(encoder), gradients(oracle))
