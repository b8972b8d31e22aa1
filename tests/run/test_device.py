"""Steps on a GPU, as far as a CPU can test them; the meta device replaces the GPU."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from interlace.attention import AttentionPlan
from interlace.attention.plan import TENSOR_FIELDS
from interlace.comm.channels import process_group as channel_group
from interlace.layout import Layout, ParallelSpec
from interlace.masks import BitfieldMask
from interlace.model import Media
from interlace.run import parallelize
from interlace.run.execute import device as devices
from interlace.run.execute.device import device_of, moved
from interlace.run.graph import edges
from interlace.run.tables.batch import ChunkInputs
from interlace.schedule import Op
from tests.distributed.pipeline import REPRESENTATIVE, parity
from tests.distributed.workers import run_ranks
from tests.run.parity import make_layout
from tests.tiny import random_microbatches, tiny_mllm

META = torch.device("meta")
Pair = namedtuple("Pair", "ids names")


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a value, except lengths."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, AttentionPlan):
        return [getattr(value, name) for name in TENSOR_FIELDS]
    if isinstance(value, BitfieldMask):
        return [x for x in (value.bits, value.doc, value.span, value.pos, value.window) if isinstance(x, torch.Tensor)]
    if isinstance(value, Media):
        return [] if value.data is None else [value.data]
    if isinstance(value, dict):
        return [x for key, each in value.items() if key not in devices.ON_THE_HOST for x in tensors(each)]
    return [x for each in value for x in tensors(each)] if isinstance(value, (list, tuple)) else []


def test_everything_in_a_batch_is_moved():
    mask = BitfieldMask.causal(1, 5)
    given = {
        "ids": torch.arange(5),
        "mask": BitfieldMask(mask.bits, span=torch.full((1, 5), -1, dtype=torch.int32), window=3, sinks=1),
        "plan": AttentionPlan.build(mask),
        "nested": [Pair(torch.ones(2), "a"), {"media": (Media((3, 4, 4), 1, torch.zeros(3, 4, 4)), Media((8, 4), 1))}],
        "lengths": torch.tensor([4]),
        "text": "as it is",
    }
    got = moved(given, META)
    assert len(tensors(got)) == len(tensors(given)) > 15 and all(x.is_meta for x in tensors(got))
    assert not any(x.is_meta for x in tensors(given)), "the given ones were changed"
    assert got["text"] == "as it is" and got["lengths"] is given["lengths"]
    assert (got["mask"].window, got["mask"].sinks) == (3, 1) and got["plan"].block == given["plan"].block
    pair, inner = got["nested"]
    assert isinstance(pair, Pair) and pair.names == "a" and inner["media"][1].data is None
    shape = torch.empty(3, device="meta")
    assert moved(shape, torch.device("cpu")) is shape, "what says a shape alone has no data to move"


def test_what_stages_are_given_lies_on_their_device():
    mllm = tiny_mllm()
    samples = [sample for group in random_microbatches(mllm, "all") for sample in group]
    table = parallelize(mllm, make_layout(mllm, "parallel", 3)).table(samples)
    stages = [(name, stage) for name in mllm.modules_order() for stage in range(3)]  # a first stage, and two later ones
    here, away = (ChunkInputs(mllm, table, samples, stages, device) for device in (torch.device("cpu"), META))
    for i, chunk in enumerate(table.chunks):
        for first in (True, False):
            there = away.of(chunk.module, i, first_stage=first)
            assert first or there is away.of(chunk.module, i, first_stage=first)
            assert len(tensors(there)) == len(tensors(here.of(chunk.module, i, first_stage=first))) > 0
            assert all(x.is_meta for x in tensors(there))


def test_the_device_is_that_of_the_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert device_of(model) == torch.device("cpu") == device_of(nn.Linear(2, 2, device="meta"))

    class Elsewhere(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            where = namedtuple("where", "is_meta device")
            return iter([where(False, torch.device("cuda", 0)), where(False, torch.device("cpu"))])

    with pytest.raises(
        ValueError, match=r"weights are on cpu, cuda:0, .* move the model to one device with .to\(device\)"
    ):
        device_of(Elsewhere())


class Event:
    """A CUDA event at a moment in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at

    def synchronize(self) -> None:
        pass


