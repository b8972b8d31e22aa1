"""State of a step: the stages of a rank, and the inputs of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from interlace.parallel import Ranks
from interlace.parallel.route import Routes
from interlace.run.lanes import Place

Key = tuple[str, int]
Value = tuple[str, int, int]
"""An activation: module, stage, chunk."""
Message = tuple[str, int, int, int, int]
"""An activation, the chunk that reads it, and 1 for its gradient (else 0)."""


@dataclass
class StageRuntime:
    """A stage of this rank. last: the last of its pipeline. sink: its output is a loss. place: this rank's place among
    those that compute it."""

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

    inputs: (module, chunk, first stage) -> collated inputs. dealt: selects the part of them for a rank at some place.
    scale: factor of the summed loss: 1 / valid targets of the whole batch. start: called once, before the first
    backward, message or sum, and before the first forward that several ranks run together. ends: chunk -> its module
    and last stage, whose output is the rows of the chunk. mark: records a time mark; `times` consists of these.
    drawing: starts to watch for random numbers; drew: whether a forward that several ranks run together drew any, each
    rank from its own state. dispatch: starts the exchange of the next step's items (streams) and returns a call, which
    returns the end time of that exchange, or None.
    """

    routes: Routes
    ends: Mapping[int, Key]
    inputs: Callable[[str, int, bool], dict[str, Any]]
    dealt: Callable[[str, int, Place, dict[str, Any]], dict[str, Any]]
    scale: float
    start: Callable[[], None] = lambda: None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    mark: Callable[[], Any] = time.monotonic
    drawing: Callable[[], Callable[[], bool]] = lambda: lambda: False
    dispatch: Callable[[], Callable[[], float | None]] = lambda: lambda: None
    drew: bool = False
    loss: Tensor | None = None  # float64, summed over the chunks of this rank; on its device
    times: list[tuple[Any, Any]] = field(default_factory=list)  # start, finish of each action, as marked
