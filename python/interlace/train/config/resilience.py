"""[resilience] of a training config: settings of `interlace train --elastic` for failing nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from interlace.train.config.base import WEEK, NotNegative, Positive, Section


class Resilience(Section):
    """Elastic training on nodes that may fail or join: ``interlace train CONFIG --elastic``. Ignored without
    --elastic."""

    faults: NotNegative = 1
    """Number of nodes that may fail at the same time without losing a layer. At least faults + 1 pipelines hold the
    whole model each."""
    nodes: Positive = 2
    """Nodes to wait for before the first step. More nodes may join later."""
    min_nodes: Positive | None = None
    """Nodes of the smallest pipeline. Default: the fewest with enough memory for the model. With fewer than (faults +
    1) * min_nodes nodes left, the run saves and stops."""
    ranks_per_node: Positive = 1
    """Ranks that each node starts: a multiple of tp * cp."""
    heartbeat: Annotated[float, Field(ge=0.2, le=3600.0)] = 5.0
    """Seconds without progress of a rank, or without a message from a node, until it counts as lost. The limit is 12
    times as long for an action whose process still uses the CPU. A process that exits is detected at once."""
    gather: Annotated[float, Field(ge=0.0, le=WEEK)] = 60.0
    """Seconds to wait for more nodes after the first one has joined. Then training starts with fewer than ``nodes`` if
    at least (faults + 1) * min_nodes have joined."""
    notice: Annotated[float, Field(gt=0.0, le=WEEK)] = 25.0
    """Seconds between SIGTERM to a node and its end. The node hands over its layers in this time, after the current
    step. Kubernetes gives 30 by default, Slurm the value of ``--signal``."""
    coordinator: Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$")] | None = None
    """host:port of ``interlace coordinator``, on a machine that outlives the nodes. Default: the coordinator and all
    ``nodes`` are started on this machine."""
    coordinator_patience: Annotated[float, Field(ge=0.0, le=WEEK)] = 30.0
    """Seconds that nodes wait for a failed coordinator to restart, and that a restarted one waits for nodes to
    reconnect. A restart needs ``interlace coordinator --state``. 0: no restart."""
