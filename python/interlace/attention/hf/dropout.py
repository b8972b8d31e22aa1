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
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def dropout_rate(module: nn.Module) -> float:
    """The rate that `module` passes to HuggingFace's attention interface in training; 0 if it does not call it."""
    kind: Any = type(module)  # mypy takes a class of modules for unhashable
    path = _attribute(kind)
    try:
        return float(attrgetter(path)(module)) if path else 0.0
    except (AttributeError, TypeError):
        return 0.0


@cache
def _attribute(kind: type[nn.Module]) -> str:
    """The attribute of `self` in the argument `dropout` of the call of the attention interface; "" if not found.

    forward(): attention_interface(..., dropout=0.0 if not self.training else self.attn_dropout.p) -> "attn_dropout.p"
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError, AttributeError):
        return ""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in (node for node in calls if ast.unparse(node.func) == "attention_interface"):
        argument = next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "dropout"), "")
        named = [path for path in re.findall(r"self\.([\w.]+)", argument) if path != "training"]
        return named[0] if named else ""
    return ""


def dropout_key(module: nn.Module, rate: float) -> str:
    """The key of `module.config` that sets its attention dropout to `rate` ("table.key" in a part); "" if not found."""
    keys = [key for key, value in _rates(getattr(module, "config", None)) if value == rate]
    kind: Any = type(module)
    read = _read_by(kind)
    keys = [key for key in keys if key.split(".")[-1] in read] or keys
    keys = [key for key in keys if "." not in key] or keys
    keys = [key for key in keys if "att" in key] or keys
    return keys[0] if keys else ""


def _rates(config: object, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers in a config, and in its sub-configs and tables, whose name contains dropout."""
    for key, value in (config if isinstance(config, dict) else getattr(config, "__dict__", {})).items():
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            yield from _rates(value, f"{prefix}{key}.")
        elif isinstance(key, str) and "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, float(value)


@cache
def _read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Names in the source of a class that look like attributes of a config."""
    try:
        return frozenset(re.findall(r"config\.(\w+)", inspect.getsource(kind)))
    except (OSError, TypeError):
        return frozenset()


def path_of(config: PretrainedConfig, part: PretrainedConfig) -> str:
    """Path of `part` in a config: "" for the config itself, "text_config." for a part of it."""
    candidates = [(path, candidate) for path, candidate in _parts(config) if type(candidate) is type(part)]
    equal = [
        path for path, candidate in candidates if candidate is part or candidate.to_dict() == part.to_dict()
    ]  # models copy configs
    return [*equal, *(path for path, _ in candidates), ""][0]


def _parts(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """A config and all configs in it, each with its path."""
    yield prefix, config
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            yield from _parts(value, f"{prefix}{key}.")


def no_dropout(module: nn.Module, rate: float) -> ValueError:
    """Error for a module that drops attention weights under a plan."""
    name, key = type(module).__name__, dropout_key(module, rate)
    config = type(getattr(module, "config", None)).__name__
    setting = f"{key} = {rate:g} in {config}" if key else f"dropout = {rate:g}"
    return ValueError(
        f"{name} has attention dropout in training ({setting}), which bitfield attention does not support: build the "
        f'model from a config with {key or "attention dropout"} = 0, or use attn_implementation="sdpa"'
    )
