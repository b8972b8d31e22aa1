"""Tuning: freezing by pattern, LoRA, groups of learning rates.

Applied in this order: module keys (``freeze``, ``freeze_projector``), ``train.lora``, ``train.freeze``,
``train.train``. All of them are applied before the model is cut, so that the schedule has the layers with a backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from interlace.model.lora import add_lora
from interlace.model.patterns import ENCODERS, Names, is_adapter
from interlace.train import optim
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.model import Encoder
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.model import MultimodalModel


class Rates(NamedTuple):
    """Training settings of a parameter.

    group: its group, in words.
    optimizer: name of its optimizer.
    lr: peak learning rate.
    decay: weight decay.
    """

    group: str
    optimizer: str
    lr: float
    decay: float


def tune(config: Config, model: MultimodalModel, *, source: str = "config") -> None:
    """Applies ``[train]``: freezes and unfreezes parameters and adds adapters. Module keys are already applied.

    Raises ConfigError for a pattern that matches nothing or has no effect, and for adapters that are not possible.
    """
    train = config.train
    if train.lora is not None:
        with blaming(f"{source}: [train.lora]"):
            add_lora(model, **train.lora.model_dump())
    if train.freeze or train.train:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        names = Names(model)
        for pattern in train.freeze:
            matches = {name for name in _matching(names, pattern, "freeze", source) if not is_adapter(name)}
            if not matches:
                raise ConfigError(
                    f"{source}: [train] freeze: {pattern!r} matches only adapters, which must be trained: remove their "
                    "layers from train.lora.targets"
                )
            trained -= matches
        for pattern in train.train:
            trained |= _matching(names, pattern, "train", source)
        model.train_only(trained)
    rates(config, model, source=source)  # validates the groups
    check_degrees(config, model, source=source)


def check_degrees(config: Config, model: nn.Module, *, source: str = "config") -> None:
    """Raises ConfigError for degrees and shards in ``[parallel]`` under which ``[train]`` cannot train `model`."""
    _check_whole(config, model, source)
    lora = config.train.lora
    if lora is None or not lora.dropout:
        return
    adapters = [name for name, _ in model.named_parameters() if is_adapter(name)]
    for name in config.modules():
        spec = config.parallel.module(name)
        if spec.tp * spec.cp > 1 and any(path.startswith(_prefix(name)) for path in adapters):
            degrees = " and ".join(f"{key} = {n}" for key, n in (("tp", spec.tp), ("cp", spec.cp)) if n > 1)
            raise ConfigError(
                f"{source}: [train.lora] dropout = {lora.dropout:g}: not supported with {degrees} ranks of {name}, "
                "which would drop different elements: set it to 0"
            )


def rates(config: Config, model: nn.Module, *, source: str = "config") -> dict[str, Rates]:
    """Training settings of each trained parameter, by its first name.

    The first matching group of ``train.groups`` has priority over the module's own keys, and these over ``[train]``'s.
    A projector's own rate has priority over its encoder's. Raises ConfigError for a group without trained parameters.
    """
    train, names = config.train, Names(model)
    projectors = names.projectors()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    settings: dict[str, tuple[str, float, float]] = {}
    for group in train.groups:
        matching = _matching(names, group.pattern, "groups", source)
        mine = [name for name in trained if name in matching and name not in settings]
        if not mine:
            why = "frozen" if matching.isdisjoint(trained) else "frozen or in a group before it"
            raise ConfigError(f"{source}: [train] groups: all matches of {group.pattern!r} are {why}; remove it")
        for name in mine:
            _, lr, decay = _of_module(name, config, name in projectors)
            lr = lr if group.lr is None else group.lr
            settings[name] = group.pattern, lr, decay if group.weight_decay is None else group.weight_decay
    matrices = _matrices(model) if train.optimizer == "muon" else ()
    made = {}
    for name in trained:
        label, lr, decay = settings.get(name) or _of_module(name, config, name in projectors)
        optimizer = "adamw" if train.optimizer == "muon" and name not in matrices else train.optimizer
        made[name] = Rates(label, optimizer, lr, decay)
    return made


def _matrices(model: nn.Module) -> set[str]:
    """First names of the weights of linear layers, except the head and embeddings tied to it."""
    whole = getattr(model, "language_model", None)
    head = getattr(whole, "get_output_embeddings", lambda: None)()
    layers = [layer for layer in model.modules() if layer is not head]
    linear = {id(layer.weight) for layer in layers if isinstance(layer, nn.Linear)}
    linear -= {id(layer.weight) for layer in layers if isinstance(layer, nn.Embedding)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in linear}


def _of_module(name: str, config: Config, projector: bool) -> tuple[str, float, float]:
    """(module, peak learning rate, weight decay) of a parameter without a group."""
    train, parts = config.train, name.split(".")
    group = parts[1] if parts[0] == ENCODERS[:-1] else parts[0]
    module = config.model.modules()[group]
    lr, decay = module.lr, module.weight_decay
    if projector and isinstance(module, Encoder):
        group = f"{group}.projector"
        lr = lr if module.projector_lr is None else module.projector_lr
    group += " (LoRA)" if is_adapter(name) else ""
    return group, (train.lr if lr is None else lr), (train.weight_decay if decay is None else decay)


def summary(model: nn.Module, rates_of: Mapping[str, Rates]) -> list[str]:
    """A line per group of trained parameters, and a line for the frozen ones."""
    sizes: dict[Rates, int] = {}
    frozen = 0
    for name, parameter in model.named_parameters():
        if name in rates_of:
            sizes[rates_of[name]] = sizes.get(rates_of[name], 0) + parameter.numel()
        else:
            frozen += parameter.numel()
    lines = [
        f"trains {size:,} parameters of {each.group}: {each.optimizer}, lr {each.lr:g}, weight decay {each.decay:g}"
        for each, size in sizes.items()
    ]
    return lines + [f"{frozen:,} of {frozen + sum(sizes.values()):,} parameters are frozen"]


def _check_whole(config: Config, model: nn.Module, source: str) -> None:
    """Raises ConfigError for an unusable optimizer, and for one that needs whole matrices but would have shards."""
    optimizer = config.train.optimizer
    optim.check(config.train, source=source)
    if not optim.needs_whole_weights(optimizer):
        return
    for name in config.modules():
        spec = config.parallel.module(name)
        trained = any(p.requires_grad for key, p in model.named_parameters() if key.startswith(_prefix(name)))
        if trained and (spec.tp > 1 or spec.shard != "none"):
            key = f"tp = {spec.tp}" if spec.tp > 1 else f"shard = {spec.shard!r}"
            raise ConfigError(
                f"{source}: [train] optimizer = {optimizer!r} needs whole matrices, but ranks have only pieces of them "
                f"with parallel.{name}.{key}: use 'adamw' or 'sgd', or omit {key.split()[0]}"
            )


def _prefix(name: str) -> str:
    """Common prefix of the names of all parameters of a module."""
    return f"{name}." if name == "language_model" else f"{ENCODERS}{name}."


def _matching(names: Names, pattern: str, key: str, source: str) -> set[str]:
    with blaming(f"{source}: [train] {key}"):
        return names.matching(pattern)
