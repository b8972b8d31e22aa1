"""Loads the tokenizer and the processor from a folder written by HuggingFace's save_pretrained.

Image processors of transformers exist for torchvision and, nearly all, for Pillow; the library prefers torchvision
if it is installed. Processors with a video part need torchvision, even for pictures. Without torchvision they are
loaded without that part here, and videos are refused with the package to install.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

VIDEO = "video_processor"
# A folder with such a part has at least one of its files. The first is the one that save_pretrained writes today.
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
PROCESSOR = ("preprocessor_config.json", "processor_config.json")

OWN_PROMPTS = {
    "PaliGemmaProcessor": "takes one picture with a prefix and a suffix in the place of a chat, and writes the prompt "
    "itself",
    "VoxtralProcessor": "has its chats written by the package mistral-common in the place of a template",
}
"""Processors that do not work with any chat template -> reason."""


class NoVideos(dict[str, Any]):
    """Replaces a processor's video part: some processors read its settings for picture chats, too. A dict, because
    these settings are written as JSON."""

    num_frames = fps = None


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's tokenizer. Raises ValueError with the folder's name if it has none or cannot be loaded."""
    from transformers import AutoTokenizer

    _check_folder(folder)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the library may raise anything on broken files
        raise ValueError(f"{folder}: no tokenizer can be loaded: {_why(Path(folder), error, TOKENIZER)}") from None


def load_processor(folder: str | Path) -> Any:
    """The folder's processor: tokenizer, image processor, feature extractor etc. of its model.

    Raises ValueError with the folder's name if it cannot be loaded, and with the package to install if one is missing.
    """
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    _check_folder(folder)
    _refuse_own_prompts(folder, _processor_class(Path(folder)))
    try:
        if not is_torchvision_available():
            loaded = _without_video(Path(folder))
            if loaded is not None:
                return loaded
        processor = AutoProcessor.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        hint = "; pip install torchvision" if "orchvision" in str(error) else ""
        why = _why(Path(folder), error, TOKENIZER, PROCESSOR)
        raise ValueError(f"{folder}: no processor can be loaded: {why}{hint}") from None
    if getattr(processor, "tokenizer", None) is None:
        raise ValueError(
            f"{folder}: holds a {type(processor).__name__} without a tokenizer; name a folder with both "
            "as data.tokenizer"
        )
    _refuse_own_prompts(folder, type(processor))
    return processor


def _refuse_own_prompts(folder: str | Path, kind: Any) -> None:
    name = next((each.__name__ for each in getattr(kind, "__mro__", ()) if each.__name__ in OWN_PROMPTS), None)
    if name is not None:
        raise ValueError(
            f"{folder}: {name} {OWN_PROMPTS[name]}, so no template makes it train on chats here: take a checkpoint "
            "whose processor has a chat template, or put its tower and its language model together as [model.NAME] "
            "with folders of their own"
        )


def _without_video(folder: Path) -> Any:
    """The processor without its video part, if its class has one; None for other classes."""
    import transformers

    kind = _processor_class(folder)
    if kind is None or VIDEO not in kind.get_attributes():
        return None

    bare = _without_part(kind)
    autos = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    parts = [
        NoVideos() if name == VIDEO else autos[name].from_pretrained(str(folder), local_files_only=True)
        for name in kind.get_attributes()
    ]
    settings, _ = kind.get_processor_dict(str(folder), local_files_only=True)
    return bare.from_args_and_dict(parts, settings)


@cache
def _without_part(kind: Any) -> Any:
    """Subclass of the processor's class whose video part is optional."""

    def check(self: Any, name: str, argument: Any) -> Any:
        if name == VIDEO:
            return NoVideos
        return kind.check_argument_for_proper_class(self, name, argument)

    def reduce(self: Any) -> Any:  # pickle: the class shares its name with the original
        return _empty, (kind,), self.__dict__

    members = {"check_argument_for_proper_class": check, "__module__": kind.__module__, "__reduce__": reduce}
    return type(kind.__name__, (kind,), members)


def _empty(kind: Any) -> Any:
    made = _without_part(kind)
    return made.__new__(made)


def _processor_class(folder: Path) -> Any:
    """The class named in the folder's files, if any."""
    import transformers

    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        try:
            name_in_file = json.loads((folder / name).read_text(encoding="utf-8")).get("processor_class")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(name_in_file, str) and hasattr(transformers, name_in_file):
            return getattr(transformers, name_in_file)
    return None


def _check_folder(folder: str | Path) -> None:
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder; name one with a tokenizer as data.tokenizer")


def _why(folder: Path, error: Exception, *needed: tuple[str, ...]) -> str:
    """The problem with a folder. The library's own message names neither missing nor broken files."""
    for names in needed:
        if not any((folder / name).exists() for name in names):
            return f"it has no {names[0]}: copy it from where the model was saved"
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            return f"{file.name} is no JSON ({problem}): copy the folder again"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
