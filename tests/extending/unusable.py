"""Optimizers, schedules and a constant that cannot be used as extensions."""

from __future__ import annotations

from typing import Any

import torch

from interlace.comm.transports.base import Transport
from interlace.schedule import Schedule, compute_actions

NOTHING = 3


class Whole(torch.optim.SGD):
    """Usable, but not known to be element-wise."""


class Counts(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["step"] = state.get("step", 0) + 1


class Remembers(Counts):
    """Its state begins as a copy of the weights."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["first"] = weight.clone()
                weight.lerp_(state["first"], 0.5).sub_(weight.grad, alpha=group["lr"])


class Slows(Counts):
    """Keeps a counter in its groups, which checkpoints do not have."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=group["lr"] / group["k"])


class Raises(Counts):
    def step(self) -> None:  # type: ignore[override]
        raise RuntimeError("no rows today")


def no_schedule(graph: Any, table: Any, **options: Any) -> list[Any]:
    return []


def forwards_only(graph: Any, table: Any, **options: Any) -> Schedule:
    return Schedule.of_order("half", graph, table, compute_actions(graph, table, backward=False), backward=False)


class Silent(Transport):
    """A transport that does not say where it can run."""
