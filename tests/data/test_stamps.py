"""The stamps as chats: the records, the files that they name, held-out samples, and substitutes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from interlace.cli import main
from interlace.data import DecodeError, load_chats
from interlace.data.builtin import stamps_folder
from interlace.data.builtin.fetch import exclusive
from interlace.data.builtin.stamps import (
    KINDS,
    LANGUAGES,
    QUESTIONS,
    Drawn,
    MediaFile,
    Settings,
    _Entry,
    _Side,
    draw,
    media_of,
    shares,
    texts_of,
    walk,
)
from interlace.data.builtin.stamps_index import Clip, Stamp, is_held_out, load_index
from interlace.data.builtin.stamps_media import distorted, write_media
from interlace.data.chats.encoding.bpe import LEAST, write_tokenizer
from interlace.data.chats.encoding.load import load_tokenizer
from interlace.data.chats.encoding.tokens import TokenizerFormat
from interlace.data.chats.files.sources import Rules
from interlace.modalities.audio import AudioSpec
from interlace.modalities.image import ImageSpec
from tests.data.package import BROKEN, SETTINGS, WORDS

SPECS = {"vision": ImageSpec(16, 9), "audio": AudioSpec(80, 6.0)}
TOKENS = {"vision": lambda s: (s[1] // 16) * (s[2] // 16), "audio": lambda s: -(-s[1] // 2)}


def read(folder: Path, split: str) -> list[Any]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text("utf-8").splitlines()]


def hashes(folder: Path) -> dict[str, str]:
    """Hashes of all files except made.json and README.md, which contain the path of the package."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (stamps_folder.MADE, stamps_folder.README)
    }


def kind_of(record: Any) -> str:
    """Kind of the record according to its question."""
    [*media], text = media_of(record), texts_of(record)[0]
    kinds = "+".join("speech" if path.endswith(".flac") else "image" for path in media)
    if text.startswith("Say in "):
        return "text"
    asked = {question: kind for kind, question in QUESTIONS.items()}
    return asked.get(text, "images" if len(media) > 1 and "speech" not in kinds else kinds)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(KINDS), st.floats(0.01, 9), min_size=1), st.integers(1, 5000))
def test_records_are_as_many_of_each_kind_as_its_share_says(mixture: dict[str, float], records: int) -> None:
    result = shares(mixture, records)
    assert sum(result.values()) == records
    assert all(abs(count - records * mixture[k] / sum(mixture.values())) < 1 for k, count in result.items())


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 9))
def test_nothing_comes_again_before_all_have_come(size: int, count: int, seed: int) -> None:
    result = walk(size, count, [seed])
    assert len(result) == count and result == walk(size, count, [seed])
    assert all(len(set(result[at : at + size])) == len(result[at : at + size]) for at in range(0, count, size))


def test_the_mixture_of_kinds_and_what_they_ask(package: Path, folder: Path) -> None:
    drawn = draw(load_index(package / "stamps/1/stamps"), SETTINGS)
    counts = Counter(map(kind_of, drawn.train))
    assert set(counts) == {"category", "language", "image", "speech", "image+speech", "images", "text"}
    assert sum(counts.values()) == 150 and max(counts.values()) - min(counts.values()) <= 1
    train, held = read(folder, "train"), read(folder, "validation")
    assert all(record in drawn.train for record in train) and 120 < len(train) < 150  # without broken files
    for record in train + held:
        kind = kind_of(record)
        assert record.get("kind") == (kind if kind in QUESTIONS else None)
        words = texts_of(record)[-1]
        if kind == "category":
            assert media_of(record)[0].split("/")[1] == words
        elif kind == "language":
            code = media_of(record)[0].rpartition("_desc")[2].strip("_").partition(".")[0] or "en"
            assert words == LANGUAGES[code]
        else:
            assert all(any(w.split("{}")[0] in line for w in WORDS.values()) or "voi" in line or "mot" in line
                       for line in words.splitlines()), words  # fmt: skip


