"""The pipeline over real processes: parity with one process, and peers that die or hang."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch.distributed as dist

from interlace.layout import Layout, ParallelSpec
from interlace.run import PipelineError, parallelize
from interlace.train.commands import crash
from tests.distributed.pipeline import REPRESENTATIVE, parity
from tests.distributed.workers import run_ranks, shorten
from tests.run.assign import batch_of, model_of
from tests.run.parity import FREEZING, assert_same_gradient, make_layout, oracle
from tests.tiny import random_microbatches, tiny_mllm


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gloo_ranks_equal_one_process(world):
    for kind, value in run_ranks(world, parity, world, REPRESENTATIVE):
        assert kind == "returned", value
        assert value > 0


def over_shared_memory(rank: int, world: int, cases: list[tuple]) -> int:
    os.environ["INTERLACE_TRANSPORT"] = "shm"
    return parity(rank, world, cases)


@pytest.mark.parametrize(
    ("world", "cases"), [(2, [0, 3, 4]), *(pytest.param(n, [*range(8)], marks=pytest.mark.slow) for n in (2, 3))]
)
def test_edges_over_shared_memory_equal_one_process(world, cases):
    for kind, value in run_ranks(world, over_shared_memory, world, [REPRESENTATIVE[case] for case in cases]):
        assert kind == "returned", value
        assert value > 0


def orders(rank: int, transport: str) -> set[str]:
    """Two stages under schedules that send and receive in different orders; returns the paths of the edges."""
    os.environ["INTERLACE_TRANSPORT"] = transport
    taken: set[str] = set()
    for schedule in ("1f1b", "gpipe", "zb_h1", "zb_h2"):
        mllm = tiny_mllm(layers=2, encoders=("vision",))
        microbatches = random_microbatches(mllm, "no_image", count=4)
        loss, gradients = oracle(mllm, microbatches)
        mllm.zero_grad()
        layout = make_layout(mllm, "replicated", 2)
        parallel = parallelize(mllm, layout, schedule=schedule, transport="distributed", timeout=30)
        assert parallel.channel is not None
        for _ in range(2):
            assert abs(parallel.step(microbatches).loss - loss) <= 1e-5 * abs(loss), schedule
            for name, parameter in parallel.named_parameters():
                assert_same_gradient(f"{schedule} {name}", parameter.grad, gradients[name])
            parallel.zero_grad()
        taken |= parallel.channel.paths["pipeline edge"]
    return taken


def test_two_stages_over_shared_memory_in_any_order():
    assert run_ranks(2, orders, "shm") == [("returned", {"shm"})] * 2


def deferral(rank: int, world: int, methods: list[str]) -> int:
    """All assignments of samples, on ranks that each make the table alone; returns the number of deferred samples."""
    deferred = 0
    for method in methods:
        mllm = model_of("stages")
        samples = batch_of(method, "stages")
        loss, gradients = oracle(mllm, [samples])
        mllm.zero_grad()
        specs = {name: ParallelSpec(pp=2 if name == "language_model" else 1) for name in mllm.modules_order()}
        layout = Layout.from_specs(mllm, specs)
        parallel = parallelize(mllm, layout, transport="distributed", assign=method, timeout=30)
        result = parallel.step(samples, 3)
        assert abs(result.loss - loss) <= 1e-5 * abs(loss), method
        for name, parameter in parallel.named_parameters():
            assert_same_gradient(f"{method} {name}", parameter.grad, gradients[name])
        deferred += len(result.table.deferred)
    return deferred


@pytest.mark.slow
def test_deferred_samples_on_gloo_ranks_equal_one_process():
    result = run_ranks(4, deferral, 4, ["stratified", "entrain", "as_printed"])
    assert [kind for kind, _ in result] == ["returned"] * 4, result
    assert len({value for _, value in result}) == 1 and result[0][1] >= 2


def replicas(rank: int) -> float:
    """Two data-parallel replicas of a 1-rank pipeline, one of them without images."""
    mllm = tiny_mllm(layers=1)
    specs = {name: ParallelSpec(dp=2) for name in mllm.modules_order()}
    layout = Layout.from_specs(mllm, specs, ranks=1)
    images, texts = (random_microbatches(mllm, kind, seed=i, count=2) for i, kind in enumerate(("all", "text")))
    batch = [group for pair in zip(images, texts, strict=True) for group in pair]
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    parallel = parallelize(mllm, layout, transport="distributed", timeout=30)
    result = parallel.step(batch)
    assert abs(result.loss - loss) <= 1e-5 * loss
    for name, parameter in parallel.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])
    # A modality that no replica has: its parameters keep no gradient.
    parallel.zero_grad()
    parallel.step(texts)
    assert all(p.grad is None for name, p in parallel.named_parameters() if name.startswith("encoders."))
    # One sample, as in the last batch of an epoch: a replica has none.
    mllm.zero_grad()
    parallel.zero_grad()
    loss, gradients = oracle(mllm, [images[0][:1]])
    parallel.zero_grad()
    assert abs(parallel.step(images[0][:1], 2).loss - loss) <= 1e-5 * loss
    for name, parameter in parallel.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])
    return result.loss


def test_replicas_equal_one_process_even_without_a_sample():
    results = run_ranks(2, replicas)
    assert [kind for kind, _ in results] == ["returned", "returned"], results
    assert results[0] == results[1]


def split_and_replicated(rank: int) -> int:
    """Two replicas, each with the language model in two stages on two ranks, tied embeddings, one without images."""
    compared = 0
    for schedule in ("1f1b", "gpipe"):
        mllm = tiny_mllm(layers=2, tied=True, encoders=("vision",))
        specs = {"vision": ParallelSpec(dp=2), "language_model": ParallelSpec(pp=2, dp=2)}
        layout = Layout.from_specs(mllm, specs, ranks=2)
        parts = [random_microbatches(mllm, kind, seed=i, count=3) for i, kind in enumerate(("no_image", "text"))]
        batch = [group for pair in zip(*parts, strict=True) for group in pair]
        loss, gradients = oracle(mllm, batch)
        mllm.zero_grad()
        parallel = parallelize(mllm, layout, schedule=schedule, transport="distributed", timeout=30)
        assert abs(parallel.step(batch).loss - loss) <= 1e-5 * loss
        for name, parameter in parallel.named_parameters():
            assert_same_gradient(f"rank {rank} {schedule} {name}", parameter.grad, gradients[name])
            compared += 1
    return compared


def test_split_language_model_with_replicas_equals_one_process():
    for kind, value in run_ranks(4, split_and_replicated):
        assert kind == "returned", value
        assert value > 0


def unequal(rank: int, degrees: list[tuple[int, int]]) -> list[tuple[float, int]]:
    """Five ranks, split between encoder and language model by `degrees`; returns the exchanges of a step."""
    found = []
    for vision, language in degrees:
        for kind, freezing, chunks in (("all", "nothing", None), ("no_image", "encoders but projectors", 1)):
            mllm = tiny_mllm(layers=1, encoders=("vision",))
            for path in FREEZING[freezing]:
                if not path.startswith("audio"):
                    mllm.freeze(path)
            batch = [sample for group in random_microbatches(mllm, kind) for sample in group]
            loss, gradients = oracle(mllm, [batch])
            mllm.zero_grad()
            specs = {"vision": ParallelSpec(dp=vision), "language_model": ParallelSpec(dp=language)}
            parallel = parallelize(mllm, Layout.from_specs(mllm, specs), transport="distributed", timeout=30)
            before = parallel.channel.collectives
            result = parallel.step(batch, microbatches=2, chunks={"vision": chunks} if chunks else None)
            norm = parallel.clip_grad_norm_(1e9)
            exchanged = parallel.channel.collectives - before
            assert abs(result.loss - loss) <= 1e-5 * loss
            for name, parameter in parallel.named_parameters():
                assert_same_gradient(f"rank {rank} {degrees} {kind} {name}", parameter.grad, gradients[name])
            whole = parallel.full_gradients()
            for name, gradient in gradients.items():
                assert_same_gradient(f"rank {rank} {degrees} {kind} {name}", whole[name], gradient)
            squares = sum(float(g.double().square().sum()) for g in gradients.values() if g is not None)
            assert norm == pytest.approx(squares**0.5, rel=1e-5)
            found.append((result.loss, exchanged))
    return found


@pytest.mark.parametrize("degrees", [(3, 2), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_unequal_degrees_on_five_processes_equal_one_process(degrees):
    """A step, clipping included, exchanges twice outside of its lists: its inputs, and the loss with the norm."""
    results = run_ranks(5, unequal, [degrees])
    assert [kind for kind, _ in results] == ["returned"] * 5, results
    for _, value in results:
        assert value == results[0][1]
        assert all(exchanged == 2 for _, exchanged in value)


def refuse(rank: int) -> str:
    """Replica 1 has nothing to train on: both ranks raise an error at once, without waiting for each other."""
    mllm = tiny_mllm(layers=1)
    specs = {name: ParallelSpec(dp=2) for name in mllm.modules_order()}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, ranks=1), timeout=30)
    samples = random_microbatches(mllm, "text", count=1)[0]
    try:
        parallel.step(samples if rank == 0 else [])
    except ValueError as error:
        parallel.step(samples)  # nothing is broken
        return str(error)
    return "no error"


def test_a_batch_that_one_replica_refuses_stops_both_at_once():
    results = run_ranks(2, refuse)
    assert [kind for kind, _ in results] == ["returned", "returned"], results
    assert "rank 1 rejected" in results[0][1] and "at least one sample" in results[1][1]


def lose_peer(rank: int, world: int, how: str, crash_folder: str) -> tuple[str, float]:
    """Rank 1 dies or stops responding after one good step; the others return their error and its delay."""
    mllm = tiny_mllm(layers=1)
    specs = {name: ParallelSpec() for name in mllm.modules_order()}
    layout = Layout.from_specs(mllm, specs, ranks=world)
    parallel = parallelize(mllm, layout, transport="distributed", timeout=60, crash_folder=crash_folder)
    microbatches = random_microbatches(mllm, "all")
    parallel.step(microbatches)
    assert parallel.channel is not None
    dist.barrier()
    shorten(parallel.channel, 4)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    start = time.monotonic()
    try:
        parallel.step(microbatches)
    except PipelineError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize(("world", "how"), [(2, "hangs"), (3, "dies")])
def test_lost_peer_is_named_within_the_timeout(world, how, tmp_path):
    """A folder keeps the last actions of the other ranks; `interlace doctor crash` reports the same from it."""
    results = run_ranks(world, lose_peer, world, how, str(tmp_path), timeout=200, stopped=[1])
    for rank in range(0, world, 2):
        kind, value = results[rank]
        assert kind == "returned", value
        message, seconds = value
        assert "lost rank 1 " in message and "start of the step" in message, message
        assert seconds < 50  # less than the previous timeout
    result = crash.read(tmp_path)
    assert sorted(result.dumps) == list(range(0, world, 2)) and result.missing == result.culprits == [1]
    assert all(any(event.kind == "compute" for event in dump.events) for dump in result.dumps.values())
    assert "likely cause: rank 1, which left no file" in crash.report(result)[0]


def lose_peer_elsewhere(rank: int, where: str) -> tuple[str, float]:
    """Rank 1 hangs before the process groups are made, or after a step; the others return the error of the next
    call."""
    mllm = tiny_mllm(layers=2, tied=True, encoders=("vision",))
    layout = Layout.from_specs(mllm, {"vision": ParallelSpec(), "language_model": ParallelSpec(pp=2)})

    def hang() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        if where == "groups":
            hang()
        start = time.monotonic()
        parallel = parallelize(mllm, layout, transport="distributed", timeout=4 if where == "groups" else 60)
        parallel.step(random_microbatches(mllm, "all"))
        assert parallel.channel is not None
        dist.barrier()
        shorten(parallel.channel, 4)
        hang()
        start = time.monotonic()
        parallel.timeline()
    except PipelineError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize(
    ("where", "says"),
    [
        pytest.param(
            "groups",
            r"not all ranks joined the creation of the group \[0, 1, 2\] within 4 s|lost rank 1 \(no answer",
            marks=pytest.mark.slow,
        ),
        ("timeline", r"timeline: lost rank 1 \(no answer within"),
    ],
)
def test_waits_outside_of_steps_are_bounded_too(where, says):
    results = run_ranks(3, lose_peer_elsewhere, where, timeout=200, stopped=[1])
    for rank in (0, 2):
        kind, value = results[rank]
        assert kind == "returned", value
        message, seconds = value
        # After a timeout gloo closes all connections of that rank: rank 2 may only learn that rank 0 left.
        assert re.search(says if rank == 0 else rf"{says}|timeline: lost rank 0", message), message
        assert seconds < 50
