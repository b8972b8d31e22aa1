"""GPipe: all forwards, then all backwards.

The simplest schedule. It holds all chunks at once, so memory grows with their number. Backwards run in the order of the
forwards, so gradients are added in the same order as under 1F1B.
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
    """GPipe schedule of one step. Options and errors: `interlace.schedule.generate`.

    Durations decide only whether encoders on the language model's ranks run their backwards last. A limit that the
    schedule cannot keep is an error.
    """
    return make("gpipe", graph, table, **options)
