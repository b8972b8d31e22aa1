"""Every planted fault is found and reported by file and line, and only its record is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interlace import cli
from interlace.data.chats.encoding.tokens import TokenizerFormat
from interlace.data.chats.examine import examine
from interlace.data.chats.files.records import ChatFileError, find
from interlace.data.chats.files.shapes import parse
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.page import Findings
from interlace.data.chats.store import prepare
from interlace.modalities.errors import BROKEN, BrokenSampleError
from interlace.modalities.image import decode_image
from tests.data.chat_faults import FAULTS, RIGHT, TEMPLATE, chats, image, said, sound, talk, user, write_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Valid and broken files."""
    write_files(tmp_path)
    return tmp_path


GOOD = talk(user(image("good.png")), said("a red one"))


def _planted(folder: Path) -> Path:
    lines = [line if isinstance(line, bytes) else line.encode() for _, _, line in FAULTS]
    good = [b"", *[GOOD.encode()] * 3]
    path = folder / "chats.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([*good, *lines, GOOD.encode()]) + b'\n{"messages": [{"ro')
    return path


def test_every_fault_is_found_and_costs_its_record_alone(folder: Path) -> None:
    path = _planted(folder)
    result = list(examine([path], chats(), Rules(max_tokens=512), folder / "media"))
    by_line = {one.raw.number: one for one in result}
    for number, (kind, words, line) in enumerate(FAULTS, 5):
        broken = by_line[number].broken
        assert broken is not None and broken.kind == kind and words in str(broken), (kind, line[:200], broken)
        assert "\n" not in str(broken), broken
    last = by_line.pop(6 + len(FAULTS)).broken
    assert last is not None and last.kind == "json", "written by half"
    assert [number for number, one in by_line.items() if one.broken is None] == [2, 3, 4, 5 + len(FAULTS)]
    assert {kind for kind, _, _ in FAULTS} == set(BROKEN) - {"template", "no encoder", "tar"}


def test_what_is_odd_and_right_is_taken(folder: Path) -> None:
    path = folder / "right.jsonl"
    path.write_text("\n".join(RIGHT.values()))
    made = chats()
    for name, one in zip(RIGHT, examine([path], made, Rules(), folder / "media")):
        assert one.broken is None and one.chat is not None and one.encoded is not None, (name, one.broken)
        for item, data in zip(one.encoded.items, made.load(one.chat, one.encoded)):
            assert tuple(data.shape) == item.shape and bool(data.isfinite().all()), name
    red = decode_image(folder / "turned.jpg", (3, 40, 24)).mean(axis=(1, 2))
    inks = decode_image(folder / "inks.jpg", (3, 24, 40)).mean(axis=(1, 2))
    first = decode_image(folder / "moving.gif", (3, 24, 40)).mean(axis=(1, 2))
    deep = decode_image(folder / "colours16.png", (3, 24, 40)).mean(axis=(1, 2))
    assert red[0] > 240 > 20 > red[1] and first[0] > 240 > 20 > first[1]
    assert inks[0] > 220 and inks[1] < 200 and abs(deep - [60_000 / 257, 300 / 257, 9_000 / 257]).max() < 2


def test_media_that_the_model_cannot_take_are_found(folder: Path) -> None:
    path = folder / "a.jsonl"
    path.write_text(talk(user(sound("stereo.wav")), said("b")))
    made = chats()
    seeing = TokenizerFormat(
        made.tokenizer,
        TEMPLATE,
        name="the template",
        tags={"vision": "<image>"},
        specs={"vision": made.specs["vision"]},
        tokens={"vision": made.tokens["vision"]},
    )
    [one] = examine([path], seeing, Rules(), folder)
    assert one.broken is not None and one.broken.kind == "no encoder"


@pytest.mark.parametrize("says", ["m['content'].index('zz')", "'%d' % m['content']", "1 / (m['content'] | int)"])
@pytest.mark.parametrize("marked", [False, True])
def test_whatever_a_template_raises_costs_one_record(folder: Path, says: str, marked: bool) -> None:
    strict = "{% if messages | length > 2 %}{% set x = namespace(v=0) %}{% for m in messages %}{{ SAYS }}{% endfor %}"
    made = chats()
    text = strict.replace("SAYS", says) + "{% endif %}" + TEMPLATE
    text += "{% if false %}{% generation %}{% endgeneration %}{% endif %}" if marked else ""
    refusing = TokenizerFormat(
        made.tokenizer, text, name="the template", tags=made.tags, specs=made.specs, tokens=made.tokens
    )
    path = folder / "a.jsonl"
    path.write_text(talk(user("a"), said("b"), user("c"), said("d")))
    [one] = examine([path], refusing, Rules(), folder)
    assert one.broken is not None and one.broken.kind == "template"


def test_halves_of_characters_in_a_list_are_found_too(folder: Path) -> None:
    (folder / "a.json").write_text("[" + talk(user("half \ud83d"), said("b")) + "]")
    [one] = examine([folder / "a.json"], chats(), Rules(), folder)
    assert one.broken is not None and one.broken.kind == "encoding"


def test_a_folder_that_may_not_be_read_costs_its_records_alone(folder: Path, monkeypatch: Any) -> None:
    import os

    real = os.stat

    def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
        if "locked" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    path = folder / "a.jsonl"
    path.write_text(talk(user(image("locked/a.png")), said("b")) + "\n" + GOOD)
    monkeypatch.setattr(os, "stat", refused)
    one, other = examine([path], chats(), Rules(), folder)
    assert one.broken is not None and one.broken.kind == "broken file" and "Permission denied" in str(one.broken)
    assert other.broken is None


