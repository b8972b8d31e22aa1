"""The closing report of rank 0: what fails in it never costs the summary of a finished run."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from interlace.train import rank, report
from interlace.train.config import ConfigError, from_table
from interlace.train.launch import launcher
from interlace.train.metrics import HELD_OUT, LOSS, free_memory
from interlace.train.schema import Config, Parallel
from tests.train.one_process import ToyModel, toy_config, toy_feed

OUTCOME = {"step": 12, "seconds": 2.0, "samples": 8, "tokens": 80, "metrics": {LOSS: 1.5, HELD_OUT: 1.75}}


class Tokens:
    vocab_size = 32


def _close(folder: Path, *overrides: str) -> dict[str, Any]:
    config = toy_config(*overrides)
    feed = toy_feed(config)
    feed.held_out_data.name = "toy"
    rank.close(config, folder, OUTCOME, ToyModel(), Tokens(), feed, "toy.toml")
    return dict(json.loads((folder / "summary.json").read_text()))


def test_without_samples_no_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "load_whole", lambda *_, **__: pytest.fail("nothing needs the model"))
    summary = _close(tmp_path, "log.samples=0")
    assert summary["train_loss"] == 1.5 and summary["tokens_per_second"] == 40
    assert summary["uniform_byte_baseline"] == pytest.approx(5.545, abs=1e-3) and "unigram_byte_baseline" in summary


def test_a_page_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank, "load_whole", lambda *_, **__: ToyModel())
    monkeypatch.setattr(report, "spread_by_kind", full)
    monkeypatch.setattr("tests.train.one_process.ToyData.tokens", {}, raising=False)
    assert _close(tmp_path, "log.samples=4")["held_out_loss"] == 1.75
    said = capfd.readouterr().err
    assert "the closing report lacks the answers to held-out samples: [Errno 28] No space left" in said
    assert len(said.strip().splitlines()) == 1


def test_a_model_that_has_no_room_is_not_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks had pieces of it; the system would end the one process that wants it all."""
    loaded: list[str] = []
    monkeypatch.setattr(rank, "load_whole", lambda *_, **__: loaded.append("whole"))
    size = sum(parameter.nbytes for parameter in ToyModel().parameters())
    for free, found in ((int(size / rank.MOST_OF_FREE) - 8, []), (2 * size, ["whole"]), (None, ["whole"] * 2)):
        monkeypatch.setattr(rank, "free_memory", lambda free=free: free)
        assert _close(tmp_path, "log.samples=4")["train_loss"] == 1.5
        assert loaded == found
        if not found:
            said = capfd.readouterr().err
            assert "lacks the answers to held-out samples: the whole model has 0.0 GiB of weights" in said
            assert "interlace generate answers where there is more" in said and len(said.splitlines()) == 1


def test_memory_that_is_free_is_told() -> None:
    free = free_memory()
    assert free is None or 2**20 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _refused(tmp_path: Path) -> Config:
    from tests.train.test_build import TABLE

    run = {"name": "tiny", "folder": str(tmp_path), "deterministic": False}
    return from_table(copy.deepcopy(TABLE) | {"run": run}, ["train.batch_size=4000"])


def test_a_refused_rank_ends_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is inside C++ when Python ends becomes `terminate called` and SIGABRT instead of exit code 2."""
    closed: list[str] = []

    class Watched(rank.Startup):
        def close(self) -> None:
            closed.append("startup")
            super().close()

    monkeypatch.setattr(rank, "Startup", Watched)
    config = _refused(tmp_path).model_copy(update={"parallel": Parallel(ranks=1, threads=1)})
    before, ours = set(threading.enumerate()), {"sign-of-life", "interlace-prefetch", "run-lock"}
    with pytest.raises(ConfigError, match="make batch_size smaller"):
        rank.run(config, source="tiny.toml")
    assert closed == ["startup"]
    assert not {thread.name for thread in set(threading.enumerate()) - before} & ours
    assert (tmp_path / "tiny/latest/config.toml").exists() and not (tmp_path / "tiny/latest/run.lock").exists()


REFUSED = """if True:
    import os, sys, threading
    from pathlib import Path
    from interlace.train import rank
    from tests.train.test_rank import _refused
    try:
        rank.run(_refused(Path(sys.argv[1])), source="tiny.toml")
    except ValueError as error:
        print(error)
    print(sorted(thread.name for thread in threading.enumerate()))
    sys.exit(2)"""


@pytest.mark.slow
def test_ranks_that_are_refused_leave_no_thread_in_the_store(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **launcher.rendezvous(2)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", REFUSED, str(tmp_path)],
            env={**environment, "RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    for text in said:
        assert "make batch_size smaller" in text and "sign-of-life" not in text.splitlines()[-1], text


def test_other_data_than_a_run_was_prepared_with_is_refused() -> None:
    config = toy_config()
    assert rank.other_data(config, "no apt", "other", prepared=False, source="a.toml").data.dataset == "other"
    with pytest.raises(ConfigError, match=r"a.toml: the data that this run was prepared with is gone: no apt"):
        rank.other_data(config, "no apt", "other", prepared=True, source="a.toml")
