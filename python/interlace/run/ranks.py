"""The ranks that a process plays: their stages, with weights that are the model's own.

Between processes a rank's stages hold the parameters of its model, or pieces of them with tensor parallelism. Where
one process plays several ranks, each has its own modules and its own `.grad` (see `interlace.run.weights`); the model
itself is trained, in place, whatever the layout, and an optimizer over ``mllm.parameters()`` is the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from interlace.comm.channel import Channel
from interlace.comm.transports import Transport
from interlace.layout import Lane, Layout, Reduction
from interlace.run.executor import Executor, Key, StageRuntime
from interlace.run.graph import parameter_layers
from interlace.run.lanes import Place, cut
from interlace.run.weights import Pieces, Views, cut_weights
from interlace.schedule import StageGraph


class Rank:
    """One rank of this process.

    stages: (module, stage) -> StageModule. own: name in the whole model -> parameter on this rank; each once, under its
    first name. cut: of those of which it holds a piece, where that belongs. counts: the names of those that no lower
    rank holds (of a piece: none that holds the same piece): who sums over the model takes these of each rank.
    places: (module, stage) -> this rank's place among those that compute it.
    """

    def __init__(
        self, number: int, stages: dict[Key, nn.Module], places: Mapping[Key, Place], graph: StageGraph, mllm: Any
    ) -> None:
        self.number, self.stages, self.places = number, stages, places
        self.cut = {name: held for stage in stages.values() for name, held in cut_weights(stage).items()}
        self._graph = graph
        self._layers = parameter_layers(mllm)
        place = {name: i for i, (name, _) in enumerate(mllm.named_parameters(remove_duplicate=False))}
        held: dict[int, tuple[str, nn.Parameter]] = {}
        for stage in stages.values():
            for name, parameter in stage.named_parameters():
                first = held.setdefault(id(parameter), (name, parameter))
                if place[name] < place[first[0]]:
                    held[id(parameter)] = (name, parameter)
        self.own = dict(sorted(held.values(), key=lambda item: place[item[0]]))
        aliases = {name: names for names in mllm.tied_parameters() for name in names}
        self.counts = {
            name
            for name in self.own
            if number == min(r for alias in aliases.get(name, (name,)) for r in self._holders(alias))
        }
        self._tied = {
            number: [name for names in mllm.tied_parameters() if self._places(names) == group for name in names]
            for number, group in enumerate(graph.tied)
        }

    def _holders(self, name: str) -> list[int]:
        """The ranks that hold what this one holds of a weight."""
        module, layer = self._layers[name]
        lanes, tp = self._graph.layout.holders(module, layer), self._graph.layout.spec(module).tp
        if name not in self.cut:
            return [rank for lane in lanes for rank in lane.ranks]
        place = next(lane.ranks.index(self.number) for lane in lanes if self.number in lane.ranks)
        return [rank for lane in lanes for rank in lane.ranks[place % tp :: tp]]

    def _places(self, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted({self._layers[name] for name in names}))

    def parameters(self, reduction: Reduction) -> list[nn.Parameter]:
        """What `reduction` sums of this rank, in the order of the model."""
        if reduction.tied >= 0:
            return [p for name, p in self.own.items() if name in self._tied[reduction.tied]]
        layers = range(reduction.start, reduction.stop)
        at = self._layers
        return [p for n, p in self.own.items() if at[n][0] == reduction.module and at[n][1] in layers]

    def connect(self, transports: Mapping[tuple[int, ...], Transport]) -> None:
        """Have the groups of ranks in its lanes (`groups_of`) speak over their transports."""
        for place in self.places.values():
            place.connect(transports)

    def executor(self, channel: Channel) -> Executor:
        """What runs this rank's lists over `channel`."""
        graph = self._graph
        feeding = {producer for producer, _ in graph.links}
        runtimes = {}
        for (module, index), stage in self.stages.items():
            replica = graph.layout.replica(self.number, module)
            assert replica is not None
            last = index == len(graph.layout.pipelines(module)[replica].stages) - 1
            sink = last and module not in feeding
            runtimes[module, index] = StageRuntime(stage, last, sink, self.places[module, index])
        lanes = [lane.ranks for lane in graph.layout.lanes()]
        return Executor(self.number, runtimes, channel, graph.modules, lanes, graph.reductions, self.parameters)


def lane_of(layout: Layout, number: int, key: Key) -> Lane:
    """The lane in which rank `number` computes the stage (module, index)."""
    stage = next(stage for stage in layout.of_rank(number) if (stage.module, stage.index) == key)
    return next(lane for lane in stage.lanes if number in lane.ranks)


def make_ranks(
    mllm: Any, graph: StageGraph, numbers: Sequence[int], checkpointing: bool, views: Views, pieces: Pieces
) -> dict[int, Rank]:
    """The ranks `numbers` of this process."""
    several = len(numbers) > 1
    own = dict(mllm.named_parameters(remove_duplicate=False))
    taken: set[int] = set()
    found = {}
    for number in numbers:
        stages: dict[Key, nn.Module] = {}
        places: dict[Key, Place] = {}
        mine: dict[int, nn.Parameter] = {}  # id of the model's own -> this rank's
        for stage in graph.layout.of_rank(number):
            key = stage.module, stage.index
            tp = graph.layout.spec(stage.module).tp
            place = places[key] = Place.of(number, lane_of(graph.layout, number, key).ranks, tp)
            part = mllm.slice(
                stage.module, stage.start, stage.stop, copy=several or tp > 1, checkpointing=checkpointing
            )
            if tp > 1:
                stages[key] = cut(part, place.tp)
                _link_pieces(part, own, mine, place.tp.rank, pieces)
            else:
                stages[key] = part
                if several:
                    _link(part, own, mine, taken, views)
        taken.update(mine)
        found[number] = Rank(number, stages, places, graph, mllm)
    return found


def _link(
    stage: nn.Module, own: Mapping[str, nn.Parameter], mine: dict[int, nn.Parameter], taken: set[int], views: Views
) -> None:
    """Give `stage` the model's own parameters, or views of those that other ranks have taken."""
    for prefix, module in stage.named_modules():
        for key, parameter in list(module._parameters.items()):
            model = own.get(f"{prefix}.{key}" if prefix else key)
            if parameter is None or model is None:
                continue
            if id(model) not in mine:
                mine[id(model)] = views.add(model) if id(model) in taken else model
            module._parameters[key] = mine[id(model)]


def _link_pieces(
    stage: nn.Module, own: Mapping[str, nn.Parameter], mine: dict[int, nn.Parameter], place: int, pieces: Pieces
) -> None:
    """Give a stage that is cut Parameters over the model's own where it has these whole; note all of them."""
    cut = cut_weights(stage)
    for prefix, module in stage.named_modules():
        for key, parameter in list(module._parameters.items()):
            name = f"{prefix}.{key}" if prefix else key
            model = own.get(name)
            if parameter is None or model is None:
                continue
            if name not in cut and id(model) not in mine:
                mine[id(model)] = nn.Parameter(model.data, requires_grad=model.requires_grad)
                pieces.add(model, place, mine[id(model)], None)
            if name in cut:
                pieces.add(model, place, parameter, cut[name])
            else:
                module._parameters[key] = mine[id(model)]
