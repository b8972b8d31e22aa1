"""Split backwards: gradients equal one process, bits equal unsplit backwards, one recomputation, little memory kept."""

from __future__ import annotations

import copy
import gc
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from interlace.comm.overlap.deferred import DeferredForward, DeferredGradients
from interlace.comm.transports.silent import SilentTransport
from interlace.layout import Layout, ParallelSpec
from interlace.model import ModalityModule, MultimodalModel, StageModule
from interlace.model import loss as losses
from interlace.parallel import Ranks, tensor_parallel
from interlace.run import ParallelModel, PipelineError, parallelize
from interlace.run.execute.deferred import LinearLayers
from interlace.run.execute.executor import METHODS
from interlace.run.execute.layers import LayerByLayer
from interlace.schedule import Op, Schedule
from interlace.schedule.actions import CODES
from interlace.simulate.trace import trace_events
from tests.comm.pool import Pool
from tests.parallel.processes import PLAN, Gated, example
from tests.run import context_parallel, full, random_cases, sharding
from tests.run import tensor_parallel as tensor_cases
from tests.run.adapters import with_adapters
from tests.run.parity import FREEZING, assert_same_gradient, make_layout, oracle
from tests.run.sharding import two_replicas
from tests.run.split_lists import halves, splitting
from tests.run.tensor_parallel import LLM, model
from tests.tiny import random_microbatches, tiny_mllm

Gradients = dict[str, torch.Tensor | None]


def gradients_of(mllm: MultimodalModel) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in mllm.named_parameters()}


def assert_same_bits(found: Gradients, expected: Gradients) -> None:
    for name, due in expected.items():
        given = found[name]
        assert (given is None) == (due is None), name
        assert given is None or due is None or (given.dtype is due.dtype and torch.equal(given, due)), name


def both(make: Callable[[], tuple[ParallelModel, Any]], **step: Any) -> tuple[ParallelModel, Gradients]:
    """A step with whole backwards, and one with split ones; both have equal bits. Returns the latter."""
    parallel, batch = make()
    loss = parallel.step(batch, **step).loss
    whole = gradients_of(parallel.mllm)
    with pytest.MonkeyPatch.context() as patch:
        splitting(patch)
        parallel, batch = make()
    assert parallel.step(batch, **step).loss == loss
    assert halves(parallel)
    result = gradients_of(parallel.mllm)
    assert_same_bits(result, whole)
    return parallel, result


# ---------------------------------------------------------------------- parity


# placement and ranks, activation checkpointing, frozen parts, tied embeddings (on one rank or on two)
LAYOUTS = [("parallel", 3), ("colocated", 2), ("replicated", 2), ("parallel", 1)]
VARIANTS = list(itertools.product(LAYOUTS, ("none", "full", "selective"), FREEZING, (False, True)))


def check_variant(layout: tuple[str, int], checkpointing: Any, freezing: str, tied: bool) -> None:
    """Split and whole backwards have equal bits. The gradients equal those of one process."""
    mllm = tiny_mllm(tied=tied, layers=2)
    for path in FREEZING[freezing]:
        mllm.freeze(path)
    mllm.train()
    batch = random_microbatches(mllm, "all")
    _, due = oracle(mllm, batch)

    def make() -> tuple[ParallelModel, Any]:
        mllm.zero_grad()
        return parallelize(mllm, make_layout(mllm, *layout), checkpointing=checkpointing), batch

    _, result = both(make)
    for name, gradient in result.items():
        assert_same_gradient(name, gradient, due[name])


@pytest.mark.parametrize("number", range(0, len(VARIANTS), 35))  # coprime to the number of values of each factor
def test_split_backward_equals_whole_backward_and_one_process(number: int) -> None:
    check_variant(*VARIANTS[number])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_so_they_have_in_more_variants(first: int) -> None:
    for number in range(1 + first, len(VARIANTS), 31):
        check_variant(*VARIANTS[number])


SWEEPS: dict[str, Callable[[int], Any]] = {
    "layouts": random_cases.check_layout,
    "tables": random_cases.check_table,
    "tensor parallel": tensor_cases.check_case,
    "context parallel": context_parallel.check_case,
    "sharded": sharding.check_case,
}


