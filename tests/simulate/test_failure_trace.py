"""Node traces: files round-trip, errors name the line, and spot traces keep their range."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.simulate.failure_trace import (
    SPOT,
    Change,
    TraceError,
    nodes_at_start,
    read_trace,
    spot_trace,
    trace_lines,
)
from tests.simulate.failure_trace import traces


@settings(max_examples=25)
@given(traces())
def test_what_is_written_is_read_again(changes):
    assert read_trace(trace_lines(changes), "x.csv") == changes


def test_columns_may_be_in_any_order_and_lines_may_be_comments():
    lines = ["# a cluster\n", "\n", "event, node, time\n", "fail, gpu-7, 3\n", "  # later\n", '"join","gpu-7","4.5"\n']
    assert read_trace(lines, "x.csv") == [Change(3.0, "gpu-7", "fail"), Change(4.5, "gpu-7", "join")]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "x.csv:1: no header"),
        (["1,a,fail"], "x.csv:1: the columns are 1,a,fail: they must be time,node,event"),
        (["time,node,event", "1,a"], "x.csv:2: 2 cells"),
        (["time,node,event", "", "soon,a,fail"], "x.csv:3: time 'soon'"),
        (["time,node,event", "-1,a,fail"], "x.csv:2: time '-1'"),
        (["time,node,event", "nan,a,fail"], "x.csv:2: time 'nan'"),
        (["time,node,event", ",a,fail"], "x.csv:2: no time"),
        (["time,node,event", "1,,fail"], "x.csv:2: no node"),
        (["time,node,event", "1,a,die"], "x.csv:2: event 'die': it must be fail or join"),
        (["time,node,event,warning", "1,a,fail,inf"], "x.csv:2: warning 'inf'"),
        (["time,node,event", "2,a,fail", "1,b,fail"], "x.csv:3: time 1 is before"),
        (
            ["time,node,event", "2,a,fail", "3,a,fail"],
            "x.csv:3: node 'a' has two fail events in a row (line 2): remove one, or add the join",
        ),
        (
            ["time,node,event", "2,a,join", "#", "3,a,join"],
            "x.csv:4: node 'a' has two join events in a row (line 2): remove one, or add the fail",
        ),
    ],
)
def test_errors_name_the_line(lines, said):
    with pytest.raises(TraceError) as error:
        read_trace(lines, "x.csv")
    assert said in str(error.value)


@settings(max_examples=25)
@given(traces(), st.integers(0, 8))
def test_who_is_there_at_the_start(changes, nodes):
    first: dict[str, str] = {}
    for change in changes:
        first.setdefault(change.node, change.event)
    failing = {node for node, event in first.items() if event == "fail"}
    if len(failing) > nodes:
        with pytest.raises(ValueError, match="are present at the start"):
            nodes_at_start(changes, nodes)
        return
    start = nodes_at_start(changes, nodes)
    assert len(start) == len(set(start)) == nodes and failing <= set(start)
    assert not any(first.get(node) == "join" for node in start)


def test_numbered_nodes_come_in_the_order_of_their_numbers():
    changes = [Change(1.0, name, "fail") for name in ("10", "b", "9", "a")]
    assert nodes_at_start(changes, 6) == ["0", "1", "9", "10", "a", "b"]


@pytest.mark.parametrize("cloud", list(SPOT))
def test_a_spot_trace_can_be_replayed_and_keeps_its_range(cloud):
    every, warning = SPOT[cloud]
    for seed in range(20):
        changes = spot_trace(24, every, 12, seed, warning=warning)
        assert changes == read_trace(trace_lines(changes), "x.csv")
        assert changes == spot_trace(24, every, 12, seed, warning=warning)
        there = 24
        for change in changes:
            there += 1 if change.event == "join" else -1
            assert 12 <= there <= 24 and 0 < change.time < 12 * 3600
            assert change.warning == (warning if change.event == "fail" else 0.0)
        assert len(nodes_at_start(changes, 24)) == 24


def test_a_spot_trace_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nodes is 1: it must be at least 2"):
        spot_trace(1, 60.0, 1, 0)
    with pytest.raises(ValueError, match="both must be above 0"):
        spot_trace(4, 60.0, 0.0, 0)
