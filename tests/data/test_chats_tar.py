"""Tars of WebDataset and Energon: handling of their members, read in place; and broken tars."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from interlace.data import load_chats
from interlace.data.chats.examine import examine
from interlace.data.chats.files.records import ChatFileError, find
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.files.tar import braces
from interlace.modalities import IMAGE
from interlace.modalities.files import member_of, opened
from tests.data.chat_faults import chats
from tests.data.tars import captioned, clip, picture, text, write_tar

TURNS = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "a red one"}]


def _one(path: Path, **rules: Any) -> Any:
    [one] = examine([path], chats(), Rules(**rules), path.parent / "media")
    return one


def _said(one: Any) -> list[tuple[str, str]]:
    return [(part.kind, part.text or member_of(part.path).name) for turn in one.chat.turns for part in turn.parts]


# --- contents of a sample ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        TURNS,
        {"conversations": TURNS},
        {"conversations": TURNS, "image": "where/it/was/before.jpg"},
        {"conversations": TURNS, "image": "a/0001.png"},
        {"conversations": TURNS, "images": ["png"]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": "0001.png"}, {"type": "text", "text": "what is it?"}],
                },
                {"role": "assistant", "content": "a red one"},
            ]
        },
    ],
)
def test_all_shapes_of_json_say_the_same(tmp_path: Path, said: Any) -> None:
    path = write_tar(tmp_path / "s.tar", {"a/0001.png": picture(), "a/0001.json": text(said), "a/0001.cls": b"7"})
    one = _one(path)
    assert one.broken is None, one.broken
    assert _said(one) == [("image", "a/0001.png"), ("text", "what is it?"), ("text", "a red one")]


@pytest.mark.parametrize("members", [{"x.txt": b" a frog \n"}, {"x.json": text({"caption": "a frog"})}])
@pytest.mark.parametrize("prompt", [None, "", "Name it."])
def test_captions_answer_the_prompt(tmp_path: Path, members: dict[str, bytes], prompt: str | None) -> None:
    one = _one(write_tar(tmp_path / "s.tar", {"x.jpg": picture(kind="JPEG")} | members), prompt=prompt)
    asked = IMAGE.question if prompt is None else prompt
    assert _said(one) == [("image", "x.jpg"), *[("text", asked)][: bool(asked)], ("text", "a frog")]


def test_several_pictures_and_a_clip_take_their_places(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image><audio><image>which?"}, {"from": "gpt", "value": "both"}]
    members = {"k.0.png": picture(40), "k.1.png": picture(16), "k.wav": clip(), "k.json": text(turns)}
    one = _one(write_tar(tmp_path / "s.tar", members))
    assert [name for kind, name in _said(one) if kind != "text"] == ["k.0.png", "k.wav", "k.1.png"]
    shapes = [item.shape for item in one.encoded.items]
    assert shapes[0][2] == 40 and shapes[2][2] == 16 and shapes[1][0] == 8


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_read_where_they_are(tmp_path: Path, form: int) -> None:
    """Bytes read through a window equal tarfile's, for pixels and for sound; names of any length."""
    members = {
        ("d" * 90 + "/" if form != tarfile.USTAR_FORMAT else "") + "n" * 60 + f"{n}.png": picture(8 * n, 24)
        for n in (1, 2, 3)
    }
    path = write_tar(tmp_path / "s.tar", {**members, "z.wav": clip(0.25)}, form=form)
    with tarfile.open(path) as tar:
        for info in tar.getmembers():
            name = f"{path}!{info.offset_data}+{info.size}!{info.name}"
            whole = tar.extractfile(info).read()
            with opened(name) as file:
                assert file.read() == whole
                file.seek(-5, 2)
                assert file.read(99) == whole[-5:]
            with opened(name) as file:
                if info.name.endswith(".png"):
                    expected = np.asarray(Image.open(io.BytesIO(whole)))
                    assert np.array_equal(np.asarray(Image.open(file)), expected)
                else:
                    assert np.array_equal(soundfile.read(file)[0], soundfile.read(io.BytesIO(whole))[0])


def test_tar_shards_yield_the_same_samples_as_json_lines(tmp_path: Path) -> None:
    """Oracle: extracted members, with the records as JSON lines."""
    members = captioned(24)
    shards = [
        write_tar(tmp_path / f"s-{n:02d}.tar", dict(list(members.items())[16 * n : 16 * n + 16])) for n in range(3)
    ]
    assert find([tmp_path / "s-{00..02}.tar"]) == shards
    lines = []
    for name, data in members.items():
        (tmp_path / name).write_bytes(data)
        if name.endswith(".txt"):
            asked = {"role": "user", "content": "<image>" + IMAGE.question}
            said = {"role": "assistant", "content": data.decode()}
            lines.append(text({"messages": [asked, said], "image": name.replace("txt", "png")}))
    (tmp_path / "c.jsonl").write_bytes(b"\n".join(lines))
    cache = tmp_path / "cache"
    valid = [tmp_path / "c.jsonl"]
    ours, _ = load_chats([tmp_path / "s-{00..02}.tar"], valid, chats(), Rules(), cache=cache)
    theirs, _ = load_chats([tmp_path / "c.jsonl"], shards, chats(), Rules(), cache=cache)
    assert len(ours) == len(theirs) == 24
    for index in range(24):
        one, other = ours.sample(index), theirs.sample(index)
        assert one.input_ids.equal(other.input_ids) and one.labels.equal(other.labels)
        assert ours.lengths(index) == theirs.lengths(index)
        [mine], [yours] = one.media["vision"], other.media["vision"]
        assert mine.data is not None and mine.data.equal(yours.data)
    assert not list(cache.rglob("*.png")), "nothing is unpacked"


