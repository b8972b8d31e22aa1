"""The index gives the same records as the files alone, even after kills, changes and torn writes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import cli
from interlace.data.chats.examine import examine
from interlace.data.chats.files import index as chats_index
from interlace.data.chats.files import index_pool
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.records import ChatFileError, Raw, records
from interlace.data.chats.files.shapes import stated
from interlace.data.chats.files.sources import Rules, chat_of
from interlace.modalities import named
from interlace.modalities.errors import BrokenSampleError
from tests.data.chat_faults import chats, said, talk, user
from tests.data.tars import captioned, picture, write_tar

HEADERS = Rules(decode=False)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that little data has many."""
    monkeypatch.setattr(chats_files, "PIECE", 2_000)
    monkeypatch.setattr(chats_index, "LARGE", 0)


def _write(path: Path, count: int, start: int = 0) -> Path:
    """Records of several lengths about eight images, some of them broken, with blank lines between."""
    for number in range(8):
        place = path.parent / f"p{number}.png"
        if not place.exists():
            place.write_bytes(picture(16 + number, 24))
    rng = random.Random(start)
    lines = []
    for number in range(start, start + count):
        words = " ".join(["word"] * rng.randint(1, 60))
        if number % 17 == 5:
            lines.append("{broken")
        elif number % 13 == 3:
            lines += ["", talk(user(f"<image>{number}"), said(words), images=["not/there.png"])]
        else:
            lines.append(talk(user(f"<image>{number} \u00e4\u732b"), said(words), images=[f"p{number % 8}.png"]))
    with open(path, "ab") as file:
        file.write(("\n".join(lines) + "\n").encode())
    return path


def _whole(index: chats_index.ChatIndex) -> tuple[list[Raw], list[list[chats_index.Known]]]:
    """All blocks of the index, joined."""
    blocks = list(index.blocks(16))
    assert sum(len(raws) for raws, _ in blocks) == len(index)
    return [raw for raws, _ in blocks for raw in raws], [known for _, known in blocks for known in known]


def _check(index: Any, files: list[Path], media: Path) -> None:
    """Compares with reading the files at once, without an index."""
    raws, known = _whole(index)
    expected = [raw for path in files for raw in records(path, media)]
    assert raws == expected
    for raw, told in zip(raws, known, strict=True):
        try:
            parts = chat_of(raw, HEADERS).media
        except BrokenSampleError:
            assert told == []
            continue
        assert len(told) == len(parts)
        for part, (when, size) in zip(parts, told, strict=True):
            there = os.path.exists(part.path)
            assert size == (named(part.kind).probe(part.path, decode=False) if there else ())
            assert when == ((os.stat(part.path).st_size, os.stat(part.path).st_mtime_ns) if there else (-1, -1))


def _made(index: Any) -> dict[str, float]:
    """Creation time of each piece."""
    return {file.name: file.stat().st_mtime_ns for file in (index.folder / "pieces").iterdir()}


def test_an_index_is_what_reading_gives(tmp_path: Path) -> None:
    first, second = _write(tmp_path / "a.jsonl", 120), _write(tmp_path / "b.jsonl", 40, start=500)
    tar = write_tar(tmp_path / "t.tar", {**captioned(5), "x.txt": b"lost"})
    (tmp_path / "c.json").write_text("[" + talk(user("a"), said("b")) + "]")
    files = [first, tar, second, tmp_path / "c.json"]
    index = chats_index.load(files, HEADERS, tmp_path / "cache" / "media", processes=2)
    raws, _ = _whole(index)
    assert len(chats_files.pieces(first)) > 5
    plain = [path for path in files if path != tar]
    assert [r for r in raws if r.path != tar] == [r for path in plain for r in records(path, tmp_path)]
    assert [(r.where, r.line or r.broken) for r in raws if r.path == tar] == [
        (r.where, r.broken or r.line) if r.broken else (r.where, r.line) for r in records(tar, tmp_path)
    ]
    assert index.totals["records"] == len(raws) and index.totals["image"] == sum(
        len(chat_of(raw, HEADERS).media) for raw in raws if _is_chat(raw)
    )
    assert index.totals["broken"] == sum(not _is_chat(raw) for raw in raws)


