"""GPUs and parallel degrees for encoder, language model and generator (DistTrain sections 5.1 and 5.2)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from interlace import _core
from interlace.plan.parallel_plan import LANGUAGE_MODEL, ParallelSpec


@dataclass(frozen=True)
class ModuleWork:
    """What one module costs, all layers together.

    forward: seconds of one sample through the module, per tensor-parallel size (the paper's C(TP); forward + backward
        gives the whole iteration). Tensor-parallel communication is part of it.
    layers: a pipeline size must divide layers / vpp; 0 allows any, as the paper's formulas do.
    weight_bytes: parameters and gradients (the paper's P); optimizer_bytes: sharded by ZeRO-1 (S);
        activation_bytes: of one sample (L).
    """

    forward: Sequence[float]
    layers: int = 0
    weight_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclass(frozen=True)
class Orchestration:
    """Degrees per module, and the time T_warm / vpp + T_steady of one iteration in the unit of `ModuleWork.forward`."""

    specs: dict[str, ParallelSpec]
    iteration_time: float

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs per module, tp * dp * pp."""
        return {name: spec.tp * spec.dp * spec.pp for name, spec in self.specs.items()}


def orchestrate(
    modules: Mapping[str, ModuleWork],
    gpus: int,
    batch: int,
    *,
    language_model: str = LANGUAGE_MODEL,
    tp: Sequence[int] = (1, 2, 4, 8),
    vpp: int = 1,
    gpu_memory: float = math.inf,
) -> Orchestration:
    """The TP, DP and PP of every module with the least iteration time (DistTrain 5.1), exact over the integers.

    With DP the language model's, c a module's time per sample and K = batch / DP microbatches of one sample per replica
    of the language model, a stage of a module takes (DP / dp) c(tp) / pp, and

        T = sum of (DP / dp) c(tp) over modules / vpp + (K - 1) * the slowest stage.

    The paper solves a convex relaxation per choice of TP and DP (133-922 ms in all) and rounds; this enumerates DP and
    TP by branch and bound and finds the best integers PP of each directly. DP divides the batch, a module's dp divides
    DP (whole samples per microbatch), tp * dp * pp sum to at most `gpus`. Memory per GPU is
    P / (pp tp) + S / (pp tp dp) + (DP / dp) L k / (pp tp) with k the microbatches in flight on the module's first
    stage: all stages from it to the end of the pipeline (the paper counts those of the module alone), with vpp > 1 and
    n such stages ((vpp + 1) n - 1) / vpp for interleaving, and at most K.

    Args:
        modules: name -> ModuleWork, in pipeline order: those before the language model feed it, those after it are
            fed by it.
        gpus: GPUs of the cluster; batch: samples per iteration.
        tp: tensor-parallel sizes, to which the entries of `ModuleWork.forward` belong.
        vpp: virtual pipeline size of all modules (interleaved 1F1B).
        gpu_memory: bytes.

    Raises:
        ValueError: bad input, or nothing fits.
    """
    names = list(modules)
    if language_model not in modules:
        raise ValueError(f"no module {language_model!r} among {', '.join(map(repr, names)) or 'none'}")
    for name, work in modules.items():
        if len(work.forward) != len(tp):
            raise ValueError(f"{name}: forward has {len(work.forward)} times for {len(tp)} tensor-parallel sizes")
    works = list(modules.values())
    time, degrees = _core.orchestrate(
        np.array([work.forward for work in works], dtype=np.float64),
        np.array([work.layers for work in works]),
        np.array([[work.weight_bytes, work.optimizer_bytes, work.activation_bytes] for work in works]),
        names.index(language_model),
        np.asarray(tp),
        operator.index(gpus),
        operator.index(batch),
        operator.index(vpp),
        float(gpu_memory),
    )
    specs = {name: ParallelSpec(tp=int(t), pp=int(p), dp=int(d)) for name, (t, d, p) in zip(names, degrees)}
    return Orchestration(specs, time)