def test_events_become_seconds_of_the_programs_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.mark(torch.device("cpu")) > 0
    assert devices.seconds([(1.0, 2.0)], torch.device("cpu")) == [(1.0, 2.0)]
    gpu = torch.device("cuda", 0)
    assert devices.seconds([], gpu) == []
    monkeypatch.setattr(devices, "mark", lambda device: Event(5000.0))
    monkeypatch.setattr(devices, "current", lambda device: devices.nullcontext())
    monkeypatch.setattr(devices.time, "monotonic", lambda: 100.0)
    result = devices.seconds([(Event(1000.0), Event(1500.0)), (Event(1500.0), Event(4000.0))], gpu)
    assert result == [(96.0, 96.5), (96.5, 99.0)]


@pytest.mark.parametrize("placement", ["parallel", "colocated", "replicated", "shared"])
def test_every_message_goes_over_an_edge_of_the_layout(placement: str) -> None:
    """All edges may be used; each has a communicator."""
    mllm = tiny_mllm(layers=2)
    modules = mllm.modules_order()
    for degrees in ({}, {"language_model": 2}, dict.fromkeys(modules, 2)):
        specs = {
            name: ParallelSpec(dp=degrees.get(name, 1), pp=2 if name == "language_model" else 1) for name in modules
        }
        if placement == "shared":
            ranks = specs["language_model"].pp * specs["language_model"].dp
            specs = {n: s if n == "language_model" else ParallelSpec(dp=ranks) for n, s in specs.items()}
        if placement == "replicated" and len({spec.dp for spec in specs.values()}) > 1:
            continue
        layout = Layout.from_specs(mllm, specs, placement=placement)
        parallel = parallelize(mllm, layout, transport="local")
        samples = [s for group in random_microbatches(mllm, "all", count=6) for s in group]
        schedule = parallel.schedule(parallel.table(samples, microbatches=2))
        lanes = layout.lanes()
        used = {
            (rank, *lanes[action.peer].ranks)
            for rank, actions in enumerate(schedule.actions)
            for action in actions
            if action.op is Op.SEND
        }
        assert used == set(edges(parallel.graph)), (placement, degrees)


def apart(rank: int, world: int, cases: list[int]) -> int:
    """Parity with headers on the host's group and tensors on one group per edge, as on GPUs."""
    channel_group.EDGES, channel_group.SUMS = {"cpu": "gloo"}, {"cpu": "gloo"}
    return parity(rank, world, [REPRESENTATIVE[case] for case in cases])


@pytest.mark.parametrize("cases", [[0], pytest.param([3, 5], marks=pytest.mark.slow)], ids=str)
def test_separate_communicators_for_tensors_equal_one_process(cases: list[int]) -> None:
    for kind, value in run_ranks(3, apart, 3, cases):
        assert kind == "returned" and value > 0, value


def not_an_edge(rank: int) -> str:
    from interlace.comm.channels.base import Tag
    from interlace.comm.process.errors import CommError

    channel_group.EDGES = {"cpu": "gloo"}
    here = channel_group.GroupChannel(["a"], 20.0)
    here.add_edges([(0, 1)])
    tag, said = Tag("a", 0, 0, 0, False), []
    if rank == 0:
        here.send(torch.ones(3), 1, tag)
    else:
        assert here.receive(0, tag).tolist() == [1.0, 1.0, 1.0]
        for tensor in (torch.ones(3), torch.ones(3, device="meta")):
            try:
                here.send(tensor, 0, tag)
            except CommError as error:
                said.append(str(error))
    here.finish()
    return "; ".join(said)


def test_an_edge_that_was_not_prepared_is_named() -> None:
    (_, nothing), (kind, said) = run_ranks(2, not_an_edge)
    assert kind == "returned" and nothing == "", (nothing, said)
    assert "rank 1, SEND a[0] chunk 0: no edge from rank 1 to 0: pass it to add_edges first" in said
    assert "a[0] chunk 0 is on meta, but this channel is for cpu" in said
