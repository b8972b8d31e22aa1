"""Weights that are gathered layer by layer: lifetime of each, unaffected state, and refused cases."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from interlace.estimate.traced import weights_of
from interlace.layout import Layout, ParallelSpec
from interlace.model import ModalityModule, MultimodalModel
from interlace.run import ParallelModel, PipelineError, parallelize
from interlace.run.execute.executor import Executor
from interlace.run.execute.layers import LayerByLayer
from interlace.schedule import Op
from tests.model.packing import qwen2_audio
from tests.run.parity import oracle
from tests.run.sequence_parallel import mixing
from tests.run.sharding import two_replicas
from tests.run.tensor_parallel import LLM, assert_gradient, model, norm_of
from tests.tiny import PLACEHOLDERS, random_microbatches


def gathers_by_layer(parallel: ParallelModel, module: str = LLM) -> bool:
    ops = {action.op for actions in parallel.timeline().actions for action in actions if action.module == module}
    return Op.UNSHARD_LAYERS in ops and Op.UNSHARD not in ops


def check_step(parallel: ParallelModel, alone: MultimodalModel, batch: Any) -> None:
    """Gradients are None at the start."""
    loss, gradients = oracle(alone, batch)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in parallel.mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, alone))


def test_no_more_than_a_layer_and_what_lies_beside_is_there() -> None:
    """During the computation in the middle of each layer, forward and backward; including its gradients."""
    mllm = model(encoders=())
    alone, batch = copy.deepcopy(mllm), random_microbatches(mllm, "text")
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)
    stage = parallel.stages[1][LLM, 0]
    wholes = {n: p for n, p in stage.named_parameters()}
    seen: list[tuple[str, int]] = []

    def look(way: str, layer: int) -> None:
        there = {name for name, whole in wholes.items() if whole.untyped_storage().nbytes() > whole.itemsize}
        beside = {name for name in wholes if ".layers." not in name}
        assert there == beside | {name for name in wholes if f".layers.{layer}." in name}, (way, layer)
        assert all(p.grad is None for n, p in wholes.items() if n not in there), (way, layer)
        seen.append((way, layer))

    layers = stage.layers
    assert len(layers) > 1
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda *_, n=number: look("forward", n))
        layer.mlp.register_full_backward_hook(lambda *_, n=number: look("backward", n))
    check_step(parallel, alone, batch)
    assert gathers_by_layer(parallel)
    numbers = range(len(layers))
    chunk = [*(("forward", n) for n in numbers), *(("backward", n) for n in reversed(numbers))]
    assert sorted(seen) == sorted(chunk * (len(seen) // len(chunk))) and len(seen) >= len(chunk)
    assert all(p.untyped_storage().nbytes() <= p.itemsize and p.isnan().all() for p in wholes.values())
    seen.clear()
    parallel.evaluate(batch)
    assert {way for way, _ in seen} == {"forward"}
    assert all(p.untyped_storage().nbytes() <= p.itemsize and p.isnan().all() for p in wholes.values())


@pytest.fixture
def sequence(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gathers and sums that the stages of the module "vision" begin and wait for, in order, on all ranks."""
    lines: list[str] = []
    for name in ("_gather", "_await", "_sum"):
        method = getattr(LayerByLayer, name)

        def note(self: LayerByLayer, number: int, name: str = name, method: Any = method) -> None:
            if self._sharded.shard.module == "vision" and self._sharded.place == 0:
                lines.append(f"{name[1:]} {number}")
            method(self, number)

        monkeypatch.setattr(LayerByLayer, name, note)
    return lines


@pytest.mark.parametrize("trained", ["all", "last layer"])
def test_the_next_layer_is_on_its_way_while_one_computes(sequence: list[str], trained: str) -> None:
    """And nothing is gathered for a backward that reaches no trained layer."""
    mllm = model(encoders=("vision",))
    if trained != "all":
        mllm.freeze("vision")
        mllm.freeze("vision.projector")
        mllm.encoders["vision"].layers[-1].requires_grad_(True)
    count = len(mllm.encoders["vision"].layers)
    assert count == 2
    mllm.train()
    alone, batch = copy.deepcopy(mllm), random_microbatches(mllm, "all")
    specs = {"vision": ParallelSpec(dp=2, shard="full"), LLM: ParallelSpec(dp=2)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, placement="shared"), timeout=30)
    check_step(parallel, alone, batch)
    assert gathers_by_layer(parallel, "vision")
    forward = ["gather 0", "gather 1", "await 0", "gather 2", "await 1", "await 2"]
    backward = {
        "all": "gather 0, gather 2, await 0, gather 1, await 2, sum 2, await 1, sum 1, sum 0".split(", "),
        "last layer": "gather 0, gather 2, await 0, await 2, sum 2, sum 0".split(", "),
    }[trained]
    chunks = sequence.count("sum 0")
    assert chunks
    assert sequence in (forward * chunks + backward * chunks, (forward + backward) * chunks)


