"""Several stages of a module on one rank: loss and gradients equal one process, for any order of the schedule."""

from __future__ import annotations

import pytest
import torch

from interlace.plan import analytic_costs
from interlace.run import parallelize, stage_durations
from interlace.schedule import Op, check
from tests.run.parity import assert_same_gradient, oracle
from tests.run.virtual_stages import LAYOUTS, LLM, made
from tests.tiny import random_microbatches

QUICK = ("parallel, v, tied on one rank", "parallel, three laps, tied, dp", "colocated, v in both", "shared")
OTHERS = [("interleaved", name) for name in LAYOUTS if name not in QUICK] + [("1f1b", name) for name in LAYOUTS]


@pytest.mark.parametrize("name", QUICK)
def test_virtual_stages_equal_one_process(name):
    check_layout("interleaved", name)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "name"), OTHERS)
def test_more_virtual_stages_equal_one_process(schedule, name):
    check_layout(schedule, name)


def check_layout(schedule, name):
    mllm, layout = made(name)
    if "v" in name:
        mllm.freeze("vision")
    mllm.train()
    microbatches = random_microbatches(mllm, "all", count=6)
    loss, gradients = oracle(mllm, microbatches)
    mllm.zero_grad()
    parallel = parallelize(mllm, layout, schedule=schedule)
    result = parallel.step(microbatches)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for parameter, gradient in parallel.named_parameters():
        assert_same_gradient(parameter, gradient.grad, gradients[parameter])


def test_the_measured_order_is_the_list_and_laps_take_turns():
    mllm, layout = made("parallel")
    parallel = parallelize(mllm, layout, schedule="interleaved")
    microbatches = random_microbatches(mllm, "all", count=4)
    table = parallel.table(microbatches)
    schedule = parallel.schedule(table)
    check(schedule)
    parallel.step(microbatches)
    assert parallel.timeline().actions == schedule.actions
    (first,) = layout.pipelines(LLM)[0].stages[0].ranks
    warm_up = [a for a in schedule.actions[first] if a.module == LLM and a.op is Op.FORWARD][:4]
    # Two chunks through stage 0, then the same two through stage 2 (two ranks, two rounds).
    assert [(table.chunks[a.chunk].index, a.stage) for a in warm_up] == [(0, 0), (1, 0), (0, 2), (1, 2)]


def test_options_of_a_schedule_reach_its_lists():
    mllm, layout = made("parallel")
    microbatches = random_microbatches(mllm, "all", count=6)
    counts = []
    for in_flight in (1, 2, 4):
        parallel = parallelize(mllm, layout, schedule="1f1b", schedule_options={"in_flight": in_flight})
        report = check(parallel.schedule(parallel.table(microbatches)))
        counts.append(max(report.peak_in_flight))
        assert torch.isfinite(torch.tensor(parallel.step(microbatches).loss))
    assert counts == sorted(counts) and counts[0] <= 2  # one of each of two stages
    with pytest.raises(ValueError, match="durations is a function, which ranks cannot compare: pass a mapping"):
        parallelize(mllm, layout, schedule="auto", schedule_options={"durations": lambda *_: 1.0})


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_auto_schedule_counts_recomputation_of_matmuls(checkpointing):
    mllm, layout = made("parallel, one rank")
    parallel = parallelize(mllm, layout, schedule="auto", checkpointing=checkpointing)
    counted = stage_durations(mllm, layout, analytic_costs(mllm), recompute=checkpointing == "full")
    assert parallel._lists._options["durations"] == counted


def test_backward_halves_sum_to_the_whole_backward():
    mllm, layout = made("parallel, v, tied on one rank")
    for frozen in ((), ("vision",), ("vision", "language_model")):
        for path in frozen:
            mllm.freeze(path)
        seconds = stage_durations(mllm, layout, analytic_costs(mllm))
        for stage in layout.stages():
            whole, first, second = (
                seconds[op, stage.module, stage.index] for op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
            )
            trains = any(layer.trainable for layer in mllm.layers(stage.module)[stage.start : stage.stop])
            assert first + second == pytest.approx(whole) and first >= 0 and (second > 0) == trains
