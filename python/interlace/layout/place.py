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
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from interlace.balance.partition import partition
from interlace.layout.parts import Lane, Pipeline
from interlace.layout.spec import ParallelSpec

PLACEMENTS = ("parallel", "colocated", "shared", "replicated")

Cuts = dict[str, NDArray[np.int32]]
Parts = tuple[dict[str, tuple[ParallelSpec, tuple[Pipeline, ...]]], int, str]
"""Arguments of a Layout: its modules, its world and its placement."""
Unit = list[tuple[str, int]]
"""Stages (module, index) of one replica that share a lane."""
Home = dict[tuple[str, int, int], list[Lane]]
"""(module, stage, replica) -> the lanes of a stage; those after the first are copies."""


def from_specs(
    per_layer: Mapping[str, NDArray[np.float64]], specs: Mapping[str, ParallelSpec], placement: str, ranks: int | None
) -> Parts:
    """Cut every module into ``specs[module].stages`` stages and place them.

    per_layer: module -> float64 [layers], costs of its layers; modules in the order of data flow. ranks: number per
        replica, for modules of one dp (and tp = cp = 1). Default: one for each of the pp stages (merged stages if
        colocated; virtual stages share the rank of another stage). With fewer ranks, neighbouring stages share a rank,
        grouped to minimise the load of the busiest rank.

    Raises ValueError for unknown modules, more stages than layers, degrees that do not fit the placement, and ranks
    that the specs cannot use.
    """
    _check_specs(list(per_layer), specs)
    specs = {name: specs[name] for name in per_layer}
    check_placement(specs, placement, ranks)
    cuts: Cuts = {name: _cut(name, per_layer[name], spec) for name, spec in specs.items()}
    if placement == "shared":
        return _shared(specs, cuts)
    units = _units(specs, placement)
    if ranks is not None:
        unit_cost = [sum(float(per_layer[n][cuts[n][i] : cuts[n][i + 1]].sum()) for n, i in unit) for unit in units]
        bounds = partition(np.asarray(unit_cost), ranks)
        units = [[key for unit in units[start:stop] for key in unit] for start, stop in pairwise(bounds)]
    return _placed(specs, cuts, units, placement)


def check_placement(specs: Mapping[str, ParallelSpec], placement: str, ranks: int | None) -> None:
    """Raises ValueError for an unknown placement, degrees that do not fit it, and ranks that the specs cannot use.

    specs: of all modules, in the order of data flow. Other arguments as in `from_specs`.
    """
    if placement not in PLACEMENTS:
        raise ValueError(
            f"unknown placement {placement!r}: use {', '.join(map(repr, PLACEMENTS))} "
            "(a chain cut anywhere comes from Layout.balanced)"
        )
    if placement == "shared":
        products = {name: spec.ranks for name, spec in specs.items()}
        if len({*products.values()} | ({ranks} - {None})) > 1:
            raise ValueError(
                f"shared modules run on the same ranks, so tp * cp * pp * dp must be equal for all"
                f"{'' if ranks is None else f' and equal to ranks = {ranks}'}; got "
                f"{', '.join(f'{name}: {product}' for name, product in products.items())}: change a degree, or use "
                "placement 'parallel'"
            )
        return
    encoders = {name: specs[name] for name in list(specs)[:-1]}
    for name, spec in encoders.items() if placement == "replicated" else ():
        if spec.stages != 1:
            raise ValueError(
                f"replicated placement runs all of {name!r} on every language model rank: "
                f"set its pp and virtual to 1, not {spec.stages} stages"
            )
    for degree in ("pp", "virtual", "order", "dp", "tp", "cp") if placement == "colocated" else ():
        if len({getattr(spec, degree) for spec in encoders.values()}) > 1:
            raise ValueError(
                f"colocated encoders are merged stage by stage, so they need one {degree}; got "
                f"{_degrees(encoders, degree)}: make them equal, or use placement 'parallel'"
            )
    if len({spec.dp for spec in specs.values()}) > 1 or any(spec.lane_size > 1 for spec in specs.values()):
        if placement == "replicated":
            raise ValueError(
                "replicated encoders run on every rank of the language model, which needs one dp for all modules and "
                f"tp = cp = 1; got {_degrees(specs, 'dp', 'tp', 'cp')}: change these, or use placement 'parallel'"
            )
        if ranks is not None:
            raise ValueError(
                f"ranks = {ranks} makes stages of a replica share ranks, which needs one dp for all modules and "
                f"tp = cp = 1; got {_degrees(specs, 'dp', 'tp', 'cp')}: leave ranks out"
            )
    most = len(_units(specs, placement))
    if ranks is not None and not 1 <= ranks <= most:
        raise ValueError(
            f"{ranks} ranks do not match the specs, which give {most} stages to place "
            f"({placement}: {_degrees(specs, 'pp')}): use 1 to {most} ranks per replica, or raise pp"
        )


