"""Collectives: gathers, scatters and reductions of rows, differentiable; shards of context-parallel sequences."""
