"""Slices run one after the other equal the whole module: outputs to 1e-6, and every gradient by name."""

from __future__ import annotations

import itertools

import pytest
import torch

from interlace.model import Media, Sample
from interlace.model.language import run_language
from tests.model.zoo import LANGUAGE, LAYERS, VISION, assert_same_gradients, build, gradients, sample, samples


def splits(layers):
    """Every way to cut `layers` layers into consecutive stages."""
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            yield [*zip((0, *cuts), (*cuts, layers), strict=True)]


def by_name(stages):
    result = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert name not in result, f"{name} is on two stages"
            result[name] = parameter
    return result


@pytest.mark.parametrize("family", (*VISION, "whisper"))
@pytest.mark.parametrize("share", (True, False))
def test_encoder_slices_equal_the_encoder(family, share):
    name = "audio" if family == "whisper" else "vision"
    mllm = build(VISION.get(family, VISION["siglip"]))
    batch = samples(mllm)
    inputs = mllm.collate_module(name, batch)
    shapes_only = mllm.collate_module(name, [without_data(one) for one in batch])
    weight = torch.randn(sum(m.tokens for one in batch for m in one.media.get(name, [])), 24)
    expected = mllm.encoders[name](**inputs)
    (expected * weight).sum().backward()
    wanted = {k: v for k, v in gradients(mllm).items() if k.startswith(f"encoders.{name}.")}
    for split in splits(LAYERS):
        mllm.zero_grad()
        stages = [mllm.slice(name, start, stop, copy=not share) for start, stop in split]
        hidden = None
        for stage in stages:
            hidden = stage(inputs if stage.is_first else shapes_only, hidden)
        torch.testing.assert_close(hidden, expected, rtol=1e-6, atol=1e-6)
        (hidden * weight).sum().backward()
        held = by_name(stages)
        assert held.keys() == wanted.keys()
        assert_same_gradients({k: p.grad for k, p in held.items()}, wanted, 1e-6)
        whole = dict(mllm.named_parameters())
        assert all((held[k] is whole[k]) == share for k in held)
        if not share:
            assert all(p.grad is None for p in mllm.parameters())


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("family", LANGUAGE)
def test_language_model_slices_equal_the_model(family, tied):
    mllm = build(language=LANGUAGE[family], tie_word_embeddings=tied)
    batch = samples(mllm)
    inputs = mllm.collate(batch)
    output = mllm(**inputs)
    output.loss.backward()
    wanted = {k: v for k, v in gradients(mllm).items() if k.startswith("language_model.")}
    language = mllm.collate_module("language_model", batch)
    features = {k: v.detach() for k, v in mllm.encode({k: inputs[k] for k in ("vision", "audio")}).items()}
    for split in splits(LAYERS):
        mllm.zero_grad()
        stages = [mllm.slice("language_model", start, stop) for start, stop in split]
        hidden = None
        for stage in stages:
            given = {**language, "features": features} if stage.is_first else language
            if stage.is_last:
                logits = run_language(stage.language_model, mllm.language_settings, given, hidden).logits
            hidden = stage(given, hidden)
        torch.testing.assert_close(hidden / output.targets, output.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits, output.logits, rtol=1e-6, atol=1e-6)
        (hidden / output.targets).backward()
        held = {name: p for stage in stages for name, p in stage.named_parameters(remove_duplicate=False)}
        assert held.keys() == wanted.keys()
        assert_same_gradients({k: p.grad for k, p in held.items()}, wanted, 2e-6)


def test_copies_of_tied_weights_are_independent():
    mllm = build(None, None, tie_word_embeddings=True)
    (names,) = mllm.tied_parameters()
    first, last = (mllm.slice("language_model", a, b, copy=True) for a, b in ((0, 1), (1, 3)))
    embedding, head = dict(first.named_parameters())[names[0]], dict(last.named_parameters())[names[1]]
    assert embedding is not head and torch.equal(embedding, head)
    only = mllm.slice("language_model", 0, 3, copy=True)
    assert names[0] in dict(only.named_parameters()) and names[1] not in dict(only.named_parameters())
    batch = mllm.collate_module("language_model", [sample(mllm, torch.Generator().manual_seed(0), 6)])
    mllm(**batch).loss.backward()
    total = mllm.language_model.lm_head.weight.grad * mllm(**batch).targets
    last(batch, first(batch)).backward()
    torch.testing.assert_close(embedding.grad + head.grad, total, rtol=1e-5, atol=1e-6)