# --- broken tars ------------------------------------------------------------------------------------------

GOOD = {"a.png": picture(), "a.txt": b"a"}


@pytest.mark.parametrize(
    ("members", "kind", "words"),
    [
        ({"b.png": picture()}, "tar", "no json and no txt"),
        ({"b.txt": b"words"}, "tar", "nothing that it is of"),
        ({"b.png": picture(), "b.json": b"{"}, "tar", "no JSON"),
        ({"b.png": picture(), "b.json": b'{"id": 1}'}, "tar", "neither messages nor"),
        ({"b.png": picture(), "b.txt": b"\xff\xfe"}, "tar", "UTF-8"),
        ({"b.png": picture(), "b.json": b'{"caption": "a", "caption": "b"}'}, "tar", "twice"),
        ({"b.0.png": picture(), "b.1.png": picture(), "b.json": text(TURNS)}, "media count", "1 image tags, but 2"),
        (
            {"b.0.png": picture(), "b.1.png": picture(), "b.json": text({"conversations": TURNS, "image": "x.png"})},
            "tar",
            "names 1",
        ),
        ({"b.png": picture()[:60], "b.txt": b"x"}, "broken file", "b.png"),
        ({"b.png": b"", "b.txt": b"x"}, "broken file", "b.png"),
        ({"b.wav": clip()[:20], "b.txt": b"x"}, "broken file", "b.wav"),
        ({"b.jpg": picture(), "b.txt": b"  "}, "empty", "assistant"),
    ],
)
def test_broken_members_cost_their_sample_alone(
    tmp_path: Path, members: dict[str, bytes], kind: str, words: str
) -> None:
    path = write_tar(tmp_path / "s.tar", {**GOOD, **members, "c.png": picture(), "c.txt": b"c"})
    result = list(examine([path], chats(), Rules(), tmp_path / "media"))
    assert [one.broken is None for one in result] == [True, False, True]
    broken = result[1].broken
    assert broken is not None and broken.kind == kind and words in str(broken), broken
    assert result[1].raw.where == f"{path}:2"


def test_members_in_two_places_are_told(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", {"a.png": picture(), "b.png": picture(), "b.txt": b"b", "a.txt": b"a"})
    why = [str(one.broken) for one in examine([path], chats(), Rules(), tmp_path / "media")]
    assert "no json" in why[0] and why[1] == "None" and "two places" in why[2]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_tar_that_was_cut_or_damaged_never_ends_in_silence(tmp_path_factory: Any, data: st.DataObject) -> None:
    """At any place, samples before the damage are read and the loss is reported."""
    folder = tmp_path_factory.mktemp("cut")
    path = write_tar(folder / "s.tar", captioned(6))
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        infos = tar.getmembers()
    end = infos[-1].offset_data + 512
    at = data.draw(st.integers(1, end - 1), label="at")
    cut = data.draw(st.booleans(), label="cut")
    header = (at // 512) * 512 in {info.offset for info in infos}
    if cut:
        path.write_bytes(whole[:at])
    elif header:
        start = (at // 512) * 512
        path.write_bytes(whole[:start] + b"\x55" * 512 + whole[start + 512 :])
    else:
        return
    result = list(examine([path], chats(), Rules(), folder / "media"))
    good = [one for one in result if one.broken is None]
    complete = sum(infos[2 * n + 1].offset_data + infos[2 * n + 1].size <= at for n in range(6))
    assert len(good) <= complete + (at >= infos[-1].offset_data + infos[-1].size)
    if len(good) < 6:
        assert any(one.broken is not None for one in result), (at, cut)
    if at < infos[-1].offset_data + infos[-1].size:
        assert len(good) < 6 and len(good) >= complete - 1


def test_compressed_missing_and_empty_tars_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", GOOD)
    (tmp_path / "s.tar").rename(tmp_path / "s.tar.gz")
    with pytest.raises(ChatFileError, match="decompress"):
        find([tmp_path / "s.tar.gz"])
    with pytest.raises(ChatFileError, match=r"s-001\.tar: no such file"):
        write_tar(tmp_path / "s-000.tar", GOOD)
        find([tmp_path / "s-{000..001}.tar"])
    (tmp_path / "empty.tar").write_bytes(b"")
    [one] = examine([tmp_path / "empty.tar"], chats(), Rules(), tmp_path / "media")
    assert one.broken is not None and "no tar" in str(one.broken)


def test_a_tar_that_changes_becomes_new_samples(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", captioned(8))
    before, _ = load_chats([path], [path], chats(), Rules(), cache=tmp_path / "cache")
    write_tar(path, captioned(9, start=50))
    after, _ = load_chats([path], [path], chats(), Rules(), cache=tmp_path / "cache")
    assert (len(before), len(after)) == (8, 9)
    assert before.fingerprint() != after.fingerprint()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("s-{8..11}.tar", ["s-8.tar", "s-9.tar", "s-10.tar", "s-11.tar"]),
        ("s-{008..010}.tar", ["s-008.tar", "s-009.tar", "s-010.tar"]),
        ("{a,b}-{0..1}.tar", ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]),
        ("{x}.tar", ["{x}.tar"]),
    ],
)
def test_braces(name: str, expected: list[str]) -> None:
    assert braces(name) == expected
