"""[data] workers: the processes that prepare samples, and losses that do not depend on them."""

from __future__ import annotations

import copy
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from interlace.data import ReadAhead
from interlace.data.workers import pool as workers
from interlace.train import rank
from interlace.train.config.load import ConfigError, dumps, from_table, loads
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed
from interlace.train.data.producers import producers_of
from interlace.train.report.metrics import LOSS, RESTARTS, read_metrics
from tests import forkserver
from tests.data.pictures import Killer
from tests.digits import digits
from tests.train.build import TABLE


def config(folder: Path, *overrides: str) -> Config:
    table = copy.deepcopy(TABLE) | {"run": {"name": "tiny", "folder": str(folder), "deterministic": False}}
    table["parallel"] = {"ranks": 1, "threads": 1}
    table["log"] = {"every": 1, "samples": 0, "accuracy_samples": 0, "trackers": [], "trace_step": 0}
    return from_table(table, list(overrides), source="tiny.toml")


@pytest.mark.parametrize("value", ["-1", "rey", "1.5", "true", "2000"])
def test_what_is_no_number_of_workers_is_one_line(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(tmp_path, f"data.workers={value}")
    lines = str(refused.value).splitlines()
    assert len(lines) == 1 and "a number of processes from 0 to 1024, 'auto' or 'ray' is wanted, not " in lines[0]


def test_a_saved_config_says_the_same() -> None:
    for given in ("auto", "ray", 3):
        asked = config(Path("runs"), f"data.workers={given}", "data.cache_gb=2.5", "data.prefetch=4")
        assert loads(dumps(asked)) == asked and asked.data.workers == given


def test_cores_decide_on_workers_and_ray_has_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 4):
        monkeypatch.setattr(workers, "sensible", lambda ranks, count=count: count)
        assert (producers_of(config(tmp_path, "data.workers=auto"), tmp_path, 1) is None) == (count == 0)
    assert producers_of(config(tmp_path, "data.workers=0"), tmp_path, 1) is None
    assert producers_of(config(tmp_path, "data.workers=2"), tmp_path, 1) is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"tiny.toml: \[data\] workers = 'ray', but Ray is not installed: pip install"
    ):
        producers_of(config(tmp_path, "data.workers=ray"), tmp_path, 1, source="tiny.toml")


def test_data_that_cannot_be_sent_end_with_what_to_do(tmp_path: Path) -> None:
    train, held_out = digits("train"), digits("heldout")
    train.mine = lambda: 0  # type: ignore[attr-defined]
    producers = producers_of(config(tmp_path, "data.workers=1", "data.cache_gb=0"), tmp_path, 1, source="tiny.toml")
    with pytest.raises(ConfigError, match=r"tiny.toml: \[data\] workers: .*; set data.workers = 0"):
        Feed(train, held_out, batch_size=4, seed=0, validation_samples=4, ahead=ReadAhead(producers=producers))


@pytest.mark.slow
def test_twenty_worker_kills_leave_losses_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that decodes in its thread, one with workers, and one that resumes after half of the steps."""
    forkserver.context()
    settings = ["train.steps=40", "data.options.jitter=1.0"]
    assert rank.run(config(tmp_path / "a", *settings), source="tiny.toml") == 0
    expected = [line[LOSS] for line in read_metrics(tmp_path / "a/tiny/latest")]
    draw, pools = random.Random(3), list[Any]()

    class Killed(workers.WorkerPool):
        """Loses a worker at every tenth requested item, twenty in total."""

        asked = 0

        def ask(self, task: Any) -> Any:
            if task.kind == "load":
                if not self.asked:
                    pools.append(Killer(self, draw))
                self.asked += 1
                if self.asked % 10 == 0 and len(pools[-1].killed) < 20:
                    pools[-1].kill()
            return super().ask(task)

    monkeypatch.setattr(workers, "WorkerPool", Killed)
    assert rank.run(config(tmp_path / "b", *settings, "data.workers=2"), source="tiny.toml") == 0
    lines = read_metrics(tmp_path / "b/tiny/latest")
    assert [line[LOSS] for line in lines] == expected
    assert len(pools[0].killed) == 20 and lines[-1][RESTARTS] >= 18  # the last ones may come after the last line
    assert not any("data/blank_items" in line for line in lines)
