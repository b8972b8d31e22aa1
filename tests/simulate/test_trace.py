"""The trace file: valid, complete, and with arrows that point forward in time."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.schedule import Op, StageGraph, StepTable, one_f_one_b
from interlace.schedule.actions import COMPUTE
from interlace.simulate import simulate
from interlace.simulate.trace import COMMUNICATION_THREAD, COMPUTE_THREAD, REDUCE_THREAD, trace_events
from tests.simulate.cases import lanes_graph, random_schedule
from tests.simulate.timelines import timeline_of

COSTS = dict.fromkeys(COMPUTE, 0.001)
LLM = "language_model"


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.0005]))
def test_the_trace_is_sound(seed: int, transfer: float) -> None:
    schedule = random_schedule(np.random.default_rng(seed))
    timeline = simulate(schedule, COSTS, transfer=transfer, reduce_grad=0.0005)
    events = list(trace_events(timeline))
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted((e["pid"], e["name"]) for e in slices) == sorted((r.rank, str(r.action)) for r in timeline.records())
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in slices:
        assert event["dur"] >= 0 and event["ts"] >= 0
        assert {"module", "stage"} <= set(event["args"])
        by_thread[event["pid"], event["tid"]].append(event)
    for (_, thread), members in by_thread.items():
        for event in members:
            name = event["name"]
            assert (thread >= REDUCE_THREAD) == name.startswith("REDUCE_GRAD") == ("reduction" in event["args"])
            assert (thread == COMMUNICATION_THREAD) == name.startswith(("SEND", "RECV")) == ("lane" in event["args"])
            assert (thread == COMPUTE_THREAD) == (name[:2] in ("F:", "B:", "I:", "W:"))
        for first, second in pairwise(members):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-6  # microseconds
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert by_thread.keys() <= named

    # Arrows follow the slice they are bound to, and their moments lie within that slice alone.
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    holder: dict[str, Any] = {}
    for event in events:
        if event["ph"] == "X":
            holder = event
        elif event["ph"] in ends:
            assert (holder["pid"], holder["tid"]) == (event["pid"], event["tid"])
            assert holder["ts"] <= event["ts"] < holder["ts"] + holder["dur"]
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = holder
    assert ends["s"].keys() == ends["f"].keys()
    lanes = schedule.graph.layout.lanes()
    for number, sender in ends["s"].items():
        receiver = ends["f"][number]
        assert sender["name"].startswith("SEND") and receiver["name"].startswith("RECV")
        assert receiver["pid"] in lanes[sender["args"]["lane"]].ranks
        assert sender["pid"] in lanes[receiver["args"]["lane"]].ranks
        same = ("module", "stage", "chunk", "other")
        assert [sender["args"].get(key) for key in same] == [receiver["args"].get(key) for key in same]
        assert sender["ts"] <= receiver["ts"] + receiver["dur"] + 0.1  # microseconds
    # Every SEND and every RECV has one.
    for phase, op in (("s", Op.SEND), ("f", Op.RECV)):
        result = {(event["pid"], event["name"]) for event in ends[phase].values()}
        assert result == {(r.rank, str(r.action)) for r in timeline.records() if r.action.op is op}


def test_the_file_is_json_with_names_for_ranks_and_threads(tmp_path: Path) -> None:
    graph = lanes_graph({"vision": [(0,)], LLM: [(1,), (1,)]}, 2)
    schedule = one_f_one_b(graph, StepTable.aligned(graph.links, [graph.modules] * 2))
    simulated = simulate(schedule, {Op.FORWARD: 0.001, Op.BACKWARD: 0.002}, transfer=0.001)
    timeline = timeline_of(simulated.records(), ranks=3, table=schedule.table)
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
    forward = next(e for e in trace["traceEvents"] if e["name"] == "F:vision/0@2")
    assert forward["args"] == {"module": "vision", "stage": 0, "chunk": 2, "microbatch": 1, "samples": [1]}
    assert (forward["ts"], forward["dur"]) == (1000.0, 1000.0)
    counts = [e["args"]["in flight"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 0]
    assert counts == [1, 2, 1, 0]


def test_reductions_that_overlap_have_threads_of_their_own() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [0]}, [("vision", LLM)], replicas=2)
    schedule = one_f_one_b(graph, StepTable.aligned(graph.links, [graph.modules], replicas=2))
    events = list(trace_events(simulate(schedule, COSTS, reduce_grad=0.01)))
    threads = [e["tid"] for e in events if e["name"].startswith("REDUCE_GRAD") and e["pid"] == 0]
    assert threads == [REDUCE_THREAD, REDUCE_THREAD + 1]


def test_an_empty_timeline_has_a_trace_and_a_picture(tmp_path: Path) -> None:
    empty = timeline_of([], ranks=1)
    empty.write_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    empty.plot(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")
