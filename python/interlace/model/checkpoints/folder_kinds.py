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
        what = "a GGUF file, made for inference" if folder.suffix == ".gguf" else "a file"
        raise ValueError(f"{folder} is {what}: give the folder that HuggingFace's save_pretrained wrote")
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; models are read from local folders: download it first (hf download NAME "
            "--local-dir FOLDER)"
        )
    if not (folder / CONFIG).exists():
        if (folder / ADAPTER).exists():
            base = _table(folder / ADAPTER).get("base_model_name_or_path")
            raise ValueError(
                f"{folder} holds an adapter (peft) of {base}, not a model: merge it into that (merge_and_unload), save "
                "the result and give its folder"
            )
        if any(folder.glob("*.gguf")):
            raise ValueError(
                f"{folder} holds GGUF files, made for inference: give the folder that HuggingFace's save_pretrained "
                "wrote"
            )
    table = _table(folder / CONFIG)
    for key in QUANTIZED:
        if isinstance(said := _inside(table, key), dict):
            raise ValueError(
                f"{folder} holds weights that are quantized ({said.get('quant_method', key)}): whole ones are trained; "
                "give the model as it was before"
            )
    if "auto_map" in table and not _known(table.get("model_type")):
        raise ValueError(
            f"{folder} brings its own code (auto_map in {CONFIG}), which is never run, and the installed transformers "
            f"has no model of type {table.get('model_type')!r}: give a folder that was converted to one of its classes"
        )


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _inside(table: dict[str, Any], key: str) -> Any:
    """The value of `key` in a table or in a nested table."""
    inner = (_inside(value, key) for value in table.values() if isinstance(value, dict))
    return table[key] if key in table else next((value for value in inner if value is not None), None)


def _known(kind: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return kind in CONFIG_MAPPING
