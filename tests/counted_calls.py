"""How often Python code is entered in a call: what says that a loop is in arrays or in C++, on any machine alike."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def python_calls(function: Callable[[], Any]) -> tuple[Any, int]:
    """What `function` returns, and how many functions, of Python and of C, this thread called meanwhile."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what is freed may call too, and when is not ours to say
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return result, count