def test_autocast_changes_nothing_of_what_is_gathered() -> None:
    """The same numbers as with weights that stay in memory."""
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    result = []
    for shard in ("none", "full"):
        own = copy.deepcopy(mllm)
        parallel = parallelize(own, two_replicas(own, shard), autocast=torch.bfloat16, checkpointing="full", timeout=30)
        result.append((float(parallel.step(batch).loss), {n: p.grad for n, p in own.named_parameters()}))
    assert gathers_by_layer(parallel)
    (loss, gradients), (other, others) = result
    assert other == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert (gradient - others[name]).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_gradients_of_chunks_add_up_in_fp32() -> None:
    """Eight chunks with bf16 weights: the sum has its own rounding error, not that of every addition."""
    mllm = model(encoders=()).bfloat16()
    batch = [random_microbatches(mllm, "text")[0] for _ in range(16)]
    one = copy.deepcopy(mllm)
    parallelize(one, two_replicas(one, "full"), timeout=30).step([batch[0], batch[0]])
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)
    parallel.step(batch)
    assert gathers_by_layer(parallel)
    for (name, parameter), other in zip(mllm.named_parameters(), one.parameters(), strict=True):
        assert parameter.grad.dtype is torch.bfloat16
        off = (parameter.grad.float() - other.grad.float()).norm()
        assert off <= 2**-7 * other.grad.float().norm(), name


def test_a_step_that_failed_leaves_weights_that_can_be_read() -> None:
    mllm = model(encoders=())
    alone, batch = copy.deepcopy(mllm), random_microbatches(mllm, "text")
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)

    def no_memory(*_: Any) -> None:
        raise OSError("no memory")

    layer = parallel.stages[1][LLM, 0].layers[1]
    for register in (layer.mlp.register_forward_hook, layer.mlp.register_full_backward_hook):
        broken = register(no_memory)
        with pytest.raises(PipelineError, match=r"rank 1, (FOR|BACK)WARD language_model\[0\] chunk \d+: OSError"):
            parallel.step(batch)
        broken.remove()
        for stages in parallel.stages.values():
            for parameter in stages[LLM, 0].parameters():
                assert repr(parameter)
                assert parameter.isnan().all() or parameter.isfinite().all()
        parallel.zero_grad()
        check_step(parallel, alone, batch)
        parallel.zero_grad()


def test_what_gathering_for_one_layer_cannot_serve_is_refused() -> None:
    mllm = model(encoders=())
    batch = random_microbatches(mllm, "text")
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)
    stages = [parallel.stages[rank][LLM, 0] for rank in (0, 1)]

    def again(_: Any, args: Any, kwargs: Any, first: Any) -> None:
        first(*args, **kwargs)

    hooks = [
        s.layers[1].register_forward_pre_hook(lambda *given, s=s: again(*given, s.layers[0]), with_kwargs=True)
        for s in stages
    ]
    with pytest.raises(
        PipelineError, match=r"rank \d, FORWARD .*: layer 0 of .* layers 0 to \d ran twice in one forward"
    ):
        parallel.step(batch)
    for hook in hooks:
        hook.remove()

    def reads(_: Any, __: Any, output: Any, first: Any) -> Any:
        return output + first.mlp.up_proj.weight.sum()

    for s in stages:  # of a layer that is not gathered
        s.layers[1].mlp.register_forward_hook(lambda *given, s=s: reads(*given, s.layers[0]))
    assert parallel.evaluate(batch).loss != parallel.evaluate(batch).loss  # NaN


