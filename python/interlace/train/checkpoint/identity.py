"""Identity of a checkpoint: architecture and parameters, and the differences between two of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


def identity_of(model: nn.Module, architecture: Mapping[str, object]) -> dict[str, Any]:
    """Identity of a model, which must be equal for its checkpoints: architecture table, and each parameter's shape and
    dtype.

    `model` may be on the meta device. `architecture` is JSON-able (`build.architecture` makes it from a config).
    """
    parameters = {name: [list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in model.named_parameters()}
    identity = {"architecture": json.loads(json.dumps(architecture)), "parameters": parameters}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return {"sha256": digest, **identity}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> its first one, so that tied weights are saved once under any layout."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def differences(saved: Mapping[str, Any], expected: Mapping[str, Any], limit: int = 4) -> list[str]:
    """Differences of two identities, in words, the most important first; at most `limit` lines and a count of
    the rest."""
    lines = [
        f"model.{key} is {old!r} in the checkpoint, {new!r} in the config"
        for key, old, new in _compare(_flatten(saved["architecture"]), _flatten(expected["architecture"]))
    ]
    lines += [
        f"{name} is {_tensor(old)} in the checkpoint, {_tensor(new)} in the model"
        for name, old, new in _compare(saved["parameters"], expected["parameters"])
    ]
    rest = len(lines) - limit
    return lines[:limit] + ([f"and {rest} more"] if rest > 0 else [])


def _flatten(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _compare(old: Mapping[str, T], new: Mapping[str, T]) -> Iterable[tuple[str, T | None, T | None]]:
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def _tensor(entry: Sequence[object] | None) -> str:
    return "absent" if entry is None else f"{entry[1]}{entry[0]}"
