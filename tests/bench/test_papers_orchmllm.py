"""OrchMLLM's figures: constraints of the printed values, and one step of few ranks against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.papers import mllm
from bench.papers.frame import Row, Rows
from bench.papers.mllm import MODELS, PHASES, Batch
from bench.papers.orchmllm import gathered_claims

TINY = MODELS["MLLM-10B"]
OVERHEAD = {64: (16.66, 3.79), 128: (18.49, 3.81), 256: (21.32, 3.85), 512: (24.64, 3.92), 1024: (31.37, 3.96)}


def test_printed_shapes_have_the_printed_parameters():
    for model in MODELS.values():
        for phase, billions in zip(PHASES, model.billions):
            # Table 1 rounds to whole billions, and counts embeddings.
            assert model.shape(phase).parameters / 1e9 == pytest.approx(billions, rel=0.1)
        assert sum(model.billions) == pytest.approx(float(model.name[5:-1]), rel=0.05)


def test_buffers_count_beside_what_a_rank_keeps_of_the_model():
    def fits(gathered: float) -> bool:
        rows = [Row("MLLM-84B", "all-gather: MFU", None, 0.4), Row("MLLM-84B", "all-to-all: MFU", None, 0.4)]
        rows += [Row("MLLM-84B", "all-to-all: received by the fullest rank", None, 0.2)]
        rows += [Row("MLLM-84B", "all-gather: received by the fullest rank", None, gathered)]
        return not gathered_claims(Rows(rows))[-1].holds

    # 84e9 parameters of 16 bytes over 128 GPUs: 10.5 GB of 80 GB.
    assert fits(69.0) and not fits(70.0)


def test_printed_overheads_are_below_two_percent_of_the_forward():
    for milliseconds, seconds in (*OVERHEAD.values(), (53.88, 4.05)):
        assert 0.004 < milliseconds / 1e3 / seconds < 0.02


def test_flops_pad_audio_and_pack_the_rest():
    tokens = {"vision": np.array([4, 0, 6]), "audio": np.array([0, 3, 5]), "llm": np.array([5, 6, 9])}
    batch = Batch(tokens, np.array([0, 0, 1]))
    rank = np.array([0, 1, 1], np.int32)
    for phase in ("vision", "llm"):
        shape = TINY.shape(phase)
        each = [shape.linear() * n + shape.quadratic(phase == "llm") * n**2 for n in tokens[phase].tolist()]
        result, useful = mllm.flops(TINY, batch, phase, rank)
        assert result == pytest.approx([each[0], each[1] + each[2]]) and useful == pytest.approx(sum(each))
    audio = TINY.audio
    result, useful = mllm.flops(TINY, batch, "audio", rank)
    assert result == pytest.approx([0, 2 * (audio.linear() * 5 + audio.quadratic(False) * 25)])
    assert useful == pytest.approx(audio.linear() * 8 + audio.quadratic(False) * (9 + 25))


def test_step_without_barriers_is_not_slower_and_does_all_work():
    batch = mllm.drawn(TINY, 8, 6, 3)
    for how in ("none", "llm", "all"):
        ranks_of = mllm.dealt(TINY, batch, how)
        made = mllm.step(TINY, batch, ranks_of)
        forward = [mllm.flops(TINY, batch, phase, ranks_of[phase])[0] for phase in PHASES]
        busiest = 3 * float(sum(forward).max()) / (mllm.PEAK * mllm.EFFICIENCY)
        assert busiest <= made.loose * (1 + 1e-12) and made.loose <= made.seconds * (1 + 1e-12)
        if how == "none":  # every rank reads its own rows, so that no rank waits
            assert made.loose == pytest.approx(busiest)


def test_every_way_keeps_samples_without_a_modality_at_home():
    batch = mllm.drawn(TINY, 8, 6, 3)
    for how in ("all", "all rmpad", "all pad"):
        for phase, rank in mllm.dealt(TINY, batch, how).items():
            absent = batch.tokens[phase] == 0
            assert (rank[absent] == batch.home[absent]).all() and rank.max() < 8
    pre = mllm.dealt(TINY, batch, "llm")
    assert (pre["vision"] == pre["llm"]).all()


def test_pictures_keep_to_the_resolution_of_the_model():
    for model in MODELS.values():
        batch = mllm.drawn(model, 4, 50, 0)
        assert batch.tokens["vision"].max() <= (model.resolution // 14) ** 2
        assert (batch.tokens["llm"] > 0).all()
