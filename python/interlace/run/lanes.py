"""Lanes of several ranks: which layouts run, how the stages of a lane are cut, and what connects its ranks.

Tensor parallelism, with sequence parallelism inside each stage: its rows are cut among the ranks before its first block
and joined after its last one, so that norms and residuals between the products work on 1 / tp of them. A language
model's embeddings and head are cut by their words where they are plain and make its logits; what else lies beside the
blocks that a plan cuts (a last norm, a projector) is whole on every rank, as are the rows there and those that travel
between stages.

Rows of any number are cut: all are there in every attention, no more and no fewer, so that masks, positions and labels
stay what they are (see `interlace.parallel.tensor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from interlace.attention.hf import current_plan
from interlace.model.rows import PACKED
from interlace.model.stage import StageModule
from interlace.parallel import Ranks, check_plan, tensor_parallel, used_in_part
from interlace.parallel.families import Unknown, around, derived_plan
from interlace.parallel.tensor import AROUND
from interlace.parallel.vocabulary import vocabulary_plan
from interlace.schedule import StageGraph


def with_lanes(graph: StageGraph, mllm: Any, *, sequence_parallel: bool) -> tuple[StageGraph, set[str]]:
    """The graph of a layout with what the ranks of its lanes sum besides, and the modules whose rows are cut.

    Raises ValueError for lanes that this version does not run, and for a module that its tp cannot cut. Every rank
    checks all modules: so all refuse what one of them could not hold, before any waits for another.
    """
    layout = graph.layout
    in_part: set[str] = set()
    rows: set[str] = set()
    for stage in layout.stages():
        if layout.spec(stage.module).cp > 1:
            raise ValueError(
                f"{stage} is split over ranks {stage.lane} with cp > 1, which this version plans but does not run: use "
                "tp, pp and dp"
            )
        for lane in stage.lanes:
            if list(lane.ranks) != sorted(lane.ranks):
                raise ValueError(f"{stage} is on ranks {lane}: name the ranks of a lane in ascending order")
    for name in layout.modules:
        tp = layout.spec(name).tp
        if tp > 1:
            whole = mllm.slice(name, 0, len(mllm.layer_list(name)))
            try:
                plan = plan_of(whole)
                check_plan(whole, plan, tp)
                if sequence_parallel and cuts_rows(mllm, name, plan):
                    rows.add(name)
                if used_in_part(whole, plan, sequence_parallel=name in rows):
                    in_part.add(name)
            except Unknown as error:
                raise ValueError(
                    f"{name} cannot be cut among tp = {tp} ranks: how is not known of {error}. Leave {name} at tp = 1 "
                    "and give it pp or dp"
                ) from error
            except ValueError as error:
                raise ValueError(
                    f"{name} cannot be cut among tp = {tp} ranks: {error}. Or leave {name} at tp = 1 and give it pp or "
                    "dp"
                ) from error
    return replace(graph, in_part=frozenset(in_part)), rows


def plan_of(stage: StageModule) -> dict[str, str]:
    """The plan of a stage. Raises Unknown where it cannot be derived from its blocks."""
    plan = derived_plan(stage)
    for path, part in stage.named_modules():
        if any(parameter is not None for parameter in part._parameters.values()):
            if not any(plan.get(outer, "layers") not in AROUND for outer in (path, *around(path))):
                plan[path] = "replicate"
    if not stage.is_encoder and stage.ends_with_head:
        plan |= vocabulary_plan(stage.language_model, "language_model")
    return plan


def cuts_rows(mllm: Any, name: str, plan: Mapping[str, str]) -> bool:
    """Whether the rows of module `name`, whose plan is `plan`, can be cut between the products of its blocks.

    Not where rows meet outside attention: in modules that take samples apart because of that (`mllm.packing`), and in
    those with a second list of blocks, whose rows may be others.
    """
    return mllm.packing[name] == PACKED and list(plan.values()).count("layers") == 1


def cut(stage: StageModule, ranks: Ranks, *, rows: bool) -> set[str]:
    """Cut the stage in place for this rank's place in its lane. rows: theirs too.

    Returns the names of the weights that a rank uses in part, whose gradients the lane sums once per step.
    """
    plan = plan_of(stage)
    in_part = used_in_part(stage, plan, sequence_parallel=rows)
    length = rows_of_plan if rows else None
    tensor_parallel(stage, plan, ranks, sequence_parallel=rows, length=length, sum_gradients=False)
    return in_part


def rows_of_plan() -> int:
    """The rows that blocks now take: every call of a stage has a plan, which is there again where it is recomputed."""
    plan, _ = current_plan()
    assert plan is not None
    return plan.q_len
