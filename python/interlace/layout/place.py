"""Placement: cuts every module into stages and assigns ranks to them.

Placements (cornstarch-2025-03 sections 4.1 and 6.1; orchmllm for "shared"):

- ``parallel``    each encoder and the language model own their ranks (modality parallelism)
- ``colocated``   all encoders are cut into equally many stages; stage i of all is on one lane, never one of the LLM
- ``shared``      every module on the same ranks, each with its own degrees, phase by phase
- ``replicated``  every rank of the language model runs every encoder whole (the Llama-style baseline)
- ``chain``       made by `balanced`: one chain of all layers, cut anywhere, also inside a module

Cuts minimise the slowest stage's 1F+1B time, which depends on what is frozen (dissertation 3.3.1, 3.4.1). A module with
virtual stages is cut into pp * virtual stages, which its pp lanes take in turn (`ParallelSpec.order`).

If all modules have the same dp, ranks are numbered replica by replica, which keeps ranks that communicate close
together. Otherwise they are numbered module by module.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.balance.partition import partition
from interlace.costs.modules import ModuleCosts, analytic_costs, layer_costs
from interlace.layout.parts import Lane, Pipeline, Stage
from interlace.layout.spec import ParallelSpec

PLACEMENTS = ("parallel", "colocated", "shared", "replicated")

Cuts = dict[str, NDArray[np.int32]]
Parts = tuple[dict[str, tuple[ParallelSpec, tuple[Pipeline, ...]]], int, str]
"""Arguments of a Layout: its modules, its world and its placement."""
Unit = list[tuple[str, int]]
"""Stages (module, index) of one replica that share a lane."""


def from_specs(
    mllm: Any,
    specs: Mapping[str, ParallelSpec],
    *,
    placement: str = "parallel",
    costs: Mapping[str, ModuleCosts] | None = None,
    ranks: int | None = None,
    frozen_aware: bool = True,
    recompute: bool = False,
) -> Parts:
    """Cut every module into ``specs[module].stages`` stages and place them.

    ranks: number per replica, for modules of one dp (and tp = cp = 1). Default: one for each of the pp stages (merged
        stages if colocated; virtual stages share the rank of another stage). With fewer ranks, neighbouring stages
        share a rank, grouped to minimise the load of the busiest rank.

    Raises ValueError for unknown modules, more stages than layers, degrees that do not fit the placement, and ranks
    that the specs cannot use.
    """
    order = list(mllm.modules_order())
    _check_specs(order, specs)
    if placement not in PLACEMENTS:
        raise ValueError(
            f"unknown placement {placement!r}: use {', '.join(map(repr, PLACEMENTS))} "
            "(a chain cut anywhere comes from Layout.balanced)"
        )
    per_layer = layer_costs(
        costs if costs is not None else analytic_costs(mllm), order, frozen_aware=frozen_aware, recompute=recompute
    )
    cuts: Cuts = {name: _cut(name, per_layer[name], specs[name]) for name in order}
    if placement == "shared":
        return _shared(order, specs, cuts, ranks)
    units = _units(order, specs, placement)
    if len({spec.dp for spec in specs.values()}) > 1 or any(spec.lane_size > 1 for spec in specs.values()):
        if placement == "replicated":
            raise ValueError(
                "replicated encoders run on every rank of the language model, which needs one dp for all modules and "
                f"tp = cp = 1; got {_degrees(specs, 'dp', 'tp', 'cp')}"
            )
        if ranks is not None:
            raise ValueError(
                f"ranks = {ranks} makes stages of a replica share ranks, which needs one dp for all modules and "
                f"tp = cp = 1; got {_degrees(specs, 'dp', 'tp', 'cp')}: leave ranks out"
            )
        return _unfolded(order, specs, cuts, units, placement)
    num_ranks = len(units) if ranks is None else ranks
    if not 1 <= num_ranks <= len(units):
        raise ValueError(
            f"{num_ranks} ranks do not match the specs, which give {len(units)} stages to place "
            f"({placement}: {_degrees(specs, 'pp')}): use 1 to {len(units)} ranks per replica, or raise pp"
        )
    unit_cost = [sum(float(per_layer[n][cuts[n][i] : cuts[n][i + 1]].sum()) for n, i in unit) for unit in units]
    bounds = partition(np.asarray(unit_cost), num_ranks)
    rank_of = {
        key: rank for rank in range(num_ranks) for unit in units[bounds[rank] : bounds[rank + 1]] for key in unit
    }

    def lanes(name: str, index: int, replica: int) -> tuple[Lane, ...]:
        local = [rank_of[name, index]] if (name, index) in rank_of else range(num_ranks)
        return tuple(Lane((replica * num_ranks + rank,)) for rank in local)

    return _layout(order, specs, cuts, lanes, num_ranks * specs[order[0]].dp, placement)


def balanced(
    mllm: Any,
    ranks: int,
    *,
    costs: Mapping[str, ModuleCosts] | None = None,
    frozen_aware: bool = True,
    recompute: bool = False,
    dp: int = 1,
) -> Parts:
    """Cut the chain of all layers (encoders in order, then the language model) into `ranks` balanced ranges.

    A range may hold the end of one module and the start of the next: then its rank has a stage of each.
    frozen_aware=False balances 3 x forward instead, as LLM pipelines do; both give layouts of the same kind, so their
    iteration times are comparable. dp: replicas of the whole chain.
    """
    order = list(mllm.modules_order())
    per_layer = layer_costs(
        costs if costs is not None else analytic_costs(mllm), order, frozen_aware=frozen_aware, recompute=recompute
    )
    chain = np.concatenate([per_layer[name] for name in order])
    if not 1 <= ranks <= len(chain):
        raise ValueError(f"cannot cut {len(chain)} layers into {ranks} ranges: use 1 to {len(chain)} ranks")
    bounds = partition(chain, ranks)
    cuts: Cuts = {}
    homes: dict[str, list[int]] = {}
    offset = 0
    for name in order:
        layers = len(per_layer[name])
        starts = np.clip(bounds - offset, 0, layers)
        homes[name] = [rank for rank in range(ranks) if starts[rank] < starts[rank + 1]]
        cuts[name] = np.array([*(starts[rank] for rank in homes[name]), layers], dtype=np.int32)
        offset += layers
    specs = {name: ParallelSpec(pp=len(homes[name]), dp=dp) for name in order}

    def lanes(name: str, index: int, replica: int) -> tuple[Lane, ...]:
        return (Lane((replica * ranks + homes[name][index],)),)

    return _layout(order, specs, cuts, lanes, ranks * dp, "chain")


def _units(order: Sequence[str], specs: Mapping[str, ParallelSpec], placement: str) -> list[Unit]:
    *encoders, language_model = order

    def lanes(name: str) -> list[Unit]:
        """The stages of each of its lanes."""
        spec = specs[name]
        return [[(name, i) for i in range(spec.stages) if spec.lane_index(i) == lane] for lane in range(spec.pp)]

    if placement == "parallel":
        return [unit for name in order for unit in lanes(name)]
    llm_lanes = lanes(language_model)
    if placement == "replicated":
        for name in encoders:
            if specs[name].stages != 1:
                raise ValueError(
                    f"replicated placement runs all of {name!r} on every language model rank: "
                    f"set its pp and virtual to 1, not {specs[name].stages} stages"
                )
        return llm_lanes
    for degree in ("pp", "virtual", "order", "dp", "tp", "cp"):
        if len({getattr(specs[name], degree) for name in encoders}) > 1:
            degrees = _degrees({name: specs[name] for name in encoders}, degree)
            raise ValueError(f"colocated encoders are merged stage by stage, so they need one {degree}; got {degrees}")
    merged = zip(*(lanes(name) for name in encoders), strict=True)
    return [[stage for unit in units for stage in unit] for units in merged] + llm_lanes


def _unfolded(
    order: Sequence[str], specs: Mapping[str, ParallelSpec], cuts: Cuts, units: Sequence[Unit], placement: str
) -> Parts:
    """One separate lane for each unit of each replica."""
    if len({spec.dp for spec in specs.values()}) == 1:
        turns = [(replica, unit) for replica in range(specs[order[0]].dp) for unit in units]
    else:
        blocks: dict[str, list[Unit]] = {}
        for unit in units:
            blocks.setdefault(unit[0][0], []).append(unit)
        turns = [
            (replica, unit)
            for name, module_units in blocks.items()
            for replica in range(specs[name].dp)
            for unit in module_units
        ]
    home: dict[tuple[str, int, int], Lane] = {}
    next_rank = 0
    for replica, unit in turns:
        size = specs[unit[0][0]].lane_size
        lane = Lane(tuple(range(next_rank, next_rank + size)))
        next_rank += size
        home.update({(name, index, replica): lane for name, index in unit})
    return _layout(order, specs, cuts, lambda name, i, replica: (home[name, i, replica],), next_rank, placement)


def _shared(order: Sequence[str], specs: Mapping[str, ParallelSpec], cuts: Cuts, ranks: int | None) -> Parts:
    world = specs[order[-1]].ranks
    if len({specs[name].ranks for name in order}) > 1 or ranks not in (None, world):
        products = ", ".join(f"{name}: {specs[name].ranks}" for name in order)
        raise ValueError(
            f"shared modules run on the same ranks, so tp * cp * pp * dp must be equal for all"
            f"{'' if ranks in (None, world) else f' and equal to ranks = {ranks}'}; got {products}"
        )

    def lanes(name: str, index: int, replica: int) -> tuple[Lane, ...]:
        spec = specs[name]
        size = spec.lane_size
        first = (replica * spec.pp + spec.lane_index(index)) * size
        return (Lane(tuple(range(first, first + size))),)

    return _layout(order, specs, cuts, lanes, world, "shared")


def _layout(
    order: Sequence[str], specs: Mapping[str, ParallelSpec], cuts: Cuts, lanes: Any, world: int, placement: str
) -> Parts:
    """lanes(module, stage index, replica) -> the lanes of a stage; those after the first are copies."""
    modules = {}
    for name in order:
        pipelines = []
        for replica in range(specs[name].dp):
            stages = []
            for i in range(specs[name].stages):
                lane, *copies = lanes(name, i, replica)
                stages.append(Stage(name, i, int(cuts[name][i]), int(cuts[name][i + 1]), lane, tuple(copies)))
            pipelines.append(Pipeline(name, replica, tuple(stages)))
        modules[name] = (specs[name], tuple(pipelines))
    return modules, world, placement


def _check_specs(order: Sequence[str], specs: Mapping[str, ParallelSpec]) -> None:
    for name in specs:
        if name not in order:
            similar = difflib.get_close_matches(name, order, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise ValueError(f"spec for unknown module {name!r}: the model has {', '.join(order)}{hint}")
    missing = [name for name in order if name not in specs]
    if missing:
        raise ValueError(f"no ParallelSpec for {', '.join(map(repr, missing))}: every module needs one")


def _degrees(specs: Mapping[str, ParallelSpec], *degrees: str) -> str:
    return ", ".join(
        f"{name}: " + " ".join(f"{degree}={getattr(spec, degree)}" for degree in degrees)
        for name, spec in specs.items()
    )


def _cut(name: str, costs: NDArray[np.float64], spec: ParallelSpec) -> NDArray[np.int32]:
    if spec.stages > len(costs):
        factor = f" * virtual={spec.virtual}" if spec.virtual > 1 else ""
        limit = len(costs) // spec.virtual
        advice = f"set pp to at most {limit}" if limit else f"set virtual to at most {len(costs)}"
        raise ValueError(f"{name}: pp={spec.pp}{factor} stages, but only {len(costs)} layers: {advice}")
    return partition(costs, spec.stages)
