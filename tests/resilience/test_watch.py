"""Progress pages return what was written, and a rank counts as stalled when it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.comm.process.recorder import FlightRecorder, use_page
from interlace.resilience.supervisor.progress import MOST_RANKS, Progress, ProgressPage, ProgressReader
from interlace.resilience.supervisor.watch import WORKING, Look, Stall, Watched, look_at

HEARTBEAT = 5.0


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProgressPage, ProgressReader]:
    path = tmp_path_factory.mktemp("page") / "page"
    reader = ProgressReader(path)
    assert reader.read().state == "starting" and reader.read().thread == 0
    return ProgressPage(path), reader


@settings(max_examples=50)
@given(st.data())
def test_a_page_says_what_was_written(page: tuple[ProgressPage, ProgressReader], data: st.DataObject) -> None:
    writer, reader = page
    before = reader.read()
    do = data.draw(st.sampled_from(["tick", "computing", "waiting", "idle", "enter"]))
    if do == "tick":
        writer.tick()
        assert reader.read() == Progress(**{**vars(before), "counter": before.counter + 1})
    elif do == "waiting":
        ranks = data.draw(st.lists(st.integers(0, 1 << 40), max_size=MOST_RANKS + 4))
        writer.waiting(ranks)
        assert (reader.read().state, reader.read().ranks) == ("waiting", tuple(ranks[:MOST_RANKS]))
    elif do == "idle":
        what, seconds = data.draw(st.text("abcé ", max_size=20)), data.draw(st.floats(0, 1e6))
        writer.idle(what, seconds)
        result = reader.read()
        assert (result.state, result.what, result.allowed, result.ranks) == ("idle", what, seconds, ())
    elif do == "enter":
        writer.enter(7)
        assert (reader.read().state, reader.read().generation) == ("computing", 7)
    else:
        writer.computing()
        assert reader.read().state == "computing"
    assert reader.read().counter > before.counter and reader.read().thread == threading.get_native_id()


@pytest.mark.parametrize("state", ["computing", "computing in a lane", "waiting", "idle"])
def test_what_a_page_said_before_a_wait_it_says_after_it(page: tuple[ProgressPage, ProgressReader], state: str) -> None:
    writer, reader = page
    {
        "computing": writer.computing,
        "computing in a lane": lambda: writer.computing([0, 1]),
        "waiting": lambda: writer.waiting([3, 1]),
        "idle": lambda: writer.idle("é", 7.0),
    }[state]()
    before = reader.read()
    with pytest.raises(RuntimeError), writer.idle_for("another", 30.0):
        assert (reader.read().state, reader.read().what, reader.read().allowed) == ("idle", "another", 30.0)
        raise RuntimeError
    after = reader.read()
    assert (after.state, after.ranks) == (before.state, before.ranks) and after.counter > before.counter
    assert state != "idle" or (after.what, after.allowed) == (before.what, before.allowed)


def test_the_recorder_writes_the_page(page: tuple[ProgressPage, ProgressReader]) -> None:
    writer, reader = page
    use_page(writer)
    recorder = FlightRecorder(0)
    use_page(None)
    token = recorder.begin("receive", "x", (3,))
    assert (reader.read().state, reader.read().ranks) == ("waiting", (3,))
    recorder.end(token)
    result = reader.read()
    assert result.state == "computing"
    recorder.begin("send", "x", (3,))
    assert reader.read().state == "computing" and reader.read().counter > result.counter


def test_work_of_a_lane_names_its_ranks(page: tuple[ProgressPage, ProgressReader]) -> None:
    writer, reader = page
    use_page(writer)
    recorder = FlightRecorder(0)
    use_page(None)
    work = recorder.begin("compute", "FORWARD", (0, 1))
    assert (reader.read().state, reader.read().ranks) == ("computing in a lane", (0, 1))
    recorder.end(recorder.begin("wait", "x", (5,)))  # e.g. for weights that are gathered
    assert (reader.read().state, reader.read().ranks) == ("computing in a lane", (0, 1))
    recorder.end(work)
    assert reader.read().state == "computing"
    alone = recorder.begin("compute", "FORWARD", ())
    assert reader.read().state == "computing"
    recorder.end(alone)


def see(looks: list[tuple[Progress, Look]], seconds: float = 0.25) -> list[Stall | None]:
    rank = Watched(0, HEARTBEAT)
    return [rank.see(page, look, seconds) for page, look in looks]


def at(counter: int, state: str, allowed: float = 0.0) -> Progress:
    return Progress(counter, state, 1, 1, allowed, (1,), "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "look", "patience"),
    [
        ("waiting", Look("S", 0.0), HEARTBEAT),
        ("computing", Look("S", 0.0), HEARTBEAT),
        ("computing", Look("R", 0.0), HEARTBEAT * WORKING),  # other processes occupy its core
        ("computing", Look("T", 0.0), HEARTBEAT),
        ("computing in a lane", Look("S", 0.0), HEARTBEAT),
        ("computing in a lane", Look("R", 0.0), HEARTBEAT * WORKING),
        ("waiting", Look("R", 0.0), HEARTBEAT),
        ("idle", Look("S", 0.0), 20.0),
        ("idle", Look("T", 0.0), HEARTBEAT),
    ],
)
def test_how_long_a_rank_may_stand_still(state: str, look: Look, patience: float) -> None:
    result = see([(at(1, state, 20.0), look)] * 400)
    stalls = [each for each in result if each is not None]
    assert [each is not None for each in result] == [place * 0.25 >= patience for place in range(400)]
    assert stalls[0].stopped == (look.state == "T") and stalls[0].seconds == patience


@pytest.mark.parametrize(("state", "at_work"), [("computing in a lane", True), ("computing", True), ("waiting", False)])
def test_polling_wait_is_not_work(state: str, at_work: bool) -> None:
    stall = see([(at(1, state), Look("R", 0.0))] * 400)[-1]
    assert stall is not None and stall.at_work == at_work


def test_rank_that_uses_a_core_never_counts_as_stalled() -> None:
    working = see([(at(1, "computing"), Look("S", 0.2 * place)) for place in range(100)])
    assert working == [None] * 100
    helpers = see([(at(1, "computing"), Look("S", 0.01 * place)) for place in range(100)])  # 4 % of a core
    assert helpers[19] is None and helpers[20] is not None


def test_a_rank_that_moves_again_is_none_that_stands_still() -> None:
    moves = [(at(place // 15, "waiting"), Look("S", 0.0)) for place in range(200)]
    assert see(moves) == [None] * 200


def test_a_stopped_process_is_seen_as_such() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert look_at(sleeper.pid, sleeper.pid).state in "RSD"
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        assert look_at(sleeper.pid, sleeper.pid).state == "T"
    finally:
        sleeper.kill()
        sleeper.wait()
    assert look_at(sleeper.pid, 0) == Look("", 0.0)


def test_supervisors_load_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys, interlace.resilience.supervisor.process; "
        "print(sorted({'torch', 'numpy', 'pydantic'} & {*sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
