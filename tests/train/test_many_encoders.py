"""Any number of encoders with custom names: three, two of which get the same images in different ways."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.data import ByteTokenizer
from interlace.data.builtin import stamps_folder
from interlace.run import parallelize
from interlace.train.commands.planning.costs import counted
from interlace.train.config import load as configs
from interlace.train.data.feed import Feed, datasets
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.build import build, build_layout, initialize
from interlace.train.models.media_specs import media_specs
from interlace.train.observers.base import Outputs
from interlace.train.report.metrics import read_metrics
from interlace.train.trainer import Trainer
from tests.data.package import SETTINGS, cached
from tests.digits import DATA
from tests.train.build import AUDIO, LLAMA, VISION

DINO = {key: VISION[key] for key in VISION if key != "intermediate_size"}
TABLE: dict[str, Any] = {
    "run": {"name": "three"},
    "model": {
        "wide": {
            "architecture": "SiglipVisionModel",
            "config": VISION | {"image_size": 16, "patch_size": 4},
            "projector": "pixel_shuffle",
            "projector_config": {"scale": 2},
            "postprocess_projector": "tests.train.own_modules:half",
        },
        "ears": {"architecture": "WhisperEncoder", "config": AUDIO | {"max_source_positions": 300}, "downsample": 4},
        "sharp": {
            "architecture": "dinov2",
            "config": DINO | {"image_size": 16, "patch_size": 6, "mlp_ratio": 2},
            "projector": "qformer",
            "projector_config": {"queries": 3, "layers": 1, "heads": 2},
            "preprocess": "tests.train.own_modules:halved",
            "mean": [0.0, 0.0, 0.0],
            "std": [1.0, 1.0, 1.0],
        },
        "language_model": {"architecture": "LlamaForCausalLM", "config": LLAMA | {"max_position_embeddings": 4096}},
    },
    "data": {"dataset": "chats", "max_image_tokens": 16},
    "train": {"steps": 2, "batch_size": 6, "microbatches": 2, "warmup_steps": 1, "validate_every": 0},
    "parallel": {"ranks": 1, "timeout": 60.0},
    "checkpoint": {"every": 0},
    "log": {"every": 1, "trackers": [], "trace_step": 0, "samples": 0},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1},
    "two ranks": {},
    "two ranks, in lanes": {
        "placement": "shared", "wide": {"tp": 2}, "sharp": {"tp": 2}, "ears": {"dp": 2}, "language_model": {"pp": 2},
    },
    "four ranks": {"placement": "parallel"},
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    cached(root)
    stamps_folder.make(root / "chats", replace(SETTINGS, records=60), cache=root)
    return root


def config_of(cache: Path, layout: str = "one rank") -> configs.Config:
    table = copy.deepcopy(TABLE) | {"parallel": {"timeout": 60.0, **LAYOUTS[layout]}}
    files = {split: [str(cache / "chats" / f"{split}.jsonl")] for split in ("train", "validation")}
    table["data"] |= {"cache": str(cache), "tokenizer": str(cache / "chats" / "tokenizer"), **files}
    return configs.from_table(table, source="three.toml")


def train(config: configs.Config, folder: Path) -> list[float]:
    """The losses of the steps."""
    tokenizer = tokenizer_of(config)
    model = build(config, tokenizer)
    parallel = parallelize(model, build_layout(config, model), timeout=60)
    initialize(parallel, seed=0)
    train, held_out = datasets(config, model, tokenizer)
    folder.mkdir()
    feed = Feed(train, held_out, batch_size=config.train.batch_size, seed=0, validation_samples=4)
    Trainer(config, model, parallel, feed, Outputs(folder, quiet=True)).run()
    feed.close()
    return [line["loss_metrics/step_loss"] for line in read_metrics(folder)]


@pytest.fixture(scope="module")
def on_one_rank(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(config_of(cache), tmp_path_factory.mktemp("run") / "one")


@pytest.mark.parametrize("layout", ["two ranks", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYOUTS)[2:])])
def test_two_steps_have_the_same_loss_on_one_rank_and_on_more(
    layout: str, cache: Path, tmp_path: Path, on_one_rank: list[float]
) -> None:
    assert len(on_one_rank) == 2 and on_one_rank[0] != on_one_rank[1]
    assert train(config_of(cache, layout), tmp_path / "run") == pytest.approx(on_one_rank, rel=1e-5)


def test_every_encoder_that_sees_is_shown_each_picture(cache: Path) -> None:
    config = config_of(cache)
    tokenizer = tokenizer_of(config)
    first = len(tokenizer_of(config).tokenizer) - 3  # added after the others
    assert tokenizer.placeholders == {"wide": first, "ears": first + 1, "sharp": first + 2}
    model: Any = build(config, tokenizer)
    specs = media_specs(config, model)
    assert (specs["wide"].patch_size, specs["wide"].max_tokens, specs["wide"].mean[0]) == (8, 4, 0.5)
    assert (specs["sharp"].patch_size, specs["sharp"].max_tokens, specs["sharp"].mean[0]) == (6, 16, 0.0)
    data, _ = datasets(config, model, tokenizer)
    for index in range(40):
        sample = data.sample(index, 0)
        media = sample.media
        assert len(media.get("wide", [])) == len(media.get("sharp", []))
        ids = sample.input_ids.tolist()
        for name, items in media.items():
            assert ids.count(tokenizer.placeholders[name]) == sum(item.tokens for item in items)
            assert all(item.tokens == model.encoders[name].tokens(item.shape) for item in items)
        for wide, sharp in zip(media.get("wide", []), media.get("sharp", [])):
            assert sharp.tokens == 3 and wide.shape[1] % 8 == 0 and sharp.shape[1] % 6 == 0
        assert model.collate([sample])["input_ids"].shape[1] == len(sample)
    shown = next(data.store.encoded(i).items for i in range(40) if data.kind(i) == "category")
    assert [item.encoder for item in shown] == ["wide", "sharp"] and {item.medium for item in shown} == {0}


def test_costs_cover_all_encoders_and_bytes_have_placeholders_for_them(cache: Path) -> None:
    config = config_of(cache)
    model = build(config, tokenizer_of(config))
    assert set(counted(config, model, 1.0).modules) == {"wide", "ears", "sharp", "language_model"}
    digits = configs.from_table(TABLE | {"data": {**DATA, "max_image_tokens": 16}}, source="three.toml")
    tokenizer = ByteTokenizer(digits.model.encoders())
    assert tokenizer.placeholders == {"vision": 259, "audio": 260, "wide": 263, "ears": 264, "sharp": 265}
    assert tokenizer.vocab_size == 272
    data, _ = datasets(digits, build(digits, tokenizer), tokenizer)
    media = data.sample(0, 0).media
    assert media["wide"][0].shape == (3, 8, 8) and media["sharp"][0].shape == (3, 12, 12) and "ears" not in media
    assert torch.equal(media["wide"][0].data, media["wide"][0].data)  # type: ignore[arg-type]
