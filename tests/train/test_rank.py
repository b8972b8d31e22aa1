"""The closing report of rank 0: its failures never suppress the summary of a finished run."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from interlace.train import rank, runfolder
from interlace.train.config.load import ConfigError, dumps, from_table, load
from interlace.train.config.sections import Config, Parallel
from interlace.train.launch import launcher
from interlace.train.models.costs import ranks_per_node
from interlace.train.report import closing as report
from interlace.train.report import finished
from interlace.train.report.metrics import HELD_OUT, LOSS, free_memory
from interlace.train.report.page import Page
from interlace.train.report.trackers import Trackers
from tests.train.one_process import ToyModel, toy_config, toy_feed
from tests.train.page import FACTS

OUTCOME = {"step": 12, "finished": True, "seconds": 2.0, "samples": 8, "tokens": 80} | {
    "waited": 0.1, "validating": 0.2, "saving": 0.3, "metrics": {LOSS: 1.5, HELD_OUT: 1.75},
    "forecast": {"predicted_seconds": 0.25},
}  # fmt: skip


class Tokens:
    vocab_size = 32


def _close(folder: Path, *overrides: str) -> dict[str, Any]:
    config = toy_config(*overrides)
    feed = toy_feed(config)
    feed.held_out_data.name = "toy"
    page, trackers = Page(folder, config, FACTS), Trackers(config, folder, {})
    job: Any = SimpleNamespace(config=config, source="toy.toml", tokenizer=Tokens(), feed=feed, trackers=trackers)
    job.parallel = SimpleNamespace(mllm=ToyModel())
    finished.close(finished.Ended(job, OUTCOME, page))
    return dict(json.loads((folder / "summary.json").read_text()))


def test_without_samples_no_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, "load_whole", lambda *_, **__: pytest.fail("nothing needs the model"))
    summary = _close(tmp_path, "log.samples=0")
    assert summary["train_loss"] == 1.5 and summary["tokens_per_second"] == 40
    assert summary["predicted_seconds"] == 0.25
    assert summary["uniform_byte_baseline"] == pytest.approx(5.545, abs=1e-3) and "unigram_byte_baseline" in summary


def test_a_page_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(finished, "load_whole", lambda *_, **__: ToyModel())
    monkeypatch.setattr(report, "spread_by_kind", full)
    monkeypatch.setattr("tests.train.one_process.ToyData.tokens", {}, raising=False)
    assert _close(tmp_path, "log.samples=4")["held_out_loss"] == 1.75
    output = capfd.readouterr().err
    assert "the closing report lacks the answers to held-out samples: [Errno 28] No space left" in output
    assert len(output.strip().splitlines()) == 1


def test_a_model_that_has_no_room_is_not_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks held parts of it; the one process that loads it whole would be killed by the system."""
    loaded: list[str] = []
    monkeypatch.setattr(finished, "load_whole", lambda *_, **__: loaded.append("whole"))
    size = sum(parameter.nbytes for parameter in ToyModel().parameters())
    for free, result in ((int(size / finished.MOST_OF_FREE) - 8, []), (2 * size, ["whole"]), (None, ["whole"] * 2)):
        monkeypatch.setattr(finished, "free_memory", lambda free=free: free)
        assert _close(tmp_path, "log.samples=4")["train_loss"] == 1.5
        assert loaded == result
        if not result:
            output = capfd.readouterr().err
            assert "lacks the answers to held-out samples: the whole model has 0.0 GiB of weights" in output
            assert "interlace generate answers where there is more" in output and len(output.splitlines()) == 1


def test_memory_that_is_free_is_told() -> None:
    free = free_memory()
    assert free is None or 2**20 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _refused(tmp_path: Path) -> Config:
    from tests.train.build import TABLE

    run = {"name": "tiny", "folder": str(tmp_path), "deterministic": False}
    return from_table(copy.deepcopy(TABLE) | {"run": run}, ["train.batch_size=4000", "data.drop_last=true"])


