"""Chats with records marked as questions: their selection, and pairing with the media of another question."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from interlace.data import ChatDataset, load_chats
from interlace.data.chats.files.shapes import parse
from interlace.data.chats.files.sources import Rules
from interlace.modalities.errors import BrokenSampleError
from tests.data.chat_faults import chats, said, user

SIZES = {"red": (16, 16), "green": (24, 8), "blue": (32, 16)}


@pytest.fixture
def dataset(tmp_path: Path) -> ChatDataset:
    """Images of three colours and sizes, questions about their colour, and chats that are not questions."""
    records: list[dict[str, Any]] = []
    for colour, size in SIZES.items():
        Image.new("RGB", size, colour).save(tmp_path / f"{colour}.png")
        messages = [user("<image>Which colour?"), said(f"It is {colour}."), user("Sure?"), said("Yes.")]
        records.append({"messages": messages, "images": [f"{colour}.png"], "kind": "colour"})
        records.append({"messages": [user("<image>Describe."), said("A picture.")], "images": [f"{colour}.png"]})
    two = [user("<image><image>Which one is red?"), said("First.")]
    records.append({"messages": two, "images": ["red.png", "blue.png"], "kind": "which"})
    records.append({"messages": [user("Two and two?"), said("Four.")], "kind": "sum"})
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, records)))
    path = [tmp_path / "t.jsonl"]
    return load_chats(path, path, chats(), Rules(), cache=tmp_path / "cache")[1]


def test_questions_are_those_that_name_their_kind(dataset: ChatDataset) -> None:
    result = dataset.questions()
    assert {kind: [each.index for each in asked] for kind, asked in result.items()} == {
        "colour": [0, 2, 4], "which": [6], "sum": [7],
    }  # fmt: skip
    assert [each.answer.strip() for each in result["colour"]] == [f"It is {colour}." for colour in SIZES]  # the first
    assert [asked[0].takes for asked in result.values()] == [("image",), ("image", "image"), ()]
    assert [dataset.kind(index) for index in (0, 1, 6, 7)] == ["colour", "vision", "which", "sum"]


def test_question_with_swapped_media_changes_only_the_media(dataset: ChatDataset) -> None:
    red, green, blue = dataset.questions()["colour"]
    own = dataset.asked(red)
    for other in (green, blue):
        shown, theirs = dataset.asked(red, other), dataset.asked(other)
        assert torch.equal(shown.media["vision"][0].data, theirs.media["vision"][0].data)
        assert shown.media["vision"][0].tokens == theirs.media["vision"][0].tokens
        token = dataset.format.placeholders["vision"][0]
        assert torch.equal(shown.input_ids[shown.input_ids != token], own.input_ids[own.input_ids != token])
        assert int((shown.input_ids == token).sum()) == shown.media["vision"][0].tokens
        assert torch.equal(shown.labels[shown.labels >= 0], own.labels[own.labels >= 0])
    assert torch.equal(dataset.asked(red).input_ids, own.input_ids)  # no state is left


def test_media_of_another_are_read_as_the_model_reads_them(dataset: ChatDataset, monkeypatch: Any) -> None:
    """A whole checkpoint's processor has its own preprocessing of videos."""
    red, green, _ = dataset.questions()["colour"]
    looked: list[str] = []
    own = dataset.format.look

    def look(kind: str, path: str, *, decode: bool) -> Any:
        looked.append(path)
        return own(kind, path, decode=decode)

    monkeypatch.setattr(dataset.format, "look", look)
    dataset.asked(red, green)
    assert [Path(path).name for path in looked] == ["green.png"]


def test_media_of_another_that_leave_no_room_are_refused(dataset: ChatDataset) -> None:
    red, green, _ = dataset.questions()["colour"]
    dataset.store.rules = replace(dataset.store.rules, max_tokens=len(dataset.asked(red, green).input_ids) - 1)
    with pytest.raises(BrokenSampleError, match="tokens with other media, at most"):
        dataset.asked(red, green)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("colour", "colour"), ("", ""), (None, ""), ("multi turn", "multi_turn"), ("vqa/coco", "vqa_coco"), (3, "3"),
        ("What is it?", "What_is_it"), ("?", ""), ("Farbe.größe-1", "Farbe.größe-1"), (True, ""), (["a"], ""),
        ("a" * 40, "a" * 40), ("a" * 41, ""),
    ],
)  # fmt: skip
def test_a_column_called_kind_breaks_no_record(given: Any, kind: str) -> None:
    assert parse({"messages": [user("a"), said("b")], "kind": given}, Path("/")).kind == kind
