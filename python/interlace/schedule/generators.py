"""All generators by their names in configs and in `parallelize`; a user's function by its import path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from interlace._hints import imported, nearest
from interlace.schedule.automatic import automatic
from interlace.schedule.check import check
from interlace.schedule.generate import KINDS
from interlace.schedule.gpipe import gpipe
from interlace.schedule.graph import StageGraph
from interlace.schedule.one_f_one_b import interleaved, one_f_one_b
from interlace.schedule.schedule import Schedule
from interlace.schedule.table import StepTable
from interlace.schedule.zero_bubble import zb_h1, zb_h2, zb_v

GENERATORS: dict[str, Callable[..., Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "auto": automatic,
}


def generator_of(name: str) -> Callable[..., Schedule]:
    """Generator of the schedule `name`: one of GENERATORS, or "package.module:function".

    A user's function takes (graph, table, **options), see `interlace.schedule.generate.Options`, and returns a
    Schedule of them. Every rank calls it, and all must make the same lists. Its schedules are checked as ours are.

    Raises ValueError for an unknown name.
    """
    if name in GENERATORS:
        return GENERATORS[name]
    if ":" not in name:
        raise ValueError(f"unknown schedule {name!r}; {nearest(name, GENERATORS)}")
    function = imported(name, "schedule")
    if not callable(function):
        raise ValueError(f"schedule = {name!r} is not a function (graph, table, **options) -> Schedule")
    return partial(_own, name, function)


def splits_backward(name: str) -> bool:
    """Whether lists of the schedule `name` may split backwards into halves.

    For a user's function this is its attribute ``splits_backward``; by default True.
    """
    if name in KINDS:
        return KINDS[name].halves
    return bool(getattr(imported(name, "schedule"), "splits_backward", True))


def _own(
    name: str, function: Callable[..., Any], graph: StageGraph, table: StepTable, *, backward: bool = True,
    reduce_grad: bool = True, dispatch: bool = False, **options: Any,
) -> Schedule:  # fmt: skip
    """Schedule of a user's function. Raises ValueError if it is not for this step, ScheduleError if it cannot run."""
    flags = {"backward": backward, "reduce_grad": backward and reduce_grad, "dispatch": dispatch}
    made = function(graph, table, backward=backward, reduce_grad=reduce_grad, dispatch=dispatch, **options)
    if not isinstance(made, Schedule):
        raise ValueError(f"schedule {name!r} returned {type(made).__name__}, not an interlace.schedule.Schedule")
    if made.graph is not graph or made.table is not table:
        raise ValueError(f"schedule {name!r} returned a Schedule of another graph or table: pass on those it was given")
    for flag, value in flags.items():
        if getattr(made, flag) != value:
            raise ValueError(f"schedule {name!r} returned a Schedule with {flag} = {getattr(made, flag)}, not {value}")
    check(made)
    return made
