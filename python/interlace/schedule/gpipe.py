"""GPipe: all forwards, then all backwards.

Simplest and fastest to start, but every chunk is held at once: memory grows with their number. Backwards run in the
order of the forwards, so that gradients add up in the same order as under 1F1B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.schedule.generate import Options, make
from interlace.schedule.graph import StageGraph
from interlace.schedule.schedule import Schedule
from interlace.schedule.table import StepTable

if TYPE_CHECKING:
    from typing_extensions import Unpack


def gpipe(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """The GPipe schedule of one step; options and errors: `interlace.schedule.generate`. Durations decide only whether
    encoders on the language model's ranks go backward last; a limit that it cannot keep is an error."""
    return make("gpipe", graph, table, **options)
