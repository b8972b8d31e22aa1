"""Launching: starts ranks, monitors them and ends them. Independent of the training itself.

- `launcher`: starts and monitors the local ranks; reports the one that failed. `startup`: before the first step.
- `peers`: gathers and broadcasts afterwards. `lock`: run lock, one job at a time in a run folder.

Import the modules directly: the CLI needs `launcher` at once and none of the others.
"""
