"""Supervisor of a node: starts its ranks, watches their progress and reports faults.

- `process`: the supervisor. `progress`: shared-memory page with a rank's progress. `watch`: stalled ranks.
- `ranks`: the processes of the ranks.
- `faults`: the ranks at fault among ranks that wait for each other.
"""
