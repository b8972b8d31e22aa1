"""Models from configs: refusals, and weights that depend only on the seed and the name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from interlace.data import ByteTokenizer
from interlace.layout import Layout, ParallelSpec
from interlace.train.checkpoint.identity import identity_of
from interlace.train.config import load as configs
from interlace.train.config.load import ConfigError
from interlace.train.data.feed import datasets
from interlace.train.models.build import architecture, build, build_layout, materialize
from interlace.train.models.costs import flop_costs
from interlace.train.models.media_specs import media_specs
from tests.train.build import AUDIO, LLAMA, _build, _config


def test_initial_values_match_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    model: Any = materialize(_build(), seed=0)
    theirs = WhisperEncoder(WhisperConfig(**AUDIO))
    assert torch.equal(model.encoders["audio"].module.embed_positions.weight, theirs.embed_positions.weight)
    assert not model.encoders["audio"].module.embed_positions.weight.requires_grad
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the spread of a small matrix depends on the draw
        llama = LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=264))
    assert torch.equal(model.language_model.model.rotary_emb.inv_freq, llama.model.rotary_emb.inv_freq)
    for name, weight in model.language_model.named_parameters():
        # Made by the same rule: equal spread (or all equal, for norms).
        reference = dict(llama.named_parameters())[name]
        assert weight.std().item() == pytest.approx(reference.std().item(), rel=0.35, abs=1e-6), name


def test_freezing_follows_the_config() -> None:
    model = _build("model.vision.freeze=true", "model.audio.freeze_projector=true", "model.language_model.freeze=true")
    trainable = {name.split(".module.")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trainable if "projector" in name} and not any("audio.projector" in n for n in trainable)
    assert "encoders.audio" in trainable and "encoders.vision" not in trainable
    everything = ["model.language_model.freeze=true"]
    everything += [f"model.{name}.{key}=true" for name in ("vision", "audio") for key in ("freeze", "freeze_projector")]
    with pytest.raises(ConfigError, match="freeze all parameters"):
        _build(*everything)


def test_an_old_library_is_refused_by_name(monkeypatch) -> None:
    model = _build()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.6")
    with pytest.raises(ConfigError, match=r"needs transformers 5.*but 4.57.6 is installed: pip install"):
        _build()
    with pytest.raises(ConfigError, match="needs transformers 5"):
        materialize(model, seed=0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vision.config.hiden_size=4", r"\[model.vision.config\] has no key 'hiden_size' .*mean 'hidden_size'\?"),
        ("model.audio.config.encoder_layer=4", r"\[model.audio.config\] has no key .*mean 'encoder_layers'\?"),
        ("model.vision.config.attn_implementation='sdpa'", "it is set by the trainer"),
        (
            "model.vision.config.hidden_size='wide'",
            r"tiny.toml: \[model.vision.config\] SiglipVisionModel: .*expected int",
        ),
        ("model.language_model.config.num_attention_heads=3", r"\[model.language_model.config\] LlamaForCausalLM: .*"),
        ("model.language_model.config.vocab_size=100", r"less than the tokenizer's 264; the placeholders of vision"),
        ("parallel.vision.pp=3", r"tiny.toml: \[parallel\]: .*3 stages, but only 2 layers"),
    ],
)
def test_refusals_name_the_key(override: str, message: str) -> None:
    overrides = [override]
    if override.startswith("parallel"):
        overrides.append("parallel.placement=parallel")
    with pytest.raises(ConfigError, match=message):
        config = _config(*overrides)
        build_layout(config, build(config, ByteTokenizer(), source="tiny.toml"), source="tiny.toml")


@pytest.mark.parametrize("placement", ["parallel", "colocated", "replicated", "shared"])
def test_indivisible_shards_are_detected_from_the_config(placement: str) -> None:
    """The same result as from the layout itself, for any number of ranks."""
    model = _build()
    seen = set()
    for cp, dp, pp, ranks, size in itertools.product((1, 2), (1, 2, 3), (1, 2), (None, 1), (2, 3, 4, 6)):
        encoder = {"pp": 1 if placement == "replicated" else pp, "cp": cp, "dp": dp, "shard": "full"}
        language = {"pp": pp, "cp": cp, "dp": dp, "shard": "optimizer", "shard_ranks": size}
        specs = {"vision": {**encoder, "shard_ranks": size}, "audio": encoder, "language_model": language}
        text = ",".join(f"{name}={{{','.join(f'{k}={v!r}' for k, v in spec.items())}}}" for name, spec in specs.items())
        more = "" if ranks is None else f",ranks={ranks}"
        try:
            _config(f"parallel={{placement='{placement}',{text}{more}}}")
            said = ""
        except ConfigError as error:
            said = str(error)
        if said and "hold the same weights" not in said:
            continue  # an impossible placement
        made = {name: ParallelSpec(**spec) for name, spec in specs.items()}
        try:
            Layout.from_specs(model, made, placement=placement, ranks=ranks)
            assert not said, said
        except ValueError as error:
            assert said and "hold the same weights" in str(error), error
        seen.add(bool(said))
    assert seen == {True, False}


def test_identities_tell_architectures_apart_and_nothing_else() -> None:
    def of(*overrides: str) -> str:
        return str(identity_of(_build(*overrides), architecture(_config(*overrides)))["sha256"])

    same = of()
    assert of("train.lr=0.5", "model.vision.freeze=true", "parallel.language_model.pp=2", "run.seed=5") == same
    assert of("model.language_model.config.num_attention_heads=4") != same  # equal shapes, another function
    assert of("model.vision.projector=linear") != same
    assert of("model.vision.architecture=CLIPVisionModel") != same


def test_datasets_follow_the_model() -> None:
    config = _config("data.held_out=0.3")
    model = _build()
    train, held_out = datasets(config, model, ByteTokenizer())
    assert train.name == "digits" and len(held_out) > 400
    sample = train.sample(0, 0)
    assert not sample.media["vision"][0].loaded
    assert sample.media["vision"][0].tokens == 4 and int((sample.input_ids == ByteTokenizer.IMAGE).sum()) == 4
    assert set(media_specs(config, model)) == {"vision", "audio"}


def test_a_chain_is_cut_as_interlace_plan_cuts_it() -> None:
    config = _config("parallel.placement=chain", "parallel.ranks=3", "parallel.dp=2")
    assert config.world_size() == 6 and configs.from_table({**config.model_dump(exclude_none=True)}) == config
    model = build(config, ByteTokenizer())
    layout = build_layout(config, model)
    assert layout == Layout.balanced(model, 3, costs=flop_costs(config, model), dp=2)
    assert (layout.world, layout.placement) == (6, "chain")
    one = build_layout(config, model, replicas=1)
    assert one.world == 3 and all(layout.of_rank(r) == one.of_rank(r) for r in range(3))
    with pytest.raises(ConfigError, match=r"tiny.toml: \[parallel\]: cannot cut 6 layers into 7 ranges"):
        build_layout(_config("parallel.placement=chain", "parallel.ranks=7"), model, source="tiny.toml")


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.ranks=1", "parallel.dp=2"],
        ["parallel={placement='parallel', dp=2, vision={dp=3}, language_model={pp=2, dp=1}}"],
        ["parallel={dp=2, vision={pp=2}, audio={pp=2}, language_model={dp=1}}"],
        ["parallel={placement='shared', dp=2, language_model={pp=2, dp=1}}"],
        ["parallel={placement='shared', dp=2}"],
        ["parallel={placement='replicated', dp=2, language_model={pp=2}}"],
        ["parallel={placement='chain', ranks=2, dp=2}"],
        ["parallel={placement='parallel', dp=2, vision={tp=2}, audio={pp=2}, language_model={tp=3, pp=2, dp=1}}"],
        ["parallel={dp=2, vision={tp=2}, audio={tp=2}, language_model={tp=4, cp=2}}"],
        ["parallel={placement='shared', dp=4, language_model={tp=2, pp=2, dp=1}}"],
    ],
)
def test_layouts_have_the_ranks_and_replicas_of_the_config(overrides: list[str]) -> None:
    config = _config(*overrides)
    model = build(config, ByteTokenizer())
    layout = build_layout(config, model)
    assert layout.world == config.world_size() and layout.placement == config.parallel.placed
    assert layout.data_parallel == {name: config.parallel.replicas(name) for name in config.modules()}


def test_samples_beyond_the_context_are_refused_at_start() -> None:
    def load(positions: int) -> None:
        config = _config(f"model.language_model.config.max_position_embeddings={positions}")
        datasets(config, build(config, ByteTokenizer()), ByteTokenizer(), source="tiny.toml")

    load(14)  # <bos>, 4 patches, <lang>, "en", <sep>, "three"
    with pytest.raises(ConfigError, match="has 14 tokens, at most 13 fit"):
        load(13)
