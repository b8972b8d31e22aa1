"""Fit of the lengths of FineVision's subsets to the figures that the dissertation prints of Entrain; used in
bench/lengths.py.

    python -m bench.length_fit [--seconds 120] [--seed 0]

The dissertation shows its data as curves without numbers (figures 4.3 to 4.5). It prints only derived figures: the GPU
ratios of batches of 1 to 256 samples (tables 4.2 and C.2 to C.8) and standard deviations of forward times (table 4.3).
Fitted are medians and widths of pictures and texts, the speed of either language model relative to the encoder (one
factor each), and the encoder's speed. The objective has two parts:

- 1 + 59 batches of a size show all printed ratios and no other (by likelihood).
- DistTrain's standard deviations are the printed ones (30 % is one unit). The first two rows of ChartQA, CocoQA and
  LLaVA-150k are left out: their printed values are identical, likely by mistake.

Starting values act as a weak prior.

Pictures of CocoQA and LLaVA-150k are COCO's: 640 x 480 mostly, 46 x 34 patches. The search is random (better points are
kept, steps adapt) and runs for --seconds. Another seed or machine ends elsewhere within the freedom that the print
leaves.

The spread of CocoQA's texts and of COCO's sizes was narrowed after a first fit (texts 27 in the median, width 0.85;
pictures 0.03). That fit explained the print about as well, but not one-word answers and pictures of two shapes.
Consequences: docs/who-computes-what.md. The committed numbers are those of the better of two seeds, rounded.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from bench.papers import vlm
from bench.papers.entrain_ratios import GPUS, RATIOS, SIZES, SPREADS

Floats = NDArray[np.float64]
NAMES = tuple(SPREADS)
COCO = 46 * 34  # patches
TRIALS, SAMPLES, MICROBATCHES = 400, 6000, 2000
TEXT = {"SynthChartNet": (16, 8192), "ChartQA": (8, 512), "CocoQA": (8, 256), "LLaVA-150k": (16, 2048)}
USED = [(NAMES[0], 0), (NAMES[0], 1)] + [(name, 2) for name in NAMES]  # rows of table 4.3

# Name: starting value, and its plausible deviation (medians and speeds: of their logarithm).
START = {
    "patches SynthChartNet": (2600.0, 0.9), "patches ChartQA": (2400.0, 0.9),
    "width SynthChartNet": (0.6, 0.5), "width ChartQA": (0.35, 0.4), "width COCO": (0.09, 0.03),
    "text SynthChartNet": (250.0, 1.0), "text ChartQA": (60.0, 0.7), "text CocoQA": (40.0, 0.5),
    "text LLaVA-150k": (200.0, 0.5),
    "spread SynthChartNet": (0.6, 0.5), "spread ChartQA": (0.5, 0.2), "spread CocoQA": (0.35, 0.1),
    "spread LLaVA-150k": (0.5, 0.3),
    "speed 1b": (1.0, 1.0), "speed 3b": (1.0, 1.0), "speed encoder": (0.4, 1.0),
}  # fmt: skip
LOGARITHMIC = np.array([not name.startswith(("width", "spread")) for name in START])


class Fit:
    """Fit quality of values. Draws are the same for all values, so that they compare."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.normal = {name: rng.standard_normal((2, SAMPLES)) for name in NAMES}
        self.batches = {size: rng.integers(0, SAMPLES, (TRIALS, size)) for size in SIZES}
        self.microbatches = rng.integers(0, SAMPLES, (MICROBATCHES, 4))
        self.start = np.array([value for value, _ in START.values()])
        self.start[LOGARITHMIC] = np.log(self.start[LOGARITHMIC])
        self.scale = np.array([width for _, width in START.values()])

    def named(self, x: Floats) -> dict[str, float]:
        return dict(zip(START, np.where(LOGARITHMIC, np.exp(x), x).tolist()))

    def work(self, name: str, values: dict[str, float]) -> dict[str, Floats]:
        """Seconds of a forward of each sample, by module."""
        coco = name in ("CocoQA", "LLaVA-150k")
        median = COCO if coco else values[f"patches {name}"]
        width = values["width COCO" if coco else f"width {name}"]
        patches = np.clip(np.rint(median * np.exp(width * self.normal[name][0])), 196, 16384)
        text = values[f"text {name}"] * np.exp(values[f"spread {name}"] * self.normal[name][1])
        tokens = np.clip(np.rint(text), *TEXT[name]) + np.ceil(patches / 4)
        speed = vlm.TP * vlm.PEAK * values["speed encoder"]
        result = {"vision": vlm.vision_flops(patches) / speed}
        return result | {m: vlm.llm_flops(tokens, m) / (speed * values[f"speed {m}"]) for m in vlm.LLAMA}

    def shown(self, seconds: dict[str, Floats], model: str, size: int) -> Floats:
        """float64 [GPUS + 1]: frequency of each number of encoder GPUs over the batches."""
        vision, llm = (seconds[name][self.batches[size]].sum(axis=1) for name in ("vision", model))
        gpus = np.clip(np.rint(GPUS * vision / (vision + llm)), 1, GPUS - 1).astype(np.int64)
        return (np.bincount(gpus, minlength=GPUS + 1) + 0.02) / (TRIALS + 0.02 * (GPUS + 1))

    def deviation(self, seconds: dict[str, Floats], row: int) -> float:
        """Milliseconds, over microbatches of 4, of a row of table 4.3."""
        return 1e3 * float(seconds[("vision", "1b", "3b")[row]][self.microbatches].sum(axis=1).std())

    def loss(self, x: Floats) -> float:
        if (x[~LOGARITHMIC] < 0.02).any():
            return np.inf
        values = self.named(x)
        seconds = {name: self.work(name, values) for name in NAMES}
        result = float((((x - self.start) / self.scale) ** 2).sum() / 2)
        for (name, model), rows in RATIOS.items():
            for size, row in zip(SIZES, rows):
                often = self.shown(seconds[name], model, size)[[int(pair.split(":")[0]) for pair in row.split()]]
                result -= 60 * np.log(min(1.0, often.sum())) + np.log(1 - (1 - often) ** 60 + 1e-9).sum()
        for name, row in USED:
            result += (np.log(self.deviation(seconds[name], row) / SPREADS[name][row][0]) / 0.3) ** 2 / 2
        return float(result)

    def search(self, seconds: float, seed: int) -> Floats:
        rng = np.random.default_rng(seed)
        best, step, end = self.start, 0.3, time.perf_counter() + seconds
        lowest = self.loss(best)
        while time.perf_counter() < end:
            chosen = rng.random(len(best)) < 0.4
            other = best + step * self.scale * rng.standard_normal(len(best)) * chosen
            loss = self.loss(other)
            step = min(0.3, step * 1.5) if loss < lowest else max(0.005, step * 0.97)
            if loss < lowest:
                best, lowest = other, loss
        return best


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    fit = Fit()
    x = fit.search(options.seconds, options.seed)
    values = fit.named(x)
    for name, value in values.items():
        print(f"{name:24}{value:10.4g}")
    for (name, model), rows in RATIOS.items():
        for size, row in zip(SIZES, rows):
            often = fit.shown(fit.work(name, values), model, size)
            ours = " ".join(f"{k}:{GPUS - k}" for k in range(GPUS, 0, -1) if often[k] > 1 / 60)
            print(f"{name} {model}, batch {size}: printed {row}, here {ours}")
    for name, row in USED:
        print(f"{name}, table 4.3: {SPREADS[name][row][0]} ms, here {fit.deviation(fit.work(name, values), row):.1f}")
    print(f"loss {fit.loss(x):.1f}")


if __name__ == "__main__":
    main()
