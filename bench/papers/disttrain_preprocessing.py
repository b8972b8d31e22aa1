"""DistTrain figure 21: waiting time of a training step for its images, decoded synchronously or ahead."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from bench.papers.frame import Claim, Row, Rows, Table
from interlace.data import Loader, ReadAhead
from interlace.modalities.image import decode_image
from interlace.model import Media, Sample

CASES = {"8 images of 512": (8, 512), "16 images of 512": (16, 512), "8 images of 1024": (8, 1024),
         "16 images of 1024": (16, 1024)}  # fmt: skip
STEPS = 3
SLACK = 1.5  # ratio of a step's computing to the decoding time of its images


class Pictures(Dataset[Sample]):
    """Samples of so many JPEG files, stored at 1.5 times the needed size: each is decoded and resized."""

    def __init__(self, folder: Path, images: int, side: int) -> None:
        self.files = []
        self.images, self.side = images, side
        rng = np.random.default_rng(0)
        for number in range(images):
            coarse = Image.fromarray(rng.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8))
            path = folder / f"{number}.jpg"
            coarse.resize((side * 3 // 2,) * 2, Image.Resampling.BICUBIC).save(path, quality=90)
            self.files.append(path)

    def __len__(self) -> int:
        return STEPS + 3

    def __getitem__(self, index: int) -> Sample:
        shape = (3, self.side, self.side)

        def load(path: Path) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(decode_image(path, shape))).float()

        media = [Media(shape, 1, load=lambda path=path: load(path)) for path in self.files]
        ids = torch.zeros(2, dtype=torch.long)
        return Sample(input_ids=ids, labels=ids.clone(), media={"vision": media}, name=str(index))


def waits(data: Pictures, prefetch: int, computes: float) -> float:
    """Seconds per step from requesting a sample to having its images, in steps that then compute."""
    spent = []
    with Loader(data, 1, shuffle=False, ahead=ReadAhead(prefetch)) as loader:
        for step in range(STEPS + 1):
            begin = time.perf_counter()
            [sample] = next(loader)
            for item in sample.media["vision"]:
                item.data  # noqa: B018 (decodes it, if not yet decoded)
            if step:  # the first step always waits
                spent.append(time.perf_counter() - begin)
            time.sleep(computes)
    return float(np.median(spent))


def preprocessing(case: str, small: bool) -> list[Row]:
    images, side = (1, 64) if small else CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        data = Pictures(Path(folder), images, side)
        between = waits(data, 0, 0.0)
        ahead = waits(data, 2, SLACK * between)
    return [
        Row(case, "decoded in the step", None, between * 1e3, "ms"),
        Row(case, "decoded ahead", None, ahead * 1e3, "ms"),
    ]


def hidden(rows: Rows) -> list[Claim]:
    ratio = [rows.ours(case, "decoded in the step") / rows.ours(case, "decoded ahead") for case in rows.cases()]
    longest = max(rows.ours(case, "decoded in the step") for case in rows.cases())
    left = max(rows.ours(case, "decoded ahead") for case in rows.cases())
    return [
        Claim("what a step waits for its images falls by orders of magnitude", "seconds to milliseconds",
              f"{longest:.0f} ms to {left:.2f} ms at most", min(ratio) > 10,
              "a thread of the same process decodes ahead here, nodes of their own there"),
    ]  # fmt: skip


TABLES = (
    Table("disttrain-figure-21", "DistTrain figure 21, section 8.3",
          "Time that a step waits for images to be decoded, in between and ahead.", tuple(CASES), preprocessing, hidden,
          assumed=(f"JPEG files of 1.5 times the size; a step computes {SLACK} times as long as decoding takes (the "
                   "paper's take seconds to tens of seconds)",),
          missing=("the paper's counts and sizes of images: its axis is not in the text",), timed=True),
)  # fmt: skip
