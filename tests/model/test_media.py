"""Media that are loaded on first use: once, by the first reader, and only if needed."""

from __future__ import annotations

import copy
import pickle
import threading
import time

import pytest
import torch

from interlace.model import Media, Sample
from tests.tiny import MELS, PATCH, PLACEHOLDERS, tiny_mllm


class Spy:
    """Returns `data` and counts requests."""

    def __init__(self, data, seconds=0.0, failures=0):
        self.data, self.seconds, self.failures, self.calls = data, seconds, failures, 0

    def __call__(self):
        self.calls += 1
        time.sleep(self.seconds)
        if self.calls <= self.failures:
            raise OSError("not yet")
        return self.data


def test_data_are_loaded_once_on_first_use():
    spy = Spy(torch.ones(3, 4, 4))
    item = Media((3, 4, 4), 1, load=spy)
    assert (spy.calls, item.loaded) == (0, False) and "not loaded" in repr(item)
    assert item.data is spy.data and item.data is spy.data
    assert (spy.calls, item.loaded) == (1, True)
    assert Media((3, 4, 4), 1).data is None
    bare = item.without_data()
    assert (bare.shape, bare.tokens, bare.data) == (item.shape, item.tokens, None)


def test_threads_that_ask_at_once_get_one_tensor():
    spy = Spy(torch.ones(3, 4, 4), seconds=0.05)
    item = Media((3, 4, 4), 1, load=spy)
    got = []
    threads = [threading.Thread(target=lambda: got.append(item.data)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert spy.calls == 1 and len(got) == 8 and all(data is spy.data for data in got)


def test_what_is_loaded_is_checked_and_an_error_is_not_kept():
    with pytest.raises(ValueError, match=r"shape \(3, 4, 4\) but its data has \(3, 4, 8\)"):
        Media((3, 4, 4), 1, load=Spy(torch.zeros(3, 4, 8))).data  # noqa: B018
    with pytest.raises(TypeError, match="normalise"):
        Media((3, 4, 4), 1, load=Spy(torch.zeros(3, 4, 4, dtype=torch.uint8))).data  # noqa: B018
    with pytest.raises(ValueError, match="pass one of the two"):
        Media((3, 4, 4), 1, torch.zeros(3, 4, 4), Spy(None))
    item = Media((3, 4, 4), 1, load=Spy(torch.ones(3, 4, 4), failures=1))
    with pytest.raises(OSError, match="not yet"):
        item.data  # noqa: B018
    assert item.data is not None


def test_copies_and_other_processes_get_the_data():
    for duplicate in (copy.deepcopy, copy.copy, lambda item: pickle.loads(pickle.dumps(item))):
        made = duplicate(Media((3, 4, 4), 2, load=lambda: torch.ones(3, 4, 4)))
        assert (made.shape, made.tokens, made.loaded) == ((3, 4, 4), 2, True)
        assert torch.equal(made.data, torch.ones(3, 4, 4))
    assert copy.deepcopy(Media((3, 4, 4), 2)).data is None


def lazy_sample(mllm, spies):
    media = {}
    ids = [1]
    for name, shape in (("vision", (3, 2 * PATCH, PATCH)), ("audio", (MELS, 9)), ("vision", (3, PATCH, PATCH))):
        spies.setdefault(name, []).append(Spy(torch.randn(shape)))
        tokens = mllm.encoders[name].tokens(shape)
        media.setdefault(name, []).append(Media(shape, tokens, load=spies[name][-1]))
        ids += [PLACEHOLDERS[name]] * tokens
    ids = torch.tensor([*ids, 5, 6, 7])
    return Sample(ids, torch.where(ids >= 46, -100, (ids + 9) % 40), media)


def test_collation_loads_only_media_of_its_decoded_module():
    mllm, spies = tiny_mllm(), {}
    sample = lazy_sample(mllm, spies)

    def calls():
        return {name: [spy.calls for spy in each] for name, each in spies.items()}

    mllm.collate_module("language_model", [sample])
    shapes = {name: mllm.collate_module(name, [sample], decode=False) for name in ("vision", "audio")}
    assert calls() == {"vision": [0, 0], "audio": [0]}
    assert all(image.is_meta for image in shapes["vision"]["pixel_values"])
    assert shapes["audio"]["input_features"].is_meta and shapes["audio"]["lengths"].tolist() == [9]
    pixels = mllm.collate_module("vision", [sample])["pixel_values"]
    assert calls() == {"vision": [1, 1], "audio": [0]}
    for image, blank, spy in zip(pixels, shapes["vision"]["pixel_values"], spies["vision"], strict=True):
        assert torch.equal(image, spy.data) and image.shape == blank.shape
    mllm.collate([sample])
    assert calls() == {"vision": [1, 1], "audio": [1]}


def test_custom_collation_gets_items_without_data():
    mllm, spies = tiny_mllm(encoders=("vision",)), {}
    encoder, seen = mllm.encoders["vision"], []
    encoder._collate = lambda items: seen.extend(items) or {"pixel_values": []}
    spies["vision"] = [Spy(torch.ones(3, PATCH, PATCH))]
    ids = torch.tensor([1, PLACEHOLDERS["vision"], 3, 4])
    item = Media((3, PATCH, PATCH), 1, load=spies["vision"][0])
    mllm.collate_module("vision", [Sample(ids, torch.tensor([-100, -100, 9, 8]), {"vision": [item]})], decode=False)
    assert [each.data for each in seen] == [None] and spies["vision"][0].calls == 0


def test_item_metadata_is_kept_by_copies():
    told = {"grid_thw": (1, 16, 24)}
    item = Media((384, 1176), 96, torch.zeros(384, 1176), about=told)
    assert item.about == item.without_data().about == pickle.loads(pickle.dumps(item)).about == told
    assert Media((3, 8, 8), 1).about == {}
