"""Action lists of a table: made by the run's generator, checked, and cached for tables of the same form."""

from __future__ import annotations

from interlace.run.graph import check_read
from interlace.run.tables.assign import Assigner
from interlace.schedule import Options, Schedule, StageGraph, StepTable, check, generator_of

_KEPT = 64  # schedules: tables of one form recur


class Lists:
    """The checked schedules of a run's tables. schedule: the name of the generator, with its options; assigner: source
    of durations, if samples are assigned by costs."""

    def __init__(self, graph: StageGraph, schedule: str, options: Options, assigner: Assigner | None) -> None:
        self._graph, self._generator, self._options = graph, generator_of(schedule), options
        self._assigner = assigner
        self._schedules: dict[tuple[bool, bool, str, bytes], Schedule] = {}

    def of(self, table: StepTable, *, train: bool, dispatch: bool) -> Schedule:
        """See `ParallelModel.schedule`."""
        pipelines = self._graph.pipeline_number
        form = ",".join(str(pipelines.get((chunk.module, chunk.replica))) for chunk in table.chunks)
        timed = self._assigner.options(table) if self._assigner is not None else {}
        work = table.work.tobytes() if timed and table.work is not None else b""
        key = (train, dispatch, form, table.links.tobytes() + work)
        if key not in self._schedules:
            check_read(self._graph, table)
            options = self._options if train else {}  # in evaluation no action waits for a backward
            options = {**options, **timed, "dispatch": dispatch}
            made = self._generator(self._graph, table, backward=train, reduce_grad=train, **options)
            check(made)
            if len(self._schedules) >= _KEPT:
                self._schedules.clear()
            self._schedules[key] = made
        return self._schedules[key]
