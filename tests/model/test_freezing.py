"""Freezing, modes and activation checkpointing."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from tests.model.zoo import assert_same_gradients, build, gradients, loss_plain, plain, samples

PARTS = {
    "vision": "encoders.vision.module.",
    "vision.projector": "encoders.vision.projector.",
    "audio": "encoders.audio.module.",
    "audio.projector": "encoders.audio.projector.",
    "language_model": "language_model.",
}


@pytest.mark.parametrize(
    "frozen", [c for n in (1, 2, 3) for c in itertools.combinations(("vision", "audio.projector", "language_model"), n)]
)
def test_frozen_parts_get_no_gradient_and_the_rest_is_unchanged(frozen):
    mllm = build()
    batch = samples(mllm)
    oracle = plain(mllm)
    loss_plain(oracle, batch).backward()
    for path in frozen:
        mllm.freeze(path)
    mllm(**mllm.collate(batch)).loss.backward()
    prefixes = tuple(PARTS[path] for path in frozen)
    expected = {name: None if name.startswith(prefixes) else grad for name, grad in gradients(oracle).items()}
    assert_same_gradients(gradients(mllm), expected, 2e-5)


def test_frozen_modules_stay_in_evaluation():
    mllm = build()
    mllm.freeze("vision")
    stage = mllm.slice("vision", 1, 3).train()
    mllm.train()
    assert not any(module.training for module in mllm.encoders["vision"].module.modules())
    assert mllm.encoders["vision"].projector.training and mllm.language_model.training
    inside = dict(stage.named_modules())
    assert not inside["encoders.vision.module.encoder.layers.1"].training
    assert inside["encoders.vision.projector"].training
    mllm.freeze("language_model")  # also when frozen after slicing
    late = mllm.slice("language_model", 0, 1)
    mllm.unfreeze("language_model")
    assert late.train().language_model.training
    mllm.freeze("language_model")
    assert not late.train().language_model.training
    mllm.unfreeze("vision")
    assert all(module.training for module in mllm.encoders["vision"].modules())


def test_what_trains_inside_something_frozen_is_in_training():
    mllm = build().train()
    stage = mllm.slice("language_model", 0, 3)
    mllm.freeze("language_model")
    mllm.unfreeze("language_model.model.layers.1")
    for model in (mllm, mllm.train(), stage.train()):
        layers = dict(model.named_modules())
        inside = layers["language_model.model.layers.1"]
        assert all(module.training for module in inside.modules())
        assert all(parameter.requires_grad for parameter in inside.parameters())
        assert not layers["language_model.model.layers.0"].training
    mllm.freeze("language_model.model.layers.1.mlp")
    inside = mllm.language_model.model.layers[1]
    assert inside.self_attn.training and not inside.mlp.training
    mllm.freeze("language_model")  # previous settings of its parts are void
    mllm.train()
    assert not any(module.training for module in mllm.language_model.modules())
    mllm.unfreeze("language_model")
    assert all(module.training for module in mllm.language_model.modules())


def test_unfreezing_leaves_constants_constant():
    mllm = build()
    positions = mllm.encoders["audio"].module.embed_positions.weight
    assert not positions.requires_grad
    mllm.freeze("audio")
    mllm.unfreeze("audio")
    assert not positions.requires_grad
    assert mllm.encoders["audio"].module.conv1.weight.requires_grad


def test_freezing_inside_a_module_and_unknown_names():
    mllm = build()
    mllm.freeze("language_model.model.embed_tokens")
    assert not mllm.language_model.model.embed_tokens.weight.requires_grad
    assert mllm.language_model.lm_head.weight.requires_grad
    mllm.freeze("vision.module.embeddings")
    assert not any(p.requires_grad for p in mllm.encoders["vision"].module.embeddings.parameters())
    with pytest.raises(ValueError, match=r"cannot freeze 'vison'.*did you mean 'vision'"):
        mllm.freeze("vison")
    with pytest.raises(ValueError, match=r"did you mean 'vision.projector'"):
        mllm.unfreeze("vision.projektor")


def test_dropout_is_off_in_frozen_layers_only():
    from tests.model.zoo import whisper

    mllm = build(None, lambda: whisper(dropout=0.5))
    batch = mllm.collate_module("audio", samples_of_audio(mllm))
    encoder = mllm.encoders["audio"]
    mllm.train()
    assert not torch.equal(encoder(**batch), encoder(**batch))
    mllm.freeze("audio")
    mllm.train()
    assert torch.equal(encoder(**batch), encoder(**batch))


def samples_of_audio(mllm):
    from tests.model.zoo import sample

    g = torch.Generator().manual_seed(0)
    return [sample(mllm, g, ("audio", 9), 2), sample(mllm, g, ("audio", 20), 2)]


def test_layers_say_what_trains():
    mllm = build()
    mllm.freeze("vision")
    first, middle, last = mllm.layers("vision")
    assert (first.trainable, middle.trainable, last.trainable) == (False, False, True)
    assert [part.name for part in last.parts if part.trainable] == ["encoders.vision.projector"]
    assert {part.kind for part in first.parts} == {"prologue", "layer"}
    total = sum(layer.parameters for layer in mllm.layers("vision"))
    assert total == sum(p.numel() for p in mllm.encoders["vision"].parameters())


@pytest.mark.parametrize("vision", ("siglip", "clip"))
def test_checkpointing_changes_no_number(vision):
    from tests.model.zoo import VISION

    mllm = build(VISION[vision]).train()
    batch = mllm.collate(samples(mllm))
    output = mllm(**batch)
    output.loss.backward()
    expected = {name: None if g is None else g.clone() for name, g in gradients(mllm).items()}
    for mode in ("full", "none", "selective", "full"):
        mllm.zero_grad()
        mllm.set_checkpointing(mode)
        again = mllm(**batch)
        assert torch.equal(again.loss, output.loss)
        again.loss.backward()
        assert_same_gradients(gradients(mllm), expected, 1e-7)


def test_checkpointing_recomputes_each_layer_also_in_copies():
    mllm = build(None, None).train()
    batch = mllm.collate_module("language_model", [s for s in samples(build()) if not s.media])
    for model in (mllm, copy.deepcopy(mllm)):
        calls = []
        for layer in model.layer_list("language_model"):
            layer.input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for checkpointing, count in (("none", 3), ("full", 6), ("selective", 6)):
            calls.clear()
            stage = model.slice("language_model", 0, 3, copy=True, checkpointing=checkpointing)
            stage(batch).backward()
            assert len(calls) == count
            assert all(p.grad is None for p in model.parameters())
        mllm.set_checkpointing("full")
    assert model.slice("language_model", 0, 1)  # like the model: made while checkpointing is on


def test_checkpointing_with_dropout_repeats_the_same_mask():
    from tests.model.zoo import whisper

    mllm = build(None, lambda: whisper(dropout=0.3)).train()
    batch = mllm.collate_module("audio", samples_of_audio(mllm))
    result = []
    for checkpointing in ("none", "full", "selective"):
        torch.manual_seed(0)
        stage = mllm.slice("audio", 0, 3, copy=True, checkpointing=checkpointing)
        stage(batch).square().sum().backward()
        result.append({name: p.grad for name, p in stage.named_parameters()})
    assert_same_gradients(result[1], result[0], 1e-6)
    assert_same_gradients(result[2], result[0], 1e-6)
