"""What a supervisor tells its ranks in their environment, and what they tell it by their exit code."""

from __future__ import annotations

COORDINATOR = "INTERLACE_COORDINATOR"  # host:port of the store
NODE = "INTERLACE_NODE"  # id of the node
PROGRESS = "INTERLACE_PROGRESS"  # path of this rank's page
PATIENCE = "INTERLACE_PATIENCE"  # seconds in which the coordinator may be started again; 0: it cannot be
LOCAL_RANK = "LOCAL_RANK"
ERROR = ".error"  # after the path of a page: the file in which its rank says what it failed of
STOPPED = 75  # exit code of a rank that ended well before the last step: its node left, or the run was saved
AWAY = ".away"  # after the path of a page: the file in which its supervisor says which start of the coordinator is gone
