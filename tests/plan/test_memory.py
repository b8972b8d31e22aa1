"""Memory of a rank, against the tensors counted in training processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

from interlace.estimate.traced import activations_of, weights_of
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.model import IGNORE, Checkpointing, Media, MultimodalModel, Sample, loss
from interlace.plan.memory import Activations, Load, RankMemory, WeightSize, activation_bytes, rank_memory
from interlace.run import parallelize
from interlace.run.execute.executor import Executor
from interlace.run.execute.gradients import BUCKET_BYTES, buckets
from interlace.run.execute.layers import LayerByLayer, Unit
from interlace.schedule import Action, Chunk, Op, StepTable
from interlace.schedule.memory import held_after, peak
from tests.comm.pool import Pool
from tests.tiny import MELS, PLACEHOLDERS, random_sample, tiny_mllm

LLM = "language_model"


@dataclass
class Case:
    specs: dict[str, ParallelSpec]
    placement: str = "parallel"
    freeze: tuple[str, ...] = ()
    tied: bool = False
    checkpointing: Checkpointing = "none"
    sequence_parallel: bool = True
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
    "checkpointing": Case({"vision": ParallelSpec(tp=2), LLM: ParallelSpec(pp=2)}, checkpointing="full"),
    "sharded": Case({LLM: ParallelSpec(dp=2, shard="full")}, samples=4, microbatches=1),
    "sharded by set": Case({LLM: ParallelSpec(dp=4, shard="full", shard_ranks=2)}, samples=8, microbatches=2),
    "optimizer sharded": Case({"vision": ParallelSpec(dp=2, shard="optimizer"), LLM: ParallelSpec(tp=2)}),
    "whole rows": Case({"vision": ParallelSpec(tp=2), LLM: ParallelSpec(pp=2)}, sequence_parallel=False),
    "recomputed rows": Case({LLM: ParallelSpec(tp=2, pp=3)}, checkpointing="full"),
    "selective": Case({LLM: ParallelSpec(tp=2)}, checkpointing="selective"),
    "tokens dealt": Case({"vision": ParallelSpec(cp=2), LLM: ParallelSpec(cp=2)}),
    "tokens dealt, checkpointing": Case(
        {"vision": ParallelSpec(tp=2, cp=2), LLM: ParallelSpec(cp=2)}, checkpointing="full", microbatches=2
    ),
    "autocast": Case({"vision": ParallelSpec(pp=2), LLM: ParallelSpec(pp=2)}, autocast=torch.bfloat16),
}


# ---------------------------------------------------------------------- memory of ranks


class Alive(TorchDispatchMode):
    """Storages created inside the context that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.weights: set[int] = set()  # views of them are made

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
    parameters: int = 0  # trained by an optimizer, and frozen ones
    after: int = 0  # of weights, between steps


