"""``interlace plan show`` for a config's own layout: modules, ranks, and the memory of each rank.

The same figures as a table, as text blocks (ranks x modules), as a picture and as JSON. docs/what-ranks-hold.md
explains them and the limits of the estimate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.scheduling import chunk_costs, chunk_loads, chunk_sizes, step_schedule

if TYPE_CHECKING:
    from interlace.layout import Layout
    from interlace.plan.memory import RankMemory, WeightSize
    from interlace.train.commands.planning.costs import Costs

VERSION = 1  # of the keys of the JSON
_MOST_SHOWN = 64  # ranks
_BAR = 40  # characters of the largest peak
_DEGREES = ("tp", "cp", "pp", "virtual", "order", "dp", "shard", "shard_ranks")
_KINDS = {"weights": "w", "gradients": "g", "optimizer": "o", "activations": "a", "buffers": "b"}


@dataclass(frozen=True)
class StageFacts:
    """A stage of one replica. parameters: on the first rank of a lane. seconds: of a chunk, forward and backward."""

    module: str
    replica: int
    stage: int
    start: int
    stop: int
    lanes: tuple[tuple[int, ...], ...]
    parameters: int
    seconds: float


@dataclass(frozen=True)
class LayoutFacts:
    """A config's layout with the displayed figures.

    shown: number of displayed ranks; all others are identical. by_layer: the (rank, module) whose weights are gathered
    layer by layer in the step.
    """

    name: str
    placement: str
    schedule: str
    microbatches: int
    layout: Layout
    stages: tuple[StageFacts, ...]
    memory: tuple[RankMemory, ...]
    shown: int
    origin: str
    by_layer: frozenset[tuple[int, str]] = frozenset()
    weights: tuple[WeightSize, ...] = ()

    def to_json(self) -> str:
        """JSON with sorted keys, no NaN: see docs/what-ranks-hold.md."""
        found = {
            "version": VERSION,
            "run": self.name,
            "placement": self.placement,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "world": self.layout.world,
            "costs": self.origin,
            "modules": [self._module(name) for name in self.layout.modules],
            "ranks": [self._rank(memory) for memory in self.memory],
        }
        return json.dumps(found, allow_nan=False, indent=1, sort_keys=True)

    def _module(self, name: str) -> dict[str, Any]:
        spec = self.layout.spec(name)
        stages = [
            {
                "replica": stage.replica,
                "stage": stage.stage,
                "layers": [stage.start, stage.stop],
                "lanes": [list(lane) for lane in stage.lanes],
                "parameters": stage.parameters,
                "seconds": stage.seconds,
            }
            for stage in self.stages
            if stage.module == name
        ]
        degrees = {degree: getattr(spec, degree) for degree in _DEGREES}
        return {"module": name, **degrees, "stages": stages}

    def _rank(self, memory: RankMemory) -> dict[str, Any]:
        return {
            "rank": memory.rank,
            "stages": [
                {
                    "module": stage.module,
                    "stage": stage.index,
                    "replica": self.layout.replica(memory.rank, stage.module),
                }
                for stage in self.layout.of_rank(memory.rank)
            ],
            "parameters": memory.parameters,
            "in_flight": memory.in_flight,
            "bytes": {
                "weights": memory.weights,
                "gradients": memory.gradients,
                "optimizer": memory.optimizer,
                "activations": memory.activations,
                "messages": memory.messages,
                "gradient_sums": memory.sums,
                "workspace": memory.workspace,
                "peak": memory.peak,
            },
            "bytes_on_host": {"optimizer": memory.host},
            "bytes_gathered_once": {
                "weights": memory.weights_once,
                "gradients": memory.gradients_once,
                "peak": memory.peak_once,
            },
            "bytes_as_run": {
                "weights": memory.weights_run,
                "gradients": memory.gradients_run,
                "peak": memory.peak_run,
            },
            "gathered_by_layer": [name for name in self.layout.modules if (memory.rank, name) in self.by_layer],
        }


def of_config(config: Config, model: Any, costs: Costs, microbatches: int, source: str) -> LayoutFacts:
    """Figures of the config's own layout with all replicas. Raises ConfigError if a rank cannot hold its stages."""
    from interlace.estimate.traced import weights_of
    from interlace.run import stage_durations
    from interlace.schedule import Op
    from interlace.train.models.build import build_layout
    from interlace.train.rank_memory import activations_of_config, held_by_ranks

    layout = build_layout(config, model, source=source)
    try:
        rows = config.parallel.sequence_parallel
        weights = weights_of(model, layout, sequence_parallel=rows)
        activations = activations_of_config(config, model, layout)
        loads = chunk_loads(config, model, activations, chunk_sizes(config, layout, microbatches))
        schedule = step_schedule(config, model, layout, microbatches)
        held = held_by_ranks(config, model, schedule, weights, activations, loads)
    except ValueError as error:
        raise ConfigError(f"{source}: [parallel]: {error}") from None
    scaled = chunk_costs(config, layout, costs.modules, microbatches)
    durations = stage_durations(model, layout, scaled, recompute=config.train.recompute)

    @cache
    def parameters(module: str, start: int, stop: int) -> int:
        mine = (w for w in weights if w.module == module and any(start <= layer < stop for layer in w.layers))
        return sum(weight.count(0) for weight in mine)

    stages = tuple(
        StageFacts(
            module=stage.module,
            replica=pipeline.replica,
            stage=stage.index,
            start=stage.start,
            stop=stage.stop,
            lanes=tuple(lane.ranks for lane in stage.lanes),
            parameters=parameters(stage.module, stage.start, stage.stop),
            seconds=sum(durations[op, stage.module, stage.index] for op in (Op.FORWARD, Op.BACKWARD)),
        )
        for pipeline in layout.pipelines()
        for stage in pipeline.stages
    )
    shown = layout.world // config.parallel.replicas("language_model") if config.uniform() else layout.world
    return LayoutFacts(
        config.run.name, layout.placement, config.parallel.schedule, microbatches, layout, stages, held.memory,
        shown, costs.origin, held.by_layer, tuple(weights),
    )  # fmt: skip


