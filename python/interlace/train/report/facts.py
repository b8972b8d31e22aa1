"""Facts on a run's page: its modules, the ranks that hold them, machine and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from interlace import _device
from interlace.model.naming import LANGUAGE_MODEL, short_names

if TYPE_CHECKING:
    from interlace.layout import Layout
    from interlace.model import MultimodalModel

MOST_RANKS = 64
"""Maximum number of ranks with a row on the page."""


class ModuleFacts(NamedTuple):
    """One part of the model. layers: repeated layers; parameters: all of them; trained: those that are trained."""

    name: str
    kind: str
    layers: int | None
    parameters: int
    trained: int


class Facts(NamedTuple):
    """Facts for the page of a run.

    modules: of the model. ranks: rank -> module -> description of its share, for the first ranks. world: number of
    ranks. machine: machine of rank 0, and package versions.
    """

    modules: list[ModuleFacts]
    ranks: list[dict[str, str]]
    world: int
    machine: dict[str, str]


def facts_of(model: MultimodalModel, layout: Layout) -> Facts:
    """Facts of a `MultimodalModel` (its weights may be on the meta device) on a `Layout`."""
    ranks = [_of_rank(layout, rank) for rank in range(min(layout.world, MOST_RANKS))]
    return Facts(list(_modules(model)), ranks, layout.world, machine())


def _modules(model: MultimodalModel) -> Iterable[ModuleFacts]:
    named = short_names(model)
    named[LANGUAGE_MODEL] = named.pop(LANGUAGE_MODEL)  # last, in the order of the data
    for name, paths in named.items():
        module, _, projector = name.partition(".")
        parts = {id(part): part for path in paths for part in _parameters(model, path)}.values()
        if projector and not parts:
            continue
        # For a tower named by its parts: the module that contains them.
        kind = _part(model, paths[0] if len(paths) == 1 or projector else paths[0].rpartition(".")[0])
        trained = sum(parameter.numel() for parameter in parts if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in parts)
        layers = None if projector else len(model.layer_list(module))
        yield ModuleFacts(name, type(kind).__name__, layers, total, trained)


def _part(model: nn.Module, path: str) -> object:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _parameters(model: nn.Module, path: str) -> Iterable[nn.Parameter]:
    """Parameters of a part of the model: a parameter, a module, or nothing."""
    part = _part(model, path)
    if isinstance(part, nn.Parameter):
        return [part]
    return part.parameters() if isinstance(part, nn.Module) else ()


def _of_rank(layout: Layout, rank: int) -> dict[str, str]:
    facts: dict[str, str] = {}
    for stage in layout.of_rank(rank):
        spec = layout.spec(stage.module)
        text = f"layers {stage.start}-{stage.stop - 1}" if stage.stop > stage.start else "no layers"
        replicas = len(layout.pipelines(stage.module))
        if replicas > 1:
            text += f", replica {layout.replica(rank, stage.module)} of {replicas}"
        text += "".join(f", {key} {getattr(spec, key)}" for key in ("tp", "cp") if getattr(spec, key) > 1)
        text += f", shard {spec.shard}" if spec.shard != "none" else ""
        facts[stage.module] = f"{facts[stage.module]}; {text}" if stage.module in facts else text
    return facts


def machine() -> dict[str, str]:
    """Machine and package versions of this process."""
    facts = {"processor": f"{_processor()}, {os.cpu_count()} cores", "system": platform.platform(terse=True)}
    if gpus := _device.count():
        names = [torch.get_device_module(_device.KIND).get_device_name(number) for number in range(gpus)]
        facts["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    facts["Python"] = platform.python_version()
    for package in ("interlace", "torch", "transformers", "numpy"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
            continue
    return facts | {"written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