def weight_bytes(stages: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the weights of stages and of the trained parameters: mostly the same."""
    tensors = [*(parameter for stage in stages for parameter in stage.parameters()), *parameters]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def activations_counted(held: Held, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Records the peak activations that wait for their backward, measured after forwards, and state in the step.

    parameters: of the rank.
    """
    alive, forward, backward = Alive(), Executor._forward, Executor._backward
    wait, begin, give = LayerByLayer._await, LayerByLayer._sum, LayerByLayer.sums
    layered: dict[LayerByLayer, int] = {}  # peak of unreduced gradients in a backward

    def whole(units: Iterable[Unit], trained: bool = False) -> int:
        wholes = [weight.whole for unit in units for weight in unit.weights]
        return sum(whole.nbytes for whole in wholes if whole.requires_grad or not trained)

    own = sum(parameter.nbytes for parameter in parameters), sum(p.nbytes for p in parameters if p.requires_grad)

    def waits(self: LayerByLayer, number: int) -> None:
        wait(self, number)
        there = [u for u in self._units if any(w.whole.untyped_storage().nbytes() for w in u.weights)]
        travels = [self._units[other] for other in self._gathers]
        held.weights = max(held.weights, own[0] + whole(there) + whole(travels))

    def sums(self: LayerByLayer, number: int) -> None:
        there = [w.whole for unit in self._units for w in unit.weights if w.whole.grad is not None]
        if number:
            travels = [self._units[number + 1]] if self._scattered else []
            now = gradient_bytes(there) + whole(travels, trained=True)
            layered[self] = max(layered.get(self, 0), now)
        begin(self, number)

    def gives(self: LayerByLayer) -> Any:
        sums = [total.sum[: -len(total.weights)] for total in self.totals() if total.sum is not None]
        held.gradients = max(held.gradients, sum(total.nbytes for total in sums) + layered.pop(self, 0))
        return give(self)

    def noted(self: Executor, *action: Any) -> None:
        with Alive():  # a recomputation must match the forward, where a mode is active; its tensors are not counted
            backward(self, *action)
        computed = {id(p): p for stage in self.stages.values() for p in stage.module.parameters()}
        held.gradients = max(held.gradients, gradient_bytes(computed.values()))

    def counted(self: Executor, module: str, stage: int, chunk: int, *rest: int) -> None:
        with alive:
            forward(self, module, stage, chunk, *rest)
        part = self.stages[module, stage].module  # its weights may have been gathered just now
        alive.weights.update(x.untyped_storage()._cdata for x in (*part.parameters(), *part.buffers()))
        alive.weights.update(x.untyped_storage()._cdata for x in parameters)
        held.weights = max(held.weights, weight_bytes([s.module for s in self.stages.values()], parameters))
        for received, output in self._saved.values():
            for tensor in (*received.values(), output):
                alive.add(tensor)
        if (module, stage, chunk) in self._saved:
            held.activations = max(held.activations, alive.bytes())
            held.in_flight = max(held.in_flight, len(self._saved))

    with (
        mock.patch.object(Executor, "_forward", counted),
        mock.patch.object(Executor, "_backward", noted),
        mock.patch.object(LayerByLayer, "_await", waits),
        mock.patch.object(LayerByLayer, "_sum", sums),
        mock.patch.object(LayerByLayer, "sums", gives),
    ):
        yield


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None)


def train(rank: int, name: str) -> Held:
    case, held = CASES[name], Held()
    mllm = case.model("cpu")
    options: dict[str, Any] = {
        "checkpointing": case.checkpointing,
        "autocast": case.autocast,
        "sequence_parallel": case.sequence_parallel,
    }
    parallel = parallelize(mllm, case.layout(mllm), transport="distributed", timeout=20, **options)
    parameters = [parameter for _, parameter in parallel.named_parameters()]
    with activations_counted(held, parameters):
        parallel.step(case.batch(mllm), microbatches=case.microbatches)
    held.parameters = sum(parameter.nbytes for parameter in parameters)
    held.after = weight_bytes(parallel.stages[rank].values(), parameters)
    held.gradients = max(held.gradients, gradient_bytes(parameters))
    if trained := [parameter for parameter in parameters if parameter.requires_grad]:
        optimizer = torch.optim.AdamW(trained, fused=True)
        optimizer.step()
        held.optimizer = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    return held


def loads_of(mllm: MultimodalModel, table: StepTable, samples: list[Any]) -> dict[Any, Load]:
    loads: dict[Any, Load] = {}
    for place, chunk in enumerate(table.chunks):
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
    return loads


def estimated(name: str) -> tuple[RankMemory, ...]:
    """The estimate, from a model on the meta device and the lengths of the batch."""
    case = CASES[name]
    mllm = case.model("meta")
    layout, samples = case.layout(mllm), case.batch(mllm)
    options: dict[str, Any] = {"checkpointing": case.checkpointing, "sequence_parallel": case.sequence_parallel}
    activations = activations_of(mllm, layout, **options, autocast=case.autocast, items=case.items)
    schedule = (parallel := parallelize(mllm, layout, transport="local")).schedule(
        parallel.table(samples, case.microbatches)
    )
    loads = loads_of(mllm, schedule.table, samples)
    largest = {n: max(loads[i] for i, c in enumerate(schedule.table.chunks) if c.module == n) for n in layout.modules}
    sizes = activation_bytes(layout, activations, schedule.table.chunks, loads)
    held = [(result.in_flight, result.bytes) for result in (peak(actions, sizes) for actions in schedule.actions)]
    weights = weights_of(mllm, layout, sequence_parallel=case.sequence_parallel)
    rows = [(rank, action) for rank, actions in enumerate(schedule.actions) for action in actions]
    by_layer = {(rank, action.module) for rank, action in rows if action.op is Op.UNSHARD_LAYERS}
    return rank_memory(layout, weights, activations, largest, held, bucket_bytes=BUCKET_BYTES, by_layer=by_layer)


