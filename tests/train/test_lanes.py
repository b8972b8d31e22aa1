"""Runs whose modules are cut among ranks: losses, checkpoints and resumption are those of one process.

Between real processes, each with its pieces of the weights and of the optimizer's state.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from interlace.run import parallelize
from interlace.train.build import build, build_layout, initialize
from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.config import from_table
from interlace.train.feed import Feed, datasets
from interlace.train.schema import Config
from interlace.train.trainer import Trainer, read_metrics
from tests.distributed.workers import run_ranks
from tests.train.test_resume_ranks import TABLE

STEPS = 6
CURVE = ("loss_metrics", "lr", "grad_norm", "step")
LAYOUTS = {
    "one": {},
    "tp2 pp2": {"placement": "shared", "vision": {"tp": 2, "dp": 2}, "language_model": {"tp": 2, "pp": 2}},
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
    initialize(parallel, seed=config.run.seed)
    train, held_out, _ = datasets(config, model, tokenizer)
    size, cut = config.train.batch_size, {"microbatches": config.train.microbatches, "chunks": config.chunks()}
    wanted = partial(parallel.wanted, **cut)
    feed = Feed(train, held_out, batch_size=size, seed=config.run.seed, validation_samples=8, wanted=wanted)
    folder.mkdir(exist_ok=True)
    trainer = Trainer(config, model, parallel, feed, folder, quiet=True)
    if stop is not None:
        trainer.stop_requested = lambda: trainer.step >= stop
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
    """All tensors of a checkpoint, whole, but for the generators: put together here by hand, chunk by chunk."""
    manifest = ck.read_manifest(path)
    found = {}
    for key, stored in manifest.tensors.items():
        if key.startswith(("model.", "optimizer.")):
            whole = torch.full(stored.shape, float("nan"))
            for chunk in stored.chunks:
                place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                assert bool(whole[place].isnan().all()), f"{key} is there twice"
                whole[place] = ck.read_chunk(path, stored, chunk)
            assert not whole.isnan().any(), f"{key} has a hole"
            found[key] = whole
    return found


def same_curve(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    assert len(a) == len(b)
    for ours, theirs in zip(a, b, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), (ours, theirs)


def newest(folder: Path) -> Path:
    path = checkpointfolder.newest(folder / "checkpoints")
    assert path is not None
    return path


def save_again(rank: int, layout: str, folder: str) -> tuple[float, bool]:
    """Load the newest checkpoint of `folder` under `layout`, and save what was loaded into another folder."""
    trainer = trainer_of(config_of(layout), Path(folder))
    path = trainer.resume()
    trainer.feed.close()
    trainer.checkpoints.folder = Path(folder) / f"again {layout}"
    trainer.saved_step = -1
    trainer.save()
    trainer.checkpoints.finish()
    held, whole = sum(p.numel() for p in trainer.parameters.values()), trainer.checkpoints.identity["parameters"]
    return held / sum(torch.Size(shape).numel() for shape, _ in whole.values()), path.name == "step-00000003"


def of_lanes(rank: int, folder: str, layout: str) -> dict[str, Any]:
    """An unbroken run, one that was stopped, and one that goes on from one process's checkpoint."""
    config, place = config_of(layout), Path(folder)
    whole = train(config, place / "whole")
    train(config, place / "parts", stop=3)
    parts = train(config, place / "parts", resume=True)
    from_one = train(config, place / "one", resume=True)
    same = all(torch.equal(p, parts.parameters[name]) for name, p in whole.parameters.items())
    state, other = whole.optimizer.state(), parts.optimizer.state()
    same = same and state.keys() == other.keys() and all(torch.equal(v, other[name]) for name, v in state.items())
    return {"same": same, "pieces": len(whole.regions), "steps": from_one.step}


@pytest.mark.parametrize(
    "layout", ["tp2 pp2", pytest.param("sharded", marks=pytest.mark.slow), pytest.param("sets", marks=pytest.mark.slow)]
)
def test_four_ranks_train_and_resume_as_one_process(tmp_path: Path, layout: str) -> None:
    alone = train(config_of("one"), tmp_path / "alone")
    train(config_of("one"), tmp_path / "one", stop=3)
    expected = curve(tmp_path / "alone")
    results = run_ranks(4, of_lanes, str(tmp_path), layout, timeout=240)
    for kind, value in results:
        assert kind == "returned", value
        assert value["same"] and value["pieces"] > 5 and value["steps"] == STEPS
    assert len(expected) == STEPS
    same_curve(curve(tmp_path / "whole"), expected)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")  # to the last bit
    same_curve(curve(tmp_path / "one"), expected)
    # Every weight is there once, and is that of one process to rounding.
    saved, here = contents(newest(tmp_path / "whole")), contents(newest(tmp_path / "alone"))
    assert saved.keys() == here.keys()
    for key, tensor in here.items():
        if key.endswith("k_proj.bias"):  # softmax forgets it: its gradient is rounding, of which AdamW makes steps
            continue
        assert torch.allclose(saved[key], tensor, rtol=1e-3, atol=1e-5), key
    # And one process goes on from what four have saved.
    train(config_of("one"), tmp_path / "parts two", stop=1)
    del alone
    assert not dist.is_initialized()
