"""What a rank of an elastic run holds between two generations, and how the next trainer goes on with it.

Tensors are handed on, not copied: a rank keeps the layers that it still needs where they are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from interlace.resilience.errors import ResilienceError
from interlace.resilience.takeover import Tensors
from interlace.train.checkpoint.checkpoints import AVERAGE
from interlace.train.progress import Progress
from interlace.train.trainer import Trainer

WEIGHT = "weight"


@dataclass
class Held:
    """What a rank holds after the last step that counts.

    progress: of the run, by `Trainer.progress`. tensors: parameter -> "weight", its optimizer state by key, "ema".
    """

    progress: Progress
    tensors: dict[str, dict[str, Tensor]]

    @property
    def step(self) -> int:
        return self.progress.step

    @classmethod
    def of(cls, trainer: Trainer) -> Held:
        return cls(trainer.progress(), tensors_of(trainer))


def tensors_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """All that a trainer holds, in place."""
    weights, state = trainer.state()
    found: dict[str, dict[str, Any]] = {name: {WEIGHT: weight} for name, weight in weights.items()}
    for key, tensor in state.items():
        kind, _, name = key.partition(".")
        found[name][kind] = tensor
    return {name: {key: tensor.detach() for key, tensor in each.items()} for name, each in found.items()}


def give(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Makes `weights` (by first names) the parameters of a model on meta, under all their names."""
    own = dict(model.named_parameters())  # kept: ids of what is replaced must not be used again meanwhile
    made = {
        id(own[name]): nn.Parameter(weight, requires_grad=own[name].requires_grad) for name, weight in weights.items()
    }
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]


def adopt(trainer: Trainer, held: Tensors) -> None:
    """Has a trainer go on with the optimizer state and averages in `held`; the weights it has from `give`."""
    for name in trainer.optimizer.parameters:
        if name in held:
            state = {key: tensor for key, tensor in held[name].items() if key not in (WEIGHT, AVERAGE)}
            trainer.optimizer.adopt(name, state)
    if trainer.averages is not None:
        trainer.averages.held |= {
            name: held[name][AVERAGE] for name in trainer.averages.held if AVERAGE in held.get(name, {})
        }


def sizes_of(model: nn.Module, trained: Mapping[str, Any]) -> dict[str, int]:
    """Parameter -> bytes of all that belongs to it, in the order of the model. trained: name -> its `StateSize`."""
    found = {}
    for name, parameter in model.named_parameters():
        state = trained.get(name)
        found[name] = parameter.nbytes
        if state is not None:
            found[name] += state.moments * parameter.numel() * torch.float32.itemsize + state.bytes
    return found


@dataclass(frozen=True)
class Note:
    """What a rank tells the others of a generation about itself, in the generation's store.

    step: of what it holds; -1: it holds nothing. held: the places of the parameters that it holds among all, as bits of
    a number. config, data: digests. folder, nonce: of the run, where it knows them. halted: seconds since the epoch:
    when its last step counted, how long that took, when it gave up the one after it.
    """

    host: str
    config: str
    data: str
    step: int = -1
    held: str = "0"
    folder: str = ""
    nonce: str = ""
    halted: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0))

    def names(self, order: Sequence[str]) -> list[str]:
        """Of the parameters that it holds, `order` being all of the model's."""
        bits = int(self.held, 16)
        return [name for place, name in enumerate(order) if bits >> place & 1]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, rank: int) -> Note:
        """Raises ResilienceError, naming the rank, for what is no note."""
        try:
            table = json.loads(raw)
            found = cls(**table | {"halted": tuple(map(float, table["halted"]))})
            int(found.held, 16)
        except (ValueError, TypeError, KeyError) as error:
            raise ResilienceError(
                f"rank {rank} says what is no note ({error}): do all nodes run one version?"
            ) from None
        return found


def bits_of(names: Collection[str], order: Iterable[str]) -> str:
    """The places of `names` in `order` as bits of a number, in hexadecimal."""
    return f"{sum(1 << place for place, name in enumerate(order) if name in names):x}"
