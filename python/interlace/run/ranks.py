"""The stages of a rank, with weights that are the model's own.

Between processes a rank's stages hold the parameters of its model. Where one process plays several ranks, each has its
own modules and, as ranks add to gradients at the same time, its own `.grad`: the first rank that holds a weight has the
model's own Parameter, the others a Parameter over the same storage. So the model itself is trained, in place, whatever
the layout, and an optimizer over ``mllm.parameters()`` is the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from interlace.layout import Layout

Key = tuple[str, int]


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
        """Drop the views' gradients, and follow weights that were moved or replaced since."""
        for own, view in self._pairs:
            view.grad = None
            if view.data_ptr() != own.data_ptr() or view.dtype is not own.dtype:
                view.data = own.data

    def __len__(self) -> int:
        return len(self._pairs)


def local_stages(
    mllm: Any, layout: Layout, ranks: Sequence[int], checkpointing: bool, views: Views
) -> dict[int, dict[Key, nn.Module]]:
    """rank -> (module, stage) -> its stage, for ranks of one process."""
    if len(ranks) == 1:
        return {rank: stages_of(mllm, layout, rank, checkpointing) for rank in ranks}
    own = dict(mllm.named_parameters(remove_duplicate=False))
    taken: set[int] = set()
    found = {}
    for rank in ranks:
        mine: dict[int, nn.Parameter] = {}  # id of the model's own -> this rank's
        found[rank] = stages_of(mllm, layout, rank, checkpointing, copy=True)
        for stage in found[rank].values():
            _link(stage, own, mine, taken, views)
        taken.update(mine)
    return found


def stages_of(
    mllm: Any, layout: Layout, rank: int, checkpointing: bool, *, copy: bool = False
) -> dict[Key, nn.Module]:
    """(module, stage) -> its stage on one rank."""
    return {
        (stage.module, stage.index): mllm.slice(
            stage.module, stage.start, stage.stop, copy=copy, checkpointing=checkpointing
        )
        for stage in layout.of_rank(rank)
    }


def _link(
    stage: nn.Module, own: Mapping[str, nn.Parameter], mine: dict[int, nn.Parameter], taken: set[int], views: Views
) -> None:
    """Give `stage` the model's own parameters, or views of those that other ranks have taken."""
    for prefix, module in stage.named_modules():
        for key, parameter in list(module._parameters.items()):
            name = f"{prefix}.{key}" if prefix else key
            if parameter is None or name not in own:
                continue
            model = own[name]
            if id(model) not in mine:
                mine[id(model)] = views.add(model) if id(model) in taken else model
            module._parameters[key] = mine[id(model)]

