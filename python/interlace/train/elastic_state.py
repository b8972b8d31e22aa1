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

from interlace.layout import Layout
from interlace.parallel.region import Region
from interlace.plan.memory import StateSize
from interlace.resilience.errors import ResilienceError
from interlace.resilience.takeover import Tensors
from interlace.run.graph import parameter_layers
from interlace.run.ranks import held_in_lane
from interlace.train.checkpoint.checkpoints import AVERAGE
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.checkpoint.pieces import Piece
from interlace.train.progress import Progress
from interlace.train.schema import Config
from interlace.train.trainer import Trainer

WEIGHT = "weight"


@dataclass
class Held:
    """What a rank holds after the last step that counts.

    progress: of the run, by `Trainer.progress`. tensors: parameter -> "weight", its optimizer state by key, "ema".
    regions: of those that are pieces, with tensor parallelism, where they lie in the whole: parameter -> key -> region.
    """

    progress: Progress
    tensors: dict[str, dict[str, Tensor]]
    regions: dict[str, dict[str, Region]]

    @property
    def step(self) -> int:
        return self.progress.step

    @classmethod
    def of(cls, trainer: Trainer) -> Held:
        weights, state = trainer.state()
        tensors, regions = _by_name(weights, state)
        return cls(trainer.progress(), tensors, regions)

    def beside(self, before: Held | None) -> Held:
        """This, and what the rank held before of the same step, which others may need.

        Not where that is of another step, as after going back to a checkpoint: layers of two steps are no model.
        """
        if before is None or before.step != self.step:
            return self
        return Held(self.progress, {**before.tensors, **self.tensors}, {**before.regions, **self.regions})

    def to_save(self) -> tuple[dict[str, Tensor | Piece], dict[str, Tensor | Piece]]:
        """The weights, and the rest as `key.name`, as checkpoints take them."""
        weights: dict[str, Tensor | Piece] = {}
        state: dict[str, Tensor | Piece] = {}
        for name, each in self.tensors.items():
            for key, tensor in each.items():
                lies = self.regions.get(name, {}).get(key)
                found = tensor if lies is None else Piece(tensor, lies)
                if key == WEIGHT:
                    weights[name] = found
                else:
                    state[f"{key}.{name}"] = found
        return weights, state


def tensors_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """All that a trainer holds, in place."""
    return _by_name(*trainer.state())[0]


def _by_name(
    weights: Mapping[str, Tensor | Piece], state: Mapping[str, Tensor | Piece]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Region]]]:
    """Tensors and regions as `Held` has them, of what `Trainer.state` says."""
    tensors: dict[str, dict[str, Tensor]] = {}
    regions: dict[str, dict[str, Region]] = {}
    named = [((name, WEIGHT), each) for name, each in weights.items()]
    named += [((key.partition(".")[2], key.partition(".")[0]), each) for key, each in state.items()]
    for (name, key), each in named:
        if isinstance(each, Piece):
            regions.setdefault(name, {})[key] = each.region
        tensors.setdefault(name, {})[key] = (each.tensor if isinstance(each, Piece) else each).detach()
    return tensors, regions


def give(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Makes `weights` (by first names) the parameters of a model on meta, under all their names; of pieces see
    `give_pieces`."""
    own = dict(model.named_parameters())  # kept: ids of what is replaced must not be used again meanwhile
    made = {
        id(own[name]): nn.Parameter(weight, requires_grad=own[name].requires_grad) for name, weight in weights.items()
    }
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]


def give_pieces(parallel: Any, weights: Mapping[str, Tensor]) -> None:
    """The same of pieces, which a model has when it has been parallelized. They take the places of those there; into
    rows of what is sharded they are copied, as these are a part of what steps compute with."""
    first, own = canonical_names(parallel.mllm), dict(parallel.named_parameters())
    sharded = {shard.module for shard in parallel.graph.shards}
    layers = parameter_layers(parallel.mllm)
    for name in parallel.regions():
        if first[name] in weights:
            if layers[name][0] in sharded:
                own[name].data.copy_(weights[first[name]])
            else:
                own[name].data = weights[first[name]]


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


def sizes_of(model: Any, trained: Mapping[str, StateSize], lane: Layout, config: Config) -> list[dict[str, int]]:
    """For each place in a lane: parameter -> bytes of all that a rank there has of it, in the order of the model.

    trained: name -> its `StateSize`. lane: with all of the model on one. Raises ValueError for a module that its tp or
    cp cannot cut.
    """
    found, own = [], dict(model.named_parameters())
    for numbers in held_in_lane(model, lane, sequence_parallel=config.parallel.sequence_parallel):
        sizes = {name: count * own[name].element_size() for name, count in numbers.items()}
        for name in sizes.keys() & trained.keys():
            state = trained[name]
            sizes[name] += state.moments * numbers[name] * torch.float32.itemsize + state.bytes
        found.append(sizes)
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