def test_what_the_template_refuses(folder: Path) -> None:
    strict = "{% if messages | length > 2 %}{{ raise_exception('too much talk') }}{% endif %}" + TEMPLATE
    made = chats()
    refusing = TokenizerFormat(
        made.tokenizer, strict, name="the template", tags=made.tags, specs=made.specs, tokens=made.tokens
    )
    path = folder / "a.jsonl"
    path.write_text(talk(user("a"), said("b")) + "\n" + talk(user("a"), said("b"), user("c"), said("d")))
    one, other = examine([path], refusing, Rules(), folder)
    assert one.broken is None
    assert other.broken is not None and other.broken.kind == "template" and "too much talk" in str(other.broken)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"on_broken": "error"}, r"chats.jsonl:5: no text in UTF-8.*on_broken"),
        ({"max_tokens": 8}, r"no sample is left"),
        ({"on_too_long": "error", "max_tokens": 8}, r"chats.jsonl:2: has \d+ tokens, more than data.max_tokens = 8"),
    ],
)
def test_errors_where_they_are_asked_for(folder: Path, rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatFileError, match=message):
        prepare([_planted(folder)], chats(), Rules(**rules), folder / "cache")


def test_headers_alone_do_not_find_what_is_torn(folder: Path) -> None:
    path = folder / "a.jsonl"
    path.write_text(talk(user(image("torn.png")), said("b")))
    [one] = examine([path], chats(), Rules(decode=False), folder)
    assert one.broken is None
    [one] = examine([path], chats(), Rules(), folder)
    assert one.broken is not None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.jsonl", None, "no such file"),
        ("a.txt", "x", "of no known kind"),
        ("a.json", "[1, 2", "no JSON"),
        ("a.jsonl", "\n\n", "the files are empty"),
        ("a.jsonl", "", "the files are empty"),
        ("a.jsonl", " [\n{}", "is one JSON list: name it .json"),
        ("a.parquet", "PAR1 no more", "no parquet that can be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ChatFileError, match=message):
        prepare(find([tmp_path / name]), chats(), Rules(), tmp_path / "cache")


def test_folders_that_datasets_did_not_write(tmp_path: Path) -> None:
    with pytest.raises(ChatFileError, match=r"no state\.json"):
        find([tmp_path])
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "state.json").touch()
    (tmp_path / "dataset_dict.json").touch()
    with pytest.raises(ChatFileError, match=r"name one of them: .*/test, .*/train"):
        find([tmp_path])
    with pytest.raises(ChatFileError, match="named twice"):
        find([tmp_path / "train", tmp_path / "train"])


def test_template_mismatch_raises_instead_of_skipping_samples(folder: Path) -> None:
    path = folder / "a.jsonl"
    path.write_text(GOOD)
    with pytest.raises(ChatFileError, match=r"a.jsonl:1: .*template"):
        markless = TEMPLATE + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
        made = chats()
        wrong = TokenizerFormat(
            made.tokenizer, markless, name="the template", tags=made.tags, specs=made.specs, tokens=made.tokens
        )
        list(examine([path], wrong, Rules(), folder))


def test_check_reports_and_writes_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = _planted(folder), folder / "page.html"
    assert cli.main(["data", "check", str(path), "--out", str(page)]) == 1
    output = capsys.readouterr().out
    assert f"{len(FAULTS) + 5} records" in output
    for kind in {"json", "order", "missing file", "broken file", "media count", "url"}:
        assert f"x {kind} ({BROKEN[kind]})" in output, kind
    shown = page.read_text()
    assert shown.count("<section>") >= 4 and "data:image/jpeg;base64," in shown and "chats.jsonl:5" in shown
    good = folder / "good.jsonl"
    good.write_text(GOOD)
    assert cli.main(["data", "check", str(good), "--samples", "0"]) == 0
    assert cli.main(["data", "check", str(folder / "gone.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_check_never_writes_over_what_it_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = folder / "good.jsonl"
    good.write_text(GOOD)
    assert cli.main(["data", "check", str(good), "--out", str(folder / "folder" / ".." / "good.jsonl")]) == 2
    assert good.read_text() == GOOD and "which is read" in capsys.readouterr().err


def test_a_page_shows_pictures_that_cannot_be_read_as_such(folder: Path) -> None:
    path, page = folder / "a.jsonl", folder / "page.html"
    path.write_text(talk(user(image("torn.png")), said("b")))
    assert cli.main(["data", "check", str(path), "--headers", "--out", str(page)]) == 0
    assert "torn.png: " in page.read_text() and not list(folder.glob(".page*"))


def test_what_is_too_long_is_broken_where_it_is_an_error(folder: Path) -> None:
    path = folder / "a.jsonl"
    path.write_text(GOOD)
    [one] = examine([path], chats(), Rules(max_tokens=8, on_too_long="error"), folder)
    for strict in (False, True):
        result = Findings(strict)
        result.add(one)
        assert len(result.broken) == strict


@pytest.mark.parametrize("record", [None, 3, "x", {}, {"messages": {}}, {"messages": [None]}])
def test_no_record_makes_the_parser_fail_otherwise(record: Any) -> None:
    with pytest.raises(BrokenSampleError):
        parse(record, Path("."))
