"""The tokenizer and the processor of a folder that HuggingFace's save_pretrained wrote.

Image processors of transformers exist for torchvision and, nearly all, for Pillow alone; the library takes the first
where it is installed. Processors with a part for videos need torchvision for it, also for pictures alone: without
torchvision they are made without that part here, and videos are refused with what to install.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VIDEO = "video_processor"


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's tokenizer. Raises ValueError, naming the folder, when there is none that can be loaded."""
    from transformers import AutoTokenizer

    _check_folder(folder)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever its files make the library raise
        raise ValueError(f"{folder}: no tokenizer can be loaded: {_first_line(error)}") from None


def load_processor(folder: str | Path) -> Any:
    """The folder's processor: tokenizer and image processor, feature extractor, ... as its model wants them.

    Raises ValueError, naming the folder, when it cannot be loaded, with what to install if that is why.
    """
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    _check_folder(folder)
    try:
        if not is_torchvision_available():
            found = _without_video(Path(folder))
            if found is not None:
                return found
        processor = AutoProcessor.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        hint = "; pip install torchvision" if "orchvision" in str(error) else ""
        raise ValueError(f"{folder}: no processor can be loaded: {_first_line(error)}{hint}") from None
    if getattr(processor, "tokenizer", None) is None:
        raise ValueError(
            f"{folder}: holds a {type(processor).__name__} without a tokenizer; name a folder with both "
            "as data.tokenizer"
        )
    return processor


def _without_video(folder: Path) -> Any:
    """The processor without its part for videos, if its class has one; None for other classes."""
    import transformers

    kind = _processor_class(folder)
    if kind is None or VIDEO not in kind.get_attributes():
        return None

    def check(self: Any, name: str, argument: Any) -> Any:
        if name == VIDEO and argument is None:
            return type(None)
        return kind.check_argument_for_proper_class(self, name, argument)

    bare: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check, "__module__": kind.__module__})
    autos = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }
    parts = [
        None if name == VIDEO else autos[name].from_pretrained(str(folder), local_files_only=True)
        for name in kind.get_attributes()
    ]
    said, _ = kind.get_processor_dict(str(folder), local_files_only=True)
    return bare.from_args_and_dict(parts, said)


def _processor_class(folder: Path) -> Any:
    """The class that the folder's files name, if any."""
    import transformers

    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        try:
            said = json.loads((folder / name).read_text(encoding="utf-8")).get("processor_class")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(said, str) and hasattr(transformers, said):
            return getattr(transformers, said)
    return None


def _check_folder(folder: str | Path) -> None:
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder; name one with a tokenizer as data.tokenizer")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
