"""Helpers of test_dispatch.py and of other tests."""

from __future__ import annotations

from typing import Any

import torch

from interlace.model import Sample
from tests.tiny import random_sample

LLM = "language_model"


NAMES = ("vision", "audio", LLM)


def batch_of(mllm: Any, kind: str, count: int = 11) -> list[Sample]:
    """uneven: many media in a few samples. one modality: no audio. text: no media."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for i in range(count):
        images = 0 if kind == "text" else (4 if i in (0, 1) else i % 3 % 2)
        clips = 0 if kind != "uneven" else (3 if i == 2 else i % 2)
        result.append(random_sample(mllm, generator, images=images, clips=clips, text=3 + 7 * (i % 4)))
    return result
