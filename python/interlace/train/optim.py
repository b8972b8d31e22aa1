"""Optimizer of a rank: its kinds, learning rate and weight decay of each parameter group, learning-rate schedules.

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

State is keyed by global parameter name, not by position, so it can be saved by one layout and loaded by another.
Parameters without a gradient in a step (their modality was absent) keep weight and state unchanged, as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace._text import one_line
from interlace.plan.memory import StateSize
from interlace.train.config.load import ConfigError, imported
from interlace.train.config.sections import Config
from interlace.train.config.train import Train
from interlace.train.offload import MOMENTS, OffloadedAdamW

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


# ---------------------------------------------------------------------- kinds of optimizers


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
    if not parameter.is_meta:
        return _state_of_a_copy(kind, parameter, parameter.device, train)
    try:  # shapes alone, without memory
        return _state_of_a_copy(kind, parameter, torch.device("meta"), train)
    except Exception:  # the class reads values, which meta tensors do not have
        return _state_of_a_copy(kind, parameter, torch.device("cpu"), train)


def _state_of_a_copy(kind: str, parameter: nn.Parameter, device: torch.device, train: Train) -> dict[str, Tensor]:
    """Zeros in the shapes of the state after an update of a copy of a parameter."""
    copy = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))
    optimizer = _own(kind, [{"params": [copy]}], train)
    _update(optimizer, copy, torch.zeros_like(copy))
    return {key: torch.zeros_like(tensor) for key, tensor in optimizer.state[copy].items()}


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
        start = torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).reshape(shape)
        try:
            weight, optimizer = _of_one(start, train)
            _update(optimizer, weight, weight.detach().cos())
            if wrong := [name for name, value in optimizer.state[weight].items() if not isinstance(value, Tensor)]:
                kind = type(optimizer.state[weight][wrong[0]]).__name__
                raise ConfigError(
                    f"optimizer = {train.optimizer!r} keeps its state {wrong[0]!r} as {kind}: keep it as a tensor, so "
                    "that checkpoints include it"
                )
            resumed, other = _of_one(weight.detach(), train)
            state = first_state(train.optimizer, resumed, train)
            for name, value in optimizer.state[weight].items():
                state[name].copy_(value)
            other.state[resumed].update(state)
            fresh, begun = _of_one(start, train)
            begun.state[fresh].update(first_state(train.optimizer, fresh, train))
            _update(begun, fresh, fresh.detach().cos())
            for each, parameter in ((optimizer, weight), (other, resumed), (begun, fresh)):
                _update(each, parameter, parameter.detach().sin())
        except ConfigError as error:
            raise ConfigError(f"{source}: [train] {error}") from None
        except Exception as error:  # a user's class may raise anything
            raise ConfigError(f"{key} failed in a trial update of a {shape} weight: {one_line(error, None)}") from None
        if not torch.equal(weight, resumed):
            raise ConfigError(
                f"{key} does not continue from its saved state: keep all of its state as tensors in "
                "optimizer.state[parameter], not in groups or attributes"
            )
        if not torch.equal(weight, fresh):
            raise ConfigError(
                f"{key} does not begin with a state of zeros, which checkpoints assume of weights without a gradient: "
                "initialize its state with zeros"
            )


def _of_one(start: Tensor, train: Train) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A weight with the values of `start`, and a user's optimizer of it."""
    weight = nn.Parameter(start.clone())
    group = {"params": [weight], "lr": train.lr, "weight_decay": train.weight_decay}
    return weight, _own(train.optimizer, [group], train)


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
