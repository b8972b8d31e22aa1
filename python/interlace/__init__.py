"""Interlace: bitfield attention, scheduling and a pipeline runtime for training multimodal LLMs."""

__version__ = "0.1.0"
