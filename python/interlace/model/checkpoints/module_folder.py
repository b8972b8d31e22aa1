"""Folder of a model that was built from modules: one HuggingFace folder per module, and a description of how they fit.

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
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from interlace._text import one_line
from interlace.model.collate import check_bidirectional
from interlace.model.inputs.placeholders import Ids
from interlace.model.language import LanguageSettings, merge_tokens
from interlace.model.modality import ModalityModule
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.projector import PROJECTORS
from interlace.model.stages.slice import find_layers
from interlace.model.whole.model import copy_original, read_module
from interlace.model.whole.parts import decoder_layers

T = TypeVar("T")
FACTS, PROJECTOR = "interlace.json", "projector.safetensors"
FORMAT = 1
PLAIN = ("linear", "mlp")  # projectors without a config
CALLBACKS = ("preprocess", "postprocess", "postprocess_projector", "_tokens", "_collate")


def save_modules(
    encoders: Mapping[str, ModalityModule],
    language_model: nn.Module,
    settings: LanguageSettings,
    folder: Path,
    source: Path | None = None,
) -> None:
    """Write the modules into `folder`, which must exist and be empty.

    source: the folder that they were read from, if any.
    Raises ValueError for settings that cannot be saved: functions, layers named by hand, and a projector of the user's
    own class.
    """
    modules: dict[str, Any] = {}
    _check_settings(language_model, settings)
    for name, encoder in encoders.items():
        if set_ := [key for key in CALLBACKS if getattr(encoder, key) is not None]:
            raise ValueError(
                f"{name} has a {set_[0].strip('_')} function, which cannot be stored in a folder of "
                "weights: save it yourself"
            )
        _check_layers(name, encoder.module, encoder.layer_path, None)
        kind = next((key for key, each in PROJECTORS.items() if type(encoder.projector) is each), None)
        if encoder.projector is not None and (kind is None or (kind not in PLAIN and encoder.projector_class is None)):
            raise ValueError(
                f"the projector of {name} is {type(encoder.projector).__name__}, not one of {', '.join(PROJECTORS)}: "
                "save its weights yourself"
            )
        modules[name] = {"class": _class_of(encoder.module), "projector": kind, "downsample": encoder.downsample}
        modules[name]["projector_config"] = encoder.projector_config
    modules[LANGUAGE_MODEL] = {"class": _class_of(language_model)}
    for name, module in {**{n: e.module for n, e in encoders.items()}, LANGUAGE_MODEL: language_model}.items():
        module.save_pretrained(folder / name)  # type: ignore[operator]
        copy_original(None if source is None else source / name, folder / name)
    save_file(projector_weights(encoders), folder / PROJECTOR)
    facts = {
        "format": FORMAT,
        "modules": modules,
        "placeholders": settings.placeholders,
        "bidirectional": settings.bidirectional,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def projector_weights(encoders: Mapping[str, ModalityModule]) -> dict[str, Tensor]:
    """Contents of projector.safetensors."""
    return {
        f"{name}.{key}": value.detach().to("cpu").contiguous()
        for name, encoder in encoders.items()
        if encoder.projector is not None
        for key, value in encoder.projector.state_dict().items()
    }


def _check_settings(language_model: nn.Module, settings: LanguageSettings) -> None:
    """Raise ValueError for settings of a language model that are not in its weights and would be lost."""
    if settings.preprocess or settings.postprocess or settings.merge is not merge_tokens or settings.positions:
        raise ValueError("the language model has callbacks, which cannot be stored: save its modules yourself")
    if settings.deepstack:
        raise ValueError(
            "DeepStack features, added behind layers of the language model, cannot be stored: save the modules yourself"
        )
    _check_layers(LANGUAGE_MODEL, language_model, settings.layer_path, decoder_layers(language_model))


def _check_layers(name: str, module: nn.Module, path: str, reported: str | None) -> None:
    """Raise ValueError if a reader would not find the layers at `path`. reported: path from HuggingFace's model."""
    try:
        layers: str | None = find_layers(module, reported)
    except ValueError:
        layers = None
    if layers != path:
        raise ValueError(f"{name} has layers={path!r}, which cannot be stored: save its modules yourself")