def _is_chat(raw: Any) -> bool:
    try:
        chat_of(raw, HEADERS)
    except BrokenSampleError:
        return False
    return True


def test_samples_are_the_same_with_and_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.jsonl", 150)
    tar = write_tar(tmp_path / "t.tar", captioned(5))
    made = chats()
    ours = list(examine([path, tar], made, Rules(), tmp_path / "one" / "media"))
    assert (tmp_path / "one" / "index").is_dir()
    monkeypatch.setattr(chats_index, "LARGE", 1 << 40)
    theirs = list(examine([path, tar], made, Rules(), tmp_path / "two" / "media"))
    assert not (tmp_path / "two" / "index").exists()
    assert [(one.raw, one.chat, one.encoded, str(one.broken), one.media) for one in ours] == [
        (one.raw, one.chat, one.encoded, str(one.broken), one.media) for one in theirs
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.just(b""), st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")))),
    st.integers(1, 50),
    st.booleans(),
)
def test_pieces_of_any_size_have_each_line_once(
    tmp_path_factory: Any, lines: list[bytes], piece: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    text = b"\n".join(lines) + (b"\n" if ends else b"")
    path.write_bytes(text if not text.startswith(b"[") else b" " + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chats_files, "PIECE", piece)
        if path.read_bytes().lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return
        result = list(records(path, path.parent))
    with path.open("rb") as file:
        whole = [(number, line) for number, line in enumerate(file, 1)]
    whole = [(n, line[3:] if n == 1 and line.startswith(b"\xef\xbb\xbf") else line) for n, line in whole]
    assert [(raw.number, raw.line) for raw in result] == [(n, line) for n, line in whole if line.strip()]
    data = path.read_bytes()
    assert all(data[raw.offset : raw.offset + len(raw.line)] == raw.line for raw in result)


# --- changes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_appended_costs_what_is_new(tmp_path: Path) -> None:
    path, media = _write(tmp_path / "a.jsonl", 100), tmp_path / "cache" / "media"
    before = _made(chats_index.load([path], HEADERS, media, processes=1))
    time.sleep(0.02)
    _write(path, 30, start=700)
    index = chats_index.load([path], HEADERS, media, processes=1)
    _check(index, [path], media)
    after = _made(index)
    assert [after[name] for name in before].count(0) == 0
    assert sum(after[name] != before[name] for name in before) == 1, "the last piece alone"


def test_a_last_line_that_grows_is_read_again(tmp_path: Path) -> None:
    """Also if the piece that contains it ended with the file."""
    path, media = tmp_path / "a.jsonl", tmp_path / "cache" / "media"
    line = talk(user("a"), said("b" * (2_000 - len(talk(user("a"), said(""))))))
    path.write_text(line)
    assert path.stat().st_size == chats_files.PIECE
    chats_index.load([path], HEADERS, media, processes=1)
    path.write_text(line + "   \n" + talk(user("c"), said("d")) + "\n")
    _check(chats_index.load([path], HEADERS, media, processes=1), [path], media)


@pytest.mark.slow
def test_a_touched_file_is_kept_and_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path, media = _write(tmp_path / "a.jsonl", 100), tmp_path / "cache" / "media"
    before = _made(chats_index.load([path], HEADERS, media, processes=1))
    os.utime(path, ns=(1, 1))
    assert _made(chats_index.load([path], HEADERS, media, processes=1)) == before
    data = bytearray(path.read_bytes())
    at = data.index(b"word", 5_000)
    data[at : at + 4] = b"lord"
    path.write_bytes(bytes(data))  # the same length as before
    index = chats_index.load([path], HEADERS, media, processes=1)
    _check(index, [path], media)
    assert sum(when != before[name] for name, when in _made(index).items()) == 1
    stat = path.stat()
    data[at : at + 4] = b"ward"
    path.write_bytes(bytes(data))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a hidden change is found by the record's checksum
    index = chats_index.load([path], HEADERS, media, processes=1)
    with pytest.raises(ChatFileError, match="has changed since it was indexed"):
        _whole(index)


@pytest.mark.parametrize(
    "how", ["cut", pytest.param("flipped", marks=pytest.mark.slow), pytest.param("gone", marks=pytest.mark.slow)]
)
def test_a_torn_index_is_made_anew(tmp_path: Path, how: str) -> None:
    path, media = _write(tmp_path / "a.jsonl", 60), tmp_path / "cache" / "media"
    tar = write_tar(tmp_path / "t.tar", captioned(3))
    folder = chats_index.load([path, tar], HEADERS, media, processes=1).folder
    for place in sorted((folder / "pieces").iterdir()):
        data = place.read_bytes()
        if how == "gone":
            place.unlink()
        else:
            middle = len(data) // 2
            place.write_bytes(data[:middle] + (b"" if how == "cut" else bytes([data[middle] ^ 1]) + data[middle + 1 :]))
    index = chats_index.load([path, tar], HEADERS, media, processes=1)
    raws, _ = _whole(index)
    assert raws == [raw for file in (path, tar) for raw in records(file, tmp_path)]


@pytest.mark.slow
def test_a_picture_that_changed_since_is_looked_at_again(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", 60)
    before = [one.encoded for one in examine([path], chats(), HEADERS, tmp_path / "cache" / "media")]
    (tmp_path / "p0.png").write_bytes(picture(80, 24))
    after = [one.encoded for one in examine([path], chats(), HEADERS, tmp_path / "cache" / "media")]
    assert before[0].items[0].shape == (3, 24, 16) and after[0].items[0].shape[2] > 16  # type: ignore[union-attr]
    assert before[1] == after[1]


# --- kills ------------------------------------------------------------------------------------------------

SLOW = """
import sys, time
from pathlib import Path
from interlace.data.chats.files import index, index_pool, records, sources
records.PIECE = 2_000
real = index_pool._Worker.ask
def ask(*arguments):
    found = real(*arguments)
    print("done", flush=True)
    time.sleep(0.3)
    return found
index_pool._Worker.ask = ask
index.load([Path(sys.argv[1])], sources.Rules(decode=False), Path(sys.argv[2]), processes=1)
"""


@pytest.mark.slow
def test_who_is_killed_goes_on_behind_what_is_done(tmp_path: Path) -> None:
    path, media = _write(tmp_path / "a.jsonl", 200), tmp_path / "cache" / "media"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(path), str(media)], stdout=subprocess.PIPE, env=environment
    )
    assert killed.stdout is not None
    for _ in range(3):
        assert killed.stdout.readline() == b"done\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    [folder] = [place for place in (tmp_path / "cache" / "index").iterdir() if place.is_dir()]
    before = {p.name: p.stat().st_mtime_ns for p in (folder / "pieces").iterdir() if not p.name.startswith(".")}
    assert 3 <= len(before) < len(chats_files.pieces(path))
    index = chats_index.load([path], HEADERS, media, processes=1)
    _check(index, [path], media)
    after = _made(index)
    assert all(after[name] == when for name, when in before.items() if name in after)
    assert sum(after.get(name) == when for name, when in before.items()) >= 3


