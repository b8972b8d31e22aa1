"""Zero bubble: backwards in two halves, of which the second fills what would be idle.

BACKWARD_INPUT hands gradients on, so it is what others wait for; BACKWARD_WEIGHT, the gradients of the weights, may run
at any time after it (Qi et al., arXiv 2401.10241). A stage where nothing trains has no second half: its BACKWARD is the
input half alone. One before which nothing trains has a first half only for its own layers, and sends nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.schedule.generate import Options, make
from interlace.schedule.graph import StageGraph
from interlace.schedule.schedule import Schedule
from interlace.schedule.table import StepTable

if TYPE_CHECKING:
    from typing_extensions import Unpack


def zb_h1(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """ZB-H1 (section 2.2 there): 1F1B's warm-up, and no rank holds more than the fullest one does under 1F1B.

    Options and errors: `interlace.schedule.generate`.
    """
    return make("zb_h1", graph, table, **options)


def zb_h2(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """ZB-H2 (section 2.3 there): a warm-up twice as deep, for about twice the activations. On a chain of equal
    stages no rank is idle between its first and its last action.

    Options and errors: `interlace.schedule.generate`.
    """
    return make("zb_h2", graph, table, **options)


def zb_v(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """ZB-V (section 6 there), for a module whose stages go down the ranks and up again (``ParallelSpec(virtual=2,
    order="v")``): no rank holds more than the fullest one does under 1F1B on the same layout.

    Options and errors: `interlace.schedule.generate`.
    """
    return make("zb_v", graph, table, **options)
