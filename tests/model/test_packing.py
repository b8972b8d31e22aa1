"""Packing is enabled only for models that pass a separation test: nothing leaks between samples.

The layers below exist only in this file. Each changes a Llama in one way in which a future architecture could mix
tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SiglipVisionModel,
)

from interlace.attention import AttentionPlan
from interlace.layout import Layout, ParallelSpec
from interlace.masks import BitfieldMask, word
from interlace.model import Media, ModalityModule, MultimodalModel, Sample, generate
from interlace.model.rows import documents
from interlace.run import parallelize
from tests.model.packing import SIZES, lfm2, qwen2_audio
from tests.model.zoo import (
    MELS,
    VOCAB,
    assert_same_gradients,
    build,
    gradients,
    llama,
    logits_plain,
    loss_plain,
    plain,
    sample,
    samples,
    siglip,
)


class Shift(nn.Module):
    """Half of each token comes from the previous token, also across samples."""

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return torch.cat([before[..., ::2], x[..., 1::2]], dim=-1)


class RunningMean(nn.Module):
    """A linear recurrence without a decay."""

    def forward(self, x):
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


class BatchMean(nn.Module):
    """Statistics over all rows and all tokens."""

    def forward(self, x):
        return x - x.mean((0, 1), keepdim=True) / 2


class Capacity(nn.Module):
    """An expert takes the first tokens of the batch and drops the others."""

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        mine = flat[:, :1] > 0
        return torch.where(mine & (mine.cumsum(0) <= 6), 2 * flat, flat).view_as(x)


class InTraining(nn.Module):
    """Batch statistics that evaluation replaces by fixed ones."""

    def forward(self, x):
        return x - x.mean((0, 1), keepdim=True) if self.training else x


class Far(nn.Module):
    """A dilated convolution: only the token 20 positions earlier is seen."""

    def forward(self, x):
        return x + F.pad(x, (0, 0, 20, 0))[:, :-20]


class Backwards(nn.Module):
    """Sees the next token: not causal, independent of attention."""

    def forward(self, x):
        return x + F.pad(x, (0, 0, 0, 1))[:, 1:]


class Mixed(nn.Module):
    """A layer's own module, then a token mixer."""

    def __init__(self, module, mixing):
        super().__init__()
        self.module, self.mixing = module, mixing

    def forward(self, x):
        return self.mixing(self.module(x))


def mixing_llama(mixing, layer=1):
    torch.manual_seed(0)
    model = llama()
    model.model.layers[layer].mlp = Mixed(model.model.layers[layer].mlp, mixing())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # small weights would hide the mixing
    return model


FOUND = {
    Shift: "rows",
    RunningMean: "rows",
    Far: "rows",
    BatchMean: "alone",
    Capacity: "alone",
    InTraining: "alone",
    Backwards: "alone",  # a row's padding would reach its last token
}


# The slow tests probe the other kinds.
EVERY = [pytest.param(m, id=m.__name__, marks=[pytest.mark.slow] * (m in (RunningMean, Far, Backwards))) for m in FOUND]


def text(mllm, lengths=(31, 24, 27), seed=0):
    g = torch.Generator().manual_seed(seed)
    return [sample(mllm, g, n, name=f"sample of {n}") for n in lengths]


@pytest.mark.parametrize("mixing", EVERY)
def test_what_mixes_tokens_is_found_and_kept_inside_its_sample(mixing):
    mllm = MultimodalModel({}, mixing_llama(mixing))
    assert mllm.packing == {"language_model": FOUND[mixing]}
    batch = text(mllm)
    for training in (False, True):
        oracle = plain(mllm).train(training)
        mllm.train(training)
        expected = loss_plain(oracle, batch)
        expected.backward()
        mllm.zero_grad()
        output = mllm(**mllm.collate(batch))
        torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
        output.loss.backward()
        assert_same_gradients(gradients(mllm), gradients(oracle))


