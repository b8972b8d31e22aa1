"""Averaged weights, the best validation, and the loss scale of fp16.

All of them are part of a checkpoint, so that a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from interlace.train.config.train import EarlyStop

FIRST_SCALE, LEAST_SCALE, MOST_SCALE = 2.0**16, 2.0**-10, 2.0**24
GROWS_AFTER = 2000  # steps without overflow, as in torch.amp.GradScaler


class Averages:
    """Exponential moving averages of this rank's trained weights, in fp32 (``train.ema``).

    A shard of a weight has a shard of its average, on the same device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.held = {
            name: parameter.detach().to(torch.float32, copy=True) for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """After a step: average = decay * average + (1 - decay) * weight."""
        if self.held:
            weights = [parameter.to(torch.float32) for parameter in self.parameters.values()]
            torch._foreach_lerp_(list(self.held.values()), weights, 1.0 - self.decay)

    @torch.no_grad()
    def begin_here(self, names: Collection[str]) -> None:
        """Restarts the averages of `names` from the current weights."""
        for name in names:
            self.held[name].copy_(self.parameters[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the averages replace the weights. Weights must not change inside."""
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            self._put(self.held)
            yield
        finally:
            self._put(before)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


class _State(BaseModel):
    """Part of a checkpoint's progress; checkpoints may come from untrusted sources, so types are checked."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Verdict(_State):
    """Validation results so far. All ranks measure the same loss, so this state is equal on all ranks.

    best, step: the lowest loss [nats] and its step; step is -1 before any validation.
    mark, waited: the last loss that counted as an improvement, by ``early_stop.min_delta``, and the number of
    validations since.
    """

    best: float | None = None
    step: int = -1
    mark: float | None = None
    waited: int = 0

    def add(self, step: int, loss: float, early_stop: EarlyStop | None) -> bool:
        """Records a validation after `step`. Returns True if it is the best so far, never for a non-finite loss."""
        least = early_stop.min_delta if early_stop is not None else 0.0
        if math.isfinite(loss) and (self.mark is None or loss < self.mark - least):
            self.mark, self.waited = loss, 0
        else:
            self.waited += 1
        if not math.isfinite(loss) or (self.best is not None and loss >= self.best):
            return False
        self.best, self.step = loss, step
        return True

    def ends(self, early_stop: EarlyStop | None) -> bool:
        """True if early stopping ends the run here."""
        return early_stop is not None and self.waited >= early_stop.patience


class LossScale(_State):
    """Loss scale of fp16: keeps small gradients from becoming zero, as torch.amp.GradScaler does.

    A step whose gradients overflow is skipped and halves the scale. Many steps without overflow double it. The norm of
    all gradients decides, which is equal on every rank: so all ranks skip the same steps.

    scale: present factor. good: steps since it changed. skipped: total number of skipped steps.
    """

    scale: float = FIRST_SCALE
    good: int = 0
    skipped: int = 0

    def took(self, finite: bool) -> None:
        """Records if all gradients of a step were finite."""
        if not finite:
            self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1
            return
        self.good += 1
        if self.good >= GROWS_AFTER:
            self.scale, self.good = min(2 * self.scale, MOST_SCALE), 0

    @property
    def lost(self) -> bool:
        """True if losses overflow even when they are scaled down."""
        return self.scale < LEAST_SCALE
