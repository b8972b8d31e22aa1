"""Sharded optimizer state and weights: loss, gradients, norm and training equal those of one process."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from interlace.layout import Layout, ParallelSpec, Shard
from interlace.model import MultimodalModel
from interlace.parallel.region import Region
from interlace.run import PipelineError, parallelize
from interlace.run.execute.ranks import make_ranks
from interlace.run.execute.sharding import Sharded
from interlace.run.execute.weights import Pieces
from interlace.run.graph import stage_graph
from interlace.run.lanes import with_lanes
from interlace.schedule import Op
from tests.distributed.workers import run_ranks
from tests.model import zoo
from tests.run.parity import oracle
from tests.run.random_cases import sweep
from tests.run.sharding import GATHERED, check_case, check_training, shared, two_replicas
from tests.run.tensor_parallel import (
    DRAWN,
    LLM,
    assert_gradient,
    model,
    no_memory,
    norm_of,
)
from tests.tiny import random_microbatches

SEEDS = 3
DUE = DRAWN - {"custom"} | {"copies", "sets of slices"}
DUE |= set(GATHERED.values())
DUE |= {
    f"{side} {kind}" for side in ("encoder", "language") for kind in ("tp2", "cp2", "pp2", "dp2", "optimizer", "full")
}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_layouts_train_as_one_process_does(seed: int) -> None:
    check_case(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_layouts_train_as_one_process_does() -> None:
    sweep(check_case, range(SEEDS, SEEDS + 28), DUE)


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_absent_modules_keep_no_gradient_and_gradients_add_up(shard: str) -> None:
    mllm = model(encoders=("vision",))
    mllm.language_model.model.layers[0].mlp.unused = nn.Parameter(torch.ones(5))  # in one sum with used weights
    alone = copy.deepcopy(mllm)
    text, images = random_microbatches(mllm, "text"), random_microbatches(mllm, "all")
    parallel = parallelize(mllm, two_replicas(mllm, shard), timeout=30)
    total: dict[str, torch.Tensor] = {}
    for batch in (text, images, text):
        loss, gradients = oracle(alone, batch)
        total = {n: total.get(n, 0) + g for n, g in gradients.items() if g is not None} | {
            n: g for n, g in total.items() if gradients[n] is None
        }
        assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
        for name, parameter in mllm.named_parameters():
            assert_gradient(name, parameter.grad, total.get(name), norm_of(gradients, alone))
        ops = {action.op for actions in parallel.timeline().actions for action in actions if action.module == "vision"}
        gather = Op.UNSHARD_LAYERS if shard == "full" else Op.UNSHARD
        assert (gather in ops) == (batch is images)
        assert (Op.RESHARD in ops) == (batch is images and shard == "full")


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_weights_that_were_replaced_are_followed(shard: str) -> None:
    mllm = model(encoders=())
    batch = random_microbatches(mllm, "text")
    parallel = parallelize(mllm, two_replicas(mllm, shard), timeout=30)
    parallel.step(batch)
    for parameter in mllm.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1
    loss, _ = oracle(mllm, batch)
    assert parallel.evaluate(batch).loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "frozen", "words"),
    [
        (ParallelSpec(pp=2, dp=5, shard="full"), True, 97),
        (ParallelSpec(pp=2, dp=5, shard="full"), False, 97),
        (ParallelSpec(tp=2, dp=5, shard="full"), False, 97),
        (ParallelSpec(tp=2, cp=2, dp=2, shard="optimizer", shard_ranks=2), False, 98),
    ],
)
def test_what_ranks_keep_covers_every_weight_once(spec: ParallelSpec, frozen: bool, words: int) -> None:
    """As checkpoints need it: parts are equal or disjoint, also for ties, uneven pieces and indivisible rows."""
    mllm = zoo.build(vision=None, audio=None, vocab_size=words, num_key_value_heads=2, tie_word_embeddings=True)
    if frozen:
        mllm.freeze(LLM)
        mllm.language_model.model.layers[-1].requires_grad_(True)
    layout = Layout.from_specs(mllm, {LLM: spec})
    first = {name: names[0] for names in mllm.tied_parameters() for name in names}
    result: dict[str, set[Any]] = {}
    for rank in range(layout.world):
        own = copy.deepcopy(mllm)
        graph, rows = with_lanes(stage_graph(own, layout), own, sequence_parallel=False)
        options: Any = ("none", rows, Pieces(), torch.device("cpu"))
        held = make_ranks(own, graph, [rank], *options)[rank]
        assert held.cut.keys() <= held.own.keys()
        for name, parameter in held.own.items():
            region = held.cut[name] if name in held.cut else Region.full(parameter.shape)
            assert region.sizes == tuple(parameter.shape)
            result.setdefault(first.get(name, name), set()).update((box.offsets, box.sizes) for box in region.boxes)
    for name, parameter in mllm.named_parameters():
        times = torch.zeros(parameter.shape)
        for offsets, sizes in result[name]:
            times[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
        assert (times == 1).all(), name


def test_slices_are_even_in_bytes() -> None:
    """Also for weights with fewer rows than ranks: the remainder is dealt in turn."""
    weights = {f"w{i}": nn.Parameter(torch.zeros(rows, 4)) for i, rows in enumerate([1, 1, 2, 5, 7, 1, 1, 3])}
    owners = (4, 2, 9, 7)
    layers = dict.fromkeys(weights, 0)
    kept = [
        Sharded(Shard("m", 0, 1, owners, (owners,), True), rank, {("m", 0)}, weights, {}, layers, ()) for rank in owners
    ]
    sizes = [sum(w.part.numel() for w in each.weights.values() if w.part is not None) for each in kept]
    assert sum(sizes) == 4 * 21 and max(sizes) - min(sizes) <= 4
    for name, whole in weights.items():
        rows = kept[0].weights[name].rows
        assert rows[0] == 0 and rows[-1] == len(whole) and all(each.weights[name].rows == rows for each in kept)
    scalar = Sharded(
        Shard("m", 0, 1, (0, 1), ((0, 1),), True), 0, set(), {"s": nn.Parameter(torch.ones(()))}, {}, {"s": 0}, ()
    )
    assert scalar.weights["s"].part is not None and scalar.weights["s"].part.shape == ()


# ---------------------------------------------------------------------- between processes


LAYOUTS = {
    "full, dp 2 x tp 2": shared(ParallelSpec(tp=2, dp=2, shard="full"), ParallelSpec(tp=2, dp=2, shard="full")),
    "optimizer, dp 4": shared(ParallelSpec(dp=4, shard="optimizer"), ParallelSpec(dp=4, shard="optimizer")),
    "sets of 2": shared(
        ParallelSpec(dp=4, shard="full", shard_ranks=2), ParallelSpec(dp=4, shard="optimizer", shard_ranks=2)
    ),
    "unequal, full": shared(ParallelSpec(dp=4, shard="full"), ParallelSpec(pp=2, dp=2, shard="full")),
}


def with_a_gate() -> MultimodalModel:
    """A model that also has a weight of one element."""
    mllm = model(tied=True, encoders=("vision",))
    mllm.encoders["vision"].projector.gate = nn.Parameter(torch.ones(1))
    mllm.freeze("vision")
    return mllm


def train(rank: int, layouts: list[str]) -> dict[str, dict[str, list[int]]]:
    """Trains with some layouts; returns the shapes of the rank's own parts."""
    kept = {}
    for layout in layouts:
        mllm, specs = with_a_gate(), LAYOUTS[layout]
        alone = copy.deepcopy(mllm)
        parallel = parallelize(
            mllm, Layout.from_specs(mllm, specs, placement="shared"), transport="distributed", timeout=30
        )
        samples = [sample for group in random_microbatches(mllm, "all") for sample in group]
        # An encoder with dp = 4 has other numbers of chunks than the language model.
        options = {"microbatches": 1, "chunks": {"vision": 2}} if layout == "unequal, full" else {}
        check_training(parallel, alone, samples, f"{layout}\n", **options)
        norms = [parallel.step(samples, **options) and parallel.clip_grad_norm_(1e9) for _ in range(2)]
        assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5), layout
        for stage in parallel._ranks[rank].stages.values():
            for name, parameter in stage.named_parameters():
                if parameter.requires_grad and name in parallel._ranks[rank]._in_part:
                    continue  # norms and biases whose gradients are summed over a whole lane
                if specs[LLM if name.startswith(LLM) else "vision"].shard == "full":
                    assert parameter.untyped_storage().nbytes() <= 4 and parameter.isnan().all(), name
                    if parameter.numel() == 1:
                        continue
                    try:
                        parameter.data.copy_(torch.ones_like(parameter.data))
                    except RuntimeError as error:
                        assert "single memory location" in str(error)
                    else:
                        raise AssertionError(f"{name} was written to, which the next step would have forgotten")
        held = parallel._ranks[rank]
        for name, tensor in parallel.state_dict().items():
            assert tensor.is_contiguous() or specs[LLM].shard == "optimizer"
            if name in held.cut:
                assert held.cut[name].sizes == tuple(tensor.shape), name
        kept[layout] = {name: list(tensor.shape) for name, tensor in parallel.state_dict().items()}
    return kept


