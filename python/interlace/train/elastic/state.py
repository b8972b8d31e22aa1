"""State of a rank of an elastic run between two generations, and its transfer to the next trainer.

Tensors are handed over without copies: the layers that a rank still needs stay in place in memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from interlace.layout import Layout
from interlace.model import MultimodalModel
from interlace.parallel.region import Region
from interlace.plan.memory import StateSize
from interlace.resilience.errors import ResilienceError
from interlace.resilience.takeover import Tensors
from interlace.run.execute.ranks import held_in_lane
from interlace.run.graph import parameter_layers
from interlace.run.parallel_model import ParallelModel
from interlace.train.checkpoint.checkpoints import AVERAGE
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.checkpoint.pieces import Piece
from interlace.train.config.sections import Config
from interlace.train.progress import Progress
from interlace.train.trainer import Trainer

WEIGHT = "weight"


@dataclass
class Held:
    """State of a rank after the last counted step.

    progress: of the run, from `Trainer.snapshot`. tensors: parameter -> "weight", optimizer state by key, "ema".
    regions: parameter -> key -> region in the whole tensor, for tensor-parallel pieces.
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
        return cls(trainer.snapshot(), tensors, regions)

    def beside(self, before: Held | None) -> Held:
        """This state merged with the previous one of the same step, which peers may need.

        The previous state is dropped if it is of another step, as after going back to a checkpoint: layers of two steps
        must not be mixed.
        """
        if before is None or before.step != self.step:
            return self
        return Held(self.progress, {**before.tensors, **self.tensors}, {**before.regions, **self.regions})

    def to_save(self) -> tuple[dict[str, Tensor | Piece], dict[str, Tensor | Piece]]:
        """Weights, and the other state as `key.name`, in the form that checkpoints take."""
        weights: dict[str, Tensor | Piece] = {}
        state: dict[str, Tensor | Piece] = {}
        for name, each in self.tensors.items():
            for key, tensor in each.items():
                lies = self.regions.get(name, {}).get(key)
                into, label = (weights, name) if key == WEIGHT else (state, f"{key}.{name}")
                into[label] = tensor if lies is None else Piece(tensor, lies)
        return weights, state


def tensors_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """All tensors of a trainer, without copies."""
    return _by_name(*trainer.state())[0]


def _by_name(
    weights: Mapping[str, Tensor | Piece], state: Mapping[str, Tensor | Piece]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Region]]]:
    """Tensors and regions in the form of `Held`, from the output of `Trainer.state`."""
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
    """Makes `weights` (by first names) the parameters of a model on meta, under all their names. For pieces see
    `give_pieces`."""
    own = dict(model.named_parameters())  # kept alive, so that ids of replaced parameters are not reused
    made = {
        id(own[name]): nn.Parameter(weight, requires_grad=own[name].requires_grad) for name, weight in weights.items()
    }
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                module._parameters[key] = made[id(parameter)]


def give_pieces(parallel: ParallelModel, weights: Mapping[str, Tensor]) -> None:
    """Sets the pieces of a parallelized model from `weights`.

    A piece replaces the tensor of the model. Rows of sharded modules are copied instead, as they are part of a buffer
    that steps use.
    """
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
    """Loads optimizer state and averages from `held` into a trainer. `give` has set the weights."""
    for name in trainer.optimizer.parameters:
        if name in held:
            state = {key: tensor for key, tensor in held[name].items() if key not in (WEIGHT, AVERAGE)}
            trainer.optimizer.adopt(name, state)
    if trainer.averages is not None:
        trainer.averages.held |= {
            name: held[name][AVERAGE] for name in trainer.averages.held if AVERAGE in held.get(name, {})
        }


def sizes_of(
    model: MultimodalModel, trained: Mapping[str, StateSize], lane: Layout, config: Config
) -> list[dict[str, int]]:
    """For each position in a lane: parameter -> bytes of weights and state on a rank there, in the order of the model.

    trained: name -> its `StateSize`. lane: a layout with the whole model on one lane. Raises ValueError for a module
    that its tp or cp cannot cut.
    """
    result, own = [], dict(model.named_parameters())
    for numbers in held_in_lane(model, lane, sequence_parallel=config.parallel.sequence_parallel):
        sizes = {name: count * own[name].element_size() for name, count in numbers.items()}
        for name in sizes.keys() & trained.keys():
            state = trained[name]
            sizes[name] += state.moments * numbers[name] * torch.float32.itemsize + state.bytes
        result.append(sizes)
    return result


@dataclass(frozen=True)
class Note:
    """Note of a rank to the others of a generation, in the generation's store.

    step: of its state; -1: it has no state. held: the parameters that it holds, as a bit mask over all. config, data:
    digests. folder, nonce: of the run, if known. halted: time of its last counted step, duration of that step, time
    when it aborted the next one (seconds, times since the epoch).
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
        """Names of the held parameters; `order`: all parameters of the model."""
        bits = int(self.held, 16)
        return [name for place, name in enumerate(order) if bits >> place & 1]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, rank: int) -> Note:
        """Parses a note. Raises ResilienceError, naming the rank, if it is malformed."""
        try:
            table = json.loads(raw)
            note = cls(**table | {"halted": tuple(map(float, table["halted"]))})
            int(note.held, 16)
        except (ValueError, TypeError, KeyError) as error:
            raise ResilienceError(
                f"rank {rank} says what is no note ({error}): do all nodes run one version?"
            ) from None
        return note


def bits_of(names: Collection[str], order: Iterable[str]) -> str:
    """Bit mask of `names` in `order`, in hexadecimal."""
    return f"{sum(1 << place for place, name in enumerate(order) if name in names):x}"
