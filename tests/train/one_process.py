"""A toy model, toy data and an adapter with the methods of `interlace.run.ParallelModel`, all in one process.

They make tests of the trainer fast and independent of the pipeline. The pipeline is tested elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from interlace.data import Sample
from interlace.schedule import Action, Op
from interlace.simulate import Timeline
from interlace.train.config import load as configs
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed
from tests.digits import DATA
from tests.simulate.timelines import timeline_of

VOCAB = 32

TABLE: dict[str, Any] = {
    "run": {"name": "toy"},
    "model": {"language_model": {"architecture": "LlamaForCausalLM"}},
    "data": dict(DATA),
    "train": {"steps": 12, "batch_size": 4, "microbatches": 2, "warmup_steps": 3, "lr": 1e-2, "validate_every": 5},
    "checkpoint": {"every": 4, "keep": 2},
    "log": {"every": 1, "trackers": [], "trace_step": 0},
}


def toy_config(*overrides: str) -> Config:
    return configs.from_table(copy.deepcopy(TABLE), list(overrides))


class ToyModel(nn.Module):
    """Embedding -> dropout -> linear, with the head tied to the embedding: next-token prediction on int sequences."""

    def __init__(self, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.encoders: dict[str, Any] = {}
        self.packing: dict[str, str] = {}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.language_model = nn.ModuleDict(
                {"embed": nn.Embedding(VOCAB, width), "mix": nn.Linear(width, width), "norm": nn.LayerNorm(width)}
            )

    def loss_sum(self, sample: Any) -> torch.Tensor:
        parts = self.language_model
        hidden = nn.functional.dropout(parts["embed"](sample.input_ids), 0.1, self.training)
        logits = parts["norm"](hidden + parts["mix"](hidden)) @ parts["embed"].weight.T
        return nn.functional.cross_entropy(logits, sample.labels, reduction="sum", ignore_index=-100)


class ToyData:
    """Samples in which each token is a fixed function of the previous one."""

    unit = "byte"

    def __init__(self, size: int, offset: int = 0) -> None:
        self.size, self.offset, self.blank_items, self.read_items = size, offset, 0, 0

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int, epoch: int = 0) -> Sample:
        generator = torch.Generator().manual_seed(1000 * epoch + index + self.offset)
        ids = torch.randint(0, VOCAB, (5 + index % 4,), generator=generator)
        return Sample(ids, (3 * ids + 1) % VOCAB, {}, f"toy {index}")

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index)

    def answer(self, index: int, epoch: int = 0) -> list[int]:
        return self.sample(index, epoch).labels.tolist()

    def questions(self) -> dict[str, list[Any]]:
        return {}

    def fingerprint(self) -> str:
        return f"toy {self.size} {self.offset}"


@dataclass(frozen=True)
class Result:
    loss: float
    tokens: int
    microbatches: int
    notes: tuple[float, ...] = ()
    table: None = None


class OneProcess:
    """`ParallelModel`'s methods over a model with ``loss_sum(sample)``."""

    dispatcher = None  # there is one replica

    def __init__(self, model: Any) -> None:
        self.model, self.places = model, []

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.model.named_parameters()

    def regions(self) -> dict[str, Any]:
        return {}

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)

    def step(
        self,
        samples: list[Any],
        microbatches: int,
        chunks: dict[str, int],
        place: tuple[int, int, int],
        note: Callable[[], float],
        loss_scale: float = 1.0,
    ) -> Result:
        self.places.append(place)
        tokens = sum(int((sample.labels != -100).sum()) for sample in samples)
        total = 0.0
        for sample in samples:
            loss = self.model.loss_sum(sample)
            (loss_scale * loss / tokens).backward()
            total += loss.item()
        return Result(total / tokens, tokens, microbatches, (note(),))

    @torch.no_grad()
    def evaluate(self, samples: list[Any], microbatches: int, chunks: dict[str, int]) -> Result:
        tokens = sum(int((sample.labels != -100).sum()) for sample in samples)
        return Result(sum(self.model.loss_sum(s).item() for s in samples) / tokens, tokens, microbatches)

    def clip_grad_norm_(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def timeline(self) -> Timeline:
        forward = Action(Op.FORWARD, "language_model", 0)
        return timeline_of([(0, forward, 0.0, 1.0)], ranks=1)


def toy_feed(config: Config) -> Feed:
    return Feed(
        ToyData(22),
        ToyData(9, offset=10_000),
        batch_size=config.train.batch_size,
        seed=config.run.seed,
        validation_samples=8,
    )
