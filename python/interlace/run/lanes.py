"""Lanes of several ranks: which layouts run, how the stages of a lane are cut, and what connects its ranks.

A lane has tp * cp ranks, tensor-parallel ones innermost: place c * tp + t. The tp ranks of one c hold the same rows and
a piece of each weight inside the blocks that a plan cuts (without sequence parallelism: all of their rows); what lies
beside these blocks (embeddings, projector, head) is whole on every rank. The cp ranks of one t hold the same weights,
and of the rows of a chunk the shares of `interlace.parallel.context`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from interlace.comm.transports import Transport
from interlace.layout import Layout
from interlace.model.language import merge_tokens
from interlace.model.rows import PACKED
from interlace.model.stage import StageModule
from interlace.model.trial_encoder import encoder_takes_any_order
from interlace.model.trial_language import language_takes_any_order
from interlace.parallel import Ranks, check_plan, tensor_parallel
from interlace.parallel.families import Unknown, around, derived_plan
from interlace.parallel.tensor import AROUND


@dataclass(frozen=True)
class Place:
    """A rank's place in a lane of `ranks`: among all of them, and in its tensor- and its context-parallel group."""

    ranks: tuple[int, ...]
    lane: Ranks
    tp: Ranks
    cp: Ranks

    @classmethod
    def of(cls, number: int, ranks: Sequence[int], tp: int) -> Place:
        """That of rank `number`; its groups are not connected yet."""
        place, cp = ranks.index(number), len(ranks) // tp
        return cls(tuple(ranks), Ranks.at(place, tp * cp), Ranks.at(place % tp, tp), Ranks.at(place // tp, cp))

    def connect(self, transports: Mapping[tuple[int, ...], Transport]) -> None:
        """Have the ranks of each of its groups speak over the transport of that group."""
        t, c, tp = self.tp.rank, self.cp.rank, self.tp.world
        groups = self.ranks, self.ranks[c * tp : (c + 1) * tp], self.ranks[t::tp]
        for ranks, group in zip((self.lane, self.tp, self.cp), groups, strict=True):
            if ranks.world > 1:
                ranks.connect(transports[group])


def groups_of(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks that speak with each other inside lanes, in an order that is the same everywhere: see `Place`."""
    found: dict[tuple[int, ...], None] = {}
    for stage in layout.stages():
        tp, cp = layout.spec(stage.module).tp, layout.spec(stage.module).cp
        for lane in stage.lanes:
            ranks = lane.ranks
            groups = [ranks, *(ranks[c * tp : (c + 1) * tp] for c in range(cp)), *(ranks[t::tp] for t in range(tp))]
            found.update(dict.fromkeys(group for group in groups if len(group) > 1))
    return list(found)


def check_lanes(mllm: Any, layout: Layout) -> None:
    """Raises ValueError for lanes that this version does not run, and for a module that its tp or cp cannot cut.

    Every rank checks all modules: so all refuse what one of them could not hold, before any waits for another.
    """
    for stage in layout.stages():
        for lane in stage.lanes:
            if list(lane.ranks) != sorted(lane.ranks):
                raise ValueError(f"{stage} is on ranks {lane}: name the ranks of a lane in ascending order")
    for name in layout.modules:
        tp, cp = layout.spec(name).tp, layout.spec(name).cp
        if cp > 1 and (reason := _not_dealt(mllm, name)):
            raise ValueError(
                f"{name} cannot be dealt among cp = {cp} ranks: {reason}. Leave {name} at cp = 1 and give it tp, pp or "
                "dp"
            )
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


def _not_dealt(mllm: Any, name: str) -> str:
    """Why the rows of a module's chunks cannot be dealt among ranks; empty where they can."""
    mixes = "its layers mix rows, or know their places, otherwise than by attention and position ids, as a trial shows"
    if name in mllm.encoders:
        encoder = mllm.encoders[name]
        return "" if encoder.packing == PACKED and encoder_takes_any_order(encoder) else mixes
    settings = mllm.language_settings
    if settings.merge is not merge_tokens or settings.preprocess is not None or settings.postprocess is not None:
        return "its callbacks (preprocess, postprocess) expect whole chunks"
    if settings.packing != PACKED or not language_takes_any_order(mllm.language_model, settings, mllm.max_length):
        return mixes
    return ""


def plan_of(stage: StageModule) -> dict[str, str]:
    """The plan of a stage. Raises Unknown where it cannot be derived from its blocks."""
    plan = derived_plan(stage)
    for path, part in stage.named_modules():
        if any(parameter is not None for parameter in part._parameters.values()):
            if not any(plan.get(outer, "layers") not in AROUND for outer in (path, *around(path))):
                plan[path] = "replicate"
    return plan


def cut(stage: StageModule, ranks: Ranks) -> nn.Module:
    """The stage, cut in place for this rank's place among its tensor-parallel ranks."""
    return tensor_parallel(stage, plan_of(stage), ranks, sequence_parallel=False)
