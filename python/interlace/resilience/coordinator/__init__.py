"""Coordinator: decides membership, generations and steps of an elastic run, with state on disk.

- `process`: connections. `authority`: lost nodes and committed steps. `roster`: the next generation.
- `hangs`: hanging nodes.
- `layouts`: layouts of generations. `state`: file for restarts.
"""
