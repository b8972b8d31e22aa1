"""Closing of a run: answers to held-out samples, their accuracy, and the summary table.

The best checkpoint (if the run keeps it), or the last one, is loaded whole into one process. This also proves that the
checkpoint can be read.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace._files import write_whole
from interlace.model.inputs.placeholders import token_ids
from interlace.train.config.sections import Config
from interlace.train.report import answers as greedy

if TYPE_CHECKING:
    from interlace.data import Question, SampleDataset, Tokenizer
    from interlace.model import MultimodalModel, Sample


@dataclass
class Answer:
    """One held-out sample: the sample, its prompt without media, the expected answer and the model's answer."""

    sample: Sample
    asked: str
    truth: str
    generated: str

    @property
    def right(self) -> bool:
        """True if the answer equals the expected one exactly."""
        return self.truth == self.generated


def answers_to(samples: Sequence[Sample], model: MultimodalModel, tokenizer: Tokenizer, config: Config) -> list[Answer]:
    """The model's greedy answers to samples."""
    prompts = [greedy.prompt_of(sample, model.placeholders) for sample in samples]
    generated = greedy.answer(model, prompts, end=tokenizer.EOS, max_new_tokens=config.log.max_new_tokens)
    media = {token for given in model.placeholders.values() for token in token_ids(given)}
    return [
        Answer(
            sample,
            tokenizer.decode([token for token in prompt.input_ids.tolist() if token not in media]).strip(),
            tokenizer.decode(greedy.truth_of(sample, tokenizer.EOS)),
            tokenizer.decode(tokens),
        )
        for sample, prompt, tokens in zip(samples, prompts, generated, strict=True)
    ]


@dataclass
class Accuracy:
    """Exact-match accuracy for one kind of held-out question.

    right: accuracy of the model. majority: accuracy of always giving the most frequent answer. swapped: accuracy of the
    model with the media of a question with another answer; None if a question has no suitable other. A model that does
    not use the media has swapped = right. count: number of questions.
    """

    kind: str
    count: int
    right: float
    majority: float
    swapped: float | None

    def rows(self) -> dict[str, float]:
        """Rows of the summary."""
        rows: dict[str, float] = {
            f"{self.kind}_accuracy": self.right,
            f"{self.kind}_majority_accuracy": self.majority,
            f"{self.kind}_questions": self.count,  # accuracy over 80 questions is less certain than over 512
        }
        return rows if self.swapped is None else rows | {f"{self.kind}_swapped_media_accuracy": self.swapped}


def accuracies(model: MultimodalModel, dataset: SampleDataset, tokenizer: Tokenizer, config: Config) -> list[Accuracy]:
    """Accuracy per kind of question, over at most ``log.accuracy_samples`` questions spread over the split."""
    rows = []
    for kind, questions in dataset.questions().items():
        count = min(len(questions), config.log.accuracy_samples)
        asked = [questions[i * len(questions) // count] for i in range(count)]
        right = _share_right([dataset.asked(each) for each in asked], model, tokenizer, config)
        turned = _swapped(dataset, asked)
        swapped = None if turned is None else _share_right(turned, model, tokenizer, config)
        most = max(Counter(each.answer for each in asked).values())
        rows.append(Accuracy(kind, count, right, most / count, swapped))
    return rows


def _swapped(dataset: SampleDataset, questions: Sequence[Question]) -> list[Sample] | None:
    """Questions with the media of another question; None if one of them has no suitable other."""
    samples = [_with_media_of_another(dataset, questions, index) for index in range(len(questions))]
    present = [sample for sample in samples if sample is not None]
    return present if len(present) == len(samples) else None


def _with_media_of_another(dataset: SampleDataset, questions: Sequence[Question], index: int) -> Sample | None:
    """Question `index` with the media of another one; None if there is no suitable one.

    Candidates are visited in a circle, starting half-way round. The other question must have another answer and the
    same number and kinds of media, and its media must fit.
    """
    own = questions[index]
    for step in range(len(questions) if own.takes else 0):
        other = questions[(index + len(questions) // 2 + step) % len(questions)]
        if other.answer != own.answer and other.takes == own.takes:
            with contextlib.suppress(ValueError):
                return dataset.asked(own, other)
    return None


def _share_right(samples: Sequence[Sample], model: MultimodalModel, tokenizer: Tokenizer, config: Config) -> float:
    return sum(answer.right for answer in answers_to(samples, model, tokenizer, config)) / len(samples)


def spread_by_kind(dataset: SampleDataset, count: int) -> list[int]:
    """Indices of up to `count` held-out samples, round-robin over the kinds of samples."""
    kinds: dict[str, list[int]] = {}
    for index in range(min(len(dataset), 64 * max(count, 1))):
        kinds.setdefault(dataset.kind(index), []).append(index)
    turns = zip_longest(*kinds.values())
    return [index for turn in turns for index in turn if index is not None][:count]


def write_summary(folder: Path, rows: Mapping[str, Any]) -> None:
    """Writes summary.json, the data of `print_summary`."""
    write_whole(folder / "summary.json", json.dumps(rows, indent=1) + "\n")


def print_summary(rows: Mapping[str, Any], title: str) -> None:
    """Prints the closing table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), shown(name, value))
    Console(highlight=False).print(table)


def shown(name: str, value: object) -> str:
    """Formatted value of the summary."""
    if isinstance(value, float):
        if name.endswith("accuracy"):
            return f"{100 * value:.1f} %"
        if "loss" in name or "baseline" in name:
            return f"{value:.3f} nats per token"
        return f"{value:,.1f}" if abs(value) >= 1.0 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