def test_no_stamp_is_on_both_sides_in_any_kind(package: Path, folder: Path) -> None:
    index = load_index(package / "stamps/1/stamps")
    sides = {stamp.key: is_held_out(stamp, SETTINGS.held_out) for stamp in index.stamps}
    for split in ("train", "validation"):
        for record in read(folder, split):
            for path in media_of(record):
                stem = path.removeprefix("media/").partition("_desc")[0].partition(".")[0]
                assert sides[stem.partition("@")[0]] == (split == "validation"), path
    held = {name for record in read(folder, "validation") for name in media_of(record)}
    assert held and not held & {name for record in read(folder, "train") for name in media_of(record)}
    assert not any(name.endswith(("@1.png", "@2.png")) for name in held)  # undistorted
    assert is_held_out(next(s for s in index.stamps if s.key == "odd/twin"), 0.3) == sides["odd/both"]  # one file
    questions = Counter(tuple(media_of(r)) for r in read(folder, "validation") if "kind" in r)
    assert max(questions.values()) == 1


def test_broken_files_are_named_and_in_no_record(folder: Path) -> None:
    output = (folder / stamps_folder.README).read_text("utf-8")
    assert output.startswith("# Chats about pictures and speech") and "are Tux Paint's" in output
    for path in BROKEN - {"broken/fonts.svg"}:  # a PNG replaces it, if it is shown at all
        stem = path.partition(".")[0]
        assert f"- {path}: " in output, path
        assert not any(stem in name for record in read(folder, "train") for name in media_of(record)) or "fonts" in stem
    assert "odd/long_desc.ogg: shorter than 0.1 s or longer than 4 s" in output
    assert "odd/wordy.txt [en]: a caption of more than 80 characters" in output
    for name in {name for split in ("train", "validation") for r in read(folder, split) for name in media_of(r)}:
        assert (folder / name).stat().st_size > 50, name


