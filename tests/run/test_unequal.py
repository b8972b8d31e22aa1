"""Modules with different data-parallel degrees and chunks, on shared or separate ranks: results equal one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.run import parallelize
from tests.run.parity import FREEZING, assert_same_gradient, oracle
from tests.tiny import random_microbatches, tiny_mllm

DEGREES = [(1, 2), (2, 1), (3, 2), (2, 3), (4, 1), (1, 4)]  # vision, language model
BATCHES = ("all", "no_image", "text", "one replica without")
EVERY = list(itertools.product(DEGREES, FREEZING, BATCHES))
# Case numbers in a checkerboard pattern: each half has all pairs of degrees, freezings and batches.
PLACES = list(itertools.product(range(len(DEGREES)), range(len(FREEZING)), range(len(BATCHES))))
HALVES = [[number for number, place in enumerate(PLACES) if sum(place) % 2 == colour] for colour in (0, 1)]


def variant(number: int) -> dict[str, Any]:
    """Other options of a case, each with its own cycle: audio's degree, chunks, stages, checkpointing."""
    return {
        "audio": (None, 1, 2, 3)[number % 4],
        "chunks": (None, 2.0, 0.5)[number % 3],
        "stages": 1 + (number // 2) % 2,
        "checkpointing": ("full", "none", "none", "selective", "none")[number % 5],
        "tied": number % 2 == 1,
        "schedule": "gpipe" if number % 7 == 0 else "1f1b",
    }


def make_batch(mllm, kind: str, language: int):
    """Lists of samples, the i-th for replica i modulo `language`; `one replica without`: replica 0 has no image."""
    if kind != "one replica without":
        return random_microbatches(mllm, kind, count=4)
    images, texts = (random_microbatches(mllm, name, count=4) for name in ("all", "text"))
    return [texts[i] if i % language == 0 else images[i] for i in range(4)]


def check_case(degrees: tuple[int, int], freezing: str, kind: str, number: int) -> None:
    vision, language = degrees
    more = variant(number)
    encoders = ("vision",) if more["audio"] is None else ("vision", "audio")
    mllm = tiny_mllm(tied=bool(more["tied"]), layers=2, encoders=encoders)
    for path in FREEZING[freezing]:
        if path.split(".")[0] in (*encoders, "language_model"):
            mllm.freeze(path)
    mllm.train()
    batch = make_batch(mllm, kind, language)
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    specs = {"vision": ParallelSpec(dp=vision), "language_model": ParallelSpec(dp=language, pp=int(more["stages"]))}
    if more["audio"] is not None:
        specs["audio"] = ParallelSpec(dp=int(more["audio"]))
    layout = Layout.from_specs(mllm, {name: specs[name] for name in mllm.modules_order()})
    parallel = parallelize(mllm, layout, schedule=more["schedule"], checkpointing=more["checkpointing"], timeout=30)
    per_replica = -(-len(batch) // language)
    chunks = {} if more["chunks"] is None else {"vision": max(1, int(per_replica * float(more["chunks"])))}
    result = parallel.step(batch, chunks=chunks)
    where = f"{degrees}, {freezing} frozen, {kind}, {more}"
    assert abs(result.loss - loss) <= 1e-5 * abs(loss), where
    for name, parameter in mllm.named_parameters():  # the given model is the one that is trained
        try:
            assert_same_gradient(name, parameter.grad, gradients[name])
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None


@pytest.mark.parametrize("first", [0, 4, 8])
def test_unequal_degrees_equal_one_process(first: int) -> None:
    for number in HALVES[0][first::12]:
        check_case(*EVERY[number], number)


@pytest.mark.slow
def test_one_half_of_unequal_degrees_equals_one_process() -> None:
    for number in HALVES[0]:
        check_case(*EVERY[number], number)


@pytest.mark.slow
@pytest.mark.every_case
def test_the_other_half_of_unequal_degrees_equals_one_process() -> None:
    for number in HALVES[1]:
        check_case(*EVERY[number], number)


def test_each_half_covers_all_pairs_of_test_parameters() -> None:
    assert sorted(HALVES[0] + HALVES[1]) == list(range(len(EVERY)))
    for half in HALVES:
        for one, other in itertools.combinations(range(3), 2):
            result = {(EVERY[number][one], EVERY[number][other]) for number in half}
            assert result == {(case[one], case[other]) for case in EVERY}


SHARED = list(itertools.product(["nothing", "encoders but projectors"], ["all", "no_image"], [None, 1, 2, 5]))


@pytest.mark.parametrize(("freezing", "kind", "chunks"), [SHARED[place] for place in (1, 7, 8, 14)])
def test_shared_ranks_equal_one_process(freezing: str, kind: str, chunks: int | None) -> None:
    """The encoders on both ranks of a two-stage language model, phase by phase."""
    check_shared(freezing, kind, chunks)


@pytest.mark.slow
def test_all_shared_ranks_equal_one_process() -> None:
    for case in SHARED:
        check_shared(*case)


def check_shared(freezing: str, kind: str, chunks: int | None) -> None:
    mllm = tiny_mllm(tied=True, layers=2)
    for path in FREEZING[freezing]:
        mllm.freeze(path)
    mllm.train()
    batch = random_microbatches(mllm, kind, count=4)
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    specs = {"vision": ParallelSpec(dp=2), "audio": ParallelSpec(pp=2), "language_model": ParallelSpec(pp=2)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, placement="shared"), timeout=30)
    flat = [sample for group in batch for sample in group]
    for given, options in ((batch, {}), (flat, {"microbatches": 4})):
        mllm.zero_grad()
        result = parallel.step(given, chunks={"vision": chunks} if chunks else None, **options)
        assert result.loss == pytest.approx(loss, rel=1e-5)
        for name, parameter in mllm.named_parameters():
            assert_same_gradient(name, parameter.grad, gradients[name])
    if chunks is None:  # one encoder phase, the language model's pipeline, the encoder's backward
        vision = [str(a)[:1] for a in parallel.timeline().actions[0] if a.module == "vision" and a.op.value in "FB"]
        assert vision == ["F"] if FREEZING[freezing] and "vision.projector" in FREEZING[freezing] else ["F", "B"]


def test_colocated_encoders_may_have_another_dp_degree() -> None:
    mllm = tiny_mllm(layers=2)
    batch = random_microbatches(mllm, "no_image", count=6)
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    specs = {"vision": ParallelSpec(dp=3), "audio": ParallelSpec(dp=3), "language_model": ParallelSpec(pp=2, dp=2)}
    layout = Layout.from_specs(mllm, specs, placement="colocated")
    assert layout.world == 7
    parallel = parallelize(mllm, layout, timeout=30)
    flat = [sample for group in batch for sample in group]
    assert parallel.step(flat, microbatches=3).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])
    wanted = {id(item) for item in parallel.wanted(flat, 3)}
    assert wanted == {id(item) for sample in flat for items in sample.media.values() for item in items}


def test_tied_weights_wait_for_sums_without_blocking() -> None:
    """Rank 1 sums its output embedding while rank 0, with a pending encoder sum, needs more backwards."""
    mllm = tiny_mllm(tied=True, layers=3, encoders=("vision",))
    batch = random_microbatches(mllm, "text", count=1) + random_microbatches(mllm, "all", count=1)
    batch[1].pop()
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    vision = [Pipeline("vision", rank, (Stage("vision", 0, 0, 3, Lane((rank,))),)) for rank in (0, 1)]
    stages = [Stage("language_model", i, i, i + 1, Lane((rank,))) for i, rank in enumerate((0, 1, 1))]
    language = Pipeline("language_model", 0, tuple(stages))
    specs = {"vision": (ParallelSpec(dp=2), tuple(vision)), "language_model": (ParallelSpec(pp=3), (language,))}
    parallel = parallelize(mllm, Layout(specs, 2), timeout=5)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])
