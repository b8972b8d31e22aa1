"""Audio encoders that take clips unpadded, against each clip alone with HuggingFace's own eager attention."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from transformers import (
    ASTConfig,
    ASTModel,
    HubertConfig,
    HubertModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
    WavLMConfig,
    WavLMModel,
)

from interlace import Layout, ParallelSpec, parallelize
from interlace.model import Media, ModalityModule
from tests.model.zoo import COMMON, assert_same_gradients, build, gradients

WAVES = {
    **COMMON,
    "hidden_size": 16,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (6, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "activation_dropout": 0.0,
    "mask_time_prob": 0.0,
}
SPECTROGRAM = {"num_mel_bins": 12, "max_length": 24, "patch_size": 4, "frequency_stride": 4, "time_stride": 4}


def wav2vec2(**changes):
    return Wav2Vec2Model(Wav2Vec2Config(**{**WAVES, **changes}))


ENCODERS = {
    "wav2vec2": (wav2vec2, "packed"),
    "wav2vec2, stable": (lambda: wav2vec2(do_stable_layer_norm=True, feat_extract_norm="layer"), "packed"),
    "wav2vec2, adapter": (lambda: wav2vec2(add_adapter=True, num_adapter_layers=1), "rows"),
    "hubert": (lambda: HubertModel(HubertConfig(**WAVES)), "packed"),
    "wavlm": (lambda: WavLMModel(WavLMConfig(**WAVES, num_buckets=8, max_bucket_distance=16)), "rows"),
    "ast": (lambda: ASTModel(ASTConfig(**COMMON, **SPECTROGRAM, hidden_size=16)), "packed"),
}
UNCUT = ("wavlm", "wav2vec2, stable")


def clips(encoder, name, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(24, 12)] * 3 if name == "ast" else [(n,) for n in (161, 90, 161, 254)]
    return [Media(shape, encoder.tokens(shape), torch.randn(shape, generator=g)) for shape in shapes]


@pytest.mark.parametrize(
    ("name", "cuts"),
    [(name, cuts) for name in ENCODERS for cuts in [(), (1, 2)] if not (cuts and name in UNCUT)],
)
def test_features_and_gradients(name, cuts):
    make, packing = ENCODERS[name]
    mllm = build(lambda: make(), audio=None)
    encoder = mllm.encoders["vision"]
    assert encoder.kind == "audio" and mllm.packing["vision"] == packing
    oracle = copy.deepcopy(encoder)
    oracle.module.set_attn_implementation("eager")
    media = clips(encoder, name)
    wanted = oracle.projector(torch.cat([oracle.module(one.data[None]).last_hidden_state[0] for one in media]))
    assert sum(one.tokens for one in media) == len(wanted)
    result = None
    for start, stop in pairwise([0, *cuts, 3]):
        result = mllm.slice("vision", start, stop)(encoder.collate(media), result)
        media = [one.without_data() for one in media]
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    for output in (result, wanted):
        (output * direction).sum().backward()
    assert_same_gradients(gradients(encoder), gradients(oracle))


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"layerdrop = 0\.1, which pipeline stages do not support: set it to 0"):
        ModalityModule(wav2vec2(layerdrop=0.1))
    encoder = ModalityModule(wav2vec2())
    with pytest.raises(ValueError, match=r"which takes \(samples\)"):
        encoder.tokens((1, 160))
    with pytest.raises(ValueError, match=r"does not take audio of shape \(3,\)"):
        encoder.tokens((3,))
    with pytest.raises(ValueError, match=r"\(20, 12\) does not fit ASTModel, which takes clips of one length"):
        ModalityModule(ENCODERS["ast"][0]()).tokens((20, 12))
    mllm = build(ENCODERS["wavlm"][0], audio=None)
    with pytest.raises(ValueError, match="need more than the hidden state of the earlier ones"):
        mllm.slice("vision", 1, 3)
    for degrees in ({"tp": 2}, {"cp": 2}):
        layout = Layout.from_specs(mllm, {"vision": ParallelSpec(**degrees), "language_model": ParallelSpec()})
        with pytest.raises(ValueError, match=r"vision does not support (tp|cp) = 2"):  # it has its own attention
            parallelize(mllm, layout, transport="local")
    masking = build(lambda: wav2vec2(mask_time_prob=0.05), audio=None).train()
    layout = Layout.from_specs(masking, {"vision": ParallelSpec(tp=2), "language_model": ParallelSpec()})
    with pytest.raises(ValueError, match=r"vision has dropout .*mask_time_prob = 0\.05"):
        parallelize(masking, layout, transport="local")
    stable = build(ENCODERS["wav2vec2, stable"][0], audio=None)
    inputs = stable.encoders["vision"].collate(clips(stable.encoders["vision"], "wav2vec2, stable"))
    with pytest.raises(ValueError, match="Wav2Vec2Model cannot"):  # the norm after its layers is registered before them
        stable.slice("vision", 1, 3)(inputs, stable.slice("vision", 0, 1)(inputs))
