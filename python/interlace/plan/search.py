"""Which degrees, which placement, which cuts: the search for a whole configuration.

Entrain's algorithm 3 (dissertation 4.4.3) and Cornstarch's algorithm 1 (cornstarch-2025-11 section 4.1) in one: every
module has its options (TP, CP, PP, recomputation), cut at the exact bottleneck, and the best combination under a number
of GPUs is found for encoders in parallel and colocated.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from interlace.plan.cost_model import Degrees, LinkModel
from interlace.plan.parallel_plan import LANGUAGE_MODEL, ParallelPlan, ParallelSpec, StagePlan
from interlace.plan.partitioning import partition
from interlace.plan.stable_batch import proportional_allocation

Floats = NDArray[np.float64]
FREE = LinkModel()


@dataclass(frozen=True)
class SearchModule:
    """What one module costs for one microbatch, float64 [layers] each.

    forward, backward: (tp, cp) -> seconds with tensor and context communication in them (`CostModel.layers`,
        `frozen_costs`; a layer without a backward has 0). These keys are the degrees that are tried.
    weight_bytes: parameters, on every tensor-parallel group whole; gradient_bytes: of trainable parameters;
        optimizer_bytes: sharded over dp * cp (ZeRO-1).
    activation_bytes: kept from forward to backward; with recomputation only input_bytes are.
    input_bytes: the hidden state before the layer, also what travels where a stage begins.
    """

    forward: Mapping[Degrees, Floats]
    backward: Mapping[Degrees, Floats]
    weight_bytes: Floats
    gradient_bytes: Floats
    optimizer_bytes: Floats
    activation_bytes: Floats
    input_bytes: Floats


@dataclass(frozen=True)
class Configuration:
    """plan: stages and ranks of a replica (tp * cp ranks per stage). iteration_time in seconds, throughput in samples
    per second. specs and recompute per module; peak_bytes: the fullest GPU of each module."""

    plan: ParallelPlan
    specs: dict[str, ParallelSpec]
    recompute: dict[str, bool]
    peak_bytes: dict[str, float]
    microbatches: int
    iteration_time: float
    throughput: float


@dataclass(frozen=True)
class _Option:
    """One way to run a group of modules: all cut into pp stages under one (tp, cp)."""

    tp: int
    cp: int
    pp: int
    recompute: bool
    cuts: dict[str, NDArray[np.int32]]
    slowest: float
    fill: float  # all stages once, and the transfers between them, forward and backward
    sync: float  # all-reduce of the stage with most gradients
    fixed: Floats  # bytes per stage
    kept: Floats  # bytes per stage and microbatch in flight
    entry: float  # bytes that enter each of its ranks, for transfers from outside

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp

    def peak(self, downstream: int, microbatches: int) -> float:
        """Bytes of the fullest GPU. Stage i holds as many microbatches as there are stages from it to the sink."""
        return float((self.fixed + self.kept * in_flight(self.pp, downstream, microbatches)).max())


def in_flight(stages: int, downstream: int, microbatches: int) -> Floats:
    """Microbatches that each stage of a module keeps under 1F1B, float64 [stages]; `downstream` stages follow it.

    The longest path from the stage to the sink, as in `StageGraph.in_flight_caps`, and never more than there are.
    """
    return np.minimum(np.arange(stages, 0, -1) + downstream, microbatches).astype(np.float64)


def search_configuration(
    modules: Mapping[str, SearchModule],
    gpus: int,
    batch: int,
    microbatch: int,
    *,
    language_model: str = LANGUAGE_MODEL,
    gpu_memory: float = np.inf,
    stage_link: LinkModel = FREE,
    data_link: LinkModel = FREE,
    dp: Sequence[int] | None = None,
    placements: Sequence[Literal["parallel", "colocated"]] = ("parallel", "colocated"),
    allocation: Literal["any", "proportional"] = "any",
    recompute: Sequence[bool] = (False, True),
) -> Configuration:
    """The configuration with the highest throughput under this cost, over all options:

        T = sum of the stages on the longest path + transfers between them + (K - 1) * the slowest stage   (eq. 4.2)
            + K * resharding where an encoder's (tp, cp) is not the language model's + the slowest gradient all-reduce

    with K = batch / (dp * microbatch). Transfers between stages count once per microbatch on the path, forward and
    backward; in the steady phase they overlap. Parallel encoders run side by side, so the longest of them counts (the
    printed sum over components is that of a chain); colocated ones are cut alike and add up stage by stage. Every
    module is cut at its exact bottleneck. A stage needs weights + gradients + optimizer state + activations of all
    microbatches that the stage graph keeps in flight there (`in_flight`).

    Complexity: options per module squared for each option of the language model that its own bound does not rule out.

    Args:
        modules: name -> SearchModule; all but `language_model` are its encoders.
        gpus: GPUs in all; replicas may leave some idle. batch, microbatch: samples.
        gpu_memory: bytes. stage_link, data_link: between stages, and between replicas.
        dp: data-parallel degrees to try (default: all that divide batch / microbatch).
        placements: of encoders (cornstarch-2025-11 section 4.1).
        allocation: "proportional" gives each module the share of its work, rounded (algorithm 3, line 4), instead of
            trying every split.
        recompute: whether activations are recomputed, per module; the values to try.

    Raises:
        ValueError: bad input, or nothing fits.
    """
    gpus, batch, microbatch = operator.index(gpus), operator.index(batch), operator.index(microbatch)
    if language_model not in modules:
        raise ValueError(f"no module {language_model!r} among {', '.join(map(repr, modules)) or 'none'}")
    if gpus < 1 or microbatch < 1 or batch < 1 or batch % microbatch:
        raise ValueError(
            f"batch {batch} must be a multiple of microbatch {microbatch}, both and gpus ({gpus}) positive"
        )
    _check(modules)
    encoders = [name for name in modules if name != language_model]
    groupings = {"parallel": [[name] for name in encoders], "colocated": [encoders] if encoders else []}
    per_dp = [d for d in (dp or range(1, gpus + 1)) if batch % (d * microbatch) == 0 and d <= gpus]
    best: tuple[float, int, str, list[tuple[list[str], _Option]]] | None = None
    for degree in per_dp:
        count = batch // (degree * microbatch)
        budget = gpus // degree
        for placement in placements:
            if placement == "colocated" and len(encoders) < 2 and "parallel" in placements:
                continue  # one encoder is placed alike either way
            groups = [*groupings[placement], [language_model]]
            shares = _shares(modules, groups, budget) if allocation == "proportional" else [None] * len(groups)
            if shares is None:
                continue
            options = [
                _options(
                    [modules[name] for name in group], group, budget, share, degree, recompute, stage_link, data_link
                )
                for group, share in zip(groups, shares, strict=True)
            ]
            # Every degree runs the same global batch, so the least time is the highest throughput.
            limit = np.inf if best is None else best[0]
            found = _combine(options, budget, count, gpu_memory, stage_link, limit)
            if found is not None:
                best = (found[0], degree, placement, list(zip(groups, found[1], strict=True)))
    if best is None:
        raise ValueError(
            f"no configuration fits {gpus} GPUs of {gpu_memory:.3g} bytes: allow other degrees or more GPUs"
        )
    return _configuration(modules, language_model, best, batch, microbatch)


def _check(modules: Mapping[str, SearchModule]) -> None:
    for name, module in modules.items():
        layers = len(module.weight_bytes)
        if not module.forward or set(module.forward) != set(module.backward):
            raise ValueError(f"{name}: forward and backward need the same (tp, cp), one at least")
        rows = {f"forward{list(key)}": row for key, row in module.forward.items()}
        rows |= {f"backward{list(key)}": row for key, row in module.backward.items()}
        names = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "input_bytes")
        rows |= {key: getattr(module, key) for key in names}
        for key, row in rows.items():
            values = np.asarray(row, dtype=np.float64)
            if values.shape != (layers,) or not layers:
                raise ValueError(f"{name}: {key} must have shape ({max(layers, 1)},), got {values.shape}")
            bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
            if len(bad):
                raise ValueError(f"{name}: {key}[{bad[0]}] is {values[bad[0]]}: values must be finite and >= 0")


def _shares(modules: Mapping[str, SearchModule], groups: list[list[str]], budget: int) -> list[int | None] | None:
    if budget < len(groups):
        return None
    work = []
    for group in groups:
        least = [min(modules[name].forward) for name in group]
        work.append(
            sum(
                float((modules[n].forward[k] + modules[n].backward[k]).sum()) for n, k in zip(group, least, strict=True)
            )
        )
    return [int(share) for share in proportional_allocation(budget, work)]


def _options(
    modules: Sequence[SearchModule],
    names: Sequence[str],
    budget: int,
    share: int | None,
    dp: int,
    recompute: Sequence[bool],
    stage_link: LinkModel,
    data_link: LinkModel,
) -> list[_Option]:
    found = []
    for tp, cp in sorted(set.intersection(*(set(module.forward) for module in modules))):
        deepest = min(budget // (tp * cp), *(len(module.weight_bytes) for module in modules))
        for pp in range(1, deepest + 1):
            if share is not None and tp * cp * pp != share:
                continue
            for again in recompute:
                found.append(_option(modules, names, tp, cp, pp, again, dp, stage_link, data_link))
    return found


def _option(
    modules: Sequence[SearchModule],
    names: Sequence[str],
    tp: int,
    cp: int,
    pp: int,
    again: bool,
    dp: int,
    stage_link: LinkModel,
    data_link: LinkModel,
) -> _Option:
    seconds, fixed, kept, gradients, moved = (np.zeros(pp) for _ in range(5))
    cuts = {}
    entry = 0.0
    for name, module in zip(names, modules, strict=True):
        forward, backward = np.asarray(module.forward[tp, cp]), np.asarray(module.backward[tp, cp])
        times = forward + backward + (np.where(backward > 0, forward, 0.0) if again else 0.0)
        bounds = partition(times, pp)
        cuts[name] = bounds
        starts = bounds[:-1]

        def stages(row: Floats, starts: NDArray[np.int32] = starts) -> Floats:
            return np.asarray(np.add.reduceat(np.asarray(row, dtype=np.float64), starts))

        seconds += stages(times)
        fixed += stages(module.weight_bytes + module.gradient_bytes + module.optimizer_bytes / (dp * cp)) / tp
        # A layer without a backward keeps nothing; one that is recomputed keeps its input.
        held = np.where(backward > 0, module.input_bytes if again else module.activation_bytes, 0.0)
        kept += stages(held) / (tp * cp)
        gradients += stages(module.gradient_bytes) / tp
        moved += np.asarray(module.input_bytes, dtype=np.float64)[starts] / (tp * cp)
        entry += float(module.input_bytes[0]) / (tp * cp)
    travel = 2 * sum(stage_link.transfer(size) for size in moved[1:])
    sync = data_link.all_reduce(float(gradients.max()), dp * cp)
    return _Option(
        tp, cp, pp, again, cuts, float(seconds.max()), float(seconds.sum()) + travel, sync, fixed, kept, entry
    )


def _combine(
    options: list[list[_Option]], budget: int, count: int, memory: float, link: LinkModel, limit: float
) -> tuple[float, list[_Option]] | None:
    """The best choice of one option per group, the language model's last, if it takes less time than `limit`."""
    *encoders, backbone = options
    best: tuple[float, list[_Option]] | None = None
    order = sorted(range(len(backbone)), key=lambda i: (_alone(backbone[i], count), i))
    for position in order:
        last = backbone[position]
        if _alone(last, count) >= limit:
            break
        if last.gpus + len(encoders) > budget or last.peak(0, count) > memory:
            continue
        # Rows of (GPUs, fill, slowest stage, all-reduce, reshard), one per choice for the encoders so far.
        rows = np.array([[0.0, 0.0, 0.0, 0.0, 0.0]])
        picks: list[tuple[_Option, ...]] = [()]
        for group in encoders:
            usable = [o for o in group if o.gpus + last.gpus <= budget and o.peak(last.pp, count) <= memory]
            if not usable:
                break
            own = np.array(
                [[o.gpus, _toward(o, last, link), o.slowest, o.sync, _reshard(o, last, link)] for o in usable]
            )
            joined = np.empty((len(rows), len(own), 5))
            joined[..., 0] = rows[:, None, 0] + own[None, :, 0]
            joined[..., 1:] = np.maximum(rows[:, None, 1:], own[None, :, 1:])
            joined[..., 4] = rows[:, None, 4] + own[None, :, 4]
            flat = joined.reshape(-1, 5)
            keep = _undominated(flat, budget - last.gpus)
            rows = flat[keep]
            picks = [(*picks[k // len(own)], usable[k % len(own)]) for k in keep]
        else:
            if not len(rows):
                continue
            times = (
                last.fill
                + rows[:, 1]
                + (count - 1) * np.maximum(rows[:, 2], last.slowest)
                + count * rows[:, 4]
                + np.maximum(rows[:, 3], last.sync)
            )
            k = int(np.argmin(times))
            if times[k] < limit:
                limit = float(times[k])
                best = (limit, [*picks[k], last])
    return best


def _alone(option: _Option, count: int) -> float:
    return option.fill + (count - 1) * option.slowest + option.sync


def _toward(encoder: _Option, last: _Option, link: LinkModel) -> float:
    return encoder.fill + 2 * link.transfer(last.entry)


def _reshard(encoder: _Option, last: _Option, link: LinkModel) -> float:
    """Forward and backward, what a rank of the language model misses of its input where the layouts differ."""
    if (encoder.tp, encoder.cp) == (last.tp, last.cp):
        return 0.0
    return 2 * link.transfer(last.entry)


def _undominated(rows: Floats, budget: int) -> list[int]:
    """Rows within the budget that no other row equals or beats in every column; the first of equal ones."""
    order = [int(k) for k in np.lexsort(rows.T[::-1]) if rows[k, 0] <= budget]
    kept: list[int] = []
    front = np.empty((len(order), rows.shape[1]))
    for k in order:
        if not (front[: len(kept)] <= rows[k]).all(axis=1).any():
            front[len(kept)] = rows[k]
            kept.append(k)
    return kept


def _configuration(
    modules: Mapping[str, SearchModule],
    language_model: str,
    best: tuple[float, int, str, list[tuple[list[str], _Option]]],
    batch: int,
    microbatch: int,
) -> Configuration:
    _, dp, placement, chosen = best
    count = batch // (dp * microbatch)
    rank = 0
    stages: list[StagePlan] = []
    specs, recompute, peaks = {}, {}, {}
    downstream = chosen[-1][1].pp
    for names, option in chosen:
        width = option.tp * option.cp
        for name in names:
            cuts = option.cuts[name]
            for index in range(option.pp):
                ranks = tuple(range(rank + index * width, rank + (index + 1) * width))
                stages.append(StagePlan(name, index, int(cuts[index]), int(cuts[index + 1]), ranks))
            specs[name] = ParallelSpec(option.tp, option.cp, option.pp, dp)
            recompute[name] = option.recompute
            peaks[name] = option.peak(0 if name == language_model else downstream, count)
        rank += option.gpus
    time = best[0]
    order = {name: i for i, name in enumerate(modules)}
    stages.sort(key=lambda s: (s.module == language_model, order[s.module], s.index))
    plan = ParallelPlan(tuple(stages), rank, placement, dp)  # type: ignore[arg-type]
    return Configuration(plan, specs, recompute, peaks, count, time, batch / time if time > 0 else float("inf"))
