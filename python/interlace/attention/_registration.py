"""Registration of `attn_implementation="interlace"` with HuggingFace, independent of the import order.

`hf` needs transformers, which takes seconds to import, and not every user of the op needs it. So importing
interlace.attention must not load transformers. If it is already loaded, `hf` is imported at once. Otherwise `hf` is
imported right after the transformers module that every model is built with.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULE = "transformers.modeling_utils"  # holds the registry and every model's base class
HF = "interlace.attention.hf"


def register() -> None:
    """Import `hf`, which registers the implementation, now or right after transformers' own modules."""
    if MODULE in sys.modules:
        _import_hf()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Import hook for one module, used once: finds it through the other finders and imports `hf` after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _import_hf()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _import_hf() -> None:
    try:
        importlib.import_module(HF)
    except ImportError as error:  # transformers versions without the interface must stay usable
        warnings.warn(f'attn_implementation="interlace" is not available: {error}', stacklevel=2)
