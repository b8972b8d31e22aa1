"""Rejects unusable model folders, with a reason, before any weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG, ADAPTER = "config.json", "adapter_config.json"
QUANTIZED = ("quantization_config", "compression_config")


def refuse_other_kinds(folder: Path) -> None:
    """Raise ValueError for a path that is not a model folder that can be trained.

    Refused are: no folder, an adapter, GGUF files, quantized weights, and a model that only its own code implements. An
    unreadable config.json is left to its reader.
    """
    if folder.is_file():
        what = "a GGUF file for inference" if folder.suffix == ".gguf" else "a file"
        raise ValueError(f"{folder} is {what}: give a folder written by HuggingFace's save_pretrained")
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; models are read from local folders only: download it first (hf download "
            "NAME --local-dir FOLDER)"
        )
    if not (folder / CONFIG).exists():
        if (folder / ADAPTER).exists():
            base = _table(folder / ADAPTER).get("base_model_name_or_path")
            raise ValueError(
                f"{folder} is a peft adapter of {base}, not a model: merge it into the base model (merge_and_unload), "
                "save the result and give its folder"
            )
        if any(folder.glob("*.gguf")):
            raise ValueError(
                f"{folder} has GGUF files for inference: give a folder written by HuggingFace's save_pretrained"
            )
    table = _table(folder / CONFIG)
    for key in QUANTIZED:
        if isinstance(inner := _inside(table, key), dict):
            raise ValueError(
                f"{folder} has quantized weights ({inner.get('quant_method', key)}), which cannot be trained: give the "
                "unquantized model"
            )
    from transformers import CONFIG_MAPPING

    if "auto_map" in table and table.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder} needs its own code (auto_map in {CONFIG}), which is never run, and the installed transformers "
            f"has no model of type {table.get('model_type')!r}: give a folder converted to a transformers class"
        )


def _table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _inside(table: dict[str, Any], key: str) -> object:
    """The value of `key` in a table or in a nested table."""
    inner = (_inside(value, key) for value in table.values() if isinstance(value, dict))
    return table[key] if key in table else next((value for value in inner if value is not None), None)
