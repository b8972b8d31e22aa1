"""Environment variables of elastic ranks, and their exit codes."""

from __future__ import annotations

COORDINATOR = "INTERLACE_COORDINATOR"  # host:port of the store
NODE = "INTERLACE_NODE"  # id of the node
PROGRESS = "INTERLACE_PROGRESS"  # path of this rank's progress page
PATIENCE = "INTERLACE_PATIENCE"  # seconds allowed for a coordinator restart; 0: no restart
LOCAL_RANK = "LOCAL_RANK"
ERROR = ".error"  # suffix of the page's path: file with the error that ended the rank
STOPPED = 75  # exit code for a clean end before the last step: the node left, or the run was saved
AWAY = ".away"  # suffix of the page's path: file with the start number of the lost coordinator, from the supervisor
