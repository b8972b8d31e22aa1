"""Comparison on a GPU, rehearsed: every contender trains on the same data, from the same loss."""

from __future__ import annotations

import json

import pytest
import torch

from bench import gpu_trainer, trainer
from interlace.train.data.feed import datasets
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.build import build, materialize


@pytest.mark.slow
def test_every_contender(tmp_path):
    out = tmp_path / "gpu_trainer.json"
    report = gpu_trainer.main(["--rehearse", "--cases", "8B lora", "--steps", "2", "--out", str(out)])
    assert json.loads(out.read_text()) == json.loads(json.dumps(report)) and report["rehearsal"]
    rows = report["cases"]["8B lora"]
    assert list(rows) == list(gpu_trainer.CONTENDERS) and not any("failed" in row for row in rows.values())
    first = rows["interlace"]["first_loss"]
    for row in rows.values():
        assert row["first_loss"] == pytest.approx(first, rel=5e-3)  # bf16, and weak weights: see the next test
        assert row["tokens_per_s"] > 0 and row["tflops"] > 0 and "mfu" not in row


def test_every_loss_is_one_loss(tmp_path):
    """Large weights, in fp32: a wrong mask, position or picture changes the loss, as does a bidirectional picture."""
    gpu_trainer.write_data(tmp_path, gpu_trainer.REHEARSED["2B"], 40)
    config = gpu_trainer.config_of(tmp_path, gpu_trainer.REHEARSED["2B"], 1, 1)
    tokenizer = tokenizer_of(config)
    mllm = materialize(build(config, tokenizer), seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in mllm.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    data = datasets(config, mllm, tokenizer)[0]
    row = [data.sample(index, 0) for index in range(3)]
    with torch.no_grad():
        both_ways = float(trainer.packed(mllm)(row))
        mllm.language_settings.bidirectional = False
        wanted = float(trainer.packed(mllm)(row))
        assert both_ways != pytest.approx(wanted, rel=1e-3)
        for loss in (trainer.Plain(mllm), trainer.InRows(mllm, "sdpa")):
            assert float(loss(row)) == pytest.approx(wanted, rel=1e-4)


def test_shapes_are_what_they_are_called(tmp_path):
    for case, billions in (("2B", 2.0), ("8B lora", 8.5)):
        shape = gpu_trainer.CASES[case]
        gpu_trainer.write_data(tmp_path, gpu_trainer.REHEARSED["2B"], 1)
        config = gpu_trainer.config_of(tmp_path, shape, 1, 1)
        model = build(config, tokenizer_of(config))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.05)