def sweep(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random case with some or all backwards split; the weights of each chunk are anywhere allowed."""
    splitting(monkeypatch, seed, share=0.8 if seed % 2 else 1.0, in_order=False)
    SWEEPS[name](seed)


@pytest.mark.parametrize("name", ["tables", "sharded"])
def test_random_cases_equal_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(name, 2, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_more_random_cases_equal_one_process(name: str) -> None:
    for seed in range(100, 103 if name == "sharded" else 106):
        with pytest.MonkeyPatch.context() as patch:
            sweep(name, seed, patch)


def train_in_halves(rank: int, name: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        splitting(patch)
        return full.train(rank, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp 2 x tp 2", "stages, tied", "frozen encoder"])
def test_four_processes_that_gather_weights_train_as_one_does(name: str, pool: Pool) -> None:
    outcomes = pool.run(4, train_in_halves, name)
    assert (raised := [o.value for o in outcomes if o.kind == "raised"]) == [], "\n".join(raised)
    assert [o.value for o in outcomes] == [full.CASES[name].layers] * 4


def test_precision_loss_scale_and_a_head_that_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 48 * 4)

    def make() -> tuple[ParallelModel, Any]:
        mllm = tiny_mllm(encoders=("vision",)).train()
        layout = make_layout(mllm, "parallel", 2)
        parallel = parallelize(mllm, layout, checkpointing="full", autocast=torch.bfloat16)
        return parallel, random_microbatches(mllm, "all")

    both(make, loss_scale=1024.0)


def test_adapters_beside_frozen_layers() -> None:
    pytest.importorskip("peft")

    def make() -> tuple[ParallelModel, Any]:
        mllm = with_adapters(model(encoders=("vision",)), ["all-linear", "vision"])
        mllm.train()
        layout = make_layout(mllm, "parallel", 2)
        return parallelize(mllm, layout, checkpointing="full"), random_microbatches(mllm, "all")

    put_off = noted_weights(lambda: both(make)[0])
    assert put_off and all(".lora_" in name or "projector" in name for name in put_off)


def test_the_layers_of_gpt2_whose_weights_lie_the_other_way() -> None:
    def make() -> tuple[ParallelModel, Any]:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=48, n_positions=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="interlace",
        )  # fmt: skip
        language = ModalityModule(GPT2LMHeadModel(config), projector=None)
        mllm = MultimodalModel(encoders={}, language_model=language)
        batch = random_microbatches(mllm, "text")
        layout = Layout.from_specs(mllm, {LLM: ParallelSpec()})
        return parallelize(mllm.train(), layout, checkpointing="full"), batch

    put_off = noted_weights(lambda: both(make)[0])
    assert sum(name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) for name in put_off) == 2 * 4


def noted_weights(run: Callable[[], ParallelModel]) -> set[str]:
    """Names of the weights that get gradients from BACKWARD_WEIGHT."""
    seen: set[int] = set()
    compute = DeferredGradients.compute

    def note(self: DeferredGradients, *args: Any) -> None:
        seen.update(self._of)
        compute(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredGradients, "compute", note)
        parallel = run()
    stages = [stage for of_rank in parallel.stages.values() for stage in of_rank.values()]
    return {name for stage in stages for name, parameter in stage.named_parameters() if id(parameter) in seen}


# ---------------------------------------------------------------------- pending work, and order of computation


def test_all_weights_of_linear_layers_wait_and_no_others() -> None:
    def make() -> tuple[ParallelModel, Any]:
        mllm = tiny_mllm(encoders=("vision",)).train()
        return parallelize(mllm, make_layout(mllm, "parallel", 2)), random_microbatches(mllm, "all")

    assert noted_weights(lambda: both(make)[0]) == {
        f"{name}.weight"
        for name, layer in tiny_mllm(encoders=("vision",)).named_modules()
        if isinstance(layer, nn.Linear)
    }


def test_all_tensor_parallel_weights_are_deferred_but_the_head() -> None:
    def make() -> tuple[ParallelModel, Any]:
        mllm = model(encoders=("vision",)).train()
        specs = {"vision": ParallelSpec(tp=2), LLM: ParallelSpec(tp=2)}
        parallel = parallelize(mllm, Layout.from_specs(mllm, specs, placement="parallel"), checkpointing="full")
        return parallel, random_microbatches(mllm, "all")

    plain = model(encoders=("vision",))
    names = {f"{name}.weight" for name, layer in plain.named_modules() if isinstance(layer, nn.Linear)}
    assert noted_weights(lambda: both(make)[0]) == names - {"language_model.lm_head.weight"}


def test_deferred_and_immediate_column_layers_share_a_product() -> None:
    """Of the two layers for which a gated MLP gathers rows, `up` represents a weight in several places."""
    ranks = Ranks.at(0, 2)
    block: Any = tensor_parallel(Gated(), PLAN, ranks)
    ranks.connect(SilentTransport(2))
    linears = LinearLayers(block, {id(block.up.weight)})
    with linears.forward():
        y = block(example().requires_grad_())
    with linears.backward() as gradients:
        y.sum().backward()
    assert block.up.weight.grad is not None and block.gate.weight.grad is None
    gradients.compute()
    assert block.gate.weight.grad is not None and linears.weights == {id(block.gate.weight), id(block.down.weight)}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_weight_in_two_places_and_compiled_layers_do_not_wait(compiled: bool) -> None:
    def make() -> tuple[ParallelModel, Any]:
        mllm = tiny_mllm(tied=True, encoders=()).train()
        parallel = parallelize(mllm, make_layout(mllm, "parallel", 1), checkpointing="full")
        ((stage,),) = (of_rank.values() for of_rank in parallel.stages.values())
        assert isinstance(stage, StageModule)
        if compiled:
            stage.layers[0].compile(backend="eager")
        return parallel, random_microbatches(mllm, "text")

    names = noted_weights(lambda: both(make)[0])
    assert {f"layers.{i}" for i in range(2) if any(f"layers.{i}." in name for name in names)} == (
        {"layers.1"} if compiled else {"layers.0", "layers.1"}
    )
    assert all(".layers." in name for name in names)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_layer_that_is_recomputed_runs_exactly_twice(checkpointing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    splitting(monkeypatch)
    mllm = tiny_mllm().train()
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 3), checkpointing=checkpointing)
    runs: Counter[str] = Counter()
    for of_rank in parallel.stages.values():
        for stage in of_rank.values():
            assert isinstance(stage, StageModule)
            for number, layer in enumerate(stage.layers):
                for name, part in layer.named_modules():
                    key = f"{id(stage)} {number} {name}"
                    if "norm" in type(part).__name__.lower():
                        part.register_forward_hook(lambda *_, key=key: runs.update([key]))
    batch = random_microbatches(mllm, "all")
    parallel.step(batch)
    assert halves(parallel)
    chunks = {id(stage): 0 for of_rank in parallel.stages.values() for stage in of_rank.values()}
    schedule, *_ = parallel._last or pytest.fail("no step")
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.op is Op.FORWARD:
                chunks[id(parallel.stages[rank][action.module, action.stage])] += 1
    times = 1 if checkpointing == "none" else 2
    assert runs and {key: count / chunks[int(key.split()[0])] for key, count in runs.items()} == dict.fromkeys(
        runs, float(times)
    )


def test_gradients_wait_for_their_row_and_the_graph_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """After BACKWARD_INPUT of the only chunk, no weight of a layer has a gradient, and all others have. Only an input
    and an output gradient of each layer are kept.
    """

    splitting(monkeypatch, most=0)
    mllm = tiny_mllm(encoders=(), layers=3).train()
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 1), checkpointing="full")
    compute, seen = DeferredGradients.compute, []

    def look(self: DeferredGradients, *args: Any) -> None:
        gc.collect()
        waiting: list[Any] = [product for _, products in self._of.values() for product in products]
        storages = [each.untyped_storage() for product in waiting for each in product.args[:2]]
        kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
        weights = {id(weight) for weight, _ in self._of.values()}
        assert all((p.grad is None) == (id(p) in weights) for p in mllm.parameters())
        seen.append(sum(kept.values()))
        compute(self, *args)

    monkeypatch.setattr(DeferredGradients, "compute", look)
    (batch,) = random_microbatches(mllm, "text")[:1]
    parallel.step([batch])
    tokens = sum(len(sample) for sample in batch)
    hidden, middle, keys, vocabulary = 16, 24, 8, 48
    layer = hidden * 2  # input of attention and of the MLP (results of norms)
    layer += hidden + middle  # input of the layers that project back
    layer += hidden + 2 * keys  # gradients of queries, keys, values
    layer += 2 * middle + 2 * hidden  # of gate and up, and of the outputs of the layers that project back
    targets = sum(int((sample.labels != -100).sum()) for sample in batch)
    assert seen == [4 * (3 * layer * tokens + (hidden + vocabulary) * targets)]
    assert all(p.grad is not None for p in mllm.parameters())
    for stage in parallel.stages[0].values():
        assert not any(isinstance(vars(m).get("forward"), DeferredForward) for m in stage.modules())


def test_weights_gathered_by_layer_get_gradients_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one layer's gradients are there in whole, though all of a stage wait."""
    splitting(monkeypatch)
    mllm = model(encoders=())
    alone, batch = copy.deepcopy(mllm), random_microbatches(mllm, "text")
    parallel = parallelize(mllm, two_replicas(mllm, "full"), timeout=30)
    stage = parallel.stages[1][LLM, 0]
    wholes = dict(stage.named_parameters())
    scatter, seen = LayerByLayer._scatter, []

    def look(self: LayerByLayer, due: Any, key: str) -> None:
        if self._sharded.place == 1 and key.endswith("weights"):
            seen.append({name.split(".layers.")[-1].split(".")[0] for name, p in wholes.items() if p.grad is not None})
        scatter(self, due, key)

    monkeypatch.setattr(LayerByLayer, "_scatter", look)
    loss, due = oracle(alone, batch)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    assert any(a.op is Op.UNSHARD_LAYERS for a in parallel.timeline().actions[0])
    for name, parameter in mllm.named_parameters():
        assert_same_gradient(name, parameter.grad, due[name])
    chunks = len([a for a in halves(parallel) if a.module == LLM]) // 2
    assert chunks and seen == [{"1"}, {"0"}, {"language_model"}] * chunks


def test_hooks_of_weights_see_one_gradient_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    splitting(monkeypatch)
    mllm = tiny_mllm(encoders=()).train()
    weight = mllm.language_model.model.layers[0].mlp.up_proj.weight
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 1))
    batch, seen = random_microbatches(mllm, "text"), []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    parallel.step(batch)
    assert len(seen) == len(batch) and torch.equal(seen[-1], weight.grad)


