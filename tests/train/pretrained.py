"""Helpers of test_pretrained.py and of other tests."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
