"""The Python examples of docs/extending.md as one module, `mine`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def imported(folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """Writes `mine.py` into `folder` and imports it; subprocesses can import it, too."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    (folder / "mine.py").write_text("\n".join(blocks))
    patch.syspath_prepend(str(folder))
    patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    patch.delitem(sys.modules, "mine", raising=False)
    return importlib.import_module("mine")
