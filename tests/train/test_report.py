"""Held-out questions answered right: with their media, with those of another one, and by the commonest answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from interlace.data import ByteTokenizer, DigitsDataset
from interlace.train import answers, report
from tests.train.one_process import toy_config


class Reader:
    """Answers what it sees on the picture (its mean) and counts nothing else: what the digits look like to it."""

    placeholders: ClassVar[dict[str, int]] = ByteTokenizer().placeholders

    def __init__(self, known: dict[float, str], blind: str = "") -> None:
        self.known, self.blind = known, blind


def seen(sample: Any) -> float:
    return round(float(sample.media["vision"][0].data.double().mean()), 12)


@pytest.fixture(scope="module")
def digits() -> DigitsDataset:
    return DigitsDataset(tokens={"vision": lambda _: 4}, split="heldout", length=60)


@pytest.fixture
def count(digits: DigitsDataset, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts the answers of a model that says `blind`, or what it knows of the picture."""
    tokenizer = ByteTokenizer()

    def answer(model: Any, prompts: Any, **_: Any) -> list[list[int]]:
        return [tokenizer.encode(model.blind or model.known[seen(prompt)]) for prompt in prompts]

    monkeypatch.setattr(answers, "answer", answer)
    return lambda model, limit=512: report.accuracies(
        model, digits, tokenizer, toy_config(f"log.accuracy_samples={limit}")
    )


def test_a_model_that_sees_is_fooled_by_other_pictures_and_a_blind_one_is_not(digits, count) -> None:
    wanted = [recipe.answer for recipe in digits.questions()["digit"]]
    known = {seen(digits[i]): answer for i, answer in enumerate(wanted)}
    assert len(known) == len(digits) == 60
    commonest = max(set(wanted), key=wanted.count)
    [sees] = count(Reader(known))
    assert (sees.kind, sees.count, sees.right, sees.swapped) == ("digit", 60, 1.0, 0.0)
    [blind] = count(Reader({}, blind=commonest))
    assert blind.right == blind.swapped == sees.majority == blind.majority == wanted.count(commonest) / 60
    assert set(sees.rows()) == {"digit_accuracy", "digit_majority_accuracy", "digit_swapped_media_accuracy"}


def test_as_many_are_asked_as_the_config_says(digits, count) -> None:
    assert [each.count for each in count(Reader({}, blind="one"), 7)] == [7]


def test_where_all_answers_are_the_same_no_media_are_swapped(digits, count, monkeypatch) -> None:
    ones = [recipe for recipe in digits.questions()["digit"] if recipe.answer == "one"]
    monkeypatch.setattr(digits, "questions", lambda: {"digit": ones})
    [found] = count(Reader({}, blind="one"))
    assert (found.right, found.majority, found.swapped) == (1.0, 1.0, None)
    assert "digit_swapped_media_accuracy" not in found.rows()


def test_the_page_has_the_counts(tmp_path, digits) -> None:
    counted = [report.Accuracy("digit", 60, 0.5, 0.25, 0.125), report.Accuracy("a<b", 2, 1.0, 1.0, None)]
    config = SimpleNamespace(run=SimpleNamespace(name="toy"))
    report.write_page([], tmp_path, config, {}, counted)
    page = (tmp_path / "samples.html").read_text()
    assert "<td>digit<td>60<td>50.0 %<td>25.0 %<td>12.5 %" in page and "<td>a&lt;b<td>2<td>100.0 %" in page
