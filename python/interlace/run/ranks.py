"""The ranks that a process plays: their stages, with weights that are the model's own.

Between processes a rank's stages hold the parameters of its model. Where one process plays several ranks, each has its
own modules and, as ranks add to gradients at the same time, its own `.grad`: the first rank that holds a weight has the
model's own Parameter, the others a Parameter over the same storage. So the model itself is trained, in place, whatever
the layout, and an optimizer over ``mllm.parameters()`` is the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from interlace.comm.channel import Channel
from interlace.layout import Reduction
from interlace.run.executor import Executor, Key, StageRuntime
from interlace.run.graph import parameter_layers
from interlace.schedule import StageGraph


class Rank:
    """One rank of this process.

    stages: (module, stage) -> StageModule. own: name in the whole model -> parameter on this rank; each once, under its
    first name. counts: the names of those that no lower rank holds: who sums over the model takes these of each rank.
    """

    def __init__(self, number: int, stages: dict[Key, nn.Module], graph: StageGraph, mllm: Any) -> None:
        self.number, self.stages = number, stages
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
        module, layer = self._layers[name]
        return [rank for lane in self._graph.layout.holders(module, layer) for rank in lane.ranks]

    def _places(self, names: Sequence[str]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted({self._layers[name] for name in names}))

    def parameters(self, reduction: Reduction) -> list[nn.Parameter]:
        """What `reduction` sums of this rank, in the order of the model."""
        if reduction.tied >= 0:
            return [p for name, p in self.own.items() if name in self._tied[reduction.tied]]
        layers = range(reduction.start, reduction.stop)
        at = self._layers
        return [p for n, p in self.own.items() if at[n][0] == reduction.module and at[n][1] in layers]

    def executor(self, channel: Channel) -> Executor:
        """What runs this rank's lists over `channel`."""
        graph = self._graph
        feeding = {producer for producer, _ in graph.links}
        runtimes = {}
        for (module, index), stage in self.stages.items():
            replica = graph.layout.replica(self.number, module)
            assert replica is not None
            last = index == len(graph.layout.pipelines(module)[replica].stages) - 1
            runtimes[module, index] = StageRuntime(stage, last, last and module not in feeding)
        lanes = [lane.ranks for lane in graph.layout.lanes()]
        return Executor(self.number, runtimes, channel, graph.modules, lanes, graph.reductions, self.parameters)


class Views:
    """The parameters over the storage of others that in-process ranks have."""

    def __init__(self) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # the model's own, the rank's

    def add(self, own: nn.Parameter) -> nn.Parameter:
        """Another Parameter over the storage of `own`."""
        view = nn.Parameter(own.data, requires_grad=own.requires_grad)
        self._pairs.append((own, view))
        return view

    def refresh(self) -> None:
        """Follow weights that were moved or replaced since."""
        for own, view in self._pairs:
            if view.data_ptr() != own.data_ptr() or view.dtype is not own.dtype:
                view.data = own.data

    def drop_gradients(self) -> None:
        """Forget the gradients of the views: those of the model's own parameters have the same sums."""
        for _, view in self._pairs:
            view.grad = None


def make_ranks(
    mllm: Any, graph: StageGraph, numbers: Sequence[int], checkpointing: bool, views: Views
) -> dict[int, Rank]:
    """The ranks `numbers` of this process."""
    several = len(numbers) > 1
    own = dict(mllm.named_parameters(remove_duplicate=False))
    taken: set[int] = set()
    found = {}
    for number in numbers:
        stages: dict[Key, nn.Module] = {
            (stage.module, stage.index): mllm.slice(
                stage.module, stage.start, stage.stop, copy=several, checkpointing=checkpointing
            )
            for stage in graph.layout.of_rank(number)
        }
        if several:
            mine: dict[int, nn.Parameter] = {}  # id of the model's own -> this rank's
            for stage in stages.values():
                _link(stage, own, mine, taken, views)
            taken.update(mine)
        found[number] = Rank(number, stages, graph, mllm)
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