@pytest.mark.parametrize(
    "layouts",
    [
        ["full, dp 2 x tp 2", "unequal, full"],
        pytest.param(["optimizer, dp 4", "sets of 2"], marks=pytest.mark.slow),
    ],
    ids=" and ".join,
)
def test_four_processes_train_as_one_does_and_keep_their_share(layouts: list[str]) -> None:
    results = run_ranks(4, train, layouts)
    assert [kind for kind, _ in results] == ["returned"] * 4, results
    mllm = with_a_gate()
    for layout in layouts:
        for module, spec in LAYOUTS[layout].items():
            own = LLM if module == LLM else "encoders"
            kept = [
                sum(torch.Size(shape).numel() for name, shape in shapes[layout].items() if name.startswith(own))
                for _, shapes in results
            ]
            sizes = [
                (p.numel(), p.requires_grad or spec.shard == "full")
                for name, p in mllm.named_parameters()
                if name.startswith(own)
            ]
            if spec.pp == spec.tp == 1:
                sets = 4 // (spec.shard_ranks or 4)
                spread, whole = (sum(n for n, each in sizes if each is way) for way in (True, False))
                assert sum(kept) == spread * sets + 4 * whole, (layout, module)
                assert max(kept) - min(kept) <= 0.02 * max(kept), (layout, module)
            else:
                assert max(kept) <= 0.6 * sum(n for n, _ in sizes), (layout, module)


