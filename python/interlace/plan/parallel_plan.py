"""Which rank runs which layers: ParallelSpec per module in, ParallelPlan (replica -> stages -> ranks) out.

Placements (cornstarch-2025-03 section 4.1 and 6.1):

- ``parallel``    each encoder and the language model own their ranks (modality parallelism)
- ``colocated``   all encoders are cut into equally many stages, stage i of each on one rank; never on the LLM's
- ``replicated``  every rank of the language model runs every encoder whole (the Llama-style baseline)
- ``chain``       made by :meth:`ParallelPlan.balanced`: one chain of all layers cut anywhere, also inside a module

Cuts minimise the slowest stage's 1F+1B time, which depends on what is frozen (dissertation 3.3.1, 3.4.1).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from interlace.plan.cost import LayerTimes, trainable_before
from interlace.plan.partitioning import partition

Placement = Literal["parallel", "colocated", "replicated", "chain"]
LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True)
class ParallelSpec:
    """How one module is spread: tensor, context, pipeline and data parallel degrees.

    This version runs pipeline stages (pp) and whole replicas (dp, the same for all modules); tp and cp must be 1.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1


@dataclass(frozen=True)
class StagePlan:
    """Layers ``[start, stop)`` of ``module`` as its pipeline stage ``index``, on ``ranks`` of one replica."""

    module: str
    index: int
    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ModuleCosts:
    """Cost of the parts (layers, embeddings, head, projector) of one module for one microbatch.

    All arrays have shape [parts]; the times may be FLOPs instead of seconds: only their ratio matters to a cut.
    ``layer[i]`` is the sliceable layer that part i travels with.
    """

    layer: NDArray[np.int64]
    times: LayerTimes
    trainable: NDArray[np.bool_]

    @property
    def num_layers(self) -> int:
        """Number of layers a cut can fall between."""
        return int(self.layer.max()) + 1

    def per_layer(
        self, *, trainable_before: bool = False, frozen_aware: bool = True, recompute: bool = False
    ) -> NDArray[np.float64]:
        """1F+1B cost of each layer, float64 [layers].

        ``frozen_aware=False`` charges backward = 2 x forward everywhere, which is what LLM partitioners assume.
        """
        if frozen_aware:
            parts = self.times.costs(~self.trainable, trainable_before=trainable_before, recompute=recompute)
        else:
            parts = (4.0 if recompute else 3.0) * self.times.forward
        return np.bincount(self.layer, weights=parts, minlength=self.num_layers).astype(np.float64)


def analytic_costs(
    mllm: Any, tokens: Mapping[str, float] | None = None, *, context: Mapping[str, float] | None = None
) -> dict[str, ModuleCosts]:
    """FLOP-based costs of every module of ``mllm`` when ``tokens[module]`` tokens pass through it.

    ``context[module]``: keys that a token sees on average, for the FLOPs of attention. What is not given is that of
    ``mllm.nominal_length(module)``: one item of the size that an encoder was configured for, and a row of up to 1,024
    tokens. Which rank gets how much goes by these figures as soon as modules share ranks: give those of your data.
    Input and weight gradient are charged one forward each, as in cornstarch-2025-03 section 4.2.
    """
    tokens, context = tokens or {}, context or {}
    for given in (tokens, context):
        unknown = [name for name in given if name not in mllm.modules_order()]
        if unknown:
            raise ValueError(f"no module {unknown[0]!r}: the model has {', '.join(mllm.modules_order())}")
    costs = {}
    for name in mllm.modules_order():
        scale = float(tokens.get(name, mllm.nominal_length(name)))
        layers = mllm.layers(name, context=context.get(name))
        parts = [(layer.index, part) for layer in layers for part in layer.parts]
        forward = np.array([part.forward_flops * scale for _, part in parts], dtype=np.float64)
        costs[name] = ModuleCosts(
            layer=np.array([index for index, _ in parts], dtype=np.int64),
            times=LayerTimes(forward, forward, forward, forward),
            trainable=np.array([part.trainable for _, part in parts], dtype=np.bool_),
        )
    return costs


