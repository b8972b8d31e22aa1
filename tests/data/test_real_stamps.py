"""The real package, when it is in the cache (``make train`` puts it there); nothing is fetched here."""

from __future__ import annotations

import pytest

from interlace.data import AudioSpec, ImageSpec, StampsDataset, find_stamps, summary, unigram_nats
from interlace.data.index import clip_languages, load_index
from interlace.data.media import DecodeError, ImageTooLarge
from interlace.data.pack import decode_item
from tests.data.package import TOKENS

STAMPS = find_stamps()
pytestmark = pytest.mark.skipif(
    STAMPS is None, reason="tuxpaint-stamps-default is not in the cache (make train gets it)"
)


@pytest.fixture(scope="module")
def index():
    return load_index(STAMPS)


def test_what_the_package_holds(index):
    assert len(index.stamps) >= 900
    assert sum(bool(s.images) for s in index.stamps) >= 900
    assert all("en" in s.captions for s in index.stamps)
    languages = clip_languages(index)
    assert sum(languages.values()) > 7000 and all(languages[x] > 300 for x in "ca ro fr ru bg es be el da".split())
    assert not index.failures
    groups = {s.key: s.group for s in index.stamps}
    assert any(key != group for key, group in groups.items())  # letters share recordings


def test_a_sample_of_files_decodes_to_the_promised_shape(index):
    images, audio = ImageSpec(), AudioSpec()
    failed = []
    for stamp in index.stamps[::23]:
        for image in stamp.images:
            try:
                decode_item(index.root, (image.path, images.fit(image.width, image.height, image.path)), images)
            except ImageTooLarge:
                pass
            except DecodeError as error:
                failed.append(str(error))
        for clip in list(stamp.clips.values())[:3]:
            decode_item(index.root, (clip.path, audio.shape(clip.frames, clip.rate)), audio)
    assert all("renders to nothing" in error for error in failed)


@pytest.mark.slow
def test_every_sample_of_an_epoch(tmp_path):
    train = StampsDataset(STAMPS, tokens=TOKENS, cache=tmp_path)
    heldout = StampsDataset(STAMPS, tokens=TOKENS, cache=tmp_path, split="heldout")
    assert all("renders to nothing" in why for why in train.failures.values()) and len(train.failures) <= 20
    for dataset in (train, heldout):
        total = 0
        for i in range(len(dataset)):
            sample = dataset[i]
            total += len(sample.input_ids)
            assert {k: [m.tokens for m in v] for k, v in sample.media.items()} == {
                k: v for k, v in dataset.lengths(i).items() if v and k != "text"
            }
            assert all(tuple(m.data.shape) == m.shape for v in sample.media.values() for m in v)
        assert total == summary(dataset)["tokens"]["sample"]["total"]
    nats = unigram_nats(map(train.answer, range(len(train))), map(heldout.answer, range(len(heldout))))
    assert 3.0 < nats < 4.5
