"""``interlace plan show`` for a config's own layout: modules, ranks, and the memory of each rank.

The same figures as a table, as text blocks (ranks x modules), as a picture and as JSON. docs/what-ranks-hold.md
explains them and the limits of the estimate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.train.blame import check_picture, writing
from interlace.train.config.load import blaming
from interlace.train.scheduling import chunk_costs, held_by_layout

if TYPE_CHECKING:
    from rich.console import Console

    from interlace.layout import Layout, Stage
    from interlace.plan.memory import RankMemory, WeightSize
    from interlace.train.commands.planning.costs import Priced

VERSION = 1  # of the keys of the JSON
_MOST_SHOWN = 64  # ranks
_BAR = 40  # characters of the largest peak
_DEGREES = ("tp", "cp", "pp", "virtual", "order", "dp", "shard", "shard_ranks")
_KINDS = {"weights": "w", "gradients": "g", "optimizer": "o", "activations": "a", "buffers": "b"}


@dataclass(frozen=True)
class StageFacts:
    """A stage of one replica. parameters: on the first rank of a lane. seconds: of a chunk, forward and backward."""

    stage: Stage
    replica: int
    parameters: int
    seconds: float


@dataclass(frozen=True)
class LayoutFacts:
    """A config's layout with the displayed figures.

    shown: number of displayed ranks; all others are identical. by_layer: the (rank, module) whose weights are gathered
    layer by layer in the step.
    """

    priced: Priced
    layout: Layout
    stages: tuple[StageFacts, ...]
    memory: tuple[RankMemory, ...]
    shown: int
    by_layer: frozenset[tuple[int, str]] = frozenset()
    weights: tuple[WeightSize, ...] = ()

    def to_json(self) -> str:
        """JSON with sorted keys, no NaN: see docs/what-ranks-hold.md."""
        priced = self.priced
        facts = {
            "version": VERSION,
            "run": priced.config.run.name,
            "placement": self.layout.placement,
            "schedule": priced.config.parallel.schedule,
            "microbatches": priced.microbatches,
            "world": self.layout.world,
            "costs": priced.costs.origin,
            "modules": [self._module(name) for name in self.layout.modules],
            "ranks": [self._rank(memory) for memory in self.memory],
        }
        return json.dumps(facts, allow_nan=False, indent=1, sort_keys=True)

    def _module(self, name: str) -> dict[str, object]:
        spec = self.layout.spec(name)
        stages = [
            {
                "replica": each.replica,
                "stage": each.stage.index,
                "layers": [each.stage.start, each.stage.stop],
                "lanes": [list(lane.ranks) for lane in each.stage.lanes],
                "parameters": each.parameters,
                "seconds": each.seconds,
            }
            for each in self.stages
            if each.stage.module == name
        ]
        degrees = {degree: getattr(spec, degree) for degree in _DEGREES}
        return {"module": name, **degrees, "stages": stages}

    def _rank(self, memory: RankMemory) -> dict[str, object]:
        rank = memory.rank
        kinds = ("weights", "gradients", "optimizer", "activations", "messages", "workspace", "peak")
        gathered = ("weights", "gradients", "peak")  # differ if weights are gathered once per step
        return {
            "rank": rank,
            "stages": [
                {"module": stage.module, "stage": stage.index, "replica": self.layout.replica(rank, stage.module)}
                for stage in self.layout.of_rank(rank)
            ],
            "parameters": memory.parameters,
            "in_flight": memory.in_flight,
            "bytes": {kind: getattr(memory, kind) for kind in kinds} | {"gradient_sums": memory.sums},
            "bytes_on_host": {"optimizer": memory.host},
            "bytes_gathered_once": {kind: getattr(memory, f"{kind}_once") for kind in gathered},
            "bytes_as_run": {kind: getattr(memory, f"{kind}_run") for kind in gathered},
            "gathered_by_layer": [name for name in self.layout.modules if (rank, name) in self.by_layer],
        }


def of_config(priced: Priced) -> LayoutFacts:
    """Figures of the config's own layout with all replicas. Raises ConfigError if a rank cannot hold its stages."""
    from interlace.run import stage_durations
    from interlace.schedule import Op
    from interlace.train.models.build import build_layout

    config, model, microbatches = priced.config, priced.model, priced.microbatches
    layout = build_layout(config, model, source=priced.source)
    with blaming(f"{priced.source}: [parallel]"):
        held, weights = held_by_layout(config, model, layout, microbatches)
    scaled = chunk_costs(config, layout, priced.costs.modules, microbatches)
    durations = stage_durations(model, layout, scaled, recompute=config.train.recompute)

    @cache
    def parameters(module: str, start: int, stop: int) -> int:
        mine = (w for w in weights if w.module == module and any(start <= layer < stop for layer in w.layers))
        return sum(weight.count(0) for weight in mine)

    stages = tuple(
        StageFacts(
            stage,
            pipeline.replica,
            parameters(stage.module, stage.start, stage.stop),
            sum(durations[op, stage.module, stage.index] for op in (Op.FORWARD, Op.BACKWARD)),
        )
        for pipeline in layout.pipelines()
        for stage in pipeline.stages
    )
    shown = layout.world // config.parallel.replicas("language_model") if config.uniform() else layout.world
    return LayoutFacts(priced, layout, stages, held.memory, shown, held.by_layer, tuple(weights))


