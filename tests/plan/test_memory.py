"""The memory of a rank, against what ranks really hold: their tensors, counted in processes that train."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from interlace.layout import Layout, ParallelSpec
from interlace.model import IGNORE, Media, MultimodalModel, Sample
from interlace.plan.memory import Load, RankMemory, Weight, activation_bytes, rank_memory, sharers
from interlace.run import parallelize
from interlace.run.executor import Executor
from interlace.run.gradients import BUCKET_BYTES
from interlace.run.traced import activations_of, weights_of
from interlace.schedule.memory import peak
from tests.comm.pool import Pool
from tests.tiny import MELS, PLACEHOLDERS, random_sample, tiny_mllm

LLM = "language_model"


@dataclass
class Case:
    specs: dict[str, ParallelSpec]
    placement: str = "parallel"
    freeze: tuple[str, ...] = ()
    tied: bool = False
    checkpointing: bool = False
    autocast: torch.dtype | None = None
    items: dict[str, tuple[int, ...]] = field(default_factory=dict)
    samples: int = 8
    microbatches: int = 4

    def model(self, device: str) -> MultimodalModel:
        with torch.device(device):
            encoders = tuple(name for name in self.specs if name != LLM)
            mllm = tiny_mllm(tied=self.tied, layers=3, hidden=64, heads=4, kv_heads=2, encoders=encoders)
        for path in self.freeze:
            mllm.freeze(path)
        return mllm.train()

    def layout(self, mllm: MultimodalModel) -> Layout:
        return Layout.from_specs(mllm, self.specs, placement=self.placement)

    def batch(self, mllm: MultimodalModel) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        samples = [random_sample(mllm, generator, images="vision" in self.specs, text=40) for _ in range(self.samples)]
        if "audio" not in self.specs:
            return samples
        clip = self.items["audio"]
        count = mllm.encoders["audio"].tokens(clip)
        ids = torch.full((count,), PLACEHOLDERS["audio"])
        return [
            Sample(
                torch.cat([ids, sample.input_ids]),
                torch.cat([torch.full((count,), IGNORE), sample.labels]),
                {**sample.media, "audio": [Media(clip, count, torch.zeros(clip))]},
            )
            for sample in samples
        ]


CASES = {
    "stages": Case({"vision": ParallelSpec(), LLM: ParallelSpec(pp=3)}, tied=True),
    "tensor parallel": Case({"vision": ParallelSpec(tp=2), LLM: ParallelSpec(tp=2)}),
    "replicas": Case({"audio": ParallelSpec(dp=2), LLM: ParallelSpec(tp=2)}, tied=True, items={"audio": (MELS, 20)}),
    "shared": Case({"vision": ParallelSpec(dp=4), LLM: ParallelSpec(tp=2, pp=2)}, placement="shared"),
    "frozen": Case(
        {"vision": ParallelSpec(), "audio": ParallelSpec(), LLM: ParallelSpec(pp=2)},
        freeze=("vision", LLM),
        items={"audio": (MELS, 32)},
    ),
    "frozen alone": Case({"vision": ParallelSpec(pp=2), LLM: ParallelSpec(tp=2)}, freeze=("vision", LLM)),
    "checkpointing": Case({"vision": ParallelSpec(tp=2), LLM: ParallelSpec(pp=2)}, checkpointing=True),
    "autocast": Case({"vision": ParallelSpec(pp=2), LLM: ParallelSpec(pp=2)}, autocast=torch.bfloat16),
}


# ---------------------------------------------------------------------- what ranks hold


class Alive(TorchDispatchMode):
    """The storages that were made inside, as far as they are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.weights: set[int] = set()  # of which views are made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def bytes(self) -> int:
        self.made = {key: each for key, each in self.made.items() if not each[0].expired()}
        return sum(size for key, (_, size) in self.made.items() if key not in self.weights)


@dataclass
class Held:
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    in_flight: int = 0


