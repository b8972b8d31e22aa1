"""Datasets of users for test_own_dataset.py: one that trains, and faulty ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from interlace.data import IGNORE, DatasetSetup, Media, Question, Sample, SampleDataset
from tests.train.own_data import CONFIG

WORDS = ("red", "green", "blue")
NOTHING = 3


def config_of(folder: Path, name: str) -> str:
    """TOML text of a tiny config with bytes as tokens and a dataset of this module."""
    lines = CONFIG.format(folder=folder).replace('"chats"', f'"tests.train.own_datasets:{name}"').splitlines()
    return "\n".join(line for line in lines if not line.startswith(("train =", "validation =", "tokenizer =")))


class Colours(SampleDataset):
    """Pictures of one colour, and its name."""

    name = "colours"

    def __init__(self, split: str, setup: DatasetSetup, *, count: int = 9) -> None:
        self.split, self.setup, self.count = split, setup, count

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        shape = (3, 16, 16 * (1 + index % 2))
        tokens, tokenizer = self.setup.tokens["vision"](shape), self.setup.tokenizer
        prompt = [tokenizer.placeholders["vision"]] * tokens + tokenizer.encode("What colour?")
        answer = [*tokenizer.encode(WORDS[index % 3]), tokenizer.EOS]
        labels = torch.tensor([IGNORE] * len(prompt) + answer)
        picture = Media(shape, tokens, load=partial(paint, index % 3, shape))
        return Sample.from_unshifted(torch.tensor(prompt + answer), labels, {"vision": [picture]}, f"picture {index}")

    def questions(self) -> dict[str, list[Question]]:
        return {"colour": [Question(index, WORDS[index % 3], ("vision",)) for index in range(len(self))]}

    def fingerprint(self) -> str:
        return f"colours {self.split} {self.count}"


def paint(channel: int, shape: tuple[int, ...]) -> torch.Tensor:
    picture = torch.full(shape, -1.0)
    picture[channel] = 1.0
    return picture


class Plain:
    def __len__(self) -> int:
        return 1


class Lacking(SampleDataset):
    def __len__(self) -> int:
        return 1

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        return Sample(torch.tensor([1]), torch.tensor([2]))


class Empty(Colours):
    def __len__(self) -> int:
        return 0


class Dicts(Colours):
    def sample(self, index: int, epoch: int | None = None) -> Sample:
        return {"input_ids": [1]}  # type: ignore[return-value]


class Raises(Colours):
    def __init__(self, split: str, setup: DatasetSetup) -> None:
        raise OSError("no disk\nat all")