def test_a_full_disk_is_not_taken_for_a_broken_file(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a.png").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_media(tmp_path, tmp_path / "out", {"a.png": MediaFile("a.png", ("a.png",))}, side=8, workers=1)


def test_the_same_settings_write_the_same_bytes(package: Path, folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    stamps_folder.make(again, SETTINGS, cache=package)
    assert hashes(again) == hashes(folder)
    other = draw(load_index(package / "stamps/1/stamps"), replace(SETTINGS, seed=1))
    assert other.train != draw(load_index(package / "stamps/1/stamps"), SETTINGS).train
    before = {path: path.stat().st_mtime_ns for path in again.rglob("*")}
    assert stamps_folder.make(again, SETTINGS, cache=package).source == "stamps"
    assert {path: path.stat().st_mtime_ns for path in again.rglob("*")} == before  # no work is repeated
    text_only = replace(SETTINGS, mixture={"text": 1.0}, records=5)
    stamps_folder.make(again, text_only, cache=package)
    assert len(read(again, "train")) == 5 and not (again / "media").exists()
    assert set(tmp_path.iterdir()) == {again, tmp_path / ".again.lock"}
    (tmp_path / "link").symlink_to(again)
    stamps_folder.make(tmp_path / "link", replace(text_only, records=4), cache=package)
    assert len(read(again, "train")) == 4 and (tmp_path / "link").is_symlink()


def test_what_is_somebody_elses_is_left_alone(package: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/diary.txt").write_text("dear")
    for there in ("mine", "mine/diary.txt"):
        with pytest.raises(FileExistsError, match="holds something else: name a new folder"):
            stamps_folder.make(tmp_path / there, SETTINGS, cache=package)
    assert (tmp_path / "mine/diary.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda folder: (folder / "train.jsonl").write_text(""), SETTINGS),
        (lambda folder: (folder / "train.jsonl").write_text(""), replace(SETTINGS, records=40)),
        (lambda folder: (folder / "mine.jsonl").write_text("{}"), replace(SETTINGS, records=40)),
        (lambda folder: (folder / "media/mine.png").write_bytes(b""), replace(SETTINGS, records=40)),
    ],
)
def test_a_folder_changed_by_hand_is_not_written_over(
    folder: Path, package: Path, tmp_path: Path, change: Any, settings: Settings
) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    change(own)
    before = hashes(own)
    with pytest.raises(FileExistsError, match=r"changed by hand, or made by another version.*: remove it, or name ano"):
        stamps_folder.make(own, settings, cache=package)
    assert hashes(own) == before


def test_neighbours_of_the_folder_are_left_alone(package: Path, tmp_path: Path) -> None:
    few = replace(SETTINGS, mixture={"text": 1.0}, records=5)
    for name, others in (("stamps", [".stamps-backup", ".stamps-2.tmp-123"]), ("s[ab]*", [".sa.tmp-1", ".sab.tmp-12"])):
        mine, stale = [tmp_path / each for each in others], tmp_path / f".{name}.tmp-99"
        for each in (*mine, stale):
            each.mkdir()
        stamps_folder.make(tmp_path / name, few, cache=package)
        assert all(each.is_dir() for each in mine) and not stale.exists()


def test_waiting_for_a_locked_folder_leaves_the_lock_in_place(package: Path, tmp_path: Path) -> None:
    with exclusive(tmp_path / ".out.lock", 1):
        for _ in range(2):  # the first gives up waiting; the second still has to wait
            with pytest.raises(TimeoutError, match="another process has held"):
                stamps_folder.make(tmp_path / "out", SETTINGS, cache=package, timeout=0)


def test_stamps_are_not_replaced_by_digits(folder: Path, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    with caplog.at_level("INFO", "interlace.data"):
        assert stamps_folder.make(own, SETTINGS, cache=tmp_path / "empty") == stamps_folder.look(folder)
    assert "kept as it is, as stamps cannot be had now: apt-get not found" in caplog.text
    with pytest.raises(FileExistsError, match="holds stamps made with other settings, and none can be had now"):
        stamps_folder.make(own, replace(SETTINGS, records=40), cache=tmp_path / "empty")
    assert hashes(own) == hashes(folder)


def test_every_picture_has_a_file_of_its_own() -> None:
    """Also for a stamp with the name of another stamp's second image."""
    one, other = (Stamp(f"animals/{name}") for name in ("lion", "lion-1"))
    drawn = Drawn()
    side = _Side([], SETTINGS, False, drawn)
    pictures = [(f"{stamp.key}.png",) for stamp in (one, other)]
    made = [side._picture(_Entry(s, p, {}, [])) for _ in range(3) for s, p in zip((one, other), pictures, strict=True)]
    assert len(set(made)) == 6 and len(drawn.files) == 6
    clips = {side._clip(Clip(path, "en", 8000, 8000)) for path in ("a/x_desc.ogg", "a/x_desc.wav", "a/x_desc.v2.ogg")}
    assert len(clips) == 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"records": 0}, "records 0 is at least 1"),
        ({"held_out": 1.0}, "between 0 and 1: 1"),
        ({"languages": ("tlh",)}, "no language 'tlh'; there are en, fr"),
        ({"languages": ()}, "languages is empty"),
        ({"mixture": {"smell": 1.0}}, "no kind of record 'smell'"),
        ({"mixture": {"text": 0.0}}, "not all 0"),
    ],
)
def test_settings_that_fit_nothing(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**wrong)


