"""What a supervisor tells its ranks in their environment."""

from __future__ import annotations

COORDINATOR = "INTERLACE_COORDINATOR"  # host:port of the store
NODE = "INTERLACE_NODE"  # id of the node
PROGRESS = "INTERLACE_PROGRESS"  # path of this rank's page
LOCAL_RANK = "LOCAL_RANK"