@pytest.mark.slow
def test_layers_that_are_compiled_gather_too() -> None:
    mllm = model(encoders=())
    alone, batch = copy.deepcopy(mllm), random_microbatches(mllm, "text")
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)
    for stages in parallel.stages.values():
        stages[LLM, 0].layers[0].compile(backend="eager")
    check_step(parallel, alone, batch)
    assert gathers_by_layer(parallel)


def rows_of_an_encoder() -> MultimodalModel:
    plain = model(encoders=())
    encoder = ModalityModule(qwen2_audio(), projector="linear")
    return MultimodalModel({"audio": encoder}, plain.language_model, placeholders={"audio": PLACEHOLDERS["audio"]})


def samples_alone() -> MultimodalModel:
    plain = model(encoders=())
    mixing(plain)
    return MultimodalModel({}, plain.language_model)


def over_the_limit() -> MultimodalModel:
    mllm = model(encoders=())
    mllm.language_settings.limit = 4
    return mllm


@pytest.mark.parametrize(
    ("make", "module"), [(rows_of_an_encoder, "audio"), (samples_alone, LLM), (over_the_limit, LLM)]
)
def test_layers_that_run_repeatedly_per_chunk_are_gathered_once(make: Any, module: str) -> None:
    mllm = make()
    assert mllm.packing[module] == {rows_of_an_encoder: "rows", samples_alone: "alone"}.get(make, "packed")
    alone, batch = copy.deepcopy(mllm), random_microbatches(mllm, "all")
    lengths = {media.shape for group in batch for sample in group for media in sample.media.get("audio", ())}
    assert module == LLM or len(lengths) > 1
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)
    check_step(parallel, alone, batch)
    assert not gathers_by_layer(parallel, module)
    assert module == LLM or gathers_by_layer(parallel)


def test_a_step_leaves_no_sums_behind() -> None:
    """Also after a failed step whose error is kept, and without the garbage collector."""
    mllm = model(encoders=("vision",))
    batch = random_microbatches(mllm, "all")
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)
    made: list[weakref.ref[Any]] = []
    sums: list[weakref.ref[Any]] = []
    begin, add = Executor.run, LayerByLayer._add

    def run(self: Executor, *args: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args)

    def added(self: LayerByLayer) -> None:
        add(self)
        made.append(weakref.ref(self))
        sums.extend(weakref.ref(total.sum) for total in self.totals() if total.sum is not None)

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(Executor, "run", run), mock.patch.object(LayerByLayer, "_add", added):
            parallel.step(batch)
            assert made and sums and not any(each() is not None for each in (*made, *sums))
            layer = parallel.stages[1]["vision", 0].layers[0]
            layer.register_full_backward_hook(lambda *_: 1 / 0)
            sums.clear()
            with pytest.raises(PipelineError, match=r"rank 1, BACKWARD vision.*ZeroDivisionError"):
                parallel.step(batch)
            assert sums and not any(each() is not None for each in sums)
    finally:
        gc.enable()


def test_a_model_of_another_dtype_is_followed() -> None:
    mllm = model(encoders=("audio",))
    batch = random_microbatches(mllm, "all")
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)
    mllm.double()
    check_step(parallel, copy.deepcopy(mllm), batch)
    assert gathers_by_layer(parallel)


@pytest.mark.parametrize("shared", ["weight", "module"])
def test_what_is_used_in_a_layer_and_beside_it_lies_beside(shared: str) -> None:
    mllm = model(encoders=())
    whole = mllm.language_model.model
    if shared == "weight":
        whole.layers[1].input_layernorm.weight = whole.norm.weight
    else:
        whole.norm = whole.layers[1].input_layernorm
    alone, batch = copy.deepcopy(mllm), random_microbatches(mllm, "text")
    layout = two_replicas(mllm, "full")
    parallel = parallelize(mllm, layout, timeout=30)
    check_step(parallel, alone, batch)
    assert gathers_by_layer(parallel)
    beside, *_ = parallel._ranks[0].by_layer[0].units
    weight = parallel.stages[0][LLM, 0].language_model.model.norm.weight
    assert any(each.whole is weight for each in beside.weights)
    sizes = {size.name: size.beside for size in weights_of(alone, layout)}
    assert [name for name, lies in sizes.items() if lies and "layernorm" in name] == [
        f"{LLM}.model.layers.1.input_layernorm.weight"
    ]
