"""Accuracy on held-out questions: with their own media, with the media of another question, and the majority class."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from interlace.data import ByteTokenizer
from interlace.modalities.errors import BrokenSampleError
from interlace.train.report import answers
from interlace.train.report import closing as report
from tests.digits import Digits
from tests.digits import digits as split_of_digits
from tests.train.one_process import toy_config


class Reader:
    """Answers from the mean of the image only, as a substitute for recognizing the digits."""

    placeholders: ClassVar[dict[str, int]] = ByteTokenizer().placeholders

    def __init__(self, known: dict[float, str], blind: str = "") -> None:
        self.known, self.blind = known, blind


def seen(sample: Any) -> float:
    return round(float(sample.media["vision"][0].data.double().mean()), 12)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return split_of_digits("heldout", length=60)


@pytest.fixture
def count(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Accuracies of a model that always answers `blind`, or if that is empty, its known answer for the image."""
    tokenizer = ByteTokenizer()

    def answer(model: Any, prompts: Any, **_: Any) -> list[list[int]]:
        return [tokenizer.encode(model.blind or model.known[seen(prompt)]) for prompt in prompts]

    monkeypatch.setattr(answers, "answer", answer)
    return lambda model, limit=512: report.accuracies(
        model, digits, tokenizer, toy_config(f"log.accuracy_samples={limit}")
    )


def test_swapped_media_lower_accuracy_only_if_model_uses_media(digits, count) -> None:
    wanted = [recipe.answer for recipe in digits.questions()["digit"]]
    known = {seen(digits[i]): answer for i, answer in enumerate(wanted)}
    assert len(known) == len(digits) == 60
    commonest = max(set(wanted), key=wanted.count)
    [sees] = count(Reader(known))
    assert (sees.kind, sees.count, sees.right, sees.swapped) == ("digit", 60, 1.0, 0.0)
    [blind] = count(Reader({}, blind=commonest))
    assert blind.right == blind.swapped == sees.majority == blind.majority == wanted.count(commonest) / 60
    names = {"digit_accuracy", "digit_majority_accuracy", "digit_swapped_media_accuracy", "digit_questions"}
    assert set(sees.rows()) == names and sees.rows()["digit_questions"] == 60


def test_as_many_are_asked_as_the_config_says(digits, count) -> None:
    assert [each.count for each in count(Reader({}, blind="one"), 7)] == [7]


def test_where_all_answers_are_the_same_no_media_are_swapped(digits, count, monkeypatch) -> None:
    ones = [recipe for recipe in digits.questions()["digit"] if recipe.answer == "one"]
    monkeypatch.setattr(digits, "questions", lambda: {"digit": ones})
    [result] = count(Reader({}, blind="one"))
    assert (result.right, result.majority, result.swapped) == (1.0, 1.0, None)
    assert "digit_swapped_media_accuracy" not in result.rows()


def test_media_that_do_not_fit_are_passed_over_for_the_next(digits, count, monkeypatch) -> None:
    refused, asked = [], digits.asked

    def picky(question: Any, shown: Any = None) -> Any:
        if shown is not None and len(refused) < 3:
            refused.append(shown)
            raise BrokenSampleError("too long", "no room")
        return asked(question, shown)

    monkeypatch.setattr(digits, "asked", picky)
    [result] = count(Reader({}, blind="one"))
    assert len(refused) == 3 and result.swapped == result.right

    def broken(question: Any, shown: Any = None) -> Any:
        if shown is not None:
            raise BrokenSampleError("size", "too thin")
        return asked(question)

    monkeypatch.setattr(digits, "asked", broken)
    assert [each.swapped for each in count(Reader({}, blind="one"))] == [None]