SLOW = (
    "stages",
    "replicas",
    "shared",
    "frozen",
    "frozen alone",
    "checkpointing",
    "autocast",
    "optimizer sharded",
    "selective",
    "whole rows",
    "recomputed rows",
    "tokens dealt, checkpointing",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_ranks_hold_what_is_estimated(name: str, pool: Pool) -> None:
    """State to the byte, activations within 10 %."""
    estimate = estimated(name)
    outcomes = pool.run(len(estimate), train, name)
    assert (raised := [o.value for o in outcomes if o.kind == "raised"]) == [], "\n".join(raised)
    for result, outcome in zip(estimate, outcomes, strict=True):
        real = outcome.value
        where = f"rank {result.rank}: {result}, not {real}"
        state = result.weights_run, result.gradients_run, result.optimizer
        assert state == (real.weights, real.gradients, real.optimizer), where
        if name.startswith("sharded"):  # one half of each weight
            assert real.parameters == result.weights_once // 3
            assert real.after <= real.parameters + 100 * 4  # each whole reads as one number
        else:
            assert real.after == result.weights, where
        assert result.in_flight == real.in_flight, where
        assert result.activations == pytest.approx(real.activations, rel=0.1), where


# ---------------------------------------------------------------------- without processes


@pytest.mark.parametrize(
    "name",
    ["checkpointing", *(pytest.param(n, marks=pytest.mark.slow) for n in ("autocast", "selective", "tokens dealt"))],
)
def test_memory_kept_for_weight_gradients_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the executor keeps for every chunk: to the byte, except rows that pad blocks and lanes."""
    case, result = CASES[name], {}
    mllm = case.model("cpu")
    layout, samples = case.layout(mllm), case.batch(mllm)[:2]
    options: dict[str, Any] = {"checkpointing": case.checkpointing, "autocast": case.autocast}
    parallel = parallelize(mllm, layout, schedule="zb_h1", transport="local", timeout=30, **options)
    backward = Executor._backward

    def noted(self: Executor, *action: Any) -> None:
        backward(self, *action)
        if (value := action[:3]) in self._put_off:
            storages = [operand.untyped_storage() for _, operand in self._put_off[value].operands()]
            size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
            result[value] = max(size, result.get(value, 0))

    monkeypatch.setattr(Executor, "_backward", noted)
    table = parallel.step(samples, 2).table
    assert table is not None and {module for module, *_ in result} == set(layout.modules)
    activations = activations_of(case.model("meta"), layout, **options, split=True)
    loads = loads_of(mllm, table, samples)
    sizes = activation_bytes(layout, activations, table.chunks, loads, deferred=True)
    assert {value: sizes[value] for value in result} == pytest.approx(
        result, rel=0.03 if name in ("selective", "tokens dealt") else 1e-6
    )
    before = activation_bytes(layout, activations, table.chunks, loads)
    if case.checkpointing == "full":  # a layer keeps its input; the weights are counted separately
        assert all(sizes[value] > 3 * before[value] for value in result if value[:2] == (LLM, 0))


def test_held_memory_changes_between_halves_of_a_backward() -> None:
    order = [(Op.FORWARD, 0), (Op.FORWARD, 1), (Op.BACKWARD_INPUT, 0), (Op.BACKWARD, 1), (Op.BACKWARD_WEIGHT, 0)]
    actions = [Action(op, LLM, 0, chunk) for op, chunk in order]
    before, between = {(LLM, 0): 10.0}, {(LLM, 0): 25.0}
    assert [size for *_, size in held_after(actions, before, between)] == [10, 20, 35, 25, 0]
    assert peak(actions, before, between).bytes == 35 and peak(actions, before).bytes == 20


def small(**specs: ParallelSpec) -> tuple[MultimodalModel, Layout]:
    case = Case({"vision": ParallelSpec(), LLM: ParallelSpec(), **specs})
    return (mllm := case.model("meta")), case.layout(mllm)


@pytest.mark.parametrize("in_parts", [False, True])
def test_logits_in_parts_are_not_kept(in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case({LLM: ParallelSpec()})
    mllm = case.model("meta")
    result = activations_of(mllm, case.layout(mllm))[LLM]
    limit = 4 * result.words * 10 if in_parts else loss.LOGITS_BYTES
    monkeypatch.setattr(loss, "LOGITS_BYTES", limit)
    real, samples = case.model("cpu"), case.batch(mllm)[:2]
    stage, inputs = real.slice(LLM, 0, 3), real.collate_module(LLM, samples)
    alive = Alive()
    alive.weights.update(x.untyped_storage()._cdata for x in (*stage.parameters(), *stage.buffers()))
    with alive:
        total = stage(inputs)
    assert total.requires_grad
    load = Load(sum(map(len, samples)), sum(int((sample.labels != IGNORE).sum()) for sample in samples))
    assert load.targets > 10
    assert replace(result, logits_bytes=limit).of_stage(0, 3, load) == pytest.approx(alive.bytes(), rel=0.02)
    whole, parts = (
        replace(result, logits_bytes=each).workspace(0, 3, load) for each in (math.inf, 4 * result.words * 10)
    )
    assert (whole, parts) == (2 * 4 * load.targets * result.words, 2 * 4 * 10 * result.words)


@given(
    layers=st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=1, max_size=6),
    dp=st.sampled_from([1, 2, 4, 6]),
    data=st.data(),
)
def test_state_is_shared_by_the_replicas(layers: list[tuple[int, bool]], dp: int, data: st.DataObject) -> None:
    """Against the parts of every weight, written out."""
    shard = data.draw(st.sampled_from(["none", "optimizer", "full"]))
    groups = [n for n in range(2, dp + 1) if dp % n == 0 and shard != "none"]
    group = data.draw(st.sampled_from([None, *groups]))
    sharing = 1 if shard == "none" else group or dp
    stages = tuple(Pipeline("only", i, (Stage("only", 0, 0, len(layers), Lane((i,))),)) for i in range(dp))
    layout = Layout({"only": (ParallelSpec(dp=dp, shard=shard, shard_ranks=group), stages)}, dp)
    beside = data.draw(st.integers(0, len(layers)))  # one of the weights is stored beside its layer, or none
    weights = [
        WeightSize(str(i), "only", (i,), (n,), 2, 2, trained, beside=i == beside)
        for i, (n, trained) in enumerate(layers)
    ]
    by_layer = data.draw(st.sets(st.integers(0, dp - 1)))
    idle = Activations((), (0.0,) * (len(layers) + 1), (False,) * len(layers))
    result = rank_memory(
        layout,
        weights,
        {"only": idle},
        {},
        [(0, 0.0)] * dp,
        bucket_bytes=1000,
        by_layer={(rank, "only") for rank in by_layer},
    )
    part = [4 * max(len(range(i, n, sharing)) for i in range(sharing)) for n, _ in layers]
    trained = [i for i, (_, is_trained) in enumerate(layers) if is_trained]
    whole = [4 * n for n, _ in layers]
    for memory in result:
        moments = part if shard != "none" else whole
        assert memory.optimizer == sum(2 * moments[i] + 4 for i in trained)
        if shard == "full" and sharing > 1:
            there = [n * (i != beside) for i, n in enumerate(whole)]
            learned = [n * (i in trained) for i, n in enumerate(there)]
            two, unreduced = (max(a + b for a, b in pairwise([0, *each, 0])) for each in (there, learned))
            assert memory.weights == sum(part) + two + (whole[beside] if beside < len(whole) else 0)
            assert memory.weights_once == sum(part) + sum(whole)
            unreduced += whole[beside] if beside in trained else 0
            assert memory.gradients == sum(2 * part[i] for i in trained) + unreduced  # sums in fp32, twice the size
            assert memory.gradients_once == sum(whole[i] for i in trained)
            assert memory.weights_run == (memory.weights if memory.rank in by_layer else memory.weights_once)
            assert memory.gradients_run == (memory.gradients if memory.rank in by_layer else memory.gradients_once)
        else:
            assert memory.weights == memory.weights_once == sum(whole)
            assert memory.gradients == memory.gradients_once == sum(whole[i] for i in trained)
        assert memory.peak >= memory.weights + memory.gradients + memory.optimizer
        sent = {i: part[i] * sharing for i in trained}
        assert memory.sums == (largest_bucket([whole[i] for i in trained], list(sent.values()), 1000) if dp > 1 else 0)


def largest_bucket(sizes: list[int], sent: list[int], most: int) -> int:
    """Largest bucket that `interlace.run.execute.gradients` makes. sent: bytes transferred for each parameter."""
    parameters = [nn.Parameter(torch.empty(size // 4)) for size in sizes]
    travels = {id(parameter): each for parameter, each in zip(parameters, sent, strict=True)}
    with mock.patch("interlace.run.execute.gradients.BUCKET_BYTES", most):
        return max((sum(travels[id(p)] for p in bucket) for bucket in buckets(parameters)), default=0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_pieces_of_words_and_weights_used_in_part(sequence_parallel: bool) -> None:
    """Compares with the ranks of one process: an odd vocabulary, and norms of which each rank uses a part.

    These norms are not sharded while they are trained.
    """
    config = LlamaConfig(vocab_size=49, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    result: dict[str, Any] = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            result[device] = MultimodalModel({}, LlamaForCausalLM(config), placeholders={})
    layout = Layout.from_specs(result["meta"], {LLM: ParallelSpec(tp=2, dp=2, shard="full")})
    parallel = parallelize(result["cpu"], layout, transport="local", sequence_parallel=sequence_parallel)
    weights = weights_of(result["meta"], layout, sequence_parallel=sequence_parallel)
    assert {weight.name for weight in weights if weight.in_part} == parallel._ranks[0]._in_part
    idle = Activations((), (0.0,) * 3, (False,) * 2)
    for memory in rank_memory(layout, weights, {LLM: idle}, {}, [(0, 0.0)] * 4, bucket_bytes=BUCKET_BYTES):
        rank = parallel._ranks[memory.rank]
        held = {id(parameter): parameter for stage in rank.stages.values() for parameter in stage.parameters()}
        assert memory.parameters == sum(parameter.numel() for parameter in held.values())
        parts = (memory.optimizer - 4 * len(weights)) // 2
        real = sum(parameter.nbytes for parameter in rank.own.values())
        assert 0 <= parts - real <= 2 * 4 * 8  # 25 words are 12 and 13


def test_context_parallel_ranks_have_their_rows_alone() -> None:
    mllm, whole = small()
    cut = Layout.from_specs(mllm, {"vision": ParallelSpec(), LLM: ParallelSpec(cp=2)})
    activations = activations_of(mllm, cut)
    chunk, load = Chunk(LLM, 0, 0, np.zeros(1, np.int32)), Load(100, 20, 8)
    sizes = [activation_bytes(layout, activations, [chunk], {LLM: load})[LLM, 0, 0] for layout in (whole, cut)]
    assert sizes[1] == activations[LLM].of_stage(0, 3, Load(56, 10, 4))  # 13 blocks of 8, and one to fill up
    assert sizes[0] / 2 < sizes[1] < 0.6 * sizes[0]


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    mllm, _ = small()
    with pytest.raises(ValueError, match=r"language_model does not support tp = 3: .*pp or dp instead"):
        weights_of(mllm, Layout.from_specs(mllm, {"vision": ParallelSpec(), LLM: ParallelSpec(tp=3)}))
