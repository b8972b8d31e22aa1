"""AdamW with a learning rate and weight decay per module, linear warm-up and cosine decay.

State is keyed by global parameter name, not by position, so it can be saved by one layout and loaded by another.
Parameters without a gradient in a step (their modality was absent) keep weight and state untouched, as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from interlace.train.offload import MOMENTS, OffloadedAdamW
from interlace.train.schema import Config
from interlace.train.schema_train import Train


def schedule_length(train: Train) -> int:
    """Steps over which the learning rate is planned."""
    return train.schedule_steps or train.steps


def lr_factor(step: int, train: Train) -> float:
    """What the peak learning rates are multiplied by in `step` (1-based): warm-up 0 -> 1, then cosine -> min_lr_ratio.

    The last warm-up step and the first after it both use about the peak; the last of the schedule's steps, and those
    beyond it, use the minimum.
    """
    if step <= train.warmup_steps:
        return step / train.warmup_steps
    after = schedule_length(train) - train.warmup_steps
    progress = min(1.0, (step - train.warmup_steps) / after) if after > 0 else 1.0
    return train.min_lr_ratio + (1.0 - train.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def settings_of(name: str, config: Config) -> tuple[float, float]:
    """(peak learning rate, weight decay) of the parameter `name`, a global name such as ``encoders.vision.module...``.

    Values of its module come before ``[train]``'s; a projector's own rate before its encoder's.
    """
    train, lr, decay = config.train, None, None
    parts = name.split(".")
    if parts[0] == "encoders":
        encoder = config.model.encoders()[parts[1]]
        lr, decay = encoder.lr, encoder.weight_decay
        if parts[2] == "projector" and encoder.projector_lr is not None:
            lr = encoder.projector_lr
    else:
        lr, decay = config.model.language_model.lr, config.model.language_model.weight_decay
    return (train.lr if lr is None else lr), (train.weight_decay if decay is None else decay)


class Optimizer:
    """AdamW over this rank's `parameters` (global name, parameter); frozen ones are passed over."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: Config) -> None:
        self.config = config
        self.parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            lr, decay = settings_of(name, config)
            # Norms, biases and other vectors are not decayed: they scale and shift, they do not overfit.
            groups.setdefault((lr, decay if parameter.dim() > 1 else 0.0), []).append(parameter)
        self.peaks = [lr for lr, _ in groups]
        self.adamw: torch.optim.AdamW | None = None
        if groups:  # a rank that holds only frozen stages has nothing to optimise
            given = [{"params": members, "lr": lr, "weight_decay": decay} for (lr, decay), members in groups.items()]
            betas, eps = (config.train.betas[0], config.train.betas[1]), config.train.eps
            if config.train.offload_optimizer:
                self.adamw = OffloadedAdamW(given, betas=betas, eps=eps)
            else:
                self.adamw = torch.optim.AdamW(given, betas=betas, eps=eps, fused=True)

    def step(self, step: int) -> float:
        """One update with the learning rates of `step` (1-based); drops the gradients; returns ``train.lr``'s rate."""
        factor = lr_factor(step, self.config.train)
        if self.adamw is not None:
            for group, peak in zip(self.adamw.param_groups, self.peaks, strict=True):
                group["lr"] = peak * factor
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
        return self.config.train.lr * factor

    def state(self) -> dict[str, Tensor]:
        """Tensors to save: ``exp_avg.<FQN>``, ``exp_avg_sq.<FQN>``, ``step.<FQN>`` of every trainable parameter.

        Parameters that have had no gradient yet appear with zeros, which is what their first update starts from. These
        are the optimizer's own tensors: a checkpoint that is loaded fills them in place.
        """
        return {
            f"{key}.{name}": self._state_of(parameter)[key]
            for name, parameter in self.parameters.items()
            for key in (*MOMENTS, "step")
        }

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        assert self.adamw is not None
        if isinstance(self.adamw, OffloadedAdamW):
            return self.adamw.state_of(parameter)
        state: dict[str, Tensor] = self.adamw.state[parameter]
        if not state:  # exactly what AdamW makes at the first update
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
