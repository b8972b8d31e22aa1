"""The trace file: valid, complete, and with arrows that lead forward in time."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.schedule import Op, StageGraph, gpipe, one_f_one_b
from interlace.simulate import Timeline, simulate
from interlace.simulate.trace import trace_events
from tests.schedule.graphs import Case, cases

COMPUTE = (Op.FORWARD, Op.BACKWARD)
COSTS = {Op.FORWARD: 0.001, Op.BACKWARD: 0.002}


@given(cases(max_microbatches=4), st.booleans(), st.sampled_from([0.0, 0.0005]))
@settings(max_examples=60, deadline=None)
def test_the_trace_is_sound(case: Case, classical: bool, transfer: float) -> None:
    timeline = simulate((one_f_one_b if classical else gpipe)(case.graph, case.presence), COSTS, transfer=transfer)
    events = list(trace_events(timeline))
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted((e["pid"], e["name"]) for e in slices) == sorted((r.rank, str(r.action)) for r in timeline.records())
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in slices:
        assert event["dur"] >= 0 and event["ts"] >= 0
        assert {"module", "stage", "microbatch"} <= set(event["args"])
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    for (_, thread), members in by_thread.items():
        assert all(("peer" in event["args"] or "REDUCE_GRAD" in event["name"]) == (thread == 1) for event in members)
        for first, second in pairwise(members):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-6  # microseconds

    # An arrow follows the slice it is bound to, and its moment lies within that slice alone.
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for holder, arrow in pairwise(events):
        if arrow["ph"] in ends:
            assert (holder["pid"], holder["tid"]) == (arrow["pid"], arrow["tid"])
            assert holder["ts"] <= arrow["ts"] < holder["ts"] + holder["dur"]
            assert arrow["id"] not in ends[arrow["ph"]]
            ends[arrow["ph"]][arrow["id"]] = holder
    sends = [r for r in timeline.records() if r.action.op is Op.SEND]
    assert ends["s"].keys() == ends["f"].keys() and len(ends["s"]) == len(sends)
    for number, sender in ends["s"].items():
        receiver = ends["f"][number]
        assert sender["name"].startswith("SEND") and receiver["name"].startswith("RECV")
        assert sender["args"]["peer"] == receiver["pid"] and receiver["args"]["peer"] == sender["pid"]
        same = ("module", "stage", "microbatch")
        assert [sender["args"][key] for key in same] == [receiver["args"][key] for key in same]
        assert sender["ts"] <= receiver["ts"] + receiver["dur"] + 0.1  # microseconds


def test_the_file_is_json_with_names_for_ranks_and_threads(tmp_path: Path) -> None:
    graph = StageGraph.build({"vision": [0], "language_model": [1, 1]}, [("vision", "language_model")], num_ranks=3)
    timeline = simulate(one_f_one_b(graph, graph.everything(2)), COSTS, transfer=0.001)
    path = tmp_path / "trace.json"
    timeline.write_trace(path)
    trace = json.loads(path.read_text())
    names = {
        (e["pid"], e["name"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if "name" in e.get("args", {})
    }
    assert names[0, "process_name", 0] == "rank 0: vision/0"
    assert names[1, "process_name", 0] == "rank 1: language_model/0, language_model/1"
    assert names[2, "process_name", 0] == "rank 2: idle"
    assert names[1, "thread_name", 0] == "compute" and names[1, "thread_name", 1] == "communication"
    forward = next(e for e in trace["traceEvents"] if e["name"] == "F:vision/0@1")
    assert forward["args"] == {"module": "vision", "stage": 0, "microbatch": 1}
    assert (forward["ts"], forward["dur"]) == (1000.0, 1000.0)
    counts = [e["args"]["in flight"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 0]
    assert counts == [1, 2, 1, 0]


def test_an_empty_timeline_has_a_trace_and_a_picture(tmp_path: Path) -> None:
    empty = Timeline.from_records([], num_ranks=1)
    empty.write_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    empty.plot(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")
