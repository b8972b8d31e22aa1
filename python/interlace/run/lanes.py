"""Lanes of several ranks: supported layouts, the cut of a lane's stages, and the connections of its ranks.

A lane has tp * cp ranks, tensor-parallel ones innermost: place c * tp + t. The tp ranks of one c hold the same rows,
and a piece of each weight inside the blocks that are cut. The cp ranks of one t hold the same weights, and their
shares of the rows of a chunk (`interlace.parallel.context`).

With sequence parallelism the rows inside each stage are also cut among the tp ranks: split before its first block and
joined after its last one. So norms and residuals between the products work on 1 / tp of the rows. A language model's
embeddings and head are cut by vocabulary if they are plain and the head makes its logits. All other modules beside the
cut blocks (a last norm, a projector) are whole on every rank, as are the rows there and those sent between stages.

Any number of rows can be cut, without padding: every attention sees exactly all rows, so masks, positions and labels do
not change (see `interlace.parallel.tensor`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.nn.modules.dropout import _DropoutNd

from interlace.attention.hf import current_plan
from interlace.comm.transports import Transport
from interlace.layout import Lane, Layout, ParallelSpec
from interlace.model import MultimodalModel
from interlace.model.language import merge_tokens
from interlace.model.patterns import is_adapter
from interlace.model.probe.encoder import encoder_takes_any_order
from interlace.model.probe.language import language_takes_any_order
from interlace.model.rows import PACKED
from interlace.model.stages.attention_switch import NAMES
from interlace.model.stages.stage import StageModule
from interlace.parallel import Ranks, check_plan, tensor_parallel, used_in_part
from interlace.parallel.families import Unknown, ancestors, derived_styles
from interlace.parallel.tensor import CONTAINERS
from interlace.parallel.vocabulary import vocabulary_plan
from interlace.schedule import StageGraph


@dataclass(frozen=True)
class Place:
    """A rank's place in a lane of `ranks`: among all of them, and in its tensor- and its context-parallel group."""

    ranks: tuple[int, ...]
    lane: Ranks
    tp: Ranks
    cp: Ranks

    @classmethod
    def of(cls, number: int, lane: Lane, tp: int) -> Place:
        """The place of rank `number`; its groups are not connected yet."""
        size, (tensor, context) = len(lane.ranks), lane.indices(number, tp)
        everyone = Ranks.at(lane.ranks.index(number), size)
        return cls(lane.ranks, everyone, Ranks.at(tensor, tp), Ranks.at(context, size // tp))

    def connect(self, transports: Mapping[tuple[int, ...], Transport]) -> None:
        """Connect the ranks of each of its groups to the transport of that group."""
        lane, tp = Lane(self.ranks), self.tp.world
        groups = self.ranks, lane.tp_groups(tp)[self.cp.rank], lane.cp_groups(tp)[self.tp.rank]
        for ranks, group in zip((self.lane, self.tp, self.cp), groups, strict=True):
            if ranks.world > 1:
                ranks.connect(transports[group])


def groups_of(layout: Layout) -> list[tuple[int, ...]]:
    """The groups of ranks that communicate inside lanes, in the same order on every rank: see `Place`."""
    unique: dict[tuple[int, ...], None] = {}
    for stage in layout.stages():
        for lane in stage.lanes:
            tp = layout.spec(stage.module).tp
            groups = lane.ranks, *lane.tp_groups(tp), *lane.cp_groups(tp)
            unique.update(dict.fromkeys(group for group in groups if len(group) > 1))
    return list(unique)


def check_stages(mllm: MultimodalModel, layout: Layout) -> None:
    """Raises ValueError, as the ranks would, for a layout that cuts a module where this is not possible."""
    for module, start, stop in dict.fromkeys((stage.module, stage.start, stage.stop) for stage in layout.stages()):
        mllm.check_stage(module, start, stop)


def with_lanes(graph: StageGraph, mllm: MultimodalModel, *, sequence_parallel: bool) -> tuple[StageGraph, set[str]]:
    """The graph of a layout with the additional sums inside lanes, and the modules whose rows are cut.

    Raises ValueError for lanes that this version does not support, for a module that its tp or cp cannot cut, and for
    such a module with dropout in training. Every rank checks all modules. So all ranks raise the same error before any
    of them waits for another.
    """
    layout = graph.layout
    in_part: set[str] = set()
    rows: set[str] = set()
    for stage in layout.stages():
        for lane in stage.lanes:
            if list(lane.ranks) != sorted(lane.ranks):
                raise ValueError(f"{stage} is on ranks {lane}: name the ranks of a lane in ascending order")
    for name in layout.modules:
        tp, cp = layout.spec(name).tp, layout.spec(name).cp
        if tp * cp > 1 and (rate := _draws(mllm, name)):
            raise ValueError(
                f"{name} has dropout ({rate}), which tp = {tp} and cp = {cp} do not support: set it to 0, freeze the "
                f"part, or use tp = cp = 1 for {name}"
            )
        if cp > 1 and (reason := _not_dealt(mllm, name)):
            raise ValueError(
                f"{name} does not support cp = {cp}: {reason}. Use cp = 1 for {name}, and tp, pp or dp instead"
            )
        if tp > 1:
            whole = mllm.slice(name, 0, len(mllm.layer_list(name)))
            how = how_cut(mllm, name, whole, tp, sequence_parallel=sequence_parallel)
            if how.rows:
                rows.add(name)
            if how.in_part:
                in_part.add(name)
                _check_tied_in_part(graph, name, whole, how.in_part)
            if any(shard.module == name for shard in layout.shard_groups()):
                _check_shared_out(name, layout.spec(name), whole, how.in_part)
    return replace(graph, in_part=frozenset(in_part)), rows


def _check_tied_in_part(graph: StageGraph, name: str, whole: StageModule, in_part: set[str]) -> None:
    """Raises ValueError for a tied weight that ranks use in part, and that is on one lane in some replicas and on
    several in others: neither the sum over whole lanes nor the sum by place is right for its gradients."""
    if not any(module == name for number in graph.uneven for module, _ in graph.tied[number]):
        return
    aliases: dict[int, list[str]] = {}
    for key, parameter in whole.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(key)
    tied = [keys[0] for keys in aliases.values() if len(keys) > 1 and not in_part.isdisjoint(keys)]
    if tied:
        raise ValueError(
            f"the tied weight {tied[0]} is on one stage, or one rank, of some replicas and on several of others, and "
            f"the ranks of a lane of {name} each use a part of it: cut and place all replicas the same way, or set "
            "sequence_parallel to false"
        )


class HowCut(NamedTuple):
    """rows: whether the rows of a module are also cut. in_part: the names of the weights that a rank uses in part."""

    rows: bool
    in_part: set[str]


def how_cut(mllm: MultimodalModel, name: str, whole: StageModule, tp: int, *, sequence_parallel: bool) -> HowCut:
    """The cut of module `name` among `tp` > 1 ranks. whole: a stage with all its layers.

    Raises ValueError for a module that cannot be cut among this number of ranks.
    """
    try:
        if name in mllm.encoders and mllm.encoders[name].implementation not in NAMES:
            raise Unknown("its attention, which does not use HuggingFace's interface")
        styles = styles_of(whole)
        check_plan(whole, styles, tp)
        rows = sequence_parallel and cuts_rows(mllm, name, styles)
        return HowCut(rows, used_in_part(whole, styles, sequence_parallel=rows))
    except (Unknown, ValueError) as error:
        reason = f"no rule for {error}. Use" if isinstance(error, Unknown) else f"{error}. Or use"
        raise ValueError(
            f"{name} does not support tp = {tp}: {reason} tp = 1 for {name}, and pp or dp instead"
        ) from error


# Config settings that change inputs at random in training: masked frames, moved positions.
_DRAWN = ("mask_time_prob", "mask_feature_prob", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")


def _draws(mllm: MultimodalModel, name: str) -> str:
    """The part of module `name` that draws random numbers in its current mode, and its rate; empty if none is found."""
    whole = f"encoders.{name}" if name in mllm.encoders else name
    for path, part in mllm.get_submodule(whole).named_modules(prefix=whole):
        config = getattr(part, "config", None) if part.training else None
        for key in _DRAWN if getattr(config, "apply_spec_augment", True) else ():
            if getattr(config, key, None):
                return f"{path}.config has {key} = {getattr(config, key)}"
        for key, value in vars(part).items() if part.training else ():
            named = "drop" in key or "jitter" in key or (key == "p" and isinstance(part, _DropoutNd))
            if named and isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
                return f"{path} has {key} = {value}"
    return ""


def _check_shared_out(name: str, spec: ParallelSpec, whole: StageModule, in_part: Collection[str]) -> None:
    """Raises ValueError if a shard would leave large weights whole. Among weights used in part, only norms and adapters
    are small.

    Gradients of weights used in part are summed over whole lanes, so these weights are not sharded (see
    `interlace.run.execute.ranks`).
    """
    held = dict(whole.named_parameters(remove_duplicate=False))
    large = [key for key in sorted(in_part) if held[key].requires_grad and held[key].dim() > 1 and not is_adapter(key)]
    if large:
        raise ValueError(
            f"{name} has shard = {spec.shard!r}, but with sequence parallelism each of its tp = {spec.tp} ranks "
            f"applies all experts to its own rows, so expert weights ({large[0]} and {len(large) - 1} more) would stay "
            "unsharded on every rank: set sequence_parallel to false, freeze the experts, or use shard = 'none' or "
            "tp = 1"
        )


def _not_dealt(mllm: MultimodalModel, name: str) -> str:
    """The reason why the rows of a module's chunks cannot be distributed among ranks; empty if they can."""
    mixes = "a probe shows that its layers mix rows, or depend on row order, other than by attention and position ids"
    if name in mllm.encoders:
        encoder = mllm.encoders[name]
        return "" if encoder.packing == PACKED and encoder_takes_any_order(encoder) else mixes
    settings = mllm.language_settings
    if settings.merge is not merge_tokens or settings.preprocess is not None or settings.postprocess is not None:
        return "its callbacks (preprocess, postprocess) need whole chunks"
    if settings.packing != PACKED or not language_takes_any_order(mllm.language_model, settings):
        return mixes
    return ""


def styles_of(stage: StageModule) -> dict[str, str]:
    """Module path -> style of a stage for `tensor_parallel`. Raises Unknown if it cannot be derived from its blocks."""
    styles = derived_styles(stage)
    for path, part in stage.named_modules():
        if any(parameter is not None for parameter in part._parameters.values()):
            if not any(styles.get(outer, "layers") not in CONTAINERS for outer in (path, *ancestors(path))):
                styles[path] = "replicate"
    if not stage.is_encoder and stage.ends_with_head:
        styles |= vocabulary_plan(stage.language_model, "language_model")
    return styles


def cuts_rows(mllm: MultimodalModel, name: str, styles: Mapping[str, str]) -> bool:
    """True if sequence parallelism is possible: the rows of module `name`, with its weights cut by `styles`, can be cut
    between the products of its blocks.

    They cannot if rows interact outside attention. This concerns modules that process samples separately for this
    reason (`mllm.packing`), modules with a second list of blocks, whose rows may differ, and encoders that pass the
    positions of all rows to their layers.
    """
    takes_item_data = name in mllm.encoders and mllm.encoders[name].takes_item_data
    return mllm.packing[name] == PACKED and list(styles.values()).count("layers") == 1 and not takes_item_data


def cut(stage: StageModule, ranks: Ranks, *, rows: bool) -> set[str]:
    """Cut the stage in place for this rank's place in its lane. rows: cut its rows, too.

    Returns the names of the weights that a rank uses in part; the lane sums their gradients once per step.
    """
    styles = styles_of(stage)
    in_part = used_in_part(stage, styles, sequence_parallel=rows)
    length = rows_of_plan if rows else None
    tensor_parallel(stage, styles, ranks, sequence_parallel=rows, length=length, sum_gradients=False)
    return in_part


def rows_of_plan() -> int:
    """Rows of the current call of a stage: each call has an attention plan, which recomputation restores."""
    plan, _ = current_plan()
    assert plan is not None
    return plan.q_len