# ---------------------------------------------------------------------- errors and reports of a step


def test_a_chunk_without_its_weights_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bypasses the checker."""
    splitting(monkeypatch)
    mllm = tiny_mllm(encoders=()).train()
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 1))
    batch = random_microbatches(mllm, "text")
    made = parallel.schedule(parallel.table(batch))
    kept = [[a for a in actions if a.op is not Op.BACKWARD_WEIGHT] for actions in made.actions]
    lacking = Schedule.of_actions(made.name, made.graph, made.table, kept)
    monkeypatch.setattr(ParallelModel, "schedule", lambda *_, **__: lacking)
    with pytest.raises(PipelineError, match=r"language_model\[0\] chunk 0 has had no BACKWARD_WEIGHT"):
        parallel.step(batch)


def test_every_op_is_run_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {op for op in Op if CODES[op] not in METHODS}
    assert refused == {Op.OPTIMIZER_STEP}
    mllm = tiny_mllm(encoders=()).train()
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 1))
    batch = random_microbatches(mllm, "text")
    made = parallel.schedule(parallel.table(batch))
    rows = made.rows.copy()
    rows[-1, 0] = CODES[Op.OPTIMIZER_STEP]
    other = Schedule(made.name, made.graph, made.table, rows, made.first)
    monkeypatch.setattr(ParallelModel, "schedule", lambda *_, **__: other)
    with pytest.raises(PipelineError, match="does not support OPTIMIZER_STEP"):
        parallel.step(batch)


def test_both_halves_are_in_the_timeline_and_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    splitting(monkeypatch)
    mllm = tiny_mllm(encoders=("vision",)).train()
    specs = {"vision": ParallelSpec(), LLM: ParallelSpec(pp=2)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, placement="parallel"))
    parallel.step(random_microbatches(mllm, "all"))
    timeline = parallel.timeline()
    measured = Counter(record.action.op for record in timeline.records())
    assert measured[Op.BACKWARD_INPUT] == measured[Op.BACKWARD_WEIGHT] == measured[Op.FORWARD] > 0
    assert all(record.finish > record.start for record in timeline.records() if record.action.op is Op.BACKWARD_WEIGHT)
    assert {"I", "W"} <= {event["name"].split(":")[0] for event in trace_events(timeline)}


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    plain, own, replaced = nn.Linear(2, 2), Scaled(2, 2), nn.Linear(2, 2)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    stage = nn.ModuleList([plain, own, replaced])
    assert LinearLayers(stage, ()).weights == {id(plain.weight)}
