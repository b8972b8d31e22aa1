"""Optimizers with a learning rate and weight decay per parameter group, and the schedules of learning rates.

State is keyed by global parameter name, not by position, so it can be saved by one layout and loaded by another.
Parameters without a gradient in a step (their modality was absent) keep weight and state unchanged, as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.plan.memory import StateSize
from interlace.train.config.sections import Config
from interlace.train.config.train import Train
from interlace.train.offload import OffloadedAdamW
from interlace.train.optimizers import first_state, make

if TYPE_CHECKING:
    from interlace.parallel.region import Region
    from interlace.train.models.tuning import Rates


def schedule_length(train: Train) -> int:
    """Number of steps of the learning-rate schedule."""
    return train.schedule_steps or train.last_step


def lr_factor(step: int, train: Train) -> float:
    """Factor of the peak learning rates in `step` (1-based): warm-up 0 -> 1, then as ``train.schedule``.

    The last warm-up step and the first step after it both use about the peak. The last step of the schedule and all
    later steps use the minimum, except with "constant".
    """
    length = schedule_length(train)
    warmup = train.warmup_of(length)
    if step <= warmup:
        return step / warmup
    begins = warmup if train.schedule != "wsd" else max(length - train.decay_of(length), warmup)
    after = length - begins
    progress = min(1.0, max(0, step - begins) / after) if after > 0 else 1.0
    if train.schedule == "constant":
        return 1.0
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1.0 - progress
    return train.min_lr_ratio + (1.0 - train.min_lr_ratio) * left


class Optimizer:
    """Optimizer of this rank's `parameters` (global name, parameter), with `rates` for each; all others are frozen."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], config: Config, rates: Mapping[str, Rates]
    ) -> None:
        self.config = config
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.kinds = {name: rates[name].optimizer for name in self.parameters}
        groups: dict[str, dict[tuple[float, float], list[nn.Parameter]]] = {}
        for name, parameter in self.parameters.items():
            each = rates[name]
            # Norms, biases and other vectors are not decayed: they scale and shift, they do not overfit.
            key = (each.lr, each.decay if parameter.dim() > 1 else 0.0)
            groups.setdefault(each.optimizer, {}).setdefault(key, []).append(parameter)
        self.made: dict[str, torch.optim.Optimizer] = {}
        self.peaks: dict[str, list[float]] = {}
        for kind, members in groups.items():  # empty on a rank with only frozen stages
            given = [{"params": each, "lr": lr, "weight_decay": decay} for (lr, decay), each in members.items()]
            self.made[kind] = make(kind, given, config.train)
            self.peaks[kind] = [lr for lr, _ in members]

    def step(self, step: int) -> float:
        """One update with the learning rates of `step` (1-based). Drops the gradients; returns the rate of
        ``train.lr``."""
        factor = lr_factor(step, self.config.train)
        for kind, optimizer in self.made.items():
            for group, peak in zip(optimizer.param_groups, self.peaks[kind], strict=True):
                group["lr"] = peak * factor
            optimizer.step()
        self.zero_grad()
        return self.config.train.lr * factor

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for optimizer in self.made.values():
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Tensors to save, such as ``exp_avg.<FQN>`` and ``step.<FQN>`` of every trainable parameter.

        Parameters that have had no gradient yet have zeros, the initial state of their first update. These are the
        optimizer's own tensors: loading a checkpoint fills them in place.
        """
        return {f"{key}.{name}": tensor for name in self.parameters for key, tensor in self._state_of(name).items()}

    def adopt(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Adopts the state of parameter `name` from another optimizer, without copying the tensors."""
        self.made[self.kinds[name]].state[self.parameters[name]] = dict(state)

    def regions(self, regions: Mapping[str, Region]) -> dict[str, Region]:
        """Regions of the tensors of `state` that are shards: the regions of their parameters in `regions`."""
        return {
            f"{key}.{name}": regions[name]
            for name, parameter in self.parameters.items()
            if name in regions
            for key, tensor in self._state_of(name).items()
            if key != "step" and tensor.shape == parameter.shape
        }

    def _state_of(self, name: str) -> dict[str, Tensor]:
        parameter, optimizer = self.parameters[name], self.made[self.kinds[name]]
        if isinstance(optimizer, OffloadedAdamW):
            return optimizer.state_of(parameter)
        state: dict[str, Tensor] = optimizer.state[parameter]
        if not state:  # exactly the state that the optimizer creates at the first update
            state.update(first_state(self.kinds[name], parameter, self.config.train))
        return state


def state_sizes(config: Config, model: nn.Module, rates: Mapping[str, Rates]) -> dict[str, StateSize]:
    """Parameter name (canonical) -> sizes of the state that the optimizer and ``train.ema`` keep for it."""
    sizes, known = {}, dict[Any, StateSize]()
    for name, parameter in model.named_parameters():
        if name in rates:
            kind = rates[name].optimizer, parameter.shape, parameter.dtype
            if kind not in known:
                first = first_state(kind[0], parameter, config.train)
                alike = sum(key != "step" and tensor.shape == parameter.shape for key, tensor in first.items())
                rest = sum(t.nbytes for key, t in first.items() if key == "step" or t.shape != parameter.shape)
                known[kind] = StateSize(alike + (config.train.ema is not None), rest)
            sizes[name] = known[kind]
    return sizes
