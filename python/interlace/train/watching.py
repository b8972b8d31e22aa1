"""What a run keeps beside weights and optimizer: averaged weights, which validation was best, the scale of fp16 losses.

All of it is part of a checkpoint, so that a run that goes on repeats the unbroken one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from interlace.train.schema_train import EarlyStop

FIRST_SCALE, LEAST_SCALE, MOST_SCALE = 2.0**16, 2.0**-10, 2.0**24
GROWS_AFTER = 2000  # steps without overflow, as in torch.amp.GradScaler


class Averages:
    """Exponential moving averages of this rank's trained weights, in fp32 (``train.ema``).

    Pieces of weights have pieces of averages, wherever the weights are.
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
        """Begin those of `names` anew with the weights as they are."""
        for name in names:
            self.held[name].copy_(self.parameters[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the averages are in place of the weights; none of them may change meanwhile."""
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
    """Part of a checkpoint's progress, which may come from anybody."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Verdict(_State):
    """What validations have said so far. All ranks measure the same loss, so all have the same.

    best, step: the least loss [nats] and the step of it; -1 without any. mark, waited: the loss that counted as better
    last, by ``early_stop.min_delta``, and the validations since.
    """

    best: float | None = None
    step: int = -1
    mark: float | None = None
    waited: int = 0

    def add(self, step: int, loss: float, early_stop: EarlyStop | None) -> bool:
        """A validation after `step`: whether it is the best so far. A loss that is no number never is."""
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
        """Whether the run is to stop here."""
        return early_stop is not None and self.waited >= early_stop.patience


class LossScale(_State):
    """The factor of losses under fp16, whose small gradients would be zero without: as torch.amp.GradScaler's.

    A step whose gradients overflow is left out, and halves the scale; many without one double it. The norm of all
    gradients, which every rank is told, decides: so all ranks leave out the same steps.

    scale: now. good: steps since it changed. skipped: steps that were left out in all.
    """

    scale: float = FIRST_SCALE
    good: int = 0
    skipped: int = 0

    def took(self, finite: bool) -> None:
        """A step had gradients that were all finite, or not."""
        if not finite:
            self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1
            return
        self.good += 1
        if self.good >= GROWS_AFTER:
            self.scale, self.good = min(2 * self.scale, MOST_SCALE), 0

    @property
    def lost(self) -> bool:
        """Whether even losses that are scaled down overflow."""
        return self.scale < LEAST_SCALE
