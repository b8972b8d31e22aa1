"""TFLOP/s and MFU of a run: the devices' peaks, and the FLOPs that a step adds."""

from __future__ import annotations

import pytest
import torch

from interlace.estimate.step_flops import StepFlops
from interlace.train.report.flops import Meter, peak_here, peak_of
from tests.run.flops import total
from tests.tiny import random_microbatches, tiny_mllm
from tests.train.one_process import ToyModel, toy_config


def test_peaks_are_found_by_the_names_that_drivers_give() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3", "bf16") == 989.4
    assert peak_of("NVIDIA H100 PCIe", "fp16") == 756.5
    assert peak_of("NVIDIA H200", "fp32") == 66.9
    assert peak_of("NVIDIA A100-SXM4-80GB", "bf16") == 312.0
    assert peak_of("NVIDIA GeForce RTX 4090", "bf16") == 165.2
    assert peak_of("NVIDIA GeForce GTX 1080", "bf16") is None
    assert peak_here(toy_config()) == 0.0
    assert peak_here(toy_config("log.peak_tflops=3.5")) == 3.5


@pytest.mark.parametrize(
    "peaks",
    [[2e-6, 3e-6], pytest.param([2e-6], marks=pytest.mark.slow), pytest.param([2e-6, 0.0], marks=pytest.mark.slow)],
)
def test_a_meter_divides_by_seconds_devices_and_their_peaks(peaks: list[float]) -> None:
    mllm = tiny_mllm()
    samples = [sample for batch in random_microbatches(mllm, "all") for sample in batch]
    meter, result = Meter(mllm, peaks, recompute=True), StepFlops(mllm, recompute=True).of(samples)
    assert meter.metrics() == {}
    meter.add(samples, None, 2.0)
    meter.add(samples, None, 1.0)
    values, (needed, executed) = meter.metrics(), total(result)
    assert values["tflops"] == pytest.approx(2 * needed / 3 / len(peaks) / 1e12)
    assert sum(v for k, v in values.items() if k.startswith("tflops/")) == pytest.approx(values["tflops"])
    if all(peaks):
        assert values["mfu(%)"] == pytest.approx(100 * 2 * needed / 3 / 1e12 / sum(peaks))
        assert values["hfu(%)"] == pytest.approx(values["mfu(%)"] * executed / needed)
    else:
        assert not any(name.startswith(("mfu", "hfu")) for name in values)
    assert meter.metrics() == {}


def test_counting_may_end_but_ends_no_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mllm = tiny_mllm()
    samples = [sample for batch in random_microbatches(mllm, "all") for sample in batch]
    meter = Meter(mllm, [1.0], recompute=False)
    meter.add(samples, None, 1.0)

    def fails(*_: object) -> None:
        raise RuntimeError("a size of its own")

    monkeypatch.setattr(StepFlops, "of", fails)
    meter.add(samples, None, 1.0)
    meter.add(samples, None, 1.0)
    assert meter.why == "a size of its own" and meter.metrics() == {}
    assert capsys.readouterr().err == f"interlace: no tflops and mfu from here on: {meter.why}\n"


def test_a_model_that_cannot_be_counted_says_why() -> None:
    meter = Meter(ToyModel(), [1.0], recompute=False)
    meter.add([], None, 1.0)
    assert meter.why == "ToyModel is no MultimodalModel" and meter.metrics() == {}

    class Looks(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())  # depends on values, not on shapes

    mllm = tiny_mllm(encoders=())
    mllm.language_model.lm_head = Looks(16, 48, bias=False)  # type: ignore[assignment]
    assert "does not run on fake tensors" in Meter(mllm, [1.0], recompute=False).why
