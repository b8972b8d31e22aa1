"""The real package, if it is in the cache (``make train`` puts it there). Nothing is fetched here."""

from __future__ import annotations

from collections import Counter

import pytest

from interlace.data import find_stamps
from interlace.data.builtin.stamps import Settings, draw, media_of, shares
from interlace.data.builtin.stamps_index import is_held_out, load_index
from interlace.data.builtin.stamps_media import write_media

STAMPS = find_stamps()
pytestmark = pytest.mark.skipif(
    STAMPS is None, reason="tuxpaint-stamps-default is not in the cache (make train gets it)"
)


@pytest.fixture(scope="module")
def index():
    return load_index(STAMPS)


@pytest.fixture(scope="module")
def drawn(index):
    return draw(index, Settings())


def test_what_the_package_holds(index):
    assert len(index.stamps) >= 900
    assert sum(bool(s.images) for s in index.stamps) >= 900
    assert all("en" in s.captions for s in index.stamps)
    languages = Counter(clip.language for stamp in index.stamps for clip in stamp.clips.values())
    assert sum(languages.values()) > 7000 and all(languages[x] > 300 for x in "ca ro fr ru bg es be el da".split())
    assert not index.failures
    groups = {s.key: s.group for s in index.stamps}
    assert any(key != group for key, group in groups.items())  # letters share recordings


def test_what_is_drawn_from_it(index, drawn):
    settings = Settings()
    counts = shares(settings.mixture, settings.records)
    assert len(drawn.train) == settings.records
    questions = Counter(r.get("kind") for r in drawn.train)
    assert all(questions[kind] == counts[kind] for kind in ("category", "language"))
    held = Counter(r.get("kind") for r in drawn.validation)
    assert held["category"] > 70 and held["language"] == 512
    sides = {stamp.key: is_held_out(stamp, settings.held_out) for stamp in index.stamps}
    source = {name: f.sources[0] for name, f in drawn.files.items()}
    for made, side in ((drawn.train, False), (drawn.validation, True)):
        for name in {name for record in made for name in media_of(record)}:
            assert (
                sides[source[name].partition("_desc")[0].rpartition(".")[0] or source[name].partition("_desc")[0]]
                == side
            )


@pytest.mark.slow
def test_files_of_all_kinds_can_be_written(drawn, tmp_path):
    some = {name: file for number, (name, file) in enumerate(sorted(drawn.files.items())) if number % 40 == 0}
    assert {target.rpartition(".")[2] for target in some} == {"png", "flac"}
    failed, why = write_media(STAMPS, tmp_path, some, 128, 2)
    assert all("renders to nothing" in reason or "as long as wide" in reason for reason in why.values()), why
    assert all((tmp_path / name).stat().st_size > 100 for name in some if name not in failed)
