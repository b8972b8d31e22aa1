"""Runs with modules cut among ranks: losses, checkpoints and resumption equal those of one process.

Ranks are real processes, each with its pieces of the weights and of the optimizer's state.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.config.load import dumps
from interlace.train.report.metrics import read_metrics
from tests.distributed.workers import run_ranks
from tests.train.lanes import (
    assert_same_bits,
    config_of,
    contents,
    curve,
    newest,
    same_curve,
    train,
    trainer_of,
)

STEPS = 6


def load_and_save(rank: int, layout: str, source: str, target: str) -> float:
    """Resumes from the newest checkpoint of `source` under `layout`, saves in `target`; returns the share of weights
    held here.
    """
    trainer = trainer_of(config_of(layout), Path(target))
    trainer.resume(newest(Path(source)))
    trainer.feed.close()
    trainer.saving.save()
    trainer.checkpoints.finish()
    sizes = [torch.Size(shape).numel() for shape, _ in trainer.checkpoints.identity["parameters"].values()]
    return sum(parameter.numel() for parameter in trainer.parameters.values()) / sum(sizes)


def of_lanes(rank: int, folder: str, layout: str) -> dict[str, Any]:
    """An uninterrupted run, a stopped one, and one that resumes from one process's checkpoint."""
    config, place = config_of(layout), Path(folder)
    whole = train(config, place / "whole")
    train(config, place / "parts", stop=3)
    parts = train(config, place / "parts", resume=True)
    from_one = train(config, place / "one", resume=True)
    same = all(torch.equal(p, parts.parameters[name]) for name, p in whole.parameters.items())
    state, other = whole.optimizer.state(), parts.optimizer.state()
    same = same and state.keys() == other.keys() and all(torch.equal(v, other[name]) for name, v in state.items())
    return {"same": same, "pieces": len(whole.regions), "steps": from_one.step}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2 pp2", "tp2 cp2", "sharded", "sets"])
def test_four_ranks_train_and_resume_as_one_process(tmp_path: Path, layout: str) -> None:
    train(config_of("one"), tmp_path / "alone")
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
    # Every weight is there once, and equals one process's up to rounding. One process loads and saves the same bits.
    saved, here = contents(newest(tmp_path / "whole")), contents(newest(tmp_path / "alone"))
    assert saved.keys() == here.keys()
    for key, tensor in here.items():
        if key.endswith("k_proj.bias"):  # softmax is invariant to it: its gradient is noise, amplified by AdamW
            continue
        assert torch.allclose(saved[key], tensor, rtol=1e-3, atol=1e-5), key
    assert load_and_save(0, "one", str(tmp_path / "whole"), str(tmp_path / "again")) == 1
    assert_same_bits(tmp_path / "whole", tmp_path / "again")


def first_steps(rank: int, layout: str, folder: str) -> int:
    return train(config_of(layout), Path(folder), stop=3).step


@pytest.mark.slow
def test_eight_ranks_one_process_and_back(tmp_path: Path) -> None:
    """tp2 pp2 dp2 -> one process -> tp4 with a pipelined encoder -> tp2 pp2 dp2: the bits are preserved."""
    places = [str(tmp_path / name) for name in ("eight", "one", "four", "eight again")]
    for kind, value in run_ranks(8, first_steps, "tp2 pp2 dp2", places[0], timeout=240):
        assert (kind, value) == ("returned", 3), value
    assert load_and_save(0, "one", places[0], places[1]) == 1
    for world, layout, source, target in ((4, "tp4", 1, 2), (8, "tp2 pp2 dp2", 2, 3)):
        for kind, value in run_ranks(world, load_and_save, layout, places[source], places[target], timeout=240):
            assert kind == "returned" and value < 0.6, value
    for place in places[1:]:
        assert_same_bits(Path(places[0]), Path(place))
    # Replicas divide their common weights: no rank writes all that it holds.
    manifest = ck.read_manifest(newest(Path(places[0])))
    written = [manifest.files[name].size for name in sorted(manifest.files)]
    assert len(written) == 8 and max(written) < 0.5 * sum(written)


def killed_while_writing(rank: int, folder: str) -> str:
    """Rank 1 dies in the middle of writing its part of the second checkpoint, while all train."""
    trainer = trainer_of(config_of("tp2 pp2", checkpoint={"every": 2, "asynchronous": True}), Path(folder))
    real = ck.write_tensors

    def write(path: Path, tensors: Any) -> Any:
        if rank == 1 and trainer.step >= 4:
            path.write_bytes(b"0" * 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, tensors)

    ck.write_tensors = write
    try:
        trainer.run()
    except Exception as error:
        return str(error)
    return "nothing"


def go_on(rank: int, folder: str) -> int:
    return train(config_of("tp2 pp2"), Path(folder), resume=True).step


@pytest.mark.slow
def test_a_kill_in_a_lane_while_writing_loses_nothing_older(tmp_path: Path) -> None:
    results = run_ranks(4, killed_while_writing, str(tmp_path / "killed"), timeout=240)
    assert results[1] == ("died", -signal.SIGKILL)
    assert all(kind == "returned" and "lost rank" in value for kind, value in results[:1] + results[2:]), results
    left = checkpointfolder.complete(tmp_path / "killed" / "checkpoints")
    assert [path.name for path in left] == ["step-00000002"] and newest(tmp_path / "killed") == left[0]
    for kind, value in run_ranks(4, go_on, str(tmp_path / "killed"), timeout=240):
        assert (kind, value) == ("returned", STEPS), value
    train(config_of("one"), tmp_path / "alone")
    same_curve(curve(tmp_path / "killed"), curve(tmp_path / "alone"))


def interlace(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "interlace", "train", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_trains_goes_on_and_answers(tmp_path: Path) -> None:
    """Four ranks as started by the launcher; then the page and the accuracy, which need the whole model."""
    log = {"every": 1, "trackers": [], "trace_step": 2, "samples": 2, "accuracy_samples": 4, "max_new_tokens": 4}
    run = {"name": "lanes", "folder": str(tmp_path), "device": "cpu"}
    config = config_of("tp2 pp2", "train.steps=3", "train.validate_every=0", log=log, run=run)
    path = tmp_path / "lanes.toml"
    path.write_text(dumps(config))
    refused = interlace(str(path), "--set", "parallel={placement='parallel', language_model={tp=3}}")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused
    assert "[parallel]: language_model does not support tp = 3" in refused.stderr
    done = interlace(str(path))
    assert done.returncode == 0 and not done.stderr, done
    folder = tmp_path / "lanes" / "latest"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3 and 0 <= summary["digit_accuracy"] <= 1
    assert (folder / "report.html").exists() and (folder / "timeline.png").exists()
    more = interlace(str(path), "--resume", "--set", "train.steps=4", "--set", "train.schedule_steps=3")
    assert more.returncode == 0 and [line["step"] for line in read_metrics(folder)] == [1, 2, 3, 4], more
