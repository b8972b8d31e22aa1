"""Zero bubble: backwards are split in two halves, and the second half fills idle time (Qi et al., arXiv 2401.10241).

BACKWARD_INPUT computes the gradients for the previous stage, so other ranks wait for it. BACKWARD_WEIGHT computes the
gradients of the weights and may run at any later time. A stage without trained weights has no second half: its BACKWARD
is the input half alone. If nothing before a stage is trained, its first half serves only its own layers, and it sends
nothing.
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
    """ZB-H1 (section 2.2 of the paper): warm-up as in 1F1B; no rank holds more than the fullest rank under 1F1B.

    Options and errors: `interlace.schedule.generate`.
    """
    return make("zb_h1", graph, table, **options)


def zb_h2(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """ZB-H2 (section 2.3 of the paper): a warm-up twice as deep, with about twice the activations.

    On a chain of equal stages no rank is idle between its first and its last action.

    Options and errors: `interlace.schedule.generate`.
    """
    return make("zb_h2", graph, table, **options)


def zb_v(graph: StageGraph, table: StepTable, **options: Unpack[Options]) -> Schedule:
    """ZB-V (section 6 of the paper), for a module whose stages go down the ranks and up again.

    Such a module has ``ParallelSpec(virtual=2, order="v")``. No rank holds more than the fullest rank under 1F1B on the
    same layout.

    Options and errors: `interlace.schedule.generate`.
    """
    return make("zb_v", graph, table, **options)
