"""Entrain's tables: constraints of the printed values, and steps of drawn samples against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.baselines import ENCODER, LLM
from bench.papers import entrain_ratios as ratios
from bench.papers import vlm
from interlace import plan
from interlace.schedule import Op

ONES = np.ones(16)
EVEN = vlm.Replica(np.arange(16), [np.array([i]) for i in range(16)], list(range(16)), np.arange(16))


def test_printed_ratios_sum_to_the_gpus_and_narrow():
    for shown in ratios.RATIOS.values():
        assert len(shown) == len(ratios.SIZES)
        counts = [len(each.split()) for each in shown]
        assert counts == sorted(counts, reverse=True) and counts[-1] == 1
        assert all(sum(map(int, pair.split(":"))) == ratios.GPUS for each in shown for pair in each.split())


def test_printed_spreads_give_the_abstract_and_repeat_rows():
    assert ratios.SPREADS["SynthChartNet"][0][0] / ratios.SPREADS["SynthChartNet"][0][2] == pytest.approx(
        10.6, abs=0.05
    )
    same = [name for name, (vision, small, _) in ratios.SPREADS.items() if vision == small]
    assert same == ["ChartQA", "CocoQA", "LLaVA-150k"]
    # 1.27 : 1 of 16 GPUs differs from table 4.2.
    assert plan.proportional_allocation(16, [1.27, 1.0]).tolist() == [9, 7]


@pytest.mark.parametrize("case", ratios.PAIRS)
def test_drawn_lengths_ask_for_the_printed_gpu_ratios(case):
    """Lengths drawn by bench.lengths, with the fitted speeds, against tables 4.2 and C.2 to C.8."""
    dataset, model = ratios.PAIRS[case]
    each = np.stack(vlm.seconds(vlm.work(dataset, model, vlm.SAMPLES, 3), model), axis=1)
    rng = np.random.default_rng(4)
    for size, row in zip(ratios.SIZES, ratios.RATIOS[dataset, model]):
        printed = {int(pair.split(":")[0]) for pair in row.split()}
        batches = np.array([each[rng.integers(0, len(each), size)].sum(axis=0) for _ in range(300)])
        shown, often = np.unique(plan.proportional_allocation(ratios.GPUS, batches)[:, 0], return_counts=True)
        inside = np.isin(shown, list(printed))
        assert often[inside].sum() >= 0.9 * 300, f"{size} samples: {dict(zip(shown.tolist(), often.tolist()))}"
        assert shown[often.argmax()] in printed
        if size == 256:
            assert shown[often.argmax()] == min(printed)


@pytest.mark.parametrize(
    ("dataset", "row"), [("SynthChartNet", 0), ("SynthChartNet", 1), *((name, 2) for name in ratios.SPREADS)]
)
def test_drawn_lengths_vary_as_printed(dataset, row):
    """DistTrain's deviations of table 4.3, except rows that repeat others. The fit is within a factor of 1.5.

    LLaVA-150k is the exception: enough text for 32.92 ms would give ratios that differ from tables C.3 and C.6.
    """
    model = "3b" if row == 2 else "1b"
    seconds = vlm.seconds(vlm.work(dataset, model, vlm.SAMPLES, 3), model)[min(row, 1)]
    result = 1e3 * seconds.reshape(-1, 4).sum(axis=1).std() / ratios.SPREADS[dataset][row][0]
    if dataset == "LLaVA-150k":
        assert 0.55 <= result <= 0.7
    else:
        assert 1 / 1.5 <= result <= 1.5


def test_flops_are_those_of_the_published_models():
    assert vlm.LLAMA["1b"].parameters == pytest.approx(1.24e9, rel=0.01)
    assert vlm.LLAMA["3b"].parameters == pytest.approx(3.21e9, rel=0.01)
    assert vlm.QWEN_VISION.parameters == pytest.approx(0.63e9, rel=0.02)
    own = vlm.work("LLaVA-150k", "1b", 1, 0)
    assert own.llm[0] >= 2 * vlm.LLAMA["1b"].parameters * own.tokens[0]


def equal_stages(colocated: bool) -> vlm.Stages:
    return vlm.Stages("3b", np.array([8, 8, 8, 8]), np.array([7, 7, 7, 7]), colocated)


def test_equal_microbatches_take_what_1f1b_takes(monkeypatch):
    monkeypatch.setattr(vlm.Stages, "shares", lambda self: {ENCODER: np.full(4, 0.25), LLM: np.full(4, 0.25)})
    # (microbatches + stages - 1) times forward and backward of a stage, F = 1/4, B = 2/4.
    assert vlm.play(equal_stages(False), EVEN, ONES, ONES).makespan == pytest.approx((16 + 7) * 0.75)
    # DIP: each rank is busy for 16 of each; encoder forwards fill for 3 F, the language model drains for 3 B.
    dip = vlm.play(equal_stages(True), EVEN, ONES, ONES)
    assert dip.busy_per_rank == pytest.approx((24.0,) * 4)
    assert dip.makespan == pytest.approx(24 + 3 * 0.75)
    for actions in dip.actions:
        phases = [(a.module, a.op) for a in actions if a.op in (Op.FORWARD, Op.BACKWARD)]
        assert phases[:16] == [(ENCODER, Op.FORWARD)] * 16 and phases[-16:] == [(ENCODER, Op.BACKWARD)] * 16


@pytest.mark.parametrize("as_printed", [False, True])
def test_every_sample_is_computed_once_whoever_deals(as_printed):
    own = vlm.work("SynthChartNet", "3b", 64, 5)
    vision, llm = vlm.seconds(own, "3b")
    dealt = {
        "static": vlm.static(64, 2, 4),
        "disttrain": vlm.disttrain(vision, llm, 2, 4, (4, 4)),
        "dip": vlm.dip(vision, 64, 2, 4),
        "entrain": vlm.entrain(vision, llm, 2, 8, as_printed=as_printed),
    }
    for name, replicas in dealt.items():
        chunks = [replica.samples[chunk] for replica in replicas for chunk in replica.encoder]
        assert sorted(np.concatenate(chunks).tolist()) == list(range(64)), name
        assert sorted(np.concatenate([replica.samples for replica in replicas]).tolist()) == list(range(64)), name
        forward = [replica.forward(vision, llm) for replica in replicas]
        assert sum(each[0].sum() for each in forward) == pytest.approx(vision.sum())
        assert sum(each[1].sum() for each in forward) == pytest.approx(llm.sum())


def test_deferred_samples_are_read_by_the_next_microbatch():
    own = vlm.work("SynthChartNet", "3b", 512, 1)
    vision, llm = vlm.seconds(own, "3b")
    replica = max(vlm.entrain(vision, llm, 4, 32, as_printed=True), key=lambda each: len(each.encoder))
    assert len(replica.encoder) > replica.slot.max() + 1, "nothing was deferred: the case shows nothing"
    for chunk, k in zip(replica.encoder, replica.microbatch):
        assert len(set(replica.slot[chunk])) == 1 and replica.slot[chunk[0]] - k in (0, 1)
    whole = vlm.undeferred(replica)
    assert len(whole.encoder) == whole.slot.max() + 1 == replica.slot.max() + 1
    assert whole.forward(vision, llm)[0] == pytest.approx(replica.forward(vision, llm)[0])
    timeline = vlm.play(vlm.Stages.cut("3b", 4, 4), replica, vision, llm)
    own = replica.samples
    assert sum(timeline.busy_per_rank) == pytest.approx(3 * (vision[own].sum() + llm[own].sum()))
