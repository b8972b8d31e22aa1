"""Separation tests: detect, on small inputs, whether samples in one row of a model influence each other."""
