"""One process is the oracle: every layout gives the loss and gradients of ``mllm(**batch)``."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

from interlace.layout import Layout, ParallelSpec
from interlace.model import Media
from interlace.run import PipelineError, StepResult, parallelize
from interlace.schedule import Op, check
from tests.run.parity import FREEZING, assert_same_gradient, make_layout, oracle
from tests.tiny import random_microbatches, tiny_mllm

# batch, activation checkpointing, tied embeddings, ranks
VARIANTS = list(itertools.product(("all", "no_image", "text"), ("none", "full", "selective"), (False, True), (1, 2, 3)))
LAYOUTS = list(itertools.product(("colocated", "parallel", "replicated"), FREEZING))


def check_variant(placement, freezing, kind, checkpointing, tied, ranks):
    where = f"{placement}, {freezing} frozen, {kind}, checkpointing={checkpointing}, tied={tied}, {ranks} ranks"
    mllm = tiny_mllm(tied=tied, layers=3)
    for path in FREEZING[freezing]:
        mllm.freeze(path)
    mllm.train()
    microbatches = random_microbatches(mllm, kind)
    loss, gradients = oracle(mllm, microbatches)
    mllm.zero_grad()
    parallel = parallelize(mllm, make_layout(mllm, placement, ranks), checkpointing=checkpointing)
    result = parallel.step(microbatches)
    assert abs(result.loss - loss) <= 1e-5 * abs(loss), where
    seen = set()
    for name, parameter in parallel.named_parameters():
        seen.add(name)
        try:
            assert_same_gradient(name, parameter.grad, gradients[name])
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
    missing = {name for name, _ in mllm.named_parameters()} - seen
    assert not missing, f"{where}: no rank holds {sorted(missing)[:3]}"


@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=[f"{p}, {f} frozen" for p, f in LAYOUTS])
def test_layouts_equal_one_process(layout):
    """Each layout with one variant: every placement is combined with each value of each factor."""
    check_variant(*LAYOUTS[layout], *VARIANTS[(25 * layout + layout // 6) % len(VARIANTS)])


@pytest.mark.slow
def test_each_variant_equals_one_process():
    """Each layout with three variants: over the layouts each variant occurs once."""
    for number, layout in enumerate(LAYOUTS):
        for variant in VARIANTS[number::18]:
            check_variant(*layout, *variant)


@pytest.mark.slow
@pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=[f"{p}, {f} frozen" for p, f in LAYOUTS])
def test_layouts_equal_one_process_in_more_variants(layout):
    """Every fifth variant, with a different start for each layout."""
    for variant in VARIANTS[layout % 5 :: 5]:
        check_variant(*LAYOUTS[layout], *variant)


def test_every_variant_is_played_with_several_layouts():
    """54 is no multiple of 5, so each layout is combined with each value of each factor."""
    played = [VARIANTS[layout % 5 :: 5] for layout in range(len(LAYOUTS))]
    assert all(sum(variant in each for each in played) >= 3 for variant in VARIANTS)
    for each in played:
        assert [set(values) for values in zip(*each)] == [set(values) for values in zip(*VARIANTS)]


def test_evaluation_gives_the_loss_and_no_gradient():
    mllm = tiny_mllm()
    microbatches = random_microbatches(mllm, "no_image")
    loss, _ = oracle(mllm, microbatches)
    mllm.zero_grad()
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 3))
    assert parallel.evaluate(microbatches).loss == pytest.approx(loss, rel=1e-5)
    assert all(p.grad is None for _, p in parallel.named_parameters())


def test_samples_are_spread_over_microbatches_without_loss():
    mllm = tiny_mllm()
    samples = [sample for group in random_microbatches(mllm, "all") for sample in group]
    loss, gradients = oracle(mllm, [samples])
    mllm.zero_grad()
    parallel = parallelize(mllm, make_layout(mllm, "colocated", 2))
    result = parallel.step(samples, microbatches=3)
    assert result.microbatches == 3
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in parallel.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_both_schedules_and_a_chain_cut_inside_modules(schedule):
    mllm = tiny_mllm(layers=3)
    mllm.freeze("vision")
    microbatches = random_microbatches(mllm, "all")
    loss, gradients = oracle(mllm, microbatches)
    mllm.zero_grad()
    parallel = parallelize(mllm, Layout.balanced(mllm, 4), schedule=schedule)
    assert parallel.step(microbatches).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in parallel.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])


def test_a_batch_without_targets_is_refused():
    mllm = tiny_mllm()
    (batch,) = random_microbatches(mllm, "text", count=1)
    for sample in batch:
        sample.labels.fill_(-100)
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 1))
    with pytest.raises(ValueError, match="no sample of the batch has a valid target"):
        parallel.step([batch])


def test_autocast_runs_in_bf16_and_keeps_fp32_gradients():
    mllm = tiny_mllm()
    microbatches = random_microbatches(mllm, "all")
    loss, gradients = oracle(mllm, microbatches)
    mllm.zero_grad()
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 3), autocast=torch.bfloat16, checkpointing="full")
    result = parallel.step(microbatches)
    assert result != loss and abs(result - loss) <= 2e-2 * loss  # bf16 has 8 bits of mantissa
    for name, parameter in parallel.named_parameters():
        if gradients[name] is not None and gradients[name].norm() > 1e-3:
            assert parameter.grad.dtype == torch.float32
            assert (parameter.grad - gradients[name]).norm() <= 0.15 * gradients[name].norm(), name


def gradients_of(parallel):
    return [(name, None if p.grad is None else p.grad.clone()) for name, p in parallel.named_parameters()]


@pytest.mark.parametrize(
    ("placement", "pp", "ranks", "dp"),
    [("parallel", 2, 1, 2), ("parallel", 2, 4, 1), ("replicated", 2, 2, 1), ("colocated", 2, 3, 2)],
)
def test_gradients_accumulate_over_steps_with_shared_weights(placement, pp, ranks, dp):
    mllm = tiny_mllm(tied=True)
    microbatches = random_microbatches(mllm, "no_image")
    loss, gradients = oracle(mllm, microbatches)
    mllm.zero_grad()
    specs = {name: ParallelSpec(dp=dp) for name in mllm.encoders} | {"language_model": ParallelSpec(pp=pp, dp=dp)}
    layout = Layout.from_specs(mllm, specs, placement=placement, ranks=ranks)
    parallel = parallelize(mllm, layout)
    for times in (1, 2):
        assert parallel.step(microbatches) == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients_of(parallel):
            expected = gradients[name]
            assert_same_gradient(name, gradient, None if expected is None else times * expected)


def test_the_ranks_run_the_very_lists_that_were_checked(monkeypatch):
    """Reductions included: tied embeddings on two ranks, and a replica without images that the other one has."""
    checked = []
    monkeypatch.setattr(
        "interlace.run.tables.lists.check", lambda schedule: checked.append((schedule, check(schedule)))
    )
    mllm = tiny_mllm(tied=True, encoders=("vision",))
    groups = [random_microbatches(mllm, kind, seed=i, count=2) for i, kind in enumerate(("all", "text"))]
    loss, gradients = oracle(mllm, [*groups[0], *groups[1]])
    mllm.zero_grad()
    specs = {"vision": ParallelSpec(dp=2), "language_model": ParallelSpec(pp=2, dp=2)}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs))
    result = parallel.step([group for pair in zip(*groups, strict=True) for group in pair])
    assert result == pytest.approx(loss, rel=1e-5)
    for name, parameter in parallel.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])

    ran = parallel.timeline().actions
    [(schedule, _)] = checked
    assert ran == schedule.actions
    for rank in range(3, 6):  # the replica without images
        sums = [a for a in ran[rank] if a.op is Op.REDUCE_GRAD]
        assert sums and all(a.module != "vision" or a.op is Op.REDUCE_GRAD for a in ran[rank])
    assert any(a.module == "vision" for a in ran[3])
    tied = [i for i, reduction in enumerate(parallel.graph.reductions) if reduction.tied >= 0]
    assert len(tied) == 2 and {a.other for actions in ran for a in actions if a.op is Op.REDUCE_GRAD} >= set(tied)


def test_freezing_after_parallelize_is_refused():
    mllm = tiny_mllm()
    mllm.freeze("vision")
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 1))
    mllm.unfreeze("vision")
    with pytest.raises(ValueError, match="parallelize again"):
        parallel.step(random_microbatches(mllm, "all"))


def test_a_failed_step_leaves_the_next_one_whole():
    mllm = tiny_mllm()
    good = random_microbatches(mllm, "all")
    loss, gradients = oracle(mllm, good)
    mllm.zero_grad()
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 3))
    bad = random_microbatches(mllm, "all")

    def unreadable():
        raise OSError("the file is gone")

    image = bad[2][0].media["vision"][0]
    bad[2][0].media["vision"][0] = Media(image.shape, image.tokens, load=unreadable)
    with pytest.raises(PipelineError, match=r"rank 0, FORWARD vision\[0\] chunk 2: OSError: the file is gone"):
        parallel.step(bad)
    parallel.zero_grad()
    assert parallel.step(good) == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients_of(parallel):
        assert_same_gradient(name, gradient, gradients[name])


@pytest.mark.parametrize(
    ("samples", "microbatches", "message"),
    [
        ("none", None, "at least one sample"),
        ("good", 0, "at least 1"),
        ("mixed", None, "mixes"),
        ("groups", 3, "omit microbatches"),
    ],
)
def test_impossible_batches_are_refused(samples, microbatches, message):
    mllm = tiny_mllm()
    groups = random_microbatches(mllm, "text")
    mixed = [groups[0][0], groups[1]]
    given = {"good": groups[0], "mixed": mixed, "groups": groups, "none": []}[samples]
    with pytest.raises(ValueError, match=message):
        parallelize(mllm, make_layout(mllm, "parallel", 1)).step(given, microbatches)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda mllm, batch: mllm.collate(batch), r"a list of samples, not a dict: pass .* to mllm\(\*\*batch\)$"),
        (lambda mllm, batch: batch[0], "a list of samples, not a Sample: put it in a list$"),
        (lambda mllm, batch: iter(batch), "a list of samples, not a list_iterator"),
        (
            lambda mllm, batch: batch[0].input_ids,
            r"a list of samples, not a Tensor: make them with .*Sample\(input_ids",
        ),
        (lambda mllm, batch: [vars(one) for one in batch], "takes samples, not a dict: make them with"),
        (lambda mllm, batch: [[one.input_ids for one in batch]], "takes samples, not a Tensor: make them with"),
    ],
)
def test_a_step_names_what_is_no_sample(form, message):
    mllm = tiny_mllm()
    batch = random_microbatches(mllm, "text")[0]
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 1))
    for call in (parallel.step, parallel.evaluate):
        with pytest.raises(ValueError, match=message):
            call(form(mllm, batch))
    parallel.step(batch)


def test_a_result_survives_pickling():
    result = StepResult(1.5, 7, 2)
    again = pickle.loads(pickle.dumps(result))
    assert (again, again.loss, again.tokens, again.microbatches) == (1.5, 1.5, 7, 2)
