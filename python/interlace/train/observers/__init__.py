"""Observers of the trainer: metrics, validation, checkpoints and recordings beside its steps."""