# ---------------------------------------------------------------------- text and pictures


def show(facts: LayoutFacts, console: Console) -> None:
    """Prints one line per module and stage, one per rank, and the ranks as blocks."""
    from interlace.train.commands.tables import table_of

    layout, shown = facts.layout, min(facts.shown, _MOST_SHOWN)
    name = facts.priced.config.run.name
    columns = ("module", "stage", "layers", "ranks", "tp", "cp", "pp", "dp", "shard", "parameters", "1F+1B ms")
    title = f"{name}: layout of {counted_noun(layout.world, 'rank')}"
    table = table_of(title, *columns, left=("module", "ranks", "shard"))
    for each in facts.stages:
        stage = each.stage
        if each.replica:
            continue
        spec = layout.spec(stage.module)
        table.add_row(
            stage.module if stage.index == 0 else "",
            str(stage.index),
            f"{stage.start}:{stage.stop}",
            ", ".join("+".join(map(str, lane.ranks)) for lane in stage.lanes),
            str(spec.tp),
            str(spec.cp),
            str(spec.pp) if spec.virtual == 1 else f"{spec.pp} x {spec.virtual}",
            str(spec.dp),
            spec.shard if spec.shard_ranks is None else f"{spec.shard} / {spec.shard_ranks}",
            f"{each.parameters / 1e6:,.2f} M",
            f"{1e3 * each.seconds:,.2f}",
        )
    console.print(table)
    if any(spec.dp > 1 for spec, _ in layout.modules.values()):
        console.print("stages of the first replica of each module; seconds are those of a chunk on one rank")
    full = list(dict.fromkeys(shard.module for shard in layout.shard_groups() if shard.full))
    # With gathered weights the peak is one of the last two if all modules gather in the same way.
    shown_kinds = ("rank", "stages", "parameters", "in flight", *_KINDS, "peak", "gathered by layer", "gathered once")
    table = table_of("bytes per rank, estimated", *(shown_kinds if full else shown_kinds[:-2]), left=("stages",))
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
    check_picture("--picture", path)
    with writing("--picture", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        plot_layout(
            facts.layout, [_held(memory) for memory in facts.memory[:shown]], path, title=facts.priced.config.run.name
        )


def _held(memory: RankMemory) -> dict[str, int]:
    """Bytes by kind, for the planned step. They add up to the peak."""
    facts = {
        "weights": memory.weights_run,
        "gradients": memory.gradients_run,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
    }
    return {**facts, "buffers": memory.peak_run - sum(facts.values())}


def size(count: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def counted_noun(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")
