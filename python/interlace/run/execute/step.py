"""State of a step: the stages of a rank, and the inputs of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from interlace.parallel import Ranks
from interlace.parallel.route import Routes
from interlace.run.comparison import Comparison
from interlace.run.execute.device import Mark
from interlace.run.lanes import Place

if TYPE_CHECKING:
    from interlace.run.tables.batch import ChunkInputs
    from interlace.run.tables.deals import Deals

Key = tuple[str, int]
Value = tuple[str, int, int]
"""An activation: module, stage, chunk."""
Read = tuple[str, int, int, int]
"""An activation, and the chunk that reads it."""
Message = tuple[str, int, int, int, int]
"""An activation, the chunk that reads it, and 1 for its gradient (else 0)."""


@dataclass
class StageRuntime:
    """A stage of this rank.

    module: a `StageModule`. last: the last of its pipeline. sink: its output is a loss. place: this rank's place among
    those that compute it.
    """

    module: nn.Module
    last: bool
    sink: bool
    place: Place


class Arrived(NamedTuple):
    """The part of a message that this rank received; the ranks that join their parts, and the rows of each."""

    mine: Tensor
    among: Ranks
    counts: Sequence[int]


@dataclass
class Step:
    """Inputs and results of one step.

    ends: chunk -> its module and last stage, whose output is the rows of the chunk. inputs: collated inputs of chunks.
    deals: selects the part of them for a rank at some place. scale: factor of the summed loss: 1 / valid targets of the
    whole batch. comparison: finished once, before the first backward, message or sum, and before the first forward that
    several ranks run together. autocast: see `StepOptions`. dispatch: starts the exchange of the next step's items
    (streams) and returns a call, which returns the end time of that exchange, or None. drew: whether a forward that
    several ranks run together drew random numbers, each rank from its own state.
    """

    routes: Routes
    ends: Mapping[int, Key]
    inputs: ChunkInputs
    deals: Deals
    scale: float
    comparison: Comparison
    device: torch.device
    autocast: torch.dtype | None = None
    dispatch: Callable[[], Callable[[], float | None]] | None = None
    drew: bool = False
    loss: Tensor | None = None  # float64, summed over the chunks of this rank; on its device
    times: list[tuple[Mark, Mark]] = field(default_factory=list)  # start, finish of each action