# ---------------------------------------------------------------------- text and pictures


def show(facts: LayoutFacts, console: Any) -> None:
    """Prints one line per module and stage, one per rank, and the ranks as blocks."""
    from rich.table import Table

    layout, shown = facts.layout, min(facts.shown, _MOST_SHOWN)
    table = Table(title=f"{facts.name}: layout of {layout.world} rank{'s' * (layout.world != 1)}", title_justify="left")
    for column in ("module", "stage", "layers", "ranks", "tp", "cp", "pp", "dp", "shard", "parameters", "1F+1B ms"):
        table.add_column(column, justify="left" if column in ("module", "ranks", "shard") else "right", overflow="fold")
    for stage in facts.stages:
        if stage.replica:
            continue
        spec = layout.spec(stage.module)
        lanes = ", ".join("+".join(map(str, lane)) for lane in stage.lanes)
        shard = spec.shard if spec.shard_ranks is None else f"{spec.shard} / {spec.shard_ranks}"
        table.add_row(
            stage.module if stage.stage == 0 else "",
            str(stage.stage),
            f"{stage.start}:{stage.stop}",
            lanes,
            *(str(degree) for degree in (spec.tp, spec.cp)),
            str(spec.pp) if spec.virtual == 1 else f"{spec.pp} x {spec.virtual}",
            str(spec.dp),
            shard,
            f"{stage.parameters / 1e6:,.2f} M",
            f"{1e3 * stage.seconds:,.2f}",
        )
    console.print(table)
    if any(spec.dp > 1 for spec, _ in layout.modules.values()):
        console.print("stages of the first replica of each module; seconds are those of a chunk on one rank")
    full = list(dict.fromkeys(shard.module for shard in layout.shard_groups() if shard.full))
    table = Table(title="bytes per rank, estimated", title_justify="left")
    columns = ["rank", "stages", "parameters", "in flight", *_KINDS, "peak"]
    if full:  # the peak is one of these if all modules gather in the same way
        columns += ["gathered by layer", "gathered once"]
    for column in columns:
        table.add_column(column, justify="left" if column == "stages" else "right", overflow="fold")
    for memory in facts.memory[:shown]:
        held = _held(memory)
        table.add_row(
            str(memory.rank),
            ", ".join(f"{s.module}[{s.start}:{s.stop}]" for s in layout.of_rank(memory.rank)),
            f"{memory.parameters / 1e6:,.2f} M",
            str(memory.in_flight),
            *(size(held[kind]) for kind in _KINDS),
            size(memory.peak_run),
            *([size(memory.peak), size(memory.peak_once)] if full else []),
        )
    console.print(table)
    for name in full:
        ranks = {rank for rank in range(layout.world) if any(s.module == name for s in layout.of_rank(rank))}
        way = "once per step"
        if ranks == {rank for rank, other in facts.by_layer if other == name}:
            way = "layer by layer, and once in a step whose replicas have different numbers of chunks"
        console.print(f"{name}: weights are gathered {way}")
    if shown < layout.world:
        rest = "hold the same, replica by replica" if facts.shown < layout.world else "are in --json"
        console.print(f"ranks {shown} to {layout.world - 1} {rest}")
    for line in blocks(facts):
        console.print(line, markup=False, no_wrap=True, overflow="crop")


