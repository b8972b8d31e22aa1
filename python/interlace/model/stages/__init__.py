"""Stages: slices of a model that a rank runs, with what their layers share."""
