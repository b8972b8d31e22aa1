"""Patterns for parameters and modules of a MultimodalModel, used in configs: ``vision``, ``*.layers.0``, ``*norm``.

A pattern is matched against names with file-name wildcards (``*`` also crosses dots). It names parameters, or modules
with all their contents. The prefix ``encoders.`` is optional. Short forms: ``vision`` is that encoder without its
projector, ``vision.projector`` is the projector, ``language_model`` is the whole language model.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterator

from torch import nn

from interlace.model.multimodal import MultimodalModel
from interlace.model.naming import inside, short_names

ENCODERS = "encoders."
_ADAPTER = re.compile(r"\.lora_[AB]\.default\b")  # peft's, inside the adapted layer
_BASE = re.compile(r"\.base_layer(?=\.|$)")


class Names:
    """Parameter names of a model, matched by patterns.

    first: every name of a parameter -> its first name. A tied weight has several names, and each of them selects it.
    """

    def __init__(self, model: nn.Module) -> None:
        held: dict[int, str] = {}
        self.first = {
            name: held.setdefault(id(parameter), name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.short = short_names(model) if isinstance(model, MultimodalModel) else {}

    def matching(self, pattern: str) -> set[str]:
        """First names of the parameters that `pattern` matches. Raises ValueError with the nearest name if none
        match.
        """
        matches = {first for name, first in self.first.items() if self.names(pattern, name)}
        if not matches:
            raise ValueError(f"{pattern!r} matches nothing in the model{self._nearest(pattern)}")
        return matches

    def projectors(self) -> set[str]:
        """First names of the parameters of all projectors."""
        places = [place for name, indices in self.short.items() if name.endswith(".projector") for place in indices]
        return {first for name, first in self.first.items() if any(inside(name, place) for place in places)}

    def names(self, pattern: str, name: str) -> bool:
        """True if `pattern` names the parameter or module `name`, or a module around it."""
        if pattern in self.short:
            return any(inside(name, place) for place in self.short[pattern])
        own = {name, base_name(name)}
        if any(fnmatch.fnmatchcase(path, pattern) for each in own for path in _paths(each)):
            return True
        # A whole model's class uses another name for its projector; "*.projector" must match it too.
        parts = (places for short, places in self.short.items() if "." in short and fnmatch.fnmatchcase(short, pattern))
        return any(inside(name, place) for places in parts for place in places)

    def _nearest(self, pattern: str) -> str:
        known = {path for name in self.first for path in _paths(name)} | self.short.keys()
        bare = pattern.strip("*.")
        near = difflib.get_close_matches(bare, sorted(known), n=1, cutoff=0.4)
        parts = {part for path in known for part in path.split(".")}
        near = near or difflib.get_close_matches(bare.split(".")[-1], sorted(parts), n=1, cutoff=0.4)
        return f"; the nearest name is {near[0]!r}" if near else ""


def _paths(name: str) -> Iterator[str]:
    """A name and the names of its enclosing modules, each also without the prefix of the encoders."""
    while name:
        yield name
        if name.startswith(ENCODERS):
            yield name.removeprefix(ENCODERS)
        name = name.rpartition(".")[0]


def is_adapter(name: str) -> bool:
    """True if a parameter name is an adapter's A or B."""
    return _ADAPTER.search(name) is not None


def base_name(name: str) -> str:
    """Name of a parameter or module without adapters."""
    return _BASE.sub("", name)
