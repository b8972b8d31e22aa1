"""Chats about a folder of images: each image has its own answer, belongs to one split, or is left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from interlace.cli import main
from interlace.data.chats.files.picture_folder import Answered, held_out
from interlace.data.chats.files.shapes import parse
from tests.data.chat_faults import write_files


def picture(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 9), (shade, 90, 9)).save(path)


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path: Path) -> dict[str, str]:
    """Path of each image -> its answer, as training reads the file."""
    chats = [parse(record, path.parent) for record in records(path)]
    return {chat.media[0].path: chat.turns[1].parts[0].text for chat in chats}


def test_names_of_sub_folders_are_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10):
        picture(tmp_path / "animals" / "sea_lion" / f"{number}.PNG", number)
        picture(tmp_path / "cat" / f"{number}.jpg", 25 * number)
    (tmp_path / "cat" / "notes.md").write_text("mine")
    (tmp_path / "cat" / ".hidden.png").write_text("no picture")
    out = tmp_path / "chats.jsonl"
    assert main(["data", "folder", str(tmp_path), "--out", str(out), "--held-out", "0.2", "--question", "Who?"]) == 0
    output = capsys.readouterr().out
    assert "2 different ones; 0 pictures left out" in output and "1 other files are no pictures" in output
    kept = tmp_path / "chats.held-out.jsonl"
    result = answers(out) | answers(kept)
    assert result == {
        str(path): "cat" if path.parent.name == "cat" else "sea lion"
        for path in tmp_path.rglob("*.*")
        if path.suffix in (".PNG", ".jpg")
    }
    assert sorted(answers(kept).values()) == ["cat"] * 2 + ["sea lion"] * 2
    assert not answers(out).keys() & answers(kept).keys()
    assert records(out)[0]["messages"][0]["content"] == "<image>Who?"
    [name] = records(out)[0]["images"]
    assert name.startswith("animals/sea_lion/")
    assert main(["data", "check", str(out), str(kept), "--samples", "0"]) == 0


def test_texts_beside_pictures_are_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "pictures", tmp_path / "elsewhere" / "chats.jsonl"
    out.parent.mkdir()
    for number in range(3):
        picture(folder / "part-1" / f"{number}.png", number)
        (folder / "part-1" / f"{number}.txt").write_bytes(
            b"\xef\xbb\xbf" * (number > 0) + f" A cat, {number}.\n".encode()
        )
    picture(folder / "part-2" / "alone.png", 9)
    assert main(["data", "folder", str(folder), "--out", str(out)]) == 1
    output = capsys.readouterr().out
    assert "alone.png: has no alone.txt beside it, as other pictures have" in output
    assert answers(out) == {str(folder / "part-1" / f"{n}.png"): f"A cat, {n}." for n in range(3)}
    assert records(out)[0]["messages"][0]["content"] == "<image>Describe the picture."


def test_what_cannot_be_used_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    (folder / "odd").mkdir(parents=True)
    write_files(folder / "odd")
    picture(folder / "cat" / "1.png")
    picture(folder / "dog" / "2.png")
    picture(folder / "__" / "3.png", 5)
    picture(folder / "<image>" / "4.png", 6)
    picture(folder / "5.png", 7)
    (folder / "odd" / "loop.png").unlink()  # never listed as a file
    out = tmp_path / "chats.jsonl"
    assert main(["data", "folder", str(folder), "--out", str(out)]) == 1
    output = capsys.readouterr().out
    for words in (
        "torn.jpg: image file is truncated",
        "empty.png: cannot identify image file",
        "deep.png: has pixels of 16 or 32 bits",
        "1.png: is the same picture as ",
        "2.png: is the same picture as ",
        "3.png: the name of its folder, '__', says nothing",
        "4.png: its answer has <image> in it",
        "5.png: lies in no sub-folder that says what it is",
    ):
        assert words in output, words
    assert set(answers(out).values()) == {"odd"} and len(answers(out)) >= 8
    assert main(["data", "check", str(out), "--samples", "0"]) == 0


def test_linked_folders_and_captions_in_capitals_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere, folder, out = tmp_path / "elsewhere", tmp_path / "own", tmp_path / "chats.jsonl"
    picture(elsewhere / "1.png")
    (elsewhere / "round").symlink_to(elsewhere)
    picture(folder / "data:dog" / "2.png", 9)
    (folder / "round").symlink_to(folder)
    (folder / "another-dog").symlink_to(folder / "data:dog")
    (folder / "cat").symlink_to(elsewhere)
    assert main(["data", "folder", str(folder), "--out", str(out)]) == 1
    assert "round: links to the same folder as " in capsys.readouterr().out
    assert sorted(answers(out).values()) == ["cat", "data:dog"]
    inside = folder / "chats.jsonl"
    assert main(["data", "folder", str(folder), "--out", str(inside)]) == 1
    assert sorted(answers(inside).values()) == ["cat", "data:dog"]  # not mistaken for inline data
    picture(tmp_path / "camera" / "IMG_0.JPG")
    (tmp_path / "camera" / "IMG_0.TXT").write_text("A boat.")
    assert main(["data", "folder", str(tmp_path / "camera"), "--out", str(tmp_path / "camera.jsonl")]) == 0
    assert list(answers(tmp_path / "camera.jsonl").values()) == ["A boat."]


def test_both_files_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for number in range(4):
        picture(tmp_path / "own" / "cat" / f"{number}.png", number)
    replace = Path.replace

    def full(self: Path, target: Path) -> Any:
        if "held-out" in target.name:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    given = ["data", "folder", str(tmp_path / "own"), "--out", str(tmp_path / "chats.jsonl"), "--held-out", "0.5"]
    assert main(given) == 2
    assert "chats.held-out.jsonl: cannot write there: No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{at}/gone"], "gone: no such folder"),
        (["{at}/a/1.png"], "1.png: a file, not a folder"),
        (["{at}/empty"], "empty: has no pictures in it or its sub-folders"),
        (["{at}/a"], "none of its 1 pictures can be used"),
        (["{at}", "--out", "{at}/a/1.png"], "give the name of a .jsonl file"),
        (["{at}", "--out", "{at}/mine.jsonl"], "mine.jsonl is there already: remove it, or give another name"),
        (["{at}", "--out", "{at}/new.jsonl", "--held-out", "1"], "a share of the pictures, from 0 to less than 1"),
        (["{at}", "--out", "{at}/new.jsonl", "--held-out", "nan"], "a share of the pictures"),
        (["{at}", "--out", "{at}/new.jsonl", "--held-out", "0.2"], "of 2 pictures that leaves none on one side"),
        (["{at}", "--question", "<image>?"], "give its words alone"),
        (["{at}", "--question", " "], "give its words alone"),
        (["{at}", "--out", "{at}/gone/new.jsonl"], "cannot write there"),
    ],
)
def test_refusals(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture(tmp_path / "a" / "1.png")
    picture(tmp_path / "b" / "2.png", 9)
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.jsonl").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = [each.replace("{at}", str(tmp_path)) for each in arguments]
    given += [] if "--out" in given else ["--out", str(tmp_path / "new.jsonl")]
    assert main(["data", "folder", *given]) == 2
    output = capsys.readouterr().err
    assert words in output and len(output.splitlines()) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), min_size=1), st.floats(0, 0.99), st.booleans())
@settings(max_examples=50, deadline=None)
def test_equal_pictures_are_on_one_side(found: list[tuple[str, int]], share: float, by_answer: bool) -> None:
    pictures = [Answered(Path(f"{place}"), answer, f"{answer}{n}") for place, (answer, n) in enumerate(found)]
    kept = held_out(pictures, share, by_answer=by_answer)
    sides: dict[str, set[bool]] = {}
    for one, side in zip(pictures, kept, strict=True):
        sides.setdefault(one.digest, set()).add(side)
    assert all(len(each) == 1 for each in sides.values())
    groups = [[d for d in sides if d.startswith(a) or not by_answer] for a in ("abc" if by_answer else "a")]
    for group in groups:
        assert sum(sides[digest] == {True} for digest in group) == round(share * len(group))
    turned = held_out(pictures[::-1], share, by_answer=by_answer)
    assert turned == kept[::-1]
