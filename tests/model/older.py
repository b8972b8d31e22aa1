"""Folders in the format of transformers 4.57.1: config.json and shapes of tiny models, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FAMILIES: dict[str, Any] = json.loads((Path(__file__).parent / "written_by_4_57.json").read_text())["families"]


def folder_of(name: str, folder: Path) -> Path:
    """The family's folder, with random weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = FAMILIES[name]["weights"]
    weights = {key: torch.randn(shape, generator=generator) / 9 for key, shape in shapes.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(FAMILIES[name]["config"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