@pytest.mark.slow
def test_dead_index_worker_is_replaced_repeated_deaths_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, media = _write(tmp_path / "a.jsonl", 100), tmp_path / "cache" / "media"
    real, asked = index_pool._Worker.ask, []

    def ask(self: Any, *arguments: Any) -> Any:
        asked.append(self)
        if len(asked) == 2:
            self._process.kill()
        return real(self, *arguments)

    monkeypatch.setattr(index_pool._Worker, "ask", ask)
    _check(chats_index.load([path], HEADERS, media, processes=1), [path], media)
    assert len({id(worker) for worker in asked}) == 2

    def always(self: Any, *arguments: Any) -> Any:
        self._process.kill()
        return real(self, *arguments)

    monkeypatch.setattr(index_pool._Worker, "ask", always)
    _write(path, 5, start=900)
    with pytest.raises(ChatFileError, match=r"a\.jsonl: the process that indexes it.*start again to go on"):
        chats_index.load([path], HEADERS, media, processes=1)


def test_a_worker_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.jsonl", 5)
    real = index_pool._Worker.__init__

    def stopped(self: Any) -> None:
        real(self)
        self._process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(index_pool._Worker, "__init__", stopped)
    monkeypatch.setattr(index_pool, "SILENT", 0.3)
    with pytest.raises(ChatFileError, match="has given no sign for"):
        chats_index.load([path], HEADERS, tmp_path / "cache" / "media", processes=1)


