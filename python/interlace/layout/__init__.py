"""Layouts: placement of the layers of each module's replicas on ranks, as pure data.

- `spec`: ParallelSpec, the degrees of a module.
- `layout`: Layout, and its groups of ranks.
- `parts`: Lane, Stage, Pipeline, Reduction, Shard.
- `place`: placements of modules, with cuts by the costs of their layers.
"""

from interlace.layout.layout import Layout
from interlace.layout.parts import Lane, Pipeline, Reduction, Shard, Stage
from interlace.layout.spec import ParallelSpec

__all__ = ["Lane", "Layout", "ParallelSpec", "Pipeline", "Reduction", "Shard", "Stage"]
