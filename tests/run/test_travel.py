"""Vectorized timing of messages equals the definition, message by message, and the step is bitwise equal."""

from __future__ import annotations

import numpy as np
import pytest

from interlace.costs.links import Link, Links
from interlace.estimate.travel import message_seconds
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.parallel.route import pairs
from interlace.plan import LinkModel
from interlace.schedule import Chunk, Edge, Op, Schedule, StageGraph, StepTable, one_f_one_b
from tests.schedule.graphs import random_case


def one_by_one(schedule: Schedule, rows: list[float], links: Links, row_bytes: dict, read_bytes: list[float]) -> list:
    """The definition, one action at a time."""
    layout, chunks = schedule.graph.layout, schedule.table.chunks
    read: dict[tuple[int, int], int] = {}
    for edge in schedule.table.edges:
        for source, _, reader, _, count in edge.pieces.tolist():
            read[source, reader] = read.get((source, reader), 0) + count
    result = []
    for rank, actions in enumerate(schedule.actions):
        for a in (a for a in actions if a.op is Op.SEND):
            pipeline = layout.pipelines(a.module)[chunks[a.chunk].replica]
            if a.other == a.chunk:
                size = rows[a.chunk] * row_bytes[a.module][pipeline.stages[a.stage].stop]
                consumer = pipeline.stages[a.stage + 1]
            else:
                size = read[a.chunk, a.other] * read_bytes[a.chunk]
                reader = chunks[a.other]
                consumer = layout.pipelines(reader.module)[reader.replica].stages[0]
            own = (consumer if a.grad else pipeline.stages[a.stage]).lane_of(rank).ranks
            peer = layout.lanes()[a.peer].ranks
            met = pairs(len(own), len(peer))
            mine = [peer[r] for s, r in met if own[s] == rank]
            result.append(max(links.message(size / len(met), rank, target) for target in mine))
    return result


def link(rng: np.random.Generator) -> Link:
    return Link(LinkModel(*rng.random(2).tolist()))


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_steps(first: int) -> None:
    """Merged, shared, copied and unequal lanes; some hosts listed, some by their number of ranks."""
    messages = 0
    for seed in range(first, first + 50):
        rng = np.random.default_rng(seed)
        case = random_case(seed)
        layout = case.graph.layout
        try:
            schedule = one_f_one_b(case.graph, case.table)
        except ValueError:
            continue
        rows = rng.integers(0, 9, len(case.table.chunks)).astype(float).tolist()
        row_bytes = {n: rng.random(1 + layout.pipelines(n)[0].num_layers).tolist() for n in layout.modules}
        read_bytes = rng.random(len(rows)).tolist()
        hosts = tuple(rng.integers(0, 3, layout.world).tolist()) if seed % 2 else ()
        links = Links(
            link(rng), link(rng), link(rng), ranks_per_process=seed % 3 + 1, ranks_per_host=seed % 4 + 1, hosts=hosts
        )
        result = message_seconds(schedule, rows, links, row_bytes, read_bytes)
        assert result.tolist() == one_by_one(schedule, rows, links, row_bytes, read_bytes), seed
        messages += len(result)
    assert messages > 100


def test_by_hand() -> None:
    """A lane of two ranks sends 6 rows of 10 bytes to one of four on the next host: four parts of 15 bytes."""
    stages = (Stage("m", 0, 0, 1, Lane((0, 1))), Stage("m", 1, 1, 2, Lane((4, 5, 6, 7))))
    with pytest.raises(ValueError, match="need lanes of 2"):
        Layout({"m": (ParallelSpec(tp=2, pp=2), (Pipeline("m", 0, stages),))}, 8)
    a = (Pipeline("a", 0, (Stage("a", 0, 0, 1, Lane((0, 1))),)),)
    b = (Pipeline("b", 0, (Stage("b", 0, 0, 1, Lane((2, 3, 4, 5))),)),)
    layout = Layout({"a": (ParallelSpec(tp=2), a), "b": (ParallelSpec(tp=4), b)}, 6)
    graph = StageGraph(layout, (("a", "b"),), {"a": (True,), "b": (True,)})
    pieces = np.array([[0, 0, 1, 0, 6]], np.int32)
    chunks = (Chunk("a", 0, 0, np.zeros(1, np.int32)), Chunk("b", 0, 0, np.zeros(1, np.int32)))
    schedule = one_f_one_b(graph, StepTable(chunks, (Edge("a", "b", "embeds", pieces),)))
    slow, fast = Link(LinkModel(1.0, 1.0)), Link(LinkModel(0.5, 0.1))
    links = Links(host=fast, network=slow, ranks_per_host=4)
    result = message_seconds(schedule, [6.0, 6.0], links, {"a": [10.0] * 2, "b": [10.0] * 2}, [10.0, 10.0])
    # Rows 0..2 go to ranks 2 and 3 on this host, 3..5 to 4 and 5 on the next; gradients return on the same routes.
    assert result.tolist() == [2.0, 16.0, 2.0, 2.0, 16.0, 16.0]
