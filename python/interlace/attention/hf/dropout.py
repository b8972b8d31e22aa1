"""Attention dropout of HuggingFace modules: its rate, and the config key that sets it.

Model families use different keys: attention_dropout, attention_probs_dropout_prob, attn_pdrop, dropout, dropout_rate
and more. The key is found by its value, then by the names that the source of the module's class reads, then by its
name.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from typing import Any

from torch import nn


def dropout_rate(module: nn.Module) -> float:
    """The rate that `module` passes to HuggingFace's attention interface in training; 0 if it does not call it."""
    kind: Any = type(module)
    path = _attribute(kind)
    try:
        return float(attrgetter(path)(module)) if path else 0.0
    except (AttributeError, TypeError):
        return 0.0


@cache
def _attribute(kind: Any) -> str:
    """The attribute of `self` in the argument `dropout` of the call of the attention interface; "" if not found.

    forward(): attention_interface(..., dropout=0.0 if not self.training else self.attn_dropout.p) -> "attn_dropout.p"
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return ""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in (each for each in calls if ast.unparse(each.func) == "attention_interface"):
        given = next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "dropout"), "")
        named = [path for path in re.findall(r"self\.([\w.]+)", given) if path != "training"]
        return named[0] if named else ""
    return ""


def dropout_key(module: nn.Module, rate: float) -> str:
    """The key of `module.config` that sets its attention dropout to `rate` ("table.key" in a part); "" if not found."""
    found = [key for key, value in _rates(getattr(module, "config", None)) if value == rate]
    kind: Any = type(module)
    read = _read_by(kind)
    found = [key for key in found if key.split(".")[-1] in read] or found
    found = [key for key in found if "." not in key] or found
    found = [key for key in found if "att" in key] or found
    return found[0] if found else ""


def _rates(config: Any, around: str = "") -> Iterator[tuple[str, float]]:
    """Numbers in a config, and in its sub-configs and tables, whose name contains dropout."""
    for key, value in (config if isinstance(config, dict) else getattr(config, "__dict__", {})).items():
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            yield from _rates(value, f"{around}{key}.")
        elif isinstance(key, str) and "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield around + key, float(value)


@cache
def _read_by(kind: Any) -> frozenset[str]:
    """Names in the source of a class that look like attributes of a config."""
    try:
        return frozenset(re.findall(r"config\.(\w+)", inspect.getsource(kind)))
    except (OSError, TypeError):
        return frozenset()


def place_of(config: Any, part: Any) -> str:
    """Path of `part` in a config: "" for the config itself, "text_config." for a part of it."""
    places = [(path, each) for path, each in _parts(config) if type(each) is type(part)]
    alike = [path for path, each in places if each is part or each.to_dict() == part.to_dict()]  # models copy configs
    return [*alike, *(path for path, _ in places), ""][0]


def _parts(config: Any, around: str = "") -> Iterator[tuple[str, Any]]:
    """A config and all configs in it, each with its path."""
    yield around, config
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            yield from _parts(value, f"{around}{key}.")


def no_dropout(module: nn.Module, rate: float) -> ValueError:
    """Error for a module that drops attention weights under a plan."""
    name, key = type(module).__name__, dropout_key(module, rate)
    config = type(getattr(module, "config", None)).__name__
    setting = f"{key} = {rate:g} in {config}" if key else f"dropout = {rate:g}"
    return ValueError(
        f"{name} drops attention weights in training ({setting}), which bitfield attention does not: make the model "
        f'from a config with {key or "attention dropout"} = 0, or use attn_implementation="sdpa"'
    )