def read_modules(folder: Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Read the arguments of a MultimodalModel. `load_projectors` reads the projectors' weights.

    Raises ValueError for a changed or incomplete folder.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / FACTS} is invalid: {error}") from None
    version = facts.get("format") if isinstance(facts, dict) else None
    if version != FORMAT:
        raise ValueError(f"{folder / FACTS} has format {version!r}, but this version of Interlace reads {FORMAT}")
    try:
        made = {name: (_class_named(each["class"]), each) for name, each in dict(facts["modules"]).items()}
        given = {name: _projector(each) for name, (_, each) in made.items() if name != LANGUAGE_MODEL}
        placeholders = {name: _ids(ids) for name, ids in dict(facts["placeholders"]).items()}
        bidirectional = check_bidirectional(facts["bidirectional"])
    except KeyError as error:
        raise ValueError(f"{folder / FACTS} is invalid: it has no {error}") from None
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / FACTS} is invalid: {error}") from None
    if LANGUAGE_MODEL not in made:
        raise ValueError(f"{folder / FACTS} names no {LANGUAGE_MODEL}")
    for name in made:
        if Path(name).name != name or not (folder / name).is_dir():
            raise ValueError(f"{folder / FACTS} names {name!r}, but its folder is missing")
    read = {name: read_module(module, folder / name, dtype) for name, (module, _) in made.items()}
    return {
        "encoders": {name: ModalityModule(read[name], **arguments) for name, arguments in given.items()},
        "language_model": read[LANGUAGE_MODEL],
        "placeholders": placeholders,
        "bidirectional": bidirectional,
    }


def _of(kind: type[T], value: Any, name: str) -> T:
    """Return `value` if it has exactly this type. Raises ValueError otherwise."""
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}, not a {kind.__name__}")
    return value


def _ids(given: object) -> Ids:
    """Placeholders of an encoder. Raises ValueError for invalid ones."""
    each = tuple(_of(int, token, "a placeholder") for token in (given if isinstance(given, list) else [given]))
    return each if isinstance(given, list) else each[0]


def _projector(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Projector arguments of a ModalityModule. Raises KeyError and ValueError for invalid ones."""
    kind = facts["projector"]
    return {
        "projector": None if kind is None else _of(str, kind, "projector"),
        "projector_config": _of(dict, facts["projector_config"], "projector_config"),
        "downsample": _of(int, facts["downsample"], "downsample"),
    }


def load_projectors(encoders: Mapping[str, ModalityModule], folder: Path) -> None:
    """Load the projectors' weights from `folder`. Raises ValueError if they do not match."""
    try:
        stored = load_file(folder / PROJECTOR)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / PROJECTOR}: {error}") from None
    holder = nn.ModuleDict({name: each.projector for name, each in encoders.items() if each.projector is not None})
    try:
        holder.load_state_dict(stored)
    except RuntimeError as error:
        raise ValueError(f"{folder / PROJECTOR}: {one_line(error, 300)}") from None


def _class_of(module: nn.Module) -> str:
    kind = type(module)
    if kind.__module__.partition(".")[0] != "transformers":
        raise ValueError(
            f"{kind.__name__} is not a class of transformers, so it could not be loaded again: save it yourself"
        )
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_named(path: str) -> type[PreTrainedModel]:
    """A model class of transformers. Names in a file never import anything else."""
    path = _of(str, path, "class")
    module, _, name = path.rpartition(".")
    class_ = getattr(importlib.import_module(module), name) if module.partition(".")[0] == "transformers" else None
    if not (isinstance(class_, type) and issubclass(class_, PreTrainedModel)):
        raise ValueError(f"{path} is not a model class of transformers")
    return class_
