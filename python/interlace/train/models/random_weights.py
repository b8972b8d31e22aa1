"""Random weights that depend only on the seed and a parameter's name, not on layout, device or other parameters."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from interlace.model import MultimodalModel
from interlace.model.lora import lora_layers, reset_adapter
from interlace.model.patterns import base_name
from interlace.model.stages.slice import clone
from interlace.parallel.families import ancestors
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.config.load import ConfigError


def random_values(
    model: MultimodalModel, names: Collection[str], seed: int, *, read: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, values), on the CPU, of the parameters whose first name is in `names`, and of all buffers.

    read: names of parameters that have their values from elsewhere, and whose parts' buffers are needed.

    Works on one layer, or one part outside the layers, at a time: the library's rules may look at all of it.
    """
    families = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    first = canonical_names(model)
    places = [part.name for name in model.modules_order() for layer in model.layers(name) for part in layer.parts]
    beside = [name.rpartition(".")[0] for name, _ in model.named_buffers() if not _inside(name, places)]
    if lost := [name for name in names if not _inside(name, places)]:
        raise ConfigError(f"no initialisation rule for {lost[0]}, which is outside all layers and parts of the model")
    for place in dict.fromkeys([*places, *beside]):
        parameters = {f"{place}.{name}": None for name, _ in model.get_submodule(place).named_parameters()}.keys()
        wanted = {name for name in parameters if first[name] == name and name in names}
        buffers = any(True for _ in model.get_submodule(place).buffers())
        if wanted or not parameters or (buffers and not parameters.isdisjoint(read)):
            yield from _part_with_values(model, place, families, first, wanted, seed)


def _part_with_values(
    model: nn.Module,
    path: str,
    families: Mapping[str, PreTrainedModel],
    first: Mapping[str, str],
    missing: Collection[str],
    seed: int,
) -> list[tuple[str, Tensor]]:
    """The `missing` parameters and the buffers of the part of `model` at `path`, as initialised by the library."""

    def fill(prefix: str, module: nn.Module) -> None:
        above = [f for f in families if prefix == f or f == "" or _inside(prefix, [f])]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_seed_of(seed, base_name(prefix)))  # GPU generators stay unchanged
            if (adapter := adapted.get(id(module))) is not None:
                torch.default_generator.manual_seed(_seed_of(seed, f"{prefix}.lora"))
                reset_adapter(adapter)
            elif above:
                families[max(above, key=len)]._init_weights(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    whole = model.get_submodule(path)
    real: dict[int, Tensor] = {id(p): nn.Parameter(_on_the_host(p), p.requires_grad) for p in whole.parameters()}
    real |= {id(buffer): _on_the_host(buffer) for buffer in whole.buffers()}
    part = copy.deepcopy(whole, real)  # memo: these tensors are replaced by their copies
    adapted = {id(layer): layer for _, layer in lora_layers(part)}
    for name, module in reversed(list(part.named_modules())):  # children first, as the library's rules expect
        inside = [f"{_join(path, name)}.{key}" for key, _ in module.named_parameters(remove_duplicate=False)]
        if not inside or any(first[key] == key for key in inside):  # a tied weight is filled under its first name
            fill(_join(path, name), module)
    child = part
    for prefix in ancestors(path):  # rules for modules around this part may fill it too (Whisper's sinusoids)
        shell = clone(model.get_submodule(prefix))
        shell._modules[path[len(prefix) :].lstrip(".").partition(".")[0]] = child
        fill(prefix, shell)
        child = shell
    parameters = [(f"{path}.{name}", parameter.detach()) for name, parameter in part.named_parameters()]
    buffers = [(f"{path}.{name}", buffer) for name, buffer in part.named_buffers()]
    return [(name, values) for name, values in parameters if name in missing] + buffers


def _on_the_host(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, device="cpu", requires_grad=False)


def _inside(name: str, places: Collection[str]) -> bool:
    return any(name.startswith(f"{place}.") for place in places)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest(), "little")
