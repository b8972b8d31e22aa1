"""Counting: FLOPs, attention pairs and shapes of a model's layers, from a run without data."""
