"""Lengths of samples of multimodal training data, drawn from distributions: input of simulated steps.

    drawn = draw("llava", 512, seed=0)      # a dataset, or a mix of several
    drawn.text, drawn.rows["vision"]        # int64 [n]
    drawn.lengths()                         # interlace.run.Lengths, for step_table

No sample is read. No paper prints parameters: they show their data as curves (dissertation figures 4.3 to 4.5,
OrchMLLM figure 3, DistTrain figure 5). The source of each number below is stated beside it:

- fitted: by `bench.length_fit`, to the GPU ratios and standard deviations that the dissertation prints of its four
  data sets (tables 4.2, C.2 to C.8, 4.3). Drawn samples give these ratios again (tests/bench/test_lengths.py).
- a fact of the data or of the encoder, as its authors publish it
- assumed: nothing is printed that it could be fitted to. Mixes are assumed, too.

Lengths of text and of media are drawn independently, as in figure 4.3 of the dissertation. Lognormal: long tails to the
right, cut at the limit of the source or the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from interlace.run import Lengths

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Lognormal:
    """exp(Normal(log median, sigma)), rounded and cut to [low, high]; sigma 0: always the median."""

    median: float
    sigma: float
    low: int = 1
    high: int = 1 << 20

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        """int64 [n]."""
        values = self.median * np.exp(self.sigma * rng.standard_normal(n))
        return np.clip(np.rint(values), self.low, self.high).astype(np.int64)


@dataclass(frozen=True)
class Items:
    """Items of one modality in a sample: tokens of an item inside the encoder; number of items; encoder tokens per row
    that the language model reads."""

    tokens: Lognormal
    count: Lognormal = Lognormal(1, 0.0)
    merge: int = 1


@dataclass(frozen=True)
class Dataset:
    """text: tokens of prompt and answer. media: encoder -> Items."""

    text: Lognormal
    media: Mapping[str, Items]


# Patches of 14 pixels; four become a row (Qwen2.5-VL). 196 to 16,384 of them, its processor's usual bounds.
def _image(patches: float, sigma: float) -> Items:
    return Items(Lognormal(patches, sigma, 196, 16384), merge=4)


# Whisper's encoder has 50 frames a second and at most 30 s; two frames become a row.
def _speech(seconds: float, sigma: float) -> Items:
    return Items(Lognormal(50 * seconds, sigma, 50, 1500), merge=2)


DATASETS: Mapping[str, Dataset] = {
    # Subsets of FineVision, on which the dissertation evaluates Entrain (4.7.1): medians and widths are fitted, but for
    # the pictures of the last two, which are COCO's, 640 x 480 mostly (a fact): 46 x 34 patches. Bounds are assumed.
    "synthchartnet": Dataset(Lognormal(125, 0.80, 16, 8192), {"vision": _image(6000, 0.51)}),  # the most variable one
    "chartqa": Dataset(Lognormal(39, 0.73, 8, 512), {"vision": _image(1540, 0.34)}),
    "cocoqa": Dataset(Lognormal(89, 0.15, 8, 256), {"vision": _image(1564, 0.11)}),
    "llava_150k": Dataset(Lognormal(206, 0.445, 16, 2048), {"vision": _image(1564, 0.11)}),
    # LLaVA-1.5: every picture is 336 x 336, so 576 rows (a fact: its encoder's patches are not merged). OrchMLLM trains
    # on it (section 8) and prints no lengths: text is assumed.
    "llava_15": Dataset(Lognormal(150, 0.90, 16, 2048), {"vision": Items(Lognormal(576, 0.0))}),
    # Assumed.
    "text": Dataset(Lognormal(400, 0.80, 16, 4096), {}),
    # Videos as clips of 2 to 64 frames; a frame of 336 x 448 has 768 patches, and attends only to itself. Assumed: the
    # papers have no video.
    "clips": Dataset(
        Lognormal(120, 0.80, 16, 2048), {"vision": Items(Lognormal(768, 0.0), Lognormal(10, 0.70, 2, 64), 4)}
    ),
    # LibriSpeech: 281,241 utterances of 960.9 hours, 12.3 s on average, none above 35 s (facts); the width is for
    # that mean, with what Whisper cuts. Text is assumed.
    "librispeech": Dataset(Lognormal(45, 0.50, 4, 256), {"audio": _speech(11.0, 0.50)}),
    # LJSpeech: 13,100 clips of 1.11 to 10.10 s, 6.57 s on average, 17.23 words each (facts); widths are assumed.
    "ljspeech": Dataset(Lognormal(24, 0.35, 4, 80), {"audio": Items(Lognormal(320, 0.35, 55, 505), merge=2)}),
    # Questions about clips (AIR-Bench in OrchMLLM): longer dialogues about shorter sounds. Assumed.
    "audio_qa": Dataset(Lognormal(110, 0.60, 16, 1024), {"audio": _speech(9.0, 0.70)}),
}

MIXES: Mapping[str, Mapping[str, float]] = {
    # LLaVA-like: pictures of one size and of many, dialogues, some text alone.
    "llava": {"llava_150k": 0.4, "synthchartnet": 0.2, "chartqa": 0.2, "text": 0.2},
    "video": {"clips": 0.6, "llava_150k": 0.3, "text": 0.1},
    "audio": {"librispeech": 0.6, "audio_qa": 0.3, "text": 0.1},
    # All at once, as OrchMLLM's data (section 8: LLaVA-1.5, LibriSpeech, AIR-Bench).
    "omni": {"llava_15": 0.5, "librispeech": 0.35, "audio_qa": 0.15},
}
"""Name -> share of each dataset among the samples; any name of `DATASETS` is a mix of itself alone, too."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """n samples. dataset: of each, its index in `names`. text: tokens. items, tokens, rows: encoder -> int64 [n]:
    number of items, encoder tokens of each item, rows of all items that the language model reads."""

    names: tuple[str, ...]
    dataset: Ints
    text: Ints
    items: Mapping[str, Ints]
    tokens: Mapping[str, Ints]
    rows: Mapping[str, Ints]

    def __len__(self) -> int:
        return len(self.text)

    @property
    def total(self) -> Ints:
        """int64 [n], tokens that the language model reads: text and rows."""
        return np.asarray(self.text + sum(self.rows.values()))

    def lengths(self) -> Lengths:
        """Lengths for `interlace.run.step_table`; half of the text are targets."""
        from interlace.run import Lengths

        return Lengths(self.total, np.maximum(self.text // 2, 1), dict(self.rows))


def encoders_of(mix: str) -> tuple[str, ...]:
    """The encoders that samples of a mix need, in alphabetical order. Raises ValueError for an unknown mix."""
    return tuple(sorted({encoder for name in _shares(mix) for encoder in DATASETS[name].media}))


def draw(mix: str, n: int, *, seed: int = 0) -> Drawn:
    """`n` samples of a dataset or mix, in random order; deterministic in its arguments.

    Raises ValueError for an unknown mix.
    """
    shares = _shares(mix)
    rng = np.random.default_rng(seed)
    names = tuple(shares)
    weights = np.array(list(shares.values()))
    dataset = rng.choice(len(names), n, p=weights / weights.sum())
    encoders = encoders_of(mix)
    text = np.zeros(n, np.int64)
    items, tokens, rows = ({name: np.zeros(n, np.int64) for name in encoders} for _ in range(3))
    for place, name in enumerate(names):
        here = np.flatnonzero(dataset == place)
        text[here] = DATASETS[name].text.draw(rng, len(here))
        for encoder, media in DATASETS[name].media.items():
            items[encoder][here] = media.count.draw(rng, len(here))
            tokens[encoder][here] = media.tokens.draw(rng, len(here))
            rows[encoder][here] = items[encoder][here] * -(-tokens[encoder][here] // media.merge)
    return Drawn(names, dataset, text, items, tokens, rows)


def _shares(mix: str) -> Mapping[str, float]:
    if mix in DATASETS:
        return {mix: 1.0}
    if mix not in MIXES:
        raise ValueError(f"no mix or dataset {mix!r}: there are {', '.join([*MIXES, *DATASETS])}")
    return MIXES[mix]
