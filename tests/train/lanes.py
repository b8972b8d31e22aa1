"""Helpers of test_lanes.py and of other tests."""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.data import ReadAhead
from interlace.run import parallelize
from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.config.load import from_table
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed, datasets
from interlace.train.models.build import build, build_layout, initialize, stored_weights
from interlace.train.observers.base import Outputs
from interlace.train.report.metrics import read_metrics
from interlace.train.trainer import Trainer
from tests.train.resume_ranks import TABLE

CURVE = ("loss_metrics", "lr", "grad_norm", "step")


LAYOUTS = {
    "one": {},
    "tp2 pp2": {"placement": "shared", "vision": {"tp": 2, "dp": 2}, "language_model": {"tp": 2, "pp": 2}},
    "tp2": {"placement": "shared", "vision": {"tp": 2}, "language_model": {"tp": 2}},
    "tp4": {"placement": "shared", "vision": {"pp": 2, "dp": 2}, "language_model": {"tp": 4}},
    "sharded": {
        "placement": "shared",
        "vision": {"tp": 2, "dp": 2, "shard": "full"},
        "language_model": {"pp": 2, "dp": 2, "shard": "optimizer"},
    },
    "sets": {
        "placement": "shared",
        "vision": {"dp": 4, "shard": "optimizer", "shard_ranks": 2},
        "language_model": {"dp": 4, "shard": "full", "shard_ranks": 2},
    },
    "tp2 cp2": {
        "placement": "shared",
        "context_order": "zigzag",
        "vision": {"dp": 4, "shard": "full"},
        "language_model": {"tp": 2, "cp": 2, "shard": "optimizer"},
    },
    "tp2 pp2 dp2": {
        "placement": "shared",
        "vision": {"tp": 2, "pp": 2, "dp": 2},
        "language_model": {"tp": 2, "pp": 2, "dp": 2},
    },
}


def config_of(layout: str, *overrides: str, **replace: Any) -> Config:
    table = copy.deepcopy(TABLE) | {"parallel": {"timeout": 60.0, **LAYOUTS[layout]}, **replace}
    if layout == "one":
        table["parallel"]["ranks"] = 1
    llm = table["model"]["language_model"]["config"]
    llm |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 32}
    table["model"]["vision"]["config"]["num_hidden_layers"] = 2
    return from_table(table, list(overrides))


def trainer_of(config: Config, folder: Path, stop: int | None = None) -> Trainer:
    """This process's rank of a run."""
    from interlace.data import ByteTokenizer

    tokenizer = ByteTokenizer()
    model = build(config, tokenizer)
    parallel = parallelize(model, build_layout(config, model), timeout=60)
    stored = cache(partial(stored_weights, config, model))
    initialize(parallel, seed=config.run.seed, stored=stored())
    train, held_out = datasets(config, model, tokenizer)
    size, cut = config.train.batch_size, {"microbatches": config.train.microbatches, "chunks": config.chunks()}
    wanted = partial(parallel.wanted, **cut)
    feed = Feed(
        train, held_out, batch_size=size, seed=config.run.seed, validation_samples=8, ahead=ReadAhead(wanted=wanted)
    )
    folder.mkdir(exist_ok=True)
    trainer = Trainer(config, model, parallel, feed, Outputs(folder, quiet=True), stored=stored)
    if stop is not None:
        trainer.membership.stop = lambda: trainer.step >= stop
    return trainer


def train(config: Config, folder: Path, *, stop: int | None = None, resume: bool = False) -> Trainer:
    trainer = trainer_of(config, folder, stop)
    if resume:
        trainer.resume()
    trainer.run()
    trainer.feed.close()
    return trainer


def curve(folder: Path) -> list[dict[str, float]]:
    return [{key: v for key, v in line.items() if key.startswith(CURVE)} for line in read_metrics(folder)]


def contents(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint except generator states, assembled here by hand, chunk by chunk."""
    manifest = ck.read_manifest(path)
    result = {}
    for key, stored in manifest.tensors.items():
        if key.startswith(("model.", "optimizer.")):
            whole = torch.full(stored.shape, float("nan"))
            for chunk in stored.chunks:
                place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                assert bool(whole[place].isnan().all()), f"{key} is there twice"
                whole[place] = ck.read_chunk(path, stored, chunk)
            assert not whole.isnan().any(), f"{key} has a hole"
            result[key] = whole
    return result


def same_curve(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    assert len(a) == len(b)
    for ours, theirs in zip(a, b, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), (ours, theirs)


def newest(folder: Path) -> Path:
    path = checkpointfolder.newest(folder / "checkpoints")
    assert path is not None
    return path


def assert_same_bits(one: Path, other: Path) -> None:
    saved, again = contents(newest(one)), contents(newest(other))
    assert saved.keys() == again.keys()
    assert [key for key, tensor in saved.items() if not torch.equal(tensor, again[key])] == []
