"""Helpers of test_adapters.py and of other tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.model import MultimodalModel
from interlace.model.lora import add_lora
from interlace.model.patterns import is_adapter


def with_adapters(mllm: MultimodalModel, targets: Sequence[str], rank: int = 2, seed: int = 0) -> MultimodalModel:
    """The model with random, non-zero adapters."""
    add_lora(mllm, targets=targets, rank=rank, alpha=3)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in mllm.named_parameters():
        if is_adapter(name):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return mllm
