"""Elastic training: runs continue after node losses and admit new nodes (dissertation chapter 2, Oobleck).

- `generation`: the set of nodes that train together, as plain data. `settings`: settings shared by all nodes.
- `coordinator/`: one process per run. It decides membership and steps.
- `supervisor/`: one process per node. It starts ranks and detects exits and hangs.
- `wire`: messages between supervisors and the coordinator.
- `member`: generation and votes of a rank. `link`: its connection to the coordinator's store.
- `takeover`: copies layers between ranks. `environment`: environment variables of a rank.

Supervisors import no torch. `member`, `link`, `takeover` and the process of the coordinator do.
"""
