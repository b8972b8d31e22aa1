"""Costs of layers, links and steps: counted in FLOPs, timed, or fitted to measurements; input of planners.

- `layer`: forward and backward, given what is frozen. `modules`: all layers of a model, in FLOPs.
- `profile`, `profile_modules`: timed layers. `fitted`: seconds from a few measurements.
- `step`: chunks of any size, and the file of costs. `counted`: the same from FLOPs.
- `host_overhead`: the rest of a step. `links`: messages and collectives.
"""
