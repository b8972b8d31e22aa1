"""Short names of the parts of a MultimodalModel, for freezing, learning rates and adapters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlace.model.multimodal import MultimodalModel

LANGUAGE_MODEL = "language_model"


def inside(name: str, place: str) -> bool:
    """True if the parameter or module `name` is `place` or inside it."""
    return f"{name}.".startswith(f"{place}.")


def did_you_mean(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message that refuses `name`: the nearest valid name, if one is close."""
    near = difflib.get_close_matches(name, [*valid], n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def short_names(model: MultimodalModel) -> dict[str, list[str]]:
    """Short name -> paths of its modules. For example, "vision" is an encoder without its projector."""
    valid = {LANGUAGE_MODEL: [LANGUAGE_MODEL]}
    for name in model.encoders:
        valid[name] = [f"encoders.{name}.{part}" for part in model.encoders[name].tower_names]
        valid[f"{name}.projector"] = [f"encoders.{name}.{part}" for part in model.encoders[name].projector_names]
    return valid


def resolve(model: MultimodalModel, path: str) -> list[str]:
    """Paths of the modules that `path` names: a short name, or any module. Raises ValueError with the nearest name."""
    valid = short_names(model)
    if path in valid:
        return valid[path]
    modules = {name for name, _ in model.named_modules() if name.count(".") > 0 or name == LANGUAGE_MODEL}
    for candidate in (path, f"encoders.{path}"):
        if candidate in modules:
            return [candidate]
    raise ValueError(
        f"cannot freeze {path!r}: no such module{did_you_mean(path, [*valid, *modules], 0.3)} "
        f"Valid names: {', '.join(map(repr, valid))} and modules inside them."
    )
