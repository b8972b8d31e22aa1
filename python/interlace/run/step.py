"""What an executor works on: the stages of a rank, and what a step gives to them."""

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
"""An activation, the chunk that reads it, and whether it is the gradient."""


@dataclass
class StageRuntime:
    """A stage of this rank. last: the last of its pipeline. sink: its output is a loss. place: this rank's place among
    those that compute it."""

    module: nn.Module
    last: bool
    sink: bool
    place: Place


class Arrived(NamedTuple):
    """What this rank received of a message, and which ranks join how many rows each."""

    mine: Tensor
    among: Ranks
    counts: Sequence[int]


@dataclass
class Step:
    """What one step works on, and what it leaves.

    inputs: (module, chunk, first stage) -> collated inputs. dealt: what of these a rank at some place is given. scale:
    multiplies the summed loss: 1 / valid targets of the whole batch. start: called once, before the first backward,
    message or sum, and before the first forward that several ranks do together. ends: chunk -> the module and the last
    stage, whose output its rows are. mark: marks a moment of the work, of which `times` is made. drawing: begins to
    watch for random numbers; drew: whether a forward drew any that several ranks do together, each from its own state.
    dispatch: begins the exchange of the coming step's items (streams); what it returns says when that ended, or None.
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
