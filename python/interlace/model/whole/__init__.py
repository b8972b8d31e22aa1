"""Whole checkpoints: HuggingFace's multimodal models split into encoders, projectors and language model."""
