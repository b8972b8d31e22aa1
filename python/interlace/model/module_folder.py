"""A model that was put together from modules, in a folder: one of HuggingFace's folders per module, and how they fit.

folder/vision/                 each module as its own save_pretrained writes it
folder/language_model/
folder/projector.safetensors   the encoders' projectors, "vision.linear.weight" ...
folder/interlace.json          classes, projectors, placeholders
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from interlace.model.modality import ModalityModule
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.placeholders import Ids
from interlace.model.projector import PROJECTORS
from interlace.model.whole import read_module

FACTS, PROJECTOR = "interlace.json", "projector.safetensors"
FORMAT = 1
PLAIN = ("linear", "mlp")  # projectors without a config
CALLBACKS = ("preprocess", "postprocess", "postprocess_projector")


def save_modules(
    encoders: Mapping[str, ModalityModule],
    language_model: nn.Module,
    placeholders: Mapping[str, Ids],
    bidirectional: bool,
    folder: Path,
) -> None:
    """Write the modules into `folder`, which is there and empty.

    Raises ValueError for what a folder cannot say: callbacks, and a projector of a class of the user's own.
    """
    modules: dict[str, Any] = {}
    for name, encoder in encoders.items():
        if set_ := [key for key in CALLBACKS if getattr(encoder, key) is not None]:
            raise ValueError(
                f"{name} has a {set_[0]} function, which a folder of weights cannot hold: save it yourself"
            )
        kind = next((key for key, each in PROJECTORS.items() if type(encoder.projector) is each), None)
        if kind is None or (kind not in PLAIN and encoder.projector_class is None):
            raise ValueError(
                f"the projector of {name} is {type(encoder.projector).__name__}, none of {', '.join(PROJECTORS)}: save "
                "its weights yourself"
            )
        modules[name] = {"class": _class_of(encoder.module), "projector": kind, "downsample": encoder.downsample}
        modules[name]["projector_config"] = encoder.projector_config
    modules[LANGUAGE_MODEL] = {"class": _class_of(language_model)}
    for name, module in {**{n: e.module for n, e in encoders.items()}, LANGUAGE_MODEL: language_model}.items():
        module.save_pretrained(folder / name)  # type: ignore[operator]
    weights = {
        f"{name}.{key}": value.detach().contiguous()
        for name, encoder in encoders.items()
        for key, value in encoder.projector.state_dict().items()  # type: ignore[union-attr]
    }
    save_file(weights, folder / PROJECTOR)
    facts = {
        "format": FORMAT,
        "modules": modules,
        "placeholders": dict(placeholders),
        "bidirectional": bidirectional,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read_modules(folder: Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """What a MultimodalModel is made of again: its arguments; the projectors' weights are `load_projectors`'.

    Raises ValueError for a folder that was changed or is not whole.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        told, modules = facts["format"], dict(facts["modules"])
        made = {name: (_class_named(each["class"]), each) for name, each in modules.items()}
        placeholders = {n: v if isinstance(v, int) else tuple(map(int, v)) for n, v in facts["placeholders"].items()}
        bidirectional = bool(facts["bidirectional"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / FACTS} does not say what the folder holds: {error}") from None
    if told != FORMAT:
        raise ValueError(f"{folder / FACTS} has format {told}, this version of Interlace reads {FORMAT}")
    if LANGUAGE_MODEL not in made:
        raise ValueError(f"{folder / FACTS} names no {LANGUAGE_MODEL}")
    encoders = {}
    for name, (found, each) in made.items():
        if name != LANGUAGE_MODEL:
            module = read_module(found, folder / name, dtype)
            given = {key: each[key] for key in ("projector", "projector_config", "downsample")}
            encoders[name] = ModalityModule(module, **given)
    return {
        "encoders": encoders,
        "language_model": read_module(made[LANGUAGE_MODEL][0], folder / LANGUAGE_MODEL, dtype),
        "placeholders": placeholders,
        "bidirectional": bidirectional,
    }


def load_projectors(encoders: Mapping[str, ModalityModule], folder: Path) -> None:
    """Fill the projectors with what `folder` has. Raises ValueError where it is not theirs."""
    try:
        stored = load_file(folder / PROJECTOR)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / PROJECTOR}: {error}") from None
    holder = nn.ModuleDict({name: encoder.projector for name, encoder in encoders.items()})  # type: ignore[misc]
    try:
        holder.load_state_dict(stored)
    except RuntimeError as error:
        raise ValueError(f"{folder / PROJECTOR}: {' '.join(str(error).split())[:300]}") from None


def _class_of(module: nn.Module) -> str:
    kind = type(module)
    if kind.__module__.partition(".")[0] != "transformers":
        raise ValueError(
            f"{kind.__name__} is no class of transformers, so nobody could load it again: save it yourself"
        )
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_named(path: str) -> type[Any]:
    """A model class of transformers: nothing else is imported because a file says so."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name) if module.partition(".")[0] == "transformers" else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ValueError(f"{path} is no model class of transformers")
    return found