def balanced(per_layer: Mapping[str, NDArray[np.float64]], ranks: int, *, dp: int) -> Parts:
    """Cut the chain of all layers (encoders in order, then the language model) into `ranks` balanced ranges.

    A range may hold the end of one module and the start of the next: then its rank has a stage of each. per_layer: as
    in `from_specs`. dp: replicas of the whole chain.
    """
    chain = np.concatenate(list(per_layer.values()))
    if not 1 <= ranks <= len(chain):
        raise ValueError(f"cannot cut {len(chain)} layers into {ranks} ranges: use 1 to {len(chain)} ranks")
    bounds = partition(chain, ranks)
    cuts: Cuts = {}
    units: list[Unit] = [[] for _ in range(ranks)]
    specs = {}
    offset = 0
    for name, costs in per_layer.items():
        layers = len(costs)
        starts = np.clip(bounds - offset, 0, layers)
        homes = [rank for rank in range(ranks) if starts[rank] < starts[rank + 1]]
        cuts[name] = np.array([*(starts[rank] for rank in homes), layers], dtype=np.int32)
        specs[name] = ParallelSpec(pp=len(homes), dp=dp)
        for index, rank in enumerate(homes):
            units[rank].append((name, index))
        offset += layers
    return _placed(specs, cuts, units, "chain")


def _units(specs: Mapping[str, ParallelSpec], placement: str) -> list[Unit]:
    """The units that need a lane. Replicated encoders need none of their own."""
    lanes = [
        [[(name, i) for i in range(spec.stages) if spec.lane_index(i) == lane] for lane in range(spec.pp)]
        for name, spec in specs.items()
    ]
    *encoders, language_model = lanes
    if placement == "parallel":
        return [unit for units in lanes for unit in units]
    if placement == "replicated":
        return language_model
    return [[stage for unit in units for stage in unit] for units in zip(*encoders, strict=True)] + language_model


def _placed(specs: Mapping[str, ParallelSpec], cuts: Cuts, units: Sequence[Unit], placement: str) -> Parts:
    """One separate lane for each unit of each replica. Replicated encoders are on all lanes of their replica."""
    replicas = {spec.dp for spec in specs.values()}
    if len(replicas) == 1:
        turns = [(replica, unit) for replica in range(replicas.pop()) for unit in units]
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
    home: Home = {}
    of_replica: dict[int, list[Lane]] = {}
    next_rank = 0
    for replica, unit in turns:
        size = specs[unit[0][0]].lane_size
        lane = Lane(tuple(range(next_rank, next_rank + size)))
        next_rank += size
        of_replica.setdefault(replica, []).append(lane)
        home.update({(name, index, replica): [lane] for name, index in unit})
    for name in list(specs)[:-1] if placement == "replicated" else ():  # encoders of one stage
        home.update({(name, 0, replica): lanes for replica, lanes in of_replica.items()})
    return _layout(specs, cuts, home, next_rank, placement)


def _shared(specs: Mapping[str, ParallelSpec], cuts: Cuts) -> Parts:
    home: Home = {}
    for name, spec in specs.items():
        for replica in range(spec.dp):
            for index in range(spec.stages):
                first = (replica * spec.pp + spec.lane_index(index)) * spec.lane_size
                home[name, index, replica] = [Lane(tuple(range(first, first + spec.lane_size)))]
    return _layout(specs, cuts, home, next(iter(specs.values())).ranks, "shared")


def _layout(specs: Mapping[str, ParallelSpec], cuts: Cuts, home: Home, world: int, placement: str) -> Parts:
    modules = {}
    for name, spec in specs.items():
        bounds = cuts[name].tolist()
        lanes = [[home[name, i, replica] for i in range(len(bounds) - 1)] for replica in range(spec.dp)]
        pipelines = (Pipeline.cut(name, replica, bounds, own) for replica, own in enumerate(lanes))
        modules[name] = (spec, tuple(pipelines))
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
