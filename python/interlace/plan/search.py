"""Configuration search: degrees, placement and cuts of a whole model.

Combines Entrain's algorithm 3 (dissertation 4.4.3) and Cornstarch's algorithm 1 (cornstarch-2025-11 section 4.1). Every
module has options (TP, CP, PP, recomputation), each cut at its exact bottleneck. The search finds the best combination
within a number of GPUs, for parallel and for colocated encoders. It is implemented in
csrc/plan/search/configuration.cpp.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from interlace import _core
from interlace.balance.assignment import require
from interlace.costs.fitted import FREE, Degrees, LinkModel
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline
from interlace.plan.stable_batch import proportional_allocation

Floats = NDArray[np.float64]
_BYTES = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "input_bytes")


@dataclass(frozen=True)
class SearchModule:
    """Costs of one module for one microbatch, float64 [layers] each.

    forward, backward: (tp, cp) -> seconds (`CostModel.layers`, `frozen_costs`; 0 for a layer without a backward),
        including context-parallel communication. The keys are the candidate degrees.
    weight_bytes: parameters, whole on every tensor-parallel group; gradient_bytes: of trainable parameters;
        optimizer_bytes: sharded over dp * cp (ZeRO-1).
    activation_bytes: kept from forward to backward. With recomputation only input_bytes are kept, and the rest for one
        layer at a time.
    input_bytes: the hidden state before the layer; also the message size at the start of a stage.
    tensor_reduces: all-reduces of a tensor of input_bytes among tensor-parallel ranks in a forward (2 for a transformer
        layer; a backward has the same number). None: 0, for times measured with this communication included.
    """

    forward: Mapping[Degrees, Floats]
    backward: Mapping[Degrees, Floats]
    weight_bytes: Floats
    gradient_bytes: Floats
    optimizer_bytes: Floats
    activation_bytes: Floats
    input_bytes: Floats
    tensor_reduces: Floats | None = None


@dataclass(frozen=True)
class Configuration:
    """Result of `search_configuration`.

    layout: dp replicas of all modules, lanes of tp * cp ranks; lanes of one replica are adjacent.
    specs, recompute: per module. peak_bytes: peak of the fullest GPU of each module.
    iteration_time: seconds of one step. throughput: samples per second.
    """

    layout: Layout
    specs: dict[str, ParallelSpec]
    recompute: dict[str, bool]
    peak_bytes: dict[str, float]
    microbatches: int
    iteration_time: float
    throughput: float


def in_flight(stages: int, downstream: int, microbatches: int) -> Floats:
    """Microbatches that each stage of a module keeps under 1F1B, float64 [stages]; `downstream` stages follow it.

    It is the number of stages from this one to the last, itself included, and at most `microbatches`. This matches
    `schedule.one_f_one_b` if every module has one chunk per microbatch.
    """
    return np.minimum(np.arange(stages, 0, -1) + downstream, microbatches).astype(np.float64)


def search_configuration(
    modules: Mapping[str, SearchModule],
    gpus: int,
    batch: int,
    microbatch: int,
    *,
    language_model: str = "language_model",
    gpu_memory: float = np.inf,
    stage_link: LinkModel = FREE,
    tensor_link: LinkModel = FREE,
    data_link: LinkModel = FREE,
    dp: Sequence[int] | None = None,
    placements: Sequence[Literal["parallel", "colocated"]] = ("parallel", "colocated"),
    allocation: Literal["any", "proportional"] = "any",
    recompute: Sequence[bool] = (False, True),
) -> Configuration:
    """The configuration with the highest throughput under this cost model, exact over all options:

        T = sum of the stages on the longest path + transfers between them + (K - 1) * the slowest stage   (eq. 4.2)
            + K * resharding where an encoder's (tp, cp) is not the language model's + the slowest gradient all-reduce

    with K = batch / (dp * microbatch).

    - Time of a stage: forward and backward of its layers, a second forward if recomputed, and the tensor-parallel
      all-reduces of each of these passes.
    - Transfers between stages count once per microbatch on the path: forward, and backward if anything before is
      trained. In the steady phase they overlap. Resharding does not overlap: it is one more such transfer each way.
    - Parallel encoders run concurrently, so only the longest counts (the printed sum over components is that of a
      chain). Colocated encoders have the same number of stages, and their times add up stage by stage.
    - A module is cut at its exact bottleneck (`partition`), for balance alone: a memory limit rejects that cut and
      does not search for another.
    - Memory of a stage: weights + gradients + optimizer state + activations of all microbatches that 1F1B keeps in
      flight there (`in_flight`).

    The runtime does not split layers inside a lane yet. Give forward and backward for (1, 1) only to search among the
    layouts that it supports.

    Complexity: for each dp and placement, the options of the language model that its own bound does not prune, times
    the part of the product of the encoders' undominated options that branch and bound leaves. This takes about 10
    milliseconds for 3 modules on 1,296 GPUs, half a second for 7 with 16 (tp, cp) each.

    Args:
        modules: name -> SearchModule; all but `language_model` are its encoders.
        gpus: total GPUs; replicas may leave some idle. batch, microbatch: samples.
        gpu_memory: bytes of one GPU.
        stage_link, tensor_link, data_link: links between stages, inside a tensor-parallel group, between replicas
            (`fit_link`).
        dp: candidate data-parallel degrees; only those that fit gpus and divide batch / microbatch are used (default:
            all).
        placements: candidate placements of encoders (cornstarch-2025-11 section 4.1).
        allocation: "proportional" gives each module GPUs in proportion to its work, rounded (algorithm 3, line 4),
            instead of searching every split.
        recompute: candidate values, per module, for whether activations are recomputed.

    Raises:
        ValueError: bad input (the message names the module, array and index), or nothing fits.
    """
    gpus, batch, microbatch = operator.index(gpus), operator.index(batch), operator.index(microbatch)
    if language_model not in modules:
        raise ValueError(f"no module {language_model!r} among {', '.join(map(repr, modules)) or 'none'}")
    if gpus < 1 or microbatch < 1 or batch < 1 or batch % microbatch:
        raise ValueError(
            f"batch is {batch}, microbatch {microbatch}, gpus {gpus}: all must be positive, and batch a multiple of "
            f"microbatch"
        )
    if allocation not in ("any", "proportional"):
        raise ValueError(f"unknown allocation {allocation!r}: use 'any' or 'proportional'")
    for placement in placements:
        if placement not in ("parallel", "colocated"):
            raise ValueError(f"unknown placement {placement!r}: use 'parallel' or 'colocated'")
    _check(modules)
    encoders = [name for name in modules if name != language_model]
    order = [*encoders, language_model]
    degrees = [
        d for d in (range(1, gpus + 1) if dp is None else dp) if 1 <= d <= gpus and batch % (d * microbatch) == 0
    ]
    groupings = {"parallel": [[name] for name in order], "colocated": [encoders, [language_model]]}
    # With at most one encoder, both placements are the same.
    searched = [p for p in placements if len(encoders) > 1 or p == "parallel" or "parallel" not in placements]
    if not encoders:
        searched = ["parallel"] if placements else []
    shares = {
        placement: [_shares(modules, groupings[placement], gpus // d, allocation) for d in degrees]
        for placement in searched
    }
    time, best_dp, colocated, groups = _core.search_configuration(
        [_arrays(modules[name]) for name in order],
        gpus,
        batch,
        microbatch,
        float(gpu_memory),
        (stage_link.latency, stage_link.per_byte),
        (tensor_link.latency, tensor_link.per_byte),
        (data_link.latency, data_link.per_byte),
        degrees,
        [bool(flag) for flag in recompute],
        shares.get("parallel", []),
        shares.get("colocated", []),
    )
    if not groups:
        raise ValueError(
            f"no configuration fits {gpus} GPUs of {gpu_memory:.3g} bytes: allow other degrees or more GPUs"
        )
    best = "colocated" if colocated else "parallel"
    return _configuration(modules, language_model, groupings[best], best, best_dp, groups, time, batch, microbatch)


def _check(modules: Mapping[str, SearchModule]) -> None:
    for name, module in modules.items():
        layers = len(module.weight_bytes)
        if not module.forward or set(module.forward) != set(module.backward):
            raise ValueError(f"{name}: forward and backward need the same keys (tp, cp), at least one")
        for degrees in module.forward:
            if len(degrees) != 2 or any(operator.index(degree) < 1 for degree in degrees):
                raise ValueError(f"{name}: forward has the key {degrees}: it must be (tp, cp), both positive")
        rows = {f"forward{list(key)}": row for key, row in module.forward.items()}
        rows |= {f"backward{list(key)}": row for key, row in module.backward.items()}
        rows |= {key: getattr(module, key) for key in _BYTES}
        if module.tensor_reduces is not None:
            rows["tensor_reduces"] = module.tensor_reduces
        for key, row in rows.items():
            values = np.asarray(row, dtype=np.float64)
            if values.shape != (layers,) or not layers:
                raise ValueError(f"{name}: {key} must have shape ({max(layers, 1)},), got {values.shape}")
            require(f"{name}: {key}", values, np.isfinite(values) & (values >= 0), "values must be finite and >= 0")


def _arrays(module: SearchModule) -> tuple[NDArray[Any], Floats, Floats, Floats]:
    keys = sorted(module.forward)
    reduces = np.zeros(len(module.weight_bytes)) if module.tensor_reduces is None else module.tensor_reduces
    per_layer = [getattr(module, name) for name in _BYTES] + [reduces]
    return (
        np.array(keys, dtype=np.int64),
        np.array([module.forward[key] for key in keys], dtype=np.float64),
        np.array([module.backward[key] for key in keys], dtype=np.float64),
        np.array(per_layer, dtype=np.float64),
    )


def _shares(
    modules: Mapping[str, SearchModule], groups: Sequence[Sequence[str]], budget: int, allocation: str
) -> list[int]:
    """GPUs of each group: -1 for any number; empty if the budget is too small."""
    if budget < len(groups):
        return []
    if allocation == "any":
        return [-1] * len(groups)
    work = []
    for group in groups:
        smallest = {name: min(modules[name].forward) for name in group}
        work.append(sum(float((modules[n].forward[k] + modules[n].backward[k]).sum()) for n, k in smallest.items()))
    return [int(share) for share in proportional_allocation(budget, work)]


def _configuration(
    modules: Mapping[str, SearchModule],
    language_model: str,
    groups: Sequence[Sequence[str]],
    placement: str,
    dp: int,
    results: Sequence[tuple[int, int, int, bool, Sequence[NDArray[np.int32]], float]],
    time: float,
    batch: int,
    microbatch: int,
) -> Configuration:
    """Configuration of a search result, with encoders first. Ranks are numbered as in `Layout.from_specs`."""
    width = sum(tp * cp * pp for tp, cp, pp, *_ in results)
    pipelines: dict[str, tuple[Pipeline, ...]] = {}
    specs, recompute, peaks = {}, {}, {}
    first_rank = 0
    for names, (tp, cp, pp, recomputed, cuts, peak) in zip(groups, results, strict=True):
        replicas = [_lanes(r * width + first_rank, pp, tp * cp) for r in range(dp)]
        for name, cuts_of in zip(names, cuts, strict=True):
            specs[name] = ParallelSpec(tp, cp, pp, dp)
            recompute[name] = recomputed
            peaks[name] = peak
            pipelines[name] = tuple(Pipeline.cut(name, r, cuts_of.tolist(), lanes) for r, lanes in enumerate(replicas))
        first_rank += tp * cp * pp
    layout = Layout({name: (specs[name], cuts_of) for name, cuts_of in pipelines.items()}, width * dp, placement)
    throughput = batch / time if time > 0 else float("inf")
    return Configuration(layout, specs, recompute, peaks, batch // (dp * microbatch), time, throughput)


def _lanes(first_rank: int, stages: int, size: int) -> list[list[Lane]]:
    """Lanes of `size` consecutive ranks, one for each stage."""
    starts = range(first_rank, first_rank + stages * size, size)
    return [[Lane(tuple(range(start, start + size)))] for start in starts]