@contextmanager
def activations_counted(held: Held) -> Iterator[None]:
    """Notes the most that was alive after a forward of those that wait for their backward."""
    alive, forward = Alive(), Executor._forward

    def counted(self: Executor, module: str, stage: int, chunk: int, *rest: int) -> None:
        part = self.stages[module, stage].module
        alive.weights.update(x.untyped_storage()._cdata for x in (*part.parameters(), *part.buffers()))
        with alive:
            forward(self, module, stage, chunk, *rest)
        for received, output in self._saved.values():
            for tensor in (*received.values(), output):
                alive.add(tensor)
        if (module, stage, chunk) in self._saved:
            held.activations = max(held.activations, alive.bytes())
            held.in_flight = max(held.in_flight, len(self._saved))

    with mock.patch.object(Executor, "_forward", counted):
        yield


def train(rank: int, name: str) -> Held:
    case, held = CASES[name], Held()
    mllm = case.model("cpu")
    options: dict[str, Any] = {"checkpointing": case.checkpointing, "autocast": case.autocast}
    parallel = parallelize(mllm, case.layout(mllm), transport="distributed", timeout=20, **options)
    with activations_counted(held):
        parallel.step(case.batch(mllm), microbatches=case.microbatches)
    parameters = [parameter for _, parameter in parallel.named_parameters()]
    held.weights = sum(parameter.nbytes for parameter in parameters)
    held.gradients = sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None)
    if trained := [parameter for parameter in parameters if parameter.requires_grad]:
        optimizer = torch.optim.AdamW(trained, fused=True)
        optimizer.step()
        held.optimizer = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    return held


def estimated(name: str) -> tuple[RankMemory, ...]:
    """The estimate, from a model without memory and the lengths of the batch."""
    case = CASES[name]
    mllm = case.model("meta")
    layout, samples = case.layout(mllm), case.batch(mllm)
    activations = activations_of(mllm, layout, checkpointing=case.checkpointing, autocast=case.autocast, items=case.items)
    schedule = (parallel := parallelize(mllm, layout, transport="local")).schedule(
        parallel.table(samples, case.microbatches)
    )
    loads: dict[Any, Load] = {}
    for place, chunk in enumerate(schedule.table.chunks):
        mine = [samples[i] for i in chunk.samples]
        if chunk.module == LLM:
            features = sum(item.tokens for sample in mine for items in sample.media.values() for item in items)
            rows, targets = sum(map(len, mine)), sum(int((sample.labels != IGNORE).sum()) for sample in mine)
            loads[place] = Load(rows, targets, features)
        else:
            encoder = mllm.encoders[chunk.module]
            loads[place] = Load(
                sum(encoder.encoder_length(item.shape) for sample in mine for item in sample.media[chunk.module])
            )
    largest = {n: max(loads[i] for i, c in enumerate(schedule.table.chunks) if c.module == n) for n in layout.modules}
    sizes = activation_bytes(layout, activations, schedule.table.chunks, loads)
    held = [(found.in_flight, found.bytes) for found in (peak(actions, sizes) for actions in schedule.actions)]
    return rank_memory(layout, weights_of(mllm, layout), activations, largest, held, bucket_bytes=BUCKET_BYTES)


@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_what_is_estimated(name: str, pool: Pool) -> None:
    """State to the byte, activations within 10 %."""
    estimate = estimated(name)
    outcomes = pool.run(len(estimate), train, name)
    assert [outcome.value for outcome in outcomes if outcome.kind == "raised"] == []
    for found, outcome in zip(estimate, outcomes, strict=True):
        real = outcome.value
        where = f"rank {found.rank}: {found}, not {real}"
        print(name, found.rank, found.activations, real.activations)
        assert (found.weights, found.gradients, found.optimizer) == (real.weights, real.gradients, real.optimizer), where
        assert found.in_flight == real.in_flight, where
        assert found.activations == pytest.approx(real.activations, rel=0.1), where
