"""TFLOP/s of a run, and utilization of its devices (MFU, HFU).

    tflops      model FLOPs per second and device, in 1e12; tflops/<module>: share of a module
    mfu(%)      model FLOPs over the peak of all devices in that time
    hfu(%)      executed FLOPs over the same peak

`interlace.model.counting.flops` defines the FLOPs. Rank 0 counts for all ranks, from lengths known on every rank.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from interlace import _device
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.model import Sample, SampleOutline
    from interlace.schedule import StepTable

# Dense products with fp32 sums (GeForce cards too), without sparsity, in 1e12 per second. Sources: data sheets of
# "NVIDIA H100 Tensor Core GPU" (SXM, NVL, PCIe), "NVIDIA H200", "NVIDIA DGX B200", "NVIDIA A100", "NVIDIA L40S", and
# the white paper of the Ada architecture, appendix A. The first entry that a GPU name contains counts.
PEAKS: tuple[tuple[str, float, float], ...] = (
    # name, bf16 and fp16, fp32 (without TF32)
    ("B200", 2250.0, 75.0),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.4, 66.9),
    ("H100 NVL", 835.5, 60.0),
    ("H100 PCIe", 756.5, 51.2),
    ("H100", 989.4, 66.9),
    ("A100", 312.0, 19.5),
    ("L40S", 362.1, 91.6),
    ("RTX 4090", 165.2, 82.6),
)


def peak_of(name: str, precision: str) -> float | None:
    """Peak TFLOP/s of a GPU of this name under ``train.precision``; None if it is not in the table."""
    for known, half, single in PEAKS:
        if known.lower() in name.lower():
            return single if precision == "fp32" else half
    return None


def peak_here(config: Config) -> float:
    """Peak TFLOP/s of this rank's device: ``log.peak_tflops``, else its GPU's; 0 if unknown, as for a CPU."""
    if config.log.peak_tflops is not None:
        return config.log.peak_tflops
    if not _device.in_use():
        return 0.0
    return peak_of(torch.get_device_module(_device.KIND).get_device_name(), config.train.precision) or 0.0


class Meter:
    """Sums of FLOPs and seconds of steps; `metrics` resets them.

    peaks: peak of each rank's device in TFLOP/s; an unknown peak (0) disables MFU and HFU. `why`: reason why the
    model's FLOPs cannot be counted, "" if they can. An error in a step disables counting; the run goes on.
    """

    def __init__(self, model: nn.Module, peaks: Sequence[float], *, recompute: bool) -> None:
        from interlace.estimate.step_flops import StepFlops, Uncountable
        from interlace.model import MultimodalModel

        self.why = ""
        self._count: StepFlops | None = None
        try:
            if not isinstance(model, MultimodalModel):
                raise Uncountable(f"{type(model).__name__} is no MultimodalModel")
            self._count = StepFlops(model, recompute=recompute)
        except Uncountable as error:
            self.why = str(error)
        self.measure(peaks)

    def measure(self, peaks: Sequence[float]) -> None:
        """Sets the device peaks for the following steps."""
        self.devices, self.peak = len(peaks), sum(peaks) if all(peaks) else 0.0
        self._empty()

    def _empty(self) -> None:
        self._seconds, self._executed = 0.0, 0
        self._needed: Counter[str] = Counter()

    def add(self, samples: Sequence[Sample | SampleOutline], table: StepTable, seconds: float) -> None:
        """Adds a step over `samples`, divided into the chunks of `table`."""
        if self._count is None:
            return
        try:
            counted = self._count.of(samples, table)
        except Exception as error:  # any error of a model on an item of a new size: training goes on
            self._count, self.why = None, str(error) or type(error).__name__
            self._empty()
            print(f"interlace: no tflops and mfu from here on: {self.why}", file=sys.stderr, flush=True)
            return
        for name, flops in counted.items():
            self._needed[name] += flops.model
            self._executed += flops.executed
        self._seconds += seconds

    def metrics(self) -> dict[str, float]:
        """Speeds since the last call; empty without a step."""
        if not self._seconds:
            return {}
        per_device = 1e-12 / self._seconds / self.devices
        needed = sum(self._needed.values())
        values = {"tflops": needed * per_device}
        values |= {f"tflops/{name}": flops * per_device for name, flops in self._needed.items()}
        if self.peak:
            of_peak = 1e-10 / self._seconds / self.peak
            values |= {"mfu(%)": needed * of_peak, "hfu(%)": self._executed * of_peak}
        self._empty()
        return values
