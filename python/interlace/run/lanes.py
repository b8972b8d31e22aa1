"""Lanes of several ranks: which layouts run, how the stages of a lane are cut, and what connects its ranks.

Tensor parallelism without sequence parallelism: all ranks of a lane hold all rows. A language model's embeddings and
head are cut by their words where they are plain and make its logits; what else lies beside the blocks that a plan cuts
(norms, a projector) is whole on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from interlace.layout import Layout
from interlace.model.stage import StageModule
from interlace.parallel import Ranks, check_plan, tensor_parallel
from interlace.parallel.families import Unknown, around, derived_plan
from interlace.parallel.tensor import AROUND
from interlace.parallel.vocabulary import vocabulary_plan


def check_lanes(mllm: Any, layout: Layout) -> None:
    """Raises ValueError for lanes that this version does not run, and for a module that its tp cannot cut.

    Every rank checks all modules: so all refuse what one of them could not hold, before any waits for another.
    """
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
                check_plan(whole, plan_of(whole), tp)
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


def cut(stage: StageModule, ranks: Ranks) -> nn.Module:
    """The stage, cut in place for this rank's place in its lane."""
    return tensor_parallel(stage, plan_of(stage), ranks, sequence_parallel=False)
