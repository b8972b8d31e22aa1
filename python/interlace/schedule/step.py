"""A graph and a table as the arrays that compiled code takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from interlace.schedule.graph import GraphArrays, Ints, StageGraph
from interlace.schedule.table import StepTable


class StepArrays(NamedTuple):
    """graph: see `GraphArrays`. chunk_pipeline: int32 [chunks], where each runs. links: int32 [m, 2], the table's."""

    graph: GraphArrays
    chunk_pipeline: Ints
    links: Ints


def step_arrays(graph: StageGraph, table: StepTable) -> StepArrays:
    """Raises ValueError for a chunk that no pipeline of the graph runs, and for one that reads what it cannot."""
    number = graph.pipeline_number
    try:
        pipelines = np.array([number[chunk.module, chunk.replica] for chunk in table.chunks], np.int32)
    except KeyError:
        chunk = next(c for c in table.chunks if (c.module, c.replica) not in number)
        replicas = {module: graph.layout.spec(module).dp for module in graph.modules}
        known = ", ".join(f"{module} has {count}" for module, count in replicas.items())
        raise ValueError(f"the step has {chunk}, which no pipeline of the layout runs; replicas: {known}") from None
    arrays = graph.arrays
    allowed = np.zeros((len(graph.modules), len(graph.modules)), bool)
    allowed[tuple(arrays.module_links.T)] = True
    modules = arrays.pipeline_module[pipelines[table.links]]
    wrong = ~allowed[modules[:, 0], modules[:, 1]]
    if wrong.any():
        producer, consumer = (table.chunks[i] for i in table.links[wrong.argmax()])
        raise ValueError(
            f"{consumer} reads {producer}, but the graph has no link ({producer.module!r}, {consumer.module!r})"
        )
    return StepArrays(arrays, pipelines, table.links)