def test_absent_parts_cost_nothing_and_are_not_listed():
    mllm = build()
    middle = mllm.slice("vision", 1, 2)
    assert {name.split(".layers.")[1].split(".")[0] for name, _ in middle.named_parameters()} == {"1"}
    assert middle.state_dict().keys() == dict(middle.named_parameters()).keys()
    assert sum(len(list(mllm.slice("vision", i, i + 1).parameters())) for i in range(3)) == len(
        list(mllm.encoders["vision"].parameters())
    )


def test_slices_of_a_model_without_memory():
    """A model on the meta device has lengths and slices, and collates."""
    with torch.device("meta"):
        mllm = build()
    real = build()
    assert mllm.encoders["vision"].tokens((3, 8, 12)) == 6 and mllm.encoders["audio"].tokens((MELS := 8, 7)) == 2
    assert MELS and [layer.parameters for layer in mllm.layers("vision")] == [
        layer.parameters for layer in real.layers("vision")
    ]
    names = {name for start in range(3) for name, _ in mllm.slice("vision", start, start + 1).named_parameters()}
    assert names == {name for name, _ in mllm.named_parameters() if name.startswith("encoders.vision.")}
    batch = mllm.collate(samples(real))
    assert batch["vision"]["pixel_values"][0].shape == (3, 8, 12)


def test_slicing_leaves_the_model_as_it_was():
    mllm = build()
    before = {name: type(module) for name, module in mllm.named_modules()}
    stage = mllm.slice("vision", 1, 2, checkpointing="full")
    stage.train()
    assert before == {name: type(module) for name, module in mllm.named_modules()}
    assert not any("forward" in module.__dict__ for module in mllm.modules())
    assert not any(module._forward_pre_hooks for module in mllm.modules())


def test_layer_drop_at_the_entry_is_an_error_not_silence():
    from tests.model.zoo import whisper

    with pytest.raises(ValueError, match=r"layer drop 0.5"):
        build(None, lambda: whisper(encoder_layerdrop=0.5))
    mllm = build(None).train()
    mllm.encoders["audio"].module.layerdrop = 1.0  # changed directly on the module
    inputs = mllm.collate_module("audio", [sample(mllm, torch.Generator().manual_seed(0), ("audio", 8))])
    with pytest.raises(RuntimeError, match=r"layerdrop"):
        mllm.slice("audio", 0, 3)(inputs)


def test_tuple_returning_layers_are_cut_too():
    """Layers of some families return tuples, which their model unpacks."""
    from torch import nn

    from interlace.model.stages.slice import carve, find_layers
    from interlace.model.stages.slice import run as run_between

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden_states, extra=None):
            return (self.linear(hidden_states), None)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(2, 4)
            self.blocks = nn.ModuleList([Layer() for _ in range(6)])
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            hidden = self.embed(x)
            for block in self.blocks:
                hidden = block(hidden_states=hidden, extra=1)[0]
            return self.norm(hidden)

    model = Model()
    path = find_layers(model)
    x = torch.randn(1, 3, 2)
    hidden, left = run_between(first := carve(model, path, 0, 2), first.blocks[0], {"x": x})
    assert left
    middle = carve(model, path, 2, 5)
    hidden, left = run_between(middle, middle.blocks[2], {"x": x.to("meta")}, hidden=hidden)
    last = carve(model, path, 5, 6)
    output, left = run_between(last, last.blocks[5], {"x": x.to("meta")}, hidden=hidden)
    assert not left
    torch.testing.assert_close(output, model(x))


def without_data(one):
    media = {k: [Media(m.shape, m.tokens, None) for m in items] for k, items in one.media.items()}
    return Sample(one.input_ids, one.labels, media, one.name)
