"""One valid call of every compiled function of schedule/, which test_core.py repeats with hostile arguments."""

from collections.abc import Callable

import numpy as np

from interlace import _core
from interlace.schedule import Op, StageGraph, StepTable, compute_actions
from interlace.schedule.actions import CODES
from interlace.schedule.step import jobs_of as jobs_of_step
from interlace.schedule.step import step_arrays


def within(array: np.ndarray, low: int, high: int) -> bool:
    return array.dtype == np.int32 and bool(((array >= low) & (array < high)).all())


def jobs_of(found, graph, chunk_pipeline, *_) -> bool:
    nodes, chunks, runs = found
    fit = within(nodes, 0, len(graph[0])) and within(chunks, 0, len(chunk_pipeline))
    return fit and nodes.shape == chunks.shape == runs.shape


def listed(found, _, chunk_pipeline, *__) -> bool:
    rows, first = found
    fit = within(rows[:, 0], 0, len(Op)) and within(rows[:, 3], -1, len(chunk_pipeline))
    return fit and first[0] == 0 and first[-1] == len(rows) and bool((np.diff(first) >= 0).all())


def ordered(found, graph, chunk_pipeline, *_) -> bool:
    """Lists, or the index of a step and two steps."""
    if len(found) == 3:
        return all(type(value) is int and value >= 0 for value in found)
    return listed(found, graph, chunk_pipeline)


def checked(found, *arguments) -> bool:
    if found["fault"] is not None:
        return True
    peaks = found["peak_in_flight"], found["peak_memory"]
    return all(np.isfinite(peak).all() and len(peak) == len(arguments[6]) - 1 for peak in peaks)


def schedule_calls() -> dict[str, tuple[tuple, Callable[..., bool]]]:
    """Name -> (arguments, check of the result and them). An encoder has copies; its consumer has tied weights."""
    graph = StageGraph.build({"a": [(0, 1)], "b": [0, 1]}, [("a", "b")], tied=[(("b", 0), ("b", 1))], replicas=2)
    table = StepTable.aligned(graph.links, [{"b"}, {"a", "b"}], replicas=2)
    fields, *chunks = arrays = step_arrays(graph, table)
    step = list(fields), *chunks
    jobs = len(_core.schedule_jobs(*step, True)[0])
    nothing = np.zeros(0)
    lists = _core.schedule_lists(*step, 1, True, True, nothing, nothing, nothing, 0)
    limits = np.ones(jobs), np.full(len(lists[1]) - 1, 9.0)
    actions = compute_actions(graph, table)
    numbers = {key: job for job, key in enumerate(map(tuple, jobs_of_step(arrays, True).work.tolist()))}
    order = np.array(
        [
            4 * numbers[graph.modules.index(action.module), action.stage, action.chunk] + CODES[action.op]
            for action in actions
        ],
        np.int32,
    )
    return {
        "schedule_of_order": ((*step, order, True, True, False), ordered),
        "schedule_jobs": ((*step, True), jobs_of),
        "schedule_lists": ((*step, 6, True, True, np.ones(4 * jobs), *limits, 9), listed),
        "schedule_bound": ((*step, True, np.ones(4 * jobs)), lambda found, *_: 0.0 <= found < np.inf),
        "schedule_check": ((*step, True, True, *lists, *limits), checked),
    }