def layer_costs(
    costs: Mapping[str, ModuleCosts], order: Sequence[str], *, frozen_aware: bool = True, recompute: bool = False
) -> dict[str, NDArray[np.float64]]:
    """1F+1B per layer for every module, with "trainable before" carried across modules.

    ``order`` lists the encoders first and the language model last, as ``mllm.modules_order()`` does.
    """
    *encoders, language_model = order
    out = {name: costs[name].per_layer(frozen_aware=frozen_aware, recompute=recompute) for name in encoders}
    trainable = {name: bool(costs[name].trainable.any()) for name in order}
    out[language_model] = costs[language_model].per_layer(
        trainable_before=trainable_before(trainable, [(name, language_model) for name in encoders])[language_model],
        frozen_aware=frozen_aware,
        recompute=recompute,
    )
    return out


@dataclass(frozen=True)
class ParallelPlan:
    """Stages of one replica and the number of replicas; global rank = replica * num_ranks + local rank."""

    stages: tuple[StagePlan, ...]
    num_ranks: int
    placement: Placement = "parallel"
    dp: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of all replicas together."""
        return self.num_ranks * self.dp

    def of_rank(self, rank: int) -> list[StagePlan]:
        """Stages on global rank ``rank``, in the order data takes."""
        return [stage for stage in self.stages if rank % self.num_ranks in stage.ranks]

    def check_executable(self) -> None:
        """Raises ValueError for a stage split over ranks (tp * cp > 1), as `search_configuration` may propose one.

        This version runs, and simulates, pipeline stages and replicas; several ranks of a stage are copies of it: those
        of an encoder that is "replicated" on all ranks.
        """
        for stage in self.stages:
            copied = self.placement == "replicated" and set(stage.ranks) == set(range(self.num_ranks))
            if len(stage.ranks) > 1 and not copied:
                raise ValueError(
                    f"{stage.module} stage {stage.index} is split over ranks {stage.ranks} (tp * cp > 1), which this "
                    "version neither runs nor simulates: search with (tp, cp) = (1, 1) alone, or use pp and dp"
                )

    @classmethod
    def from_specs(
        cls,
        mllm: Any,
        specs: Mapping[str, ParallelSpec],
        *,
        placement: str = "parallel",
        costs: Mapping[str, ModuleCosts] | None = None,
        ranks: int | None = None,
        frozen_aware: bool = True,
        recompute: bool = False,
    ) -> ParallelPlan:
        """Cut every module into ``specs[module].pp`` stages and place them.

        ``ranks`` is the number of ranks per replica; by default one for each stage (merged stage when colocated).
        With fewer, neighbouring stages share a rank, cut where the busiest rank is least busy. Raises ValueError
        for unknown modules, more stages than layers, degrees that differ where they must not, or ranks that the
        specs cannot use.
        """
        order = list(mllm.modules_order())
        _check_specs(order, specs)
        if placement not in ("parallel", "colocated", "replicated"):
            raise ValueError(
                f"unknown placement {placement!r}: use 'parallel', 'colocated' or 'replicated' "
                "(a chain cut anywhere comes from ParallelPlan.balanced)"
            )
        *encoders, language_model = order
        per_layer = layer_costs(
            costs if costs is not None else analytic_costs(mllm), order, frozen_aware=frozen_aware, recompute=recompute
        )
        cuts = {name: _cut(name, per_layer[name], specs[name].pp) for name in order}
        if placement == "colocated" and len({specs[name].pp for name in encoders}) > 1:
            degrees = ", ".join(f"{name}: pp={specs[name].pp}" for name in encoders)
            raise ValueError(f"colocated encoders are merged stage by stage, so they need one pp; got {degrees}")
        if placement == "replicated":
            for name in encoders:
                if specs[name].pp != 1:
                    raise ValueError(
                        f"replicated placement runs {name!r} whole on every language model rank: "
                        f"set its pp to 1, not {specs[name].pp}"
                    )

        if placement == "parallel":
            units = [[(name, i)] for name in order for i in range(specs[name].pp)]
        elif placement == "colocated":
            merged = specs[encoders[0]].pp if encoders else 0
            units = [[(name, i) for name in encoders] for i in range(merged)]
            units += [[(language_model, i)] for i in range(specs[language_model].pp)]
        else:
            units = [[(language_model, i)] for i in range(specs[language_model].pp)]

        num_ranks = len(units) if ranks is None else ranks
        if not 1 <= num_ranks <= len(units):
            raise ValueError(
                f"{num_ranks} ranks do not match the specs, which give {len(units)} stages to place "
                f"({placement}: {', '.join(f'{n}={specs[n].pp}' for n in order)}): "
                f"run 1 to {len(units)} ranks per replica, or raise pp"
            )
        unit_cost = [sum(float(per_layer[n][cuts[n][i] : cuts[n][i + 1]].sum()) for n, i in unit) for unit in units]
        bounds = partition(np.asarray(unit_cost), num_ranks)
        rank_of = {
            key: rank for rank in range(num_ranks) for unit in units[bounds[rank] : bounds[rank + 1]] for key in unit
        }
        stages = tuple(
            StagePlan(
                name,
                i,
                int(cuts[name][i]),
                int(cuts[name][i + 1]),
                tuple(range(num_ranks)) if (name, i) not in rank_of else (rank_of[name, i],),
            )
            for name in order
            for i in range(specs[name].pp)
        )
        return cls(stages, num_ranks, placement, specs[language_model].dp)  # type: ignore[arg-type]

    @classmethod
    def balanced(
        cls,
        mllm: Any,
        ranks: int,
        *,
        costs: Mapping[str, ModuleCosts] | None = None,
        frozen_aware: bool = True,
        recompute: bool = False,
        dp: int = 1,
    ) -> ParallelPlan:
        """Cut the chain of all layers (encoders in order, then the language model) into ``ranks`` balanced ranges.

        A range may hold the end of one module and the start of the next: then its rank hosts a stage of each.
        ``frozen_aware=False`` balances 3 x forward instead, as LLM pipelines do; both end as plans of one kind, so
        that their iteration times compare.
        """
        order = list(mllm.modules_order())
        per_layer = layer_costs(
            costs if costs is not None else analytic_costs(mllm), order, frozen_aware=frozen_aware, recompute=recompute
        )
        chain = np.concatenate([per_layer[name] for name in order])
        if not 1 <= ranks <= len(chain):
            raise ValueError(f"cannot cut {len(chain)} layers into {ranks} ranges: use 1 to {len(chain)} ranks")
        bounds = partition(chain, ranks)
        stages = []
        offset = 0
        for name in order:
            layers = len(per_layer[name])
            index = 0
            for rank in range(ranks):
                start = max(int(bounds[rank]) - offset, 0)
                stop = min(int(bounds[rank + 1]) - offset, layers)
                if start < stop:
                    stages.append(StagePlan(name, index, start, stop, (rank,)))
                    index += 1
            offset += layers
        return cls(tuple(stages), ranks, "chain", dp)

    def __iter__(self) -> Iterator[StagePlan]:
        return iter(self.stages)


def _check_specs(order: Sequence[str], specs: Mapping[str, ParallelSpec]) -> None:
    for name in specs:
        if name not in order:
            near = difflib.get_close_matches(name, order, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"spec for unknown module {name!r}: the model has {', '.join(order)}{hint}")
    missing = [name for name in order if name not in specs]
    if missing:
        raise ValueError(f"no ParallelSpec for {', '.join(map(repr, missing))}: every module needs one")
    for name, spec in specs.items():
        for degree in ("tp", "cp", "pp", "dp"):
            if getattr(spec, degree) < 1:
                raise ValueError(f"{name}: {degree} must be at least 1, got {getattr(spec, degree)}")
        for degree in ("tp", "cp"):
            if getattr(spec, degree) != 1:
                raise ValueError(
                    f"{name}: {degree}={getattr(spec, degree)} splits inside a stage, which this version does not "
                    f"run; set {degree}=1 and use pp or dp"
                )
    if len({spec.dp for spec in specs.values()}) > 1:
        degrees = ", ".join(f"{name}: dp={spec.dp}" for name, spec in specs.items())
        raise ValueError(f"all modules need the same dp in this version; got {degrees}")


def _cut(name: str, costs: NDArray[np.float64], stages: int) -> NDArray[np.int32]:
    if stages > len(costs):
        raise ValueError(f"{name}: pp={stages} stages but only {len(costs)} layers; set pp to at most {len(costs)}")
    return partition(costs, stages)
