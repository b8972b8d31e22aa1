"""Configs of earlier versions, in which ``data.dataset = "digits"`` and ``"stamps"`` were kinds of their own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from interlace._cache import cache_folder

LOOKS = 12  # distorted copies of each picture, in place of new distortions in every epoch


def read_as_chats(table: dict[str, Any]) -> None:
    """Turns ``dataset = "digits"`` of a config into the same digits as chats, in a folder of the cache.

    Pictures, prompts and tokens stay the same, so checkpoints go on with the losses that they had. A whole checkpoint
    (``model.path``) reads the chats with its own tokenizer. Raises ValueError for ``dataset = "stamps"``.
    """
    data, model = table.get("data"), table.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict):
        return
    if data.get("digit_jitter") == 0.0:
        data.pop("digit_jitter")  # saved configs list all defaults
    if data.get("train") or data.get("sources"):
        return
    if data.get("dataset") == "stamps":
        raise ValueError(
            "[data]: dataset 'stamps' is gone: set data.dataset = 'chats' and data.prepare = 'stamps', with train, "
            "validation and tokenizer in the folder to write, as configs/stamps.toml has them"
        )
    if data.get("dataset") != "digits":
        return
    encoders = [name for name, section in model.items() if isinstance(section, dict) and name != "language_model"]
    size, jitter = data.pop("digit_size", None), data.pop("digit_jitter", 0.0)
    options = {
        "side": _side(model[encoders[0]]) if size is None and encoders else size,
        "looks": LOOKS if jitter else 1,
        "held_out": data.get("held_out", 0.1),
        "byte_encoders": encoders,
    }
    train = table.get("train")
    if jitter and isinstance(train, dict) and isinstance(train.get("epochs"), (int, float)):
        train["epochs"] /= LOOKS  # an epoch has all copies
    name = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]
    folder = cache_folder(data.get("cache")).absolute() / "digits" / name
    data |= {
        "dataset": "chats",
        "prepare": "digits",
        "options": options,
        "train": [str(folder / "train.jsonl")],
        "validation": [str(folder / "validation.jsonl")],
    }
    if "path" not in model:
        data["tokenizer"] = str(folder / "tokenizer")
        data.setdefault("max_image_tokens", 64)


def _side(encoder: dict[str, Any]) -> int:
    """Side of a picture: the smallest multiple of the encoder's patches of at least the 8 pixels of a digit."""
    config = encoder.get("config")
    patch = config.get("patch_size") if isinstance(config, dict) else None
    patch = patch if isinstance(patch, int) and patch > 0 else 8
    return -(-8 // patch) * patch
