"""Configs of earlier versions, in which ``data.dataset = "digits"`` and ``"stamps"`` were kinds of their own."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from interlace._files import cache_folder

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
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(f"[data] digit_size = {size!r}: a number of pixels of at least 1")
    if type(jitter) not in (int, float) or not 0 <= jitter <= 10:
        raise ValueError(f"[data] digit_jitter = {jitter!r}: a number from 0 to 10")
    for key, kinds in (("held_out", (int, float)), ("cache", str)):
        if key in data and not isinstance(data[key], kinds):
            raise ValueError(f"[data] {key} = {data[key]!r}: a {'folder' if kinds is str else 'number'}")
    options = {
        "side": _side(model, encoders) if size is None else size,
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


def _side(model: dict[str, Any], encoders: list[str]) -> int:
    """Side of a picture: the smallest multiple of the encoders' patches of at least the 8 pixels of a digit. Raises
    ValueError for encoders of different patches: earlier versions gave each of them pictures of its own size."""
    configs = [config for name in encoders if isinstance(config := model[name].get("config"), dict)]
    patches = {patch for config in configs if isinstance(patch := config.get("patch_size"), int) and patch > 0}
    sides = {-(-8 // patch) * patch for patch in patches} or {8}
    if len(sides) > 1:
        raise ValueError(
            f"[data] dataset 'digits': encoders with patches of {sorted(patches)} pixels; set data.digit_size"
        )
    return sides.pop()