@pytest.mark.parametrize("mixing", EVERY)
def test_packed_as_before_it_would_leak(mixing):
    """Check of the tests above: packed in one row as for plain Llamas, each of these gives different numbers."""
    mllm = MultimodalModel({}, mixing_llama(mixing)).train()
    batch = text(mllm)
    oracle = plain(mllm)
    mllm.language_settings.packing = "packed"
    with torch.no_grad():
        errors = [
            (result - logits_plain(oracle, one)).abs().max() for result, one in zip(by_sample(mllm, batch), batch)
        ]
    assert max(errors) > 1e-2


def test_nan_of_one_sample_stays_there():
    for mixing in (Shift, BatchMean):
        mllm = MultimodalModel({}, mixing_llama(mixing)).eval()
        batch = text(mllm, (5, 7, 6))
        with torch.no_grad():
            clean = by_sample(mllm, batch)
            mllm.language_model.get_input_embeddings().weight[45] = torch.nan  # an id used nowhere else
            batch[1].input_ids[3] = 45
            result = by_sample(mllm, batch)
        assert result[1].isnan().any()
        for i in (0, 2):
            torch.testing.assert_close(result[i], clean[i])


def by_sample(mllm, batch):
    inputs = mllm.collate(batch)
    return mllm(**inputs).logits[inputs["mask"].doc >= 0].split([len(one) for one in batch])


def test_attention_alone_is_packed_in_one_row():
    mllm = MultimodalModel({}, llama())
    assert mllm.packing == {"language_model": "packed"}
    assert mllm.collate(text(mllm))["input_ids"].shape[0] == 1


def test_one_layer_of_many_is_found_and_weights_need_no_memory():
    """One of each group of identical layers is probed. A different layer is found at any place, also without
    weights."""
    with torch.device("meta"):
        model = llama(num_hidden_layers=24, hidden_size=2048, intermediate_size=5632, num_attention_heads=32)
        assert MultimodalModel({}, model).packing == {"language_model": "packed"}
        model.model.layers[17].mlp = Mixed(model.model.layers[17].mlp, Shift())
    assert MultimodalModel({}, model).packing == {"language_model": "rows"}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_hook_that_mixes_is_found():
    model, shift = llama(), Shift()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: shift(output))
    assert MultimodalModel({}, model).packing == {"language_model": "rows"}