def blocks(facts: LayoutFacts) -> list[str]:
    """Text lines of the ranks: layers of each module, and bytes by kind."""
    names, shown = list(facts.layout.modules), min(facts.shown, _MOST_SHOWN)
    cells = {
        (rank, name): " ".join(f"{s.start}:{s.stop}" for s in facts.layout.of_rank(rank) if s.module == name)
        for rank in range(shown)
        for name in names
    }
    widths = {name: max(len(name), *(len(cells[rank, name]) + 2 for rank in range(shown))) for name in names}
    most = max(memory.peak_run for memory in facts.memory[:shown]) or 1
    lines = ["rank  " + "  ".join(name.ljust(widths[name]) for name in names)]
    for rank in range(shown):
        boxes = [f"[{cells[rank, n]}]" if cells[rank, n] else "." for n in names]
        bar, done, total = "", 0, 0
        for kind, each in _held(facts.memory[rank]).items():
            total += each
            end = round(_BAR * total / most)
            bar, done = bar + _KINDS[kind] * (end - done), end
        line = "  ".join(box.ljust(widths[name]) for box, name in zip(boxes, names, strict=True))
        lines.append(f"{rank:4}  {line}  {bar} {size(facts.memory[rank].peak_run)}")
    return [*lines, "      " + ", ".join(f"{letter} = {kind}" for kind, letter in _KINDS.items())]


def draw(facts: LayoutFacts, path: Path) -> None:
    """Writes the picture. Raises ConfigError for a file that cannot be written."""
    from interlace.simulate import plot_layout

    shown = min(facts.shown, _MOST_SHOWN)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--picture {path}: name a file that ends in .png or .svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plot_layout(facts.layout, [_held(memory) for memory in facts.memory[:shown]], path, title=facts.name)
    except OSError as error:
        raise ConfigError(f"--picture {path}: cannot write there: {error.strerror}") from None


def _held(memory: RankMemory) -> dict[str, int]:
    """Bytes by kind, for the planned step. They add up to the peak."""
    found = {
        "weights": memory.weights_run,
        "gradients": memory.gradients_run,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
    }
    return {**found, "buffers": memory.peak_run - sum(found.values())}


def size(count: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def counted_noun(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")
