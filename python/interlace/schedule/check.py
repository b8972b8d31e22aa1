"""Schedule checker: proves that a schedule is complete, in order, free of deadlock and within memory.

The checker is csrc/schedule/checker/check.cpp, independent of all generators. This module makes its error messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace import _core
from interlace.schedule.actions import CODES, COMPUTE, Action, Op, action_of
from interlace.schedule.costs import ActivationBytes
from interlace.schedule.schedule import Schedule
from interlace.schedule.step import job_bytes, jobs_of, rank_limits, step_arrays


class ScheduleError(ValueError):
    """A schedule cannot run, or exceeds its memory. `rank` and `action`: place of the error (None: no single place)."""

    def __init__(self, message: str, rank: int | None = None, action: Action | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.action = action


@dataclass(frozen=True)
class CheckReport:
    """Statistics of a sound schedule.

    peak_in_flight: per rank, the most forwards whose backward has not run yet.
    peak_memory: per rank, the bytes that they hold, by the given activation_bytes (0 without).
    actions, messages: total counts.
    """

    peak_in_flight: tuple[int, ...]
    peak_memory: tuple[float, ...]
    actions: int
    messages: int


def check(
    schedule: Schedule,
    *,
    activation_bytes: ActivationBytes | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> CheckReport:
    """Raises ScheduleError with rank and action if the schedule is not sound.

    activation_bytes: (module, stage, chunk) or (module, stage) -> bytes that a chunk holds on a stage from its forward
        to its backward.
    memory_limit: most bytes of activations of a rank, one value or one per rank; needs activation_bytes.
    """
    graph, ranks = schedule.graph, schedule.graph.layout.world
    if len(schedule.first) - 1 != ranks:
        raise ScheduleError(
            f"the schedule has lists for {len(schedule.first) - 1} ranks, but its graph has {ranks} ranks"
        )
    if memory_limit is not None and activation_bytes is None:
        raise ValueError("memory_limit needs activation_bytes: bytes per (module, stage)")
    step = step_arrays(graph, schedule.table)
    sizes = np.zeros(0)
    if activation_bytes is not None:
        sizes = job_bytes(graph, schedule.table, jobs_of(step, schedule.backward), activation_bytes)
    limits = rank_limits(memory_limit, ranks)
    result = _core.schedule_check(
        *step, schedule.backward, schedule.reduce_grad, schedule.rows, schedule.first, sizes, limits, schedule.dispatch
    )
    if result["fault"] is not None:
        raise _error(schedule, result["fault"], limits, result["peak_memory"])
    messages = int(np.count_nonzero(schedule.rows[:, 0] == CODES[Op.SEND]))
    return CheckReport(tuple(result["peak_in_flight"]), tuple(result["peak_memory"]), len(schedule.rows), messages)


def _error(
    schedule: Schedule, fault: dict[str, Any], limits: NDArray[np.float64], peaks: Sequence[float]
) -> ScheduleError:
    modules, rank, kind = schedule.graph.modules, fault["rank"], fault["kind"]
    action, other = action_of(fault["row"], modules), action_of(fault["other"], modules)
    if kind == "extra":
        text = f"rank {rank} must not have {action}: {_reason_against(schedule, rank, action)}"
    elif kind == "deadlock":
        lines = "\n".join(f"  {_explain(schedule, fault['at'], *stuck)}" for stuck in fault["stuck"])
        text = f"deadlock: these ranks wait forever\n{lines}"
    elif kind == "memory":
        text = (
            f"rank {rank} holds {fault['bytes']:.0f} bytes ({fault['count']} forwards in flight) at {action}, over "
            f"its limit of {limits[rank]:.0f}; it would need {peaks[rank]:.0f}: use more stages, smaller "
            "microbatches or activation checkpointing"
        )
    else:
        source = f"{other.module}/{other.stage}, chunk {other.chunk}"
        words = {**fault, "action": action, "other": other, "lane": action.peer, "source": source}
        text = f"rank {rank} {_TEXTS[kind].format(**words)}"
    return ScheduleError(text, rank, action)


_TEXTS = {  # by kind of fault, after "rank ..."
    "times": "has {action} {count} times",
    "besides": "has both {action} and {other}, which contains it",
    "lacks": "lacks {action}",
    "half": "lacks {action}, the other half of {other}",
    "lane_order": "runs {action}, but rank {other_rank} of its lane runs {other}: the ranks of a lane must run its "
    "forwards and backwards in one order",
    "after_reduction": "runs {action} after the REDUCE_GRAD of its stage, {other}",
    "after_tied": "runs {action} after {other}: tied weights must be summed after all others",
    "reduction_order": "runs {action} before {other}, but other ranks after it: all ranks must sum and gather in one "
    "common order",
    "two_ways": "runs {action}, but rank {other_rank} runs {other}: either all ranks gather weights once, or all of "
    "them layer by layer",
    "meeting_order": "runs {action}, but rank {other_rank} does not: ranks that gather weights layer by layer must run "
    "equally many forwards and backwards with them in one order",
    "message_order": "expects {action}, but the next message from lane {lane} is {other}: receives must be in the "
    "order of the sends between two lanes",
    "send_forward": "runs {action} before the forward that produces it",
    "send_backward": "runs {action} before the backward of {source}",
    "no_forward": "runs {action} before its forward",
    "no_input_half": "runs {action} before its BACKWARD_INPUT",
    "no_output": "runs {action} before it has the output of {source}",
    "no_gradient": "runs {action} before it has the gradient from {source}",
    "no_unshard": "runs {action} before {other}, which gathers weights that it needs",
    "after_reshard": "runs {action} after {other}, which releases weights that it needs",
}


def _reason_against(schedule: Schedule, rank: int, action: Action) -> str:
    """Reason why an unexpected action is not needed."""
    graph, chunks = schedule.graph, schedule.table.chunks
    if action.op is Op.REDUCE_GRAD:
        return "the rank has no such reduction in this step"
    if action.op is Op.UNSHARD_LAYERS and 0 <= action.other < len(graph.shards):
        shard = graph.shards[action.other]
        if rank in shard.owners and not graph.by_layer(shard):
            return (
                "its ranks have such weights in other stages too, or they are not fully sharded, or its module may run "
                "a layer several times per chunk: gather them once"
            )
    if action.op in (Op.UNSHARD, Op.UNSHARD_LAYERS, Op.RESHARD):
        return "the rank has no shard of such weights in this step"
    if action.op is Op.DISPATCH:
        if not schedule.dispatch:
            return "the schedule was made without dispatch, which only steps of streams have"
        return "the DISPATCH of a rank is labelled with its first stage"
    if action.op not in COMPUTE | {Op.SEND, Op.RECV}:
        return f"this version does not support {action.op.name}"
    if not 0 <= action.stage < len(graph.layout.pipelines(action.module)[0].stages):
        return f"its graph has no stage {action.module}/{action.stage}"
    if not 0 <= action.chunk < len(chunks):
        return f"the step has chunks 0 to {len(chunks) - 1}"
    chunk = chunks[action.chunk]
    if chunk.module != action.module:
        return f"chunk {action.chunk} is of {chunk.module}"
    if action.op not in COMPUTE:
        return "no stage needs that message"
    stage = graph.pipelines[graph.pipeline_number[chunk.module, chunk.replica]].stages[action.stage]
    if rank not in stage.ranks:
        ranks = ", ".join(map(str, stage.ranks))
        return f"{stage} of replica {chunk.replica} is on {'ranks' if ', ' in ranks else 'rank'} {ranks}"
    if action.op is Op.FORWARD:
        return "a forward has no other chunk, peer or gradient"
    return f"{stage} has no backward for this chunk on that rank"


def _explain(schedule: Schedule, positions: Sequence[int], rank: int, waits_for: int) -> str:
    action = schedule.actions[rank][positions[rank]]
    awaited = f"rank {waits_for}"
    if action.op is Op.RECV and len(schedule.graph.layout.lanes()[action.peer].ranks) > 1:
        awaited += f" of lane {action.peer}"
    if positions[waits_for] == len(schedule.actions[waits_for]):
        state = "which has finished its list"
    else:
        state = f"which is at {schedule.actions[waits_for][positions[waits_for]]}"
    return f"rank {rank}: {action} (action {positions[rank]}) waits for {awaited}, {state}"