# --- sizes that records state -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "record", "place", "count", "expected"),
    [
        ("image", {"width": 40, "height": 24}, 0, 1, (40, 24)),
        ("image", {"width": [40, 8], "height": [24, 9]}, 1, 2, (8, 9)),
        ("image", {"width": 40, "height": 24}, 0, 2, ()),
        ("image", {"width": [40], "height": [24]}, 0, 2, ()),
        ("image", {"width": True, "height": 24}, 0, 1, ()),
        ("image", {"width": -1, "height": 24}, 0, 1, ()),
        ("image", {"width": "40", "height": 24}, 0, 1, ()),
        ("image", "a.png", 0, 1, ()),
        ("audio", {"samples": 16_000, "rate": 16_000}, 0, 1, (16_000, 16_000)),
        ("video", {"width": 4, "height": 6, "seconds": 2.5}, 0, 1, (4.0, 6.0, 2.5)),
        ("video", {"width": 4, "height": 6}, 0, 1, ()),
    ],
)
def test_stated_sizes(kind: str, record: Any, place: int, count: int, expected: tuple[float, ...]) -> None:
    assert stated(kind, record, place, count) == expected


def test_sizes_of_records_open_no_file_and_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.png").write_bytes(picture(40, 24))
    lines = [
        talk(user("<image>a"), said("b"), images=["p.png"], width=40, height=24),
        talk(user("<image>a"), said("b"), images=[{"path": "p.png", "width": 40, "height": 24}]),
        talk(
            user([{"type": "image", "image": "p.png", "width": 40, "height": 24}, {"type": "text", "text": "a"}]),
            said("b"),
        ),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(chats_index, "LARGE", 1 << 40)
    files = [one.encoded for one in examine([tmp_path / "a.jsonl"], chats(), Rules(), tmp_path / "m")]
    (tmp_path / "p.png").unlink()
    trusting = Rules(sizes="records")
    result = list(examine([tmp_path / "a.jsonl"], chats(), trusting, tmp_path / "m"))
    assert [one.encoded for one in result] == files and all(one.media == {} for one in result)
    broken = [one.broken for one in examine([tmp_path / "a.jsonl"], chats(), Rules(), tmp_path / "m")]
    assert all(one is not None and one.kind == "missing file" for one in broken)


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_counts_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "a.jsonl", 60)
    arguments = ["data", "index", str(path), "--cache", str(tmp_path / "cache"), "--processes", "1"]
    assert cli.main(arguments) == 1
    said_ = capsys.readouterr().out
    broken = sum(line.startswith("{broken") for line in path.read_text().splitlines())
    assert f"60 records, {broken} of them broken" in said_ and f"{60 - broken} of kind image" in said_
    assert "json: no JSON" in said_
    good = tmp_path / "b.jsonl"
    good.write_text(talk(user("a"), said("b")) + "\n")
    assert cli.main(["data", "index", str(good), "--cache", str(tmp_path / "cache")]) == 0
    assert cli.main(["data", "index", str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main(["data", "index", str(good), "--processes", "0"]) == 2
