from __future__ import annotations

import os

import pytest
import soundfile

from interlace.data.builtin.stamps_index import StampIndex, is_held_out, load_index
from tests.data.package import write_captions, write_png


@pytest.fixture(scope="module")
def index(tree) -> StampIndex:
    return load_index(tree)


def stamp(index: StampIndex, key: str):
    return next(s for s in index.stamps if s.key == key)


def test_captions_of_every_language(index):
    assert stamp(index, "things/thing05").captions == {
        "en": "A thing number 5.",
        "fr": "Une chose numéro 5.",
        "ru": "Вещь номер 5.",
    }
    # A byte order mark, an invalid line and an empty caption.
    assert stamp(index, "odd/voiceonly").captions == {"en": "A voice.", "fr": "Une voix."}


def test_pictures_with_their_size_svg_first(index):
    both = stamp(index, "odd/both")
    assert [(i.path, i.width, i.height) for i in both.images] == [("odd/both.svg", 40, 20), ("odd/both.png", 40, 20)]
    assert [(i.width, i.height) for i in stamp(index, "things/thing03").images] == [(51, pytest.approx(93 * 96 / 72))]
    assert stamp(index, "odd/voiceonly").images == []


def test_clips_with_their_duration(index, tree):
    for key in ("things/thing05", "odd/both"):
        for clip in stamp(index, key).clips.values():
            samples, rate = soundfile.read(tree / clip.path, always_2d=True)
            assert (clip.frames, clip.rate) == (len(samples), rate)
            assert clip.seconds == len(samples) / rate
    assert {k: c.path for k, c in stamp(index, "odd/both").clips.items()} == {
        "fr": "odd/both_desc_fr.ogg.ogg",
        "ru": "odd/both_desc_ru.wav",
    }
    assert set(stamp(index, "things/thing05").clips) == {"en", "fr", "ru"}


def test_what_is_left_out_is_said(index):
    assert set(index.failures) == {"broken/header.png", "broken/clip_desc_fr.ogg", "broken/text.txt"}
    assert all(reason and str(index.root) not in reason for reason in index.failures.values())
    assert index.skipped == {
        "odd/long_desc_fr.ogg": ("no caption in its language", "fr"),
        "odd/uncaptioned.png": ("no caption", ""),
    }


def test_stamps_that_share_a_file_share_a_group(index):
    assert stamp(index, "odd/twin").group == stamp(index, "odd/both").group == "odd/both"
    assert stamp(index, "odd/long").group == "odd/long"
    for fraction in (0.2, 0.5, 0.8):
        assert is_held_out(stamp(index, "odd/twin"), fraction) == is_held_out(stamp(index, "odd/both"), fraction)


def test_split_is_a_fixed_share_by_hash(index):
    from interlace.data.builtin.stamps_index import Stamp

    many = [Stamp(f"a/{n}", group=f"a/{n}") for n in range(4000)]
    assert 0.08 < sum(is_held_out(s, 0.1) for s in many) / 4000 < 0.12
    small = {s.key for s in many if is_held_out(s, 0.1)}
    assert small < {s.key for s in many if is_held_out(s, 0.2)}  # a larger share only adds
    # Another hash would silently move stamps between the splits of old and new runs.
    assert [n for n in range(60) if is_held_out(many[n], 0.1)] == [2, 18, 23, 41, 48, 49, 50]


def test_saved_index_is_used_and_equal(own_tree, monkeypatch):
    first = load_index(own_tree)
    monkeypatch.setattr("interlace.data.builtin.stamps_index.build_index", lambda *a: pytest.fail("built again"))
    assert load_index(own_tree) == first


def test_changed_files_and_torn_index_are_noticed(own_tree):
    before = load_index(own_tree)
    write_captions(own_tree / "things/new.txt", 99)
    write_png(own_tree / "things/new.png", 20, 20)
    (own_tree / "things/thing01.png").write_bytes(b"gone bad")
    after = load_index(own_tree)
    assert len(after.stamps) == len(before.stamps) + 1
    assert "things/thing01.png" in after.failures
    saved = own_tree.parent / "index.json"
    saved.write_bytes(saved.read_bytes()[:1000])
    assert load_index(own_tree) == after
    saved.write_text("{}")
    assert load_index(own_tree) == after


def test_no_folder_and_no_stamps(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder; fetch the stamps"):
        load_index(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no captioned stamps"):
        load_index(tmp_path / "empty")
    assert not any(p.name.startswith(".index") for p in os.scandir(tmp_path))
