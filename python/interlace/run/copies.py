"""An optimizer over the wrong parameters: those of a model whose ranks in this process train copies of it.

Such an optimizer finds no gradients, so each of its steps does nothing and says nothing. This makes it an error.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_copied: weakref.WeakKeyDictionary[Any, nn.Module] = weakref.WeakKeyDictionary()  # who has copies -> of which model


def watch(parallel: Any, model: nn.Module) -> None:
    """From now on, and as long as `parallel` lives, an optimizer's step on parameters of `model` raises ValueError.

    Not when any parameter of `model` has a gradient: then it is being trained itself, beside its copies.
    """
    _register()
    _copied[parallel] = model


@cache
def _register() -> None:
    register_optimizer_step_post_hook(_check)


def _check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    # After the step, as it may have made the gradients itself (LBFGS); without any it has changed nothing.
    for model in list(_copied.values()):
        copied = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        trained = [p for group in optimizer.param_groups for p in group["params"] if id(p) in copied]
        if trained and all(parameter.grad is None for parameter in model.parameters()):
            raise ValueError(
                f"this {type(optimizer).__name__} has the parameters of the model given to parallelize(), which no "
                "step trains: several ranks in one process train a copy of it each. Give the optimizer theirs, "
                "[p for _, p in parallel.named_parameters()], and bring back what they learned: parallel.copy_to(mllm)"
            )