def test_a_refused_rank_ends_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread inside C++ when Python ends causes `terminate called` and SIGABRT instead of exit code 2."""
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
    assert not (tmp_path / "tiny").exists()  # a start that fails leaves no folder, and no lock


def test_a_failed_start_leaves_latest_to_the_run_before(tmp_path: Path) -> None:
    config = _refused(tmp_path)
    runs = [runfolder.create(config) for _ in range(3)]
    for folder in runs:
        runfolder.point_latest(folder)
    latest = tmp_path / "tiny" / "latest"
    runfolder.discard(runs[2])
    assert latest.resolve() == runs[1].resolve()
    runfolder.discard(runs[0])
    assert latest.resolve() == runs[1].resolve()
    runfolder.discard(runs[1])
    assert not (tmp_path / "tiny").exists()


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
    output = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], output
    for text in output:
        assert "make batch_size smaller" in text and "sign-of-life" not in text.splitlines()[-1], text


def test_open_replicas_follow_the_torchrun_world_size() -> None:
    def replicas(world: int, *overrides: str) -> int:
        config = toy_config("train.batch_size=6", "train.microbatches=1", *overrides)
        made = rank.with_replicas(config, world, "toy.toml")
        rank.check_world(made, world, "toy.toml")
        return made.parallel.replicas("language_model")

    spread = "parallel={language_model={pp=2}}"
    assert (replicas(1), replicas(3), replicas(2, "parallel.dp=2"), replicas(6, spread)) == (1, 3, 2, 3)
    with pytest.raises(ConfigError, match=r"asks for 2 ranks .* but 5 were started; .* a multiple of 2 processes"):
        replicas(5, spread)
    with pytest.raises(ConfigError, match=r"asks for 2 ranks .* but 4 were started; run torchrun with 2 processes"):
        replicas(4, "parallel.dp=2")
    with pytest.raises(
        ConfigError, match=r"toy.toml: 8 ranks make 8 replicas \(parallel.dp\): .*batch_size = 6 is too"
    ):
        replicas(8)


def test_ranks_per_node_needs_several_nodes_of_equal_size() -> None:
    """A rank of a node of two and a rank of a node of one must agree: a step begins with that check."""
    assert ranks_per_node(toy_config(), [2, 2, 2, 2]) == 2
    assert ranks_per_node(toy_config(), [2, 2, 1]) is None
    assert ranks_per_node(toy_config(), [3, 3, 3]) is None
    assert ranks_per_node(toy_config("parallel.ranks_per_node=1"), [2, 2, 1]) == 1


def test_what_depends_on_replicas_waits_for_torchruns_processes(tmp_path: Path) -> None:
    """With 4 of them; alone the same configs have one replica, and are refused."""
    path = tmp_path / "toy.toml"
    packed = "data={dataset='chats', train=['a.jsonl'], tokenizer='t', max_tokens=64, pack=true}"

    def four(*overrides: str) -> Config:
        path.write_text(dumps(toy_config("train.batch_size=8")))
        return rank.with_replicas(load(path, list(overrides), open_replicas=True), 4, "toy.toml")

    said = r"toy.toml: 4 ranks make 4 replicas \(parallel.dp\): .*batch_size = "
    assert four(packed).parallel.dp == 4
    for size in (2, 16):
        with pytest.raises(ConfigError, match=said + f"{size} ") as refused:
            four(packed, f"train.batch_size={size}")
    assert "replicas of the language model (parallel.dp) = 8" in str(refused.value)
    profile, shares = "log.profile={start=1, ranks=[0, 3]}", "parallel.language_model={shard='full', shard_ranks=2}"
    assert four(profile, shares).world_size() == 4
    with pytest.raises(ConfigError, match=r"4 ranks make 4 replicas .*log.profile.ranks = \[4\], but the run has 4"):
        four("log.profile={start=1, ranks=[4]}")
    with pytest.raises(ConfigError, match=r"4 ranks make 4 replicas .*shard_ranks = 3, but 4 ranks hold"):
        four(shares.replace("=2", "=3"))
    for alone in (packed, profile, shares):
        with pytest.raises(ConfigError):
            load(path, [alone])
        with pytest.raises(ConfigError, match="1 rank makes 1 replica"):
            rank.with_replicas(load(path, [alone], open_replicas=True), 1, "toy.toml")
    with pytest.raises(ConfigError, match=r"replicas of the language model \(parallel.dp\) = 4"):
        load(path, [packed, "parallel.dp=2"], open_replicas=True)  # nothing is open


def test_failed_summary_rewrite_keeps_the_first_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write, written = report.write_summary, list[int]()

    def once(folder: Path, rows: dict[str, Any]) -> None:
        written.append(len(rows))
        write(folder, rows if len(written) == 1 else rows | {"odd": object()})

    monkeypatch.setattr(report, "write_summary", once)
    summary = _close(tmp_path, "log.samples=0")
    assert summary["train_loss"] == 1.5 and len(written) == 2 and "odd" not in summary
    assert "the closing report lacks the answers in summary.json: " in capfd.readouterr().err
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("stopped here"))
    with pytest.raises(pytest.fail.Exception, match="stopped here"):
        write(tmp_path, {"steps": 1})
    assert json.loads((tmp_path / "summary.json").read_text()) == summary  # complete at any moment


def test_speeds_of_the_last_line_are_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {LOSS: 1.5, "mfu(%)": 40.0, "tflops": 2.0, "tflops/vision": 1.0}
    monkeypatch.setitem(OUTCOME, "metrics", metrics)
    summary = _close(tmp_path, "log.samples=0")
    assert {name for name in summary if "mfu" in name or "tflops" in name} == {
        "last_mfu(%)", "last_tflops", "last_tflops/vision"
    }  # fmt: skip