def test_packed_rows_are_refused_if_samples_would_leak():
    mllm = MultimodalModel({}, mixing_llama(Shift))
    ids = torch.ones(1, 8, dtype=torch.int64)
    mask = BitfieldMask.pack([BitfieldMask.causal(1, 5), BitfieldMask.causal(1, 3)])
    with pytest.raises(ValueError, match=r"several samples.* give each sample a row"):
        mllm(ids, mask=mask)
    padded = BitfieldMask(
        torch.full((1, 8), word(0, causal=True)), doc=torch.tensor([[-1, -1, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    )
    with pytest.raises(ValueError, match="padding on the left"):
        mllm(ids, mask=padded)
    assert mllm(ids).logits.shape == (1, 8, VOCAB)


def test_documents_in_pieces_are_refused():
    doc = torch.tensor([[0, 0, 1, 1, 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match="is not contiguous"):
        documents(AttentionPlan.build(BitfieldMask(torch.full((1, 5), word(0)), doc=doc)))


# ---------------------------------------------------------------------- end to end


def qwen3_next(**changes):
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = {**SIZES, **sizes, **experts, "linear_value_head_dim": 8, "head_dim": 12, "layer_types": kinds, **changes}
    return Qwen3NextForCausalLM(Qwen3NextConfig(shared_expert_intermediate_size=8, **config))


@pytest.mark.parametrize("language", [lfm2, pytest.param(qwen3_next, marks=pytest.mark.slow)])
def test_media_loss_gradients_stages_and_generation(language):
    """The whole model, the model cut into stages, and its answers: equal to the oracle, sample by sample."""
    mllm = build(language=language)
    assert mllm.packing == {"vision": "packed", "audio": "packed", "language_model": "rows"}
    batch = samples(mllm)
    oracle = plain(mllm)
    expected = loss_plain(oracle, batch)
    expected.backward()
    output = mllm(**mllm.collate(batch))
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    output.loss.backward()
    assert_same_gradients(gradients(mllm), gradients(oracle), 1e-4)

    answers = []
    with torch.no_grad():
        for one in batch:
            ids = one.input_ids
            for _ in range(3):
                logits = logits_plain(oracle.eval(), Sample(ids, torch.full_like(ids, -100), one.media))[-1]
                logits[list(mllm.placeholders.values())] = -torch.inf
                ids = torch.cat([ids, logits.argmax()[None]])
            answers.append(ids[len(one) :].tolist())
    assert generate(mllm, batch, max_new_tokens=3) == answers


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.slow), "full", "selective"])
def test_a_pipeline_of_rows(checkpointing):
    """Every layer on its own stage; microbatches of several widths, one without media."""
    mllm = build(language=lfm2, backend="cpu")
    mllm.freeze("audio")
    mllm.train()
    batch = samples(mllm)
    microbatches = [batch[:2], batch[2:], batch[1:2]]
    output = mllm(**mllm.collate([one for group in microbatches for one in group]))
    output.loss.backward()
    wanted = {name: None if p.grad is None else p.grad.clone() for name, p in mllm.named_parameters()}
    mllm.zero_grad()
    specs = {"vision": ParallelSpec(), "audio": ParallelSpec(), "language_model": ParallelSpec(pp=3)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, placement="parallel"), checkpointing=checkpointing)
    assert parallel.step(microbatches).loss == pytest.approx(output.loss.item(), rel=1e-5)
    assert_same_gradients({name: p.grad for name, p in parallel.named_parameters()}, wanted)


# ---------------------------------------------------------------------- encoders


def test_pooling_after_the_layers_stays_inside_an_item():
    torch.manual_seed(0)
    module = qwen2_audio()
    encoder = ModalityModule(module, projector=nn.Identity())
    encoder.connect(16)
    assert encoder.packing != "packed"
    items = [torch.randn(MELS, 32) for _ in range(3)]
    media = [Media((MELS, 32), encoder.tokens((MELS, 32)), item) for item in items]
    assert media[0].tokens == 8  # of 16 tokens in the layers
    result = encoder(**encoder.collate(media)).split([one.tokens for one in media])
    module.set_attn_implementation("eager")
    for item, features in zip(items, result):
        expected = module(input_features=item[None]).last_hidden_state[0]
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_an_encoder_that_mixes_items_gets_them_one_by_one():
    torch.manual_seed(0)
    for mixing, packing in ((Shift, "rows"), (BatchMean, "alone")):
        module: SiglipVisionModel = siglip()
        layers = (module.vision_model if hasattr(module, "vision_model") else module).encoder.layers
        layers[1].mlp = Mixed(layers[1].mlp, mixing())
        encoder = ModalityModule(module, projector=nn.Identity())
        assert encoder.packing == packing
        items = [torch.randn(3, *size) for size in ((8, 12), (16, 16), (8, 12))]
        media = [Media(tuple(item.shape), encoder.tokens(tuple(item.shape)), item) for item in items]
        result = encoder(**encoder.collate(media)).split([one.tokens for one in media])
        module.set_attn_implementation("eager")
        for item, features in zip(items, result):
            expected = module(pixel_values=item[None], interpolate_pos_encoding=True).last_hidden_state[0]
            torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)


def test_the_answer_is_remembered_for_models_alike():
    first = MultimodalModel({}, mixing_llama(Shift))
    second = MultimodalModel({}, mixing_llama(Shift))
    third = MultimodalModel({}, llama())
    assert first.packing == second.packing != third.packing
    assert isinstance(third.language_model, LlamaForCausalLM)