def distributed(rank: int, seeds: list[int]) -> int:
    return sum(bool(check_case(seed, "distributed", range(4, 5))) for seed in seeds)


@pytest.mark.slow
def test_random_layouts_of_four_processes_train_as_one_does() -> None:
    seeds = [102, 103, 106, 107, 110, 111]  # shared and replicated: others seldom have replicas on four ranks
    results = run_ranks(4, distributed, seeds, timeout=240)
    assert results == [("returned", len(seeds))] * 4, results


def shares_other_ranks(rank: int) -> str:
    mllm = model(encoders=())
    parallel = parallelize(mllm, two_replicas(mllm, "full"), transport="distributed", timeout=20)
    if rank == 1:
        parallel.stages[1][LLM, 0].register_forward_pre_hook(no_memory)
    try:
        parallel.step(random_microbatches(mllm, "text"))
    except PipelineError as error:
        return str(error)
    return "no error"


def test_failed_rank_is_named_by_its_shard_peers() -> None:
    (_, other), (_, failed) = run_ranks(2, shares_other_ranks)
    assert re.fullmatch(r"rank 1, FORWARD language_model\[0\] chunk \d+: OSError: no memory", failed)
    assert "lost rank 1" in other


def replaces_weights(rank: int) -> list[str]:
    mllm = model(encoders=())
    parallel = parallelize(mllm, two_replicas(mllm, "full"), transport="distributed", timeout=20)
    batch = random_microbatches(mllm, "text")
    parallel.step(batch)
    lines = []
    try:
        parallelize(mllm, two_replicas(mllm, "full"), transport="distributed", timeout=20)
    except ValueError as error:
        lines.append(str(error))
    weight = mllm.language_model.model.layers[0].mlp.up_proj.weight
    weight.data = torch.ones_like(weight)
    try:
        parallel.step(batch)
    except PipelineError as error:
        lines.append(str(error))
    return lines


def test_weights_that_a_step_would_not_look_at_are_refused() -> None:
    for kind, value in run_ranks(2, replaces_weights):
        assert kind == "returned", value
        again, replaced = value
        assert re.search(r"has no values: an earlier .* Build and load the model again", again)
        assert re.search(r"layers.0.mlp.up_proj.weight was replaced .*: copy new weights into named_param", replaced)
