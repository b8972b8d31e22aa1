"""Kinds of optimizers: torch's own by name, or a user's class by import path.

    adamw       torch's AdamW, fused; with ``train.offload_optimizer`` its state in host memory
    sgd         torch's SGD with momentum; weight decay is added to gradients there
    adafactor   torch's Adafactor (arXiv 1804.04235): stores a row and a column of a matrix's second moment; steps are
                relative to the size of a weight, and lr is the maximum step size
    muon        torch's Muon for the matrices of linear layers except the head (Newton-Schulz in bf16; updates scaled to
                the size of AdamW's, so that its learning rates fit: arXiv 2502.16982), AdamW for all other parameters
    a.b:Class   a subclass of torch.optim.Optimizer, created with groups of parameters, lr and
                ``train.optimizer_options``

adamw and sgd are element-wise, so ranks may hold shards of weights. So may those of a user's class with a true
attribute ``elementwise``. All others need whole weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from interlace.train.config.load import ConfigError, imported
from interlace.train.config.train import Train
from interlace.train.offload import MOMENTS, OffloadedAdamW


def make(kind: str, groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """The optimizer `kind` over groups of parameters, each with its lr and weight_decay."""
    betas = (train.betas[0], train.betas[1])
    if kind == "adamw" and train.offload_optimizer:
        return OffloadedAdamW(groups, betas=betas, eps=train.eps)
    if kind == "adamw":
        return torch.optim.AdamW(groups, betas=betas, eps=train.eps, fused=True)
    if kind == "sgd":
        return torch.optim.SGD(groups, momentum=train.momentum)
    if kind == "muon":
        return torch.optim.Muon(groups, momentum=train.momentum, adjust_lr_fn="match_rms_adamw")
    if kind == "adafactor":
        return torch.optim.Adafactor(groups)
    return _own(kind, groups, train)


def first_state(kind: str, parameter: nn.Parameter, train: Train) -> dict[str, Tensor]:
    """State of a parameter before its first update: zeros, in the shapes that the optimizer keeps."""
    like = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if kind == "adamw":
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step} | {key: torch.zeros_like(like) for key in MOMENTS}
    if kind == "adafactor":
        step = torch.zeros((), dtype=torch.float32)  # on the host, as in torch
        if parameter.dim() < 2:
            return {"step": step, "variance": like}
        return {"step": step, "row_var": like[..., :1].clone(), "col_var": like[..., :1, :].clone()}
    if kind in ("sgd", "muon"):
        return {"momentum_buffer": like} if train.momentum or kind == "muon" else {}
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    probe = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))
    optimizer = _own(kind, [{"params": [probe]}], train)
    _update(optimizer, probe, torch.zeros_like(probe))
    return {key: torch.zeros_like(tensor) for key, tensor in optimizer.state[probe].items()}


def needs_whole_weights(kind: str) -> bool:
    """True if ranks must not hold shards of the weights."""
    return not getattr(_class_of(kind), "elementwise", False) if ":" in kind else kind in ("adafactor", "muon")


def check(train: Train, *, source: str = "config") -> None:
    """Raises ConfigError for a user's optimizer that cannot be created, saved or resumed.

    Checkpoints store tensors, and zeros for a parameter that has had no gradient yet. So its state must consist of
    tensors and begin with zeros.
    """
    if ":" not in train.optimizer:
        return
    key = f"{source}: [train] optimizer = {train.optimizer!r}"
    for shape in ((4, 3), (5,)):
        runs = []
        for resumed in (False, True):
            weight = nn.Parameter(torch.linspace(-1.0, 1.0, int(torch.Size(shape).numel())).reshape(shape))
            group = {"params": [weight], "lr": train.lr, "weight_decay": train.weight_decay}
            try:
                optimizer = _own(train.optimizer, [group], train)
                if resumed:
                    optimizer.state[weight].update(first_state(train.optimizer, weight, train))
                for number in (1, 2):
                    _update(optimizer, weight, weight.detach().cos() * number)
            except ConfigError as error:
                raise ConfigError(f"{source}: [train] {error}") from None
            except Exception as error:  # a user's class may raise anything
                text = " ".join(str(error).split()) or type(error).__name__
                raise ConfigError(f"{key} failed in a trial update of a {shape} weight: {text}") from None
            state = optimizer.state[weight]
            if wrong := [name for name, value in state.items() if not isinstance(value, Tensor)]:
                raise ConfigError(
                    f"{key} keeps its state {wrong[0]!r} as {type(state[wrong[0]]).__name__}: keep it as a tensor, so "
                    "that checkpoints include it"
                )
            runs.append([weight.detach(), *state.values()])
        if len(runs[0]) != len(runs[1]) or not all(map(torch.equal, *runs)):
            raise ConfigError(
                f"{key} does not begin with a state of zeros, which checkpoints assume of weights without a gradient: "
                "initialize its state with zeros"
            )


def _update(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradient: Tensor) -> None:
    weight.grad = gradient
    optimizer.step()


def _class_of(kind: str) -> type[torch.optim.Optimizer]:
    made = imported(kind, "optimizer")
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer = {kind!r} is not a subclass of torch.optim.Optimizer")
    return made


def _own(kind: str, groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    options: Mapping[str, Any] = train.optimizer_options
    try:
        return _class_of(kind)(groups, lr=train.lr, **options)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"optimizer = {kind!r} cannot be created with {dict(options)}: {error}") from None
