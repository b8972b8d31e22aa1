"""The flight recorder keeps the last events, marks unfinished ones, costs little, and writes a complete file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.comm.channels.base import Tag
from interlace.comm.process.recorder import FlightRecorder


@settings(max_examples=60)
@given(st.integers(1, 6), st.lists(st.integers(-4, 4), max_size=30))
def test_the_ring_holds_the_last_events(capacity: int, steps: list[int]) -> None:
    """steps: n >= 0: an event of n ranks begins; n < 0: the |n|-th last event ends."""
    recorder, expected = FlightRecorder(3, capacity), []
    for step in steps:
        if step >= 0:
            assert recorder.begin("compute", f"action {len(expected)}", range(step)) == len(expected)
            expected.append([len(expected), f"action {len(expected)}", list(range(step)), "waiting"])
        elif len(expected) >= -step:
            recorder.end(len(expected) + step)
            expected[step][3] = "done"
    result = [[event["id"], event["what"], event["ranks"], event["state"]] for event in recorder.events()]
    assert result == expected[-capacity:]
    for event in recorder.events():
        assert event["kind"] == "compute" and abs(event["begin"] - time.time()) < 60
        assert (event["end"] is None) == (event["state"] == "waiting")
        assert event["end"] is None or event["end"] >= event["begin"]


def test_a_dump_is_one_whole_file(tmp_path: Path) -> None:
    recorder = FlightRecorder(2, world=4)
    recorder.end(recorder.begin("send", Tag("vision", 0, 3, 5, True), (1,)))
    recorder.begin("all_reduce", "x" * 9999, (0, 2))
    path = recorder.dump(tmp_path / "crash", "lost rank 0")
    assert path == tmp_path / "crash" / "rank-2.json" and list(path.parent.iterdir()) == [path]
    table = json.loads(path.read_text())
    assert [table[key] for key in ("version", "rank", "world", "error")] == [1, 2, 4, "lost rank 0"]
    send, reduce = table["events"]
    assert (send["kind"], send["what"], send["ranks"], send["state"]) == (
        "send", "gradient of vision[0] chunk 3 for chunk 5", [1], "done",
    )  # fmt: skip
    assert reduce["state"] == "waiting" and reduce["end"] is None and len(reduce["what"]) == 500
    assert recorder.dump(tmp_path / "crash", "again") == path and json.loads(path.read_text())["error"] == "again"


def test_an_event_costs_two_calls_and_two_looks_at_the_clock() -> None:
    """The recorder is always on: no formatting, no search, and a full ring costs no more than an empty one."""
    recorder, tag = FlightRecorder(0, 100), Tag("vision", 0, 3, 5, True)
    called: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            called.append(frame.f_code.co_name if event == "call" else argument.__name__)

    for _ in range(250):
        called.clear()
        sys.setprofile(note)
        token = recorder.begin("receive", tag, (1,))
        recorder.end(token)
        sys.setprofile(None)
        assert called == ["begin", "time_ns", "end", "time_ns", "setprofile"]


def test_a_ring_has_room() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        FlightRecorder(0, 0)
