"""Exchange of the next step's items in simulated time: overlaps with compute, never shorter than its slowest rank."""

from __future__ import annotations

import numpy as np
import pytest

from interlace.costs.links import Link, LinkModel, Links
from interlace.estimate.predict import dispatch_seconds
from interlace.schedule import Op, StageGraph, StepTable
from interlace.schedule.generate import make
from interlace.simulate import simulate
from interlace.simulate.trace import REDUCE_THREAD, trace_events
from tests.simulate.reference import simulate_in_python

LLM = "language_model"
COSTS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}


def schedule(dispatch: bool = True):
    graph = StageGraph.build({"vision": [0], LLM: [1, 2]}, [("vision", LLM)], replicas=2)
    return make("1f1b", graph, StepTable.aligned(graph.links, [graph.modules] * 3, replicas=2), dispatch=dispatch)


@pytest.mark.parametrize("seconds", [0.0, 2.5, 100.0])
def test_it_lasts_beside_the_computing(seconds: float) -> None:
    made, plain = schedule(), simulate(schedule(False), COSTS)
    result = simulate(made, COSTS, dispatch=seconds)
    assert result.makespan == max(plain.makespan, seconds)
    for rank in range(made.graph.layout.world):
        assert (result.start[rank][0], result.finish[rank][0]) == (0.0, seconds)
        assert result.start[rank][1:] == plain.start[rank] and result.finish[rank][1:] == plain.finish[rank]


def test_the_slowest_rank_counts_and_the_oracle_agrees() -> None:
    made = schedule()
    ranks = {id(actions[0]): rank for rank, actions in enumerate(made.actions)}

    def seconds(action) -> float:
        return 3.0 + ranks[id(action)]

    for reduce_grad in (0.0, 1.5):
        result = simulate(made, COSTS, reduce_grad=reduce_grad, transfer=0.25, dispatch=seconds)
        other = simulate_in_python(made, COSTS, reduce_grad=reduce_grad, transfer=0.25, dispatch=seconds)
        assert result.start == other.start and result.finish == other.finish
        assert {times[0] for times in result.finish} == {3.0 + made.graph.layout.world - 1}


def test_seconds_follow_from_bytes_and_links() -> None:
    link = Link(LinkModel(1e-3, 1e-6), LinkModel(0.0, 0.0))
    links = Links(link, link, link)
    volume = np.array([[0, 1000, 0], [0, 0, 500], [4000, 0, 0]], float)
    # Rank 0 sends 1 ms + 1 ms and receives 1 + 4 ms; rank 1 receives 2 ms and sends 1.5; rank 2 sends 5 ms.
    assert dispatch_seconds(volume, links) == pytest.approx([5e-3, 2e-3, 5e-3])
    assert dispatch_seconds(np.zeros((2, 2)), links) == [0.0, 0.0]


def test_the_trace_shows_it_beside_the_ranks_work() -> None:
    events = list(trace_events(simulate(schedule(), COSTS, dispatch=4.0)))
    result = [event for event in events if event.get("cat") == "dispatch"]
    assert len(result) == 6 and {event["tid"] for event in result} == {REDUCE_THREAD}
    assert {event["dur"] for event in result} == {4e6}
