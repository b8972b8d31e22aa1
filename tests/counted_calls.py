"""Counts calls of Python code: shows on any machine that a loop runs in arrays or in C++."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def python_calls(function: Callable[[], Any]) -> tuple[Any, int]:
    """Result of `function`, and the number of functions (Python and C) that this thread called meanwhile."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # finalizers may also call functions, at unpredictable times
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return result, count
