"""GPUs and parallel degrees for encoder, language model and generator (DistTrain sections 5.1 and 5.2)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from interlace import _core
from interlace.costs.fitted import FREE, LinkModel
from interlace.layout import ParallelSpec

_BYTES = ("weight_bytes", "optimizer_bytes", "activation_bytes", "gradient_bytes", "output_bytes")


@dataclass(frozen=True)
class ModuleWork:
    """Costs of one module, summed over its layers.

    forward: seconds of one sample through the module, per tensor-parallel size (the paper's C(TP); forward + backward
        gives the whole iteration). Tensor-parallel communication is part of it.
    layers: a pipeline size must divide layers / vpp; 0 allows any, as the paper's formulas do.
    weight_bytes: parameters and gradients (the paper's P); optimizer_bytes: sharded by ZeRO-1 (S);
        activation_bytes: of one sample (L).
    gradient_bytes: gradients that data-parallel replicas sum once per iteration (0 if all weights are frozen).
    output_bytes: bytes of one sample that every stage sends to the next: a layer's output. Twice as much if `forward`
        includes the backward, whose gradient is sent back.
    """

    forward: Sequence[float]
    layers: int = 0
    weight_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activation_bytes: float = 0.0
    gradient_bytes: float = 0.0
    output_bytes: float = 0.0


@dataclass(frozen=True)
class Orchestration:
    """Degrees per module, and the time of one iteration in the unit of `ModuleWork.forward`."""

    specs: dict[str, ParallelSpec]
    iteration_time: float

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs per module, tp * dp * pp."""
        return {name: spec.ranks for name, spec in self.specs.items()}


def orchestrate(
    modules: Mapping[str, ModuleWork],
    gpus: int,
    batch: int,
    *,
    language_model: str = "language_model",
    tp: Sequence[int] = (1, 2, 4, 8),
    vpp: int = 1,
    gpu_memory: float = math.inf,
    stage_link: LinkModel = FREE,
    data_link: LinkModel = FREE,
) -> Orchestration:
    """The TP, DP and PP of every module with the least iteration time (DistTrain 5.1), exact over the integers.

    Let DP be the degree of the language model, and K = batch / DP the number of microbatches, with one sample per
    replica of the language model each. The fullest replica of a module processes s = ceil(DP / dp) samples of a
    microbatch. Each of its stages takes s c(tp) / pp, with c the time per sample. Then

        T = T_warm / vpp + T_steady + T_PP + T_DP
        T_warm   = sum of s c(tp) over modules
        T_steady = (K - 1) * the slowest stage
        T_PP     = sum over all stages but the last of the time in which its GPUs send their part, s output_bytes / tp,
                   over `stage_link`; between modules, the receiving part counts if it is larger
        T_DP     = the slowest all-reduce of gradient_bytes / (tp pp) among dp replicas over `data_link` (a ring, or
                   the reduce-scatter and all-gather of ZeRO-1, which have the same volume)

    Tensor-parallel communication is in c. Without the links T_PP and T_DP are 0.

    The paper has the same four terms, with these differences. Its T_PP is PP times one layer's transfer, which also
    counts a transfer after the last stage. Its T_DP is volume over bandwidth. It writes DP / dp for s, which is equal
    if dp divides DP. If not, as with its own 2 encoder replicas for 3 of the language model, some replica has one more
    sample, and the others wait for it.

    Every module's dp is a factor of the batch, as in the paper, and at most DP: with more, some replicas would have no
    sample of a microbatch. Transfers are charged once per iteration, for filling the pipeline, and not divided by vpp;
    in the steady phase they overlap.

    The paper solves a convex relaxation per choice of TP and DP (133-922 ms in all) and rounds. This function
    enumerates DP and TP by branch and bound and finds the best integers PP for each directly. tp * dp * pp sum to at
    most `gpus`. Memory per GPU is P / (pp tp) + S / (pp tp dp) + s L k / (pp tp), with k the microbatches in flight on
    the module's first stage. k is the number n of stages from it to the end of the pipeline (the paper counts only
    those of the module); with vpp > 1 it is ((vpp + 1) n - 1) / vpp for interleaving. k is at most K.

    Args:
        modules: name -> ModuleWork, in pipeline order: modules before the language model feed it, and it feeds those
            after it.
        gpus: GPUs of the cluster; batch: samples per iteration.
        tp: tensor-parallel sizes of the entries of `ModuleWork.forward`.
        vpp: virtual pipeline size of all modules (interleaved 1F1B).
        gpu_memory: bytes.
        stage_link, data_link: between stages, and between replicas of a module (`fit_link`), in the unit of `forward`.

    Raises:
        ValueError: bad input, or nothing fits.
    """
    names = list(modules)
    if language_model not in modules:
        raise ValueError(f"no module {language_model!r} among {', '.join(map(repr, names)) or 'none'}")
    for name, work in modules.items():
        if len(work.forward) != len(tp):
            raise ValueError(f"{name}: forward has {len(work.forward)} times, but tp has {len(tp)} sizes")
    works = list(modules.values())
    time, degrees = _core.orchestrate(
        np.array([work.forward for work in works], dtype=np.float64),
        np.array([work.layers for work in works]),
        np.array([[getattr(work, name) for name in _BYTES] for work in works], dtype=np.float64),
        names.index(language_model),
        np.asarray(tp),
        operator.index(gpus),
        operator.index(batch),
        operator.index(vpp),
        float(gpu_memory),
        (stage_link.latency, stage_link.per_byte),
        (data_link.latency, data_link.per_byte),
    )
    specs = {name: ParallelSpec(tp=int(t), pp=int(p), dp=int(d)) for name, (t, d, p) in zip(names, degrees)}
    return Orchestration(specs, time)
