"""Channels: point-to-point messages of the executor, in one process or over torch.distributed."""
