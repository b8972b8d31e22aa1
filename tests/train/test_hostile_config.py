"""Every number of a config with unreasonable values: refused by name, or the model takes a step."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from interlace.data import ByteTokenizer
from interlace.train.config import load as configs
from interlace.train.config.load import ConfigError
from interlace.train.data.feed import Feed, datasets
from interlace.train.models.architectures import model_class
from interlace.train.models.build import build, build_layout, materialize
from interlace.train.models.tuning import rates
from interlace.train.optim import Optimizer
from tests.train.build import TABLE

HOSTILE = (0, -1, -(2**40), 10**20, 2**40, 3, float("nan"), float("inf"), float("-inf"), 1e308, -0.5, 1e-320)
Place = tuple[str, ...]


def _numbers(section: Any, path: Place = ()) -> Iterator[Place]:
    """The places of numbers in the sections of a config."""
    for name, field in section.model_fields.items():
        inner = configs._section_type(field.annotation)
        if inner is not None:
            yield from _numbers(inner, (*path, name))
            for own in ("vision", "audio") if inner.free is not None else ():
                yield from _numbers(inner.free, (*path, name, own))
        elif any(kind in str(field.annotation) for kind in ("int", "float")):
            yield (*path, name)


def _keys_of_architectures() -> Iterator[Place]:
    """The places of numbers in the tables of HuggingFace keys."""
    for module, spec in TABLE["model"].items():
        result = model_class(spec["architecture"], encoder=module != "language_model")
        for field in dataclasses.fields(result.config_class):
            kind = str(field.type)
            if ("int" in kind or "float" in kind) and "bool" not in kind:
                yield "model", module, "config", field.name
    yield "model", "language_model", "config", "rope_parameters", "rope_theta"


@pytest.fixture(autouse=True, scope="module")
def digits_are_read_once() -> Iterator[None]:
    import sklearn.datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn.datasets, "load_digits", cache(sklearn.datasets.load_digits))
        yield


PLACES = [*_numbers(configs.Config), *_keys_of_architectures()]


def _try(place: Place, value: Any, *, step: bool = True) -> str:
    """Returns "refused", or "ran" if a model was made and took a `step` (for one that is too large, only the data)."""
    table = copy.deepcopy(TABLE) | {"log": {"samples": 0, "accuracy_samples": 0, "trackers": []}}
    section = table
    for key in place[:-1]:
        section = section.setdefault(key, {})
    section[place[-1]] = value
    try:
        config = configs.from_table(table, source="hostile.toml")
        model: Any = build(config, ByteTokenizer(), source="hostile.toml")
        build_layout(config, model, source="hostile.toml")
        if not step:
            return "ran"
        train, held_out = datasets(config, model, ByteTokenizer(), source="hostile.toml")
        settings = config.train
        feed = Feed(
            train,
            held_out,
            batch_size=settings.batch_size,
            seed=config.run.seed,
            validation_samples=settings.validation_samples,
        )
    except ConfigError as error:
        assert place[-1].removesuffix("s") in str(error) or "hostile.toml" in str(error), error
        return "refused"
    with feed.loader:
        samples = feed.next().samples[:2]
    if sum(parameter.numel() for parameter in model.parameters()) < 5_000_000:
        materialize(model, seed=config.run.seed)
        optimizer = Optimizer(model.named_parameters(), config, rates(config, model))
        model(**model.collate(samples)).loss.backward()
        optimizer.step(1)
    return "ran"


def test_the_sweep_covers_the_config() -> None:
    assert len(PLACES) > 100
    names = {".".join(place) for place in PLACES}
    assert {
        "train.lr",
        "train.betas",
        "run.seed",
        "parallel.vision.pp",
        "parallel.vision.dp",
        "parallel.audio.chunks",
        "log.max_new_tokens",
    } <= names
    assert {"model.vision.config.image_size", "model.audio.config.encoder_layers"} <= names


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("train.lr", float("inf"), "train.lr should be less than or equal to"),
        ("train.lr", float("nan"), "train.lr should be"),
        ("train.eps", float("inf"), "train.eps should be less than"),
        ("train.steps", 10**20, "train.steps should be less than or equal to 2147483647"),
        ("run.seed", 10**20, "run.seed should be less than 9223372036854775808"),
        ("parallel.timeout", 1e300, "parallel.timeout should be less than or equal to 604800"),
        ("parallel.threads", 10**6, "parallel.threads should be less than or equal to 1024"),
        ("model.language_model.config.num_hidden_layers", 0, "num_hidden_layers must be between 1 and 10,000, not 0"),
        ("model.vision.config.hidden_size", -16, "hidden_size must be between 1 and 2,147,483,647, not -16"),
        ("model.vision.config.image_size", 2, "image_size = 2 is less than patch_size = 4: an image must have"),
        ("model.vision.config.patch_size", [4, 4], r"patch_size must be one number, the side of a square, not [4, 4]"),
        ("model.vision.config.num_channels", 1, "num_channels must be 3 (images are read as RGB)"),
        ("model.vision.config.layer_norm_eps", -1e-6, "layer_norm_eps must be more than 0"),
        ("model.audio.config.dropout", 1.5, "dropout must be between 0 and 1, not 1.5"),
        ("model.vision.config.attention_dropout", 0.1, "must be 0, not 0.1: bitfield attention has no dropout"),
        ("model.audio.config.encoder_layerdrop", 0.1, "hostile.toml: [model.audio]: WhisperEncoder has layer drop"),
        ("model.language_model.config.num_key_value_heads", 3, "= 2 is not a multiple of num_key_value_heads = 3"),
        ("model.language_model.config.head_dim", 3, "head_dim = 3 is odd, which RoPE does not support"),
        ("model.language_model.config.rope_parameters", {"rope_theta": -1.0}, "rope_theta must be more than 0"),
        (
            "model.language_model.config.id2label",
            3,
            "[model.language_model.config] LlamaForCausalLM: transformers cannot build a model from "
            "hidden_size, id2label",
        ),
    ],
)
def test_refusals_say_what_would_be_right(place: str, value: Any, words: str) -> None:
    table = copy.deepcopy(TABLE)
    section = table
    for key in place.split(".")[:-1]:
        section = section.setdefault(key, {})
    section[place.split(".")[-1]] = value
    with pytest.raises(ConfigError) as error:
        build(configs.from_table(table, source="hostile.toml"), ByteTokenizer(), source="hostile.toml")
    assert words in str(error.value)


def test_a_sample_of_hostile_numbers_is_refused_or_built() -> None:
    pairs = [(place, value) for place in PLACES for value in HOSTILE]
    outcomes = [_try(*pair, step=False) for pair in random.Random(10).sample(pairs, 60)]
    assert outcomes.count("refused") > 30


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_hostile_numbers_are_refused_or_train(place: Place) -> None:
    outcomes = [_try(place, value) for value in HOSTILE]
    assert "refused" in outcomes or place[-1] in ("clip_norm",), outcomes
