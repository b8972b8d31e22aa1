"""[resilience] of a training config: what `interlace train --elastic` survives, and how."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from interlace.train.schema_base import WEEK, NotNegative, Positive, Section


class Resilience(Section):
    """Training on nodes that come and go: ``interlace train CONFIG --elastic``, without which this has no effect."""

    faults: NotNegative = 1
    """Nodes that may be lost at one time without a layer: faults + 1 pipelines or more hold the whole model each."""
    nodes: Positive = 2
    """Nodes that are waited for before the first step; more may come later."""
    min_nodes: Positive | None = None
    """Nodes of the smallest pipeline; by default as few as have the memory for the model. With fewer than
    (faults + 1) * min_nodes left the run saves and stops."""
    ranks_per_node: Positive = 1
    """Ranks that each node starts."""
    heartbeat: Annotated[float, Field(ge=0.2, le=3600.0)] = 5.0
    """Seconds after which a rank that does not move, or a node that is not heard of, is lost. Twelve times as long for
    an action that keeps its process at work. A process that dies is noticed at once."""
    gather: Annotated[float, Field(ge=0.0, le=WEEK)] = 60.0
    """Seconds after the first node's coming in which the others may come; then training begins with fewer than
    ``nodes`` if there are (faults + 1) * min_nodes."""
    notice: Annotated[float, Field(gt=0.0, le=WEEK)] = 25.0
    """Seconds between the SIGTERM that a node gets and its end: in them it hands its layers on after the current step.
    Kubernetes gives 30 by default, Slurm what ``--signal`` says."""
    coordinator: Annotated[str, Field(pattern=r"^\S+:[0-9]{1,5}$")] | None = None
    """host:port of ``interlace coordinator``, on a machine that outlives the nodes. By default one is started here,
    with all ``nodes`` on this machine."""
    coordinator_patience: Annotated[float, Field(ge=0.0, le=WEEK)] = 30.0
    """Seconds in which a coordinator that is gone may be started again, if it has a ``--state`` file: nodes wait for it
    so long, and it for nodes that have not come back to it."""