def test_digits_replace_stamps_until_stamps_are_available(package: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    few = replace(SETTINGS, records=40)
    made = stamps_folder.make(tmp_path / "out", few, cache=tmp_path / "empty")
    assert made.source == "digits" and made == stamps_folder.look(tmp_path / "out")
    assert made.settings == few
    assert made.words.startswith("stamps not available (apt-get not found") and "\n" not in made.words
    train, held = read(tmp_path / "out", "train"), read(tmp_path / "out", "validation")
    assert len(train) == 40 and len(held) > 400 and {r["kind"] for r in train + held} == {"digit"}
    assert {texts_of(r)[-1] for r in held} == set("zero one two three four five six seven eight nine".split())
    assert stamps_folder.make(tmp_path / "out", few, cache=package).source == "stamps"
    assert not any(r.get("kind") == "digit" for r in read(tmp_path / "out", "train"))


def test_digits_are_written_without_fetching(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(stamps_folder, "find_or_fetch", lambda _: pytest.fail("nothing is fetched"))
    command = ["data", "digits", str(tmp_path / "out"), "--records", "40"]
    assert main(command) == 0 and "40 chats to train on" in capsys.readouterr().out
    made, files = stamps_folder.look(tmp_path / "out"), hashes(tmp_path / "out")
    assert made is not None and made.source == "digits"
    words = (tmp_path / "out" / stamps_folder.README).read_text()
    assert words.startswith("# Chats about handwritten digits") and "speech" not in words and "Left out" not in words
    table = json.loads((tmp_path / "out" / stamps_folder.MADE).read_text())
    assert table["key"]["settings"].keys() == {"records", "seed", "held_out", "looks", "vocabulary"}
    assert table["words"].startswith("scikit-learn's handwritten digits: 40 chats")
    table["key"]["settings"] |= {"languages": ["en"], "pictures": 3}  # as earlier versions wrote
    (tmp_path / "out" / stamps_folder.MADE).write_text(json.dumps(table))
    assert main(command) == 0 and hashes(tmp_path / "out") == files
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    assert main(["data", "digits", str(own)]) == 2 and "holds stamps: remove it" in capsys.readouterr().err
    assert hashes(own) == hashes(folder)


def test_every_record_is_a_sample_of_the_promised_shapes(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer")
    tags = {"vision": "<image>", "audio": "<audio>"}
    chats = TokenizerFormat(
        tokenizer, tokenizer.chat_template, name="the template", tags=tags, specs=SPECS, tokens=TOKENS
    )
    files = [folder / "train.jsonl"], [folder / "validation.jsonl"]
    moved = tmp_path / "moved"
    train, held = load_chats(*files, chats, Rules(), cache=tmp_path / "cache")
    assert len(train) == len(read(folder, "train")) and train.report().endswith("every sample could be used")
    for index in range(0, len(train), 3):
        sample = train.sample(index)
        assert all(item.data.shape == item.shape for items in sample.media.values() for item in items)
        text = tokenizer.decode(sample.input_ids)
        assert text.startswith("<|user|>") and text.count("<|assistant|>") == 1
        learnt = tokenizer.decode(sample.labels[sample.labels >= 0])
        assert learnt.endswith("<|end|>") and text.endswith(learnt)
    assert set(held.questions()) == set(QUESTIONS)
    shutil.copytree(folder, moved)  # including its media
    assert len(load_chats([moved / "train.jsonl"], files[1], chats, Rules(), cache=tmp_path / "cache")[0]) == len(train)


def test_the_tokenizer_writes_any_text_and_marks_answers(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer")
    for text in ("Вещь номер 3.", "Ένα πράγμα", "a\tb  c", "\u6f22\U0001f438"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    typed = [{"type": "image"}, {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": typed}, {"role": "assistant", "content": "A frog."}]
    out = tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
    marked = [token for token, learnt in zip(out["input_ids"], out["assistant_masks"], strict=True) if learnt]
    assert tokenizer.decode(marked) == "A frog.<|end|>"
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|><image>What?<|assistant|>"
    with pytest.raises(ValueError, match=f"at least {LEAST}"):
        write_tokenizer(tmp_path, ["a"], 100)


def test_distorted_pictures_are_of_the_size_and_the_seed() -> None:
    picture = Image.effect_noise((40, 24), 90).convert("RGB")
    first, again, other = (distorted(picture, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.size == picture.size and first.tobytes() == again.tobytes() != other.tobytes()
    white = distorted(Image.new("RGB", (20, 20), "white"), np.random.default_rng(3))
    assert white.getextrema() == ((255, 255),) * 3  # white stays white


def test_media_that_vanish_are_noticed(folder: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    tokenizer = load_tokenizer(own / "tokenizer")
    tags = {"vision": "<image>", "audio": "<audio>"}
    chats = TokenizerFormat(tokenizer, tokenizer.chat_template, name="t", tags=tags, specs=SPECS, tokens=TOKENS)
    train, _ = load_chats([own / "train.jsonl"], [own / "validation.jsonl"], chats, Rules(), cache=tmp_path / "c")
    shutil.rmtree(own / "media")
    with pytest.raises(DecodeError, match="can no longer be read"):
        for index in range(len(train)):
            for items in train.sample(index).media.values():
                assert [item.data for item in items]
