"""The families of models that a config may name, and how a folder that HuggingFace wrote says which one it holds."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

# family -> (module under transformers.models, config class, model class, keys that differ from the library's defaults)
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # SigLIP's attention pooling head would only hold weights that no token ever reaches.
    "siglip": ("siglip", "SiglipVisionConfig", "SiglipVisionModel", {"vision_use_head": False}),
    "clip": ("clip", "CLIPVisionConfig", "CLIPVisionModel", {}),
    "whisper": ("whisper", "WhisperConfig", "WhisperEncoder", {}),
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("qwen2", "Qwen2Config", "Qwen2ForCausalLM", {}),
}
# What config.json calls a model -> its family, and the table of it that describes this part.
KINDS = {
    "siglip": ("siglip", "vision_config"),
    "siglip_vision_model": ("siglip", None),
    "clip": ("clip", "vision_config"),
    "clip_vision_model": ("clip", None),
    "whisper": ("whisper", None),
    "llama": ("llama", None),
    "qwen2": ("qwen2", None),
}
CONFIG = "config.json"
RESERVED = {"attn_implementation", "dtype", "torch_dtype", "architectures", "return_dict", "output_hidden_states"}
"""Keys that the trainer sets."""
BESIDE = RESERVED | {"output_attentions", "id2label", "label2id", "problem_type", "use_cache", "is_encoder_decoder"}
BESIDE |= {"model_type", "transformers_version"}
"""Keys that say nothing of what a model computes, as far as a config may say it."""


def describe(folder: Path, families: Collection[str]) -> tuple[str, dict[str, Any]]:
    """(family, keys of its HuggingFace config) of a folder of `save_pretrained`: those that its config.json decides.

    families: those that fit where the model is to stand. Raises ValueError for anything else.
    """
    family, config = _read_config(folder, families)
    keys = _known(family, config)
    return family, {key: value for key, value in config.to_diff_dict().items() if key in keys and value is not None}


def differences(folder: Path, family: str, config: Any) -> dict[str, Any]:
    """Key -> the folder's value, where a model of this HuggingFace `config` would be another than the folder's.

    Ids of tokens aside, which say nothing of what it computes. Raises ValueError as `describe` does.
    """
    _, theirs = _read_config(folder, [family])
    keys = sorted(key for key in _known(family, theirs) if not key.endswith("_token_id"))
    return {key: getattr(theirs, key) for key in keys if getattr(theirs, key) != getattr(config, key, None)}


def _read_config(folder: Path, families: Collection[str]) -> tuple[str, Any]:
    path = folder / CONFIG
    table = read_json(path)
    kind = table.get("model_type")
    family, part = KINDS.get(str(kind), ("", None))
    if family not in families:
        fit = ", ".join(name for name, (each, _) in KINDS.items() if each in families)
        raise ValueError(f"{path} has model_type = {kind!r}; what fits here: {fit}")
    inner = table if part is None else table.get(part)
    if not isinstance(inner, dict):
        raise ValueError(f"{path} has no table {part!r}")
    module, config_class, _, ours = FAMILIES[family]
    made: Any = getattr(importlib.import_module(f"transformers.models.{module}.configuration_{module}"), config_class)
    try:
        return family, made(**{**inner, **ours})
    except Exception as error:  # the library's own checks, of values that may be anything
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _known(family: str, config: Any) -> set[str]:
    """The keys that the family's config class knows, and that decide what a model computes."""
    return {key for key in vars(type(config)()) if not key.startswith("_")} - BESIDE - set(FAMILIES[family][3])


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file. Raises ValueError when it cannot be read or is no table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read it: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} holds no table")
    return table
