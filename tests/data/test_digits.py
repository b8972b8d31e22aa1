from __future__ import annotations

import numpy as np
import pytest
import torch

from interlace.data import IGNORE, DigitsDataset
from interlace.data.builtin.digits import WORDS

TOKENS = {"vision": lambda s: (s[1] // 4) * (s[2] // 4)}


@pytest.fixture(scope="module")
def splits() -> tuple[DigitsDataset, DigitsDataset]:
    return DigitsDataset(tokens=TOKENS, patch_size=4), DigitsDataset(tokens=TOKENS, patch_size=4, split="heldout")


def test_every_digit_is_in_one_split_with_its_word(splits):
    from sklearn.datasets import load_digits

    digits = load_digits()
    train, heldout = splits
    assert sorted(train.indices + heldout.indices) == list(range(1797))
    assert 0.17 < len(heldout) / 1797 < 0.23
    pictures = [{digits.images[i].tobytes() for i in d.indices} for d in splits]
    assert not pictures[0] & pictures[1]
    for dataset in splits:
        for i in range(0, len(dataset), 37):
            sample = dataset[i]
            number = dataset.indices[i]
            answer = dataset.tokenizer.decode(sample.labels[sample.labels != IGNORE].tolist())
            assert answer == WORDS[digits.target[number]] and sample.name.endswith(f"digit/{number}")
            (item,) = sample.media["vision"]
            assert item.shape == tuple(item.data.shape) == (3, 8, 8) and item.tokens == 4
            expected = np.minimum(digits.images[number] * 16, 255) / 255 * 2 - 1
            assert np.allclose(item.data.numpy(), expected, atol=1e-6)
            assert sum(map(sum, dataset.lengths(i).values())) == len(sample.input_ids)


@pytest.mark.parametrize(("patch", "size"), [(4, 8), (8, 8), (14, 14), (16, 16), (5, 10)])
def test_enlarged_to_the_patch(patch, size):
    dataset = DigitsDataset(tokens={"vision": lambda s: 1}, patch_size=patch, length=3)
    assert dataset[0].media["vision"][0].data.shape == (3, size, size) and len(dataset) == 3
    assert dataset.read_items == 1 and not dataset[2].media["vision"][0].loaded and dataset.read_items == 1


def test_jitter_changes_only_training_images_and_every_epoch():
    plain = DigitsDataset(tokens=TOKENS, patch_size=4, length=20)
    settings = {"tokens": TOKENS, "patch_size": 4, "length": 20, "jitter": 1.0}
    one, again, other = DigitsDataset(**settings), DigitsDataset(**settings), DigitsDataset(**settings, seed=1)

    def picture(dataset, index, epoch):
        return dataset.sample(index, epoch).media["vision"][0].data

    for i in range(20):
        first = picture(one, i, 0)
        assert torch.equal(first, picture(again, i, 0)) and first.shape == picture(plain, i, 0).shape
        assert not torch.equal(first, picture(one, i, 1)) and not torch.equal(first, picture(other, i, 0))
        assert torch.equal(one.sample(i, 1).input_ids, plain.sample(i, 1).input_ids)
        # Distorted, but only a little: nearer to its own digit than half of the other images are.
        distances = [(first - picture(plain, j, 0)).square().mean() for j in range(20)]
        assert distances[i] < sorted(distances)[10] and distances[i] < 0.25
    again.set_epoch(3)
    assert torch.equal(again[2].media["vision"][0].data, picture(one, 2, 3))
    held_out = DigitsDataset(**settings, split="heldout")
    assert torch.equal(picture(held_out, 0, 0), picture(held_out, 0, 1))
    assert one.fingerprint() != plain.fingerprint()


def test_bad_settings():
    with pytest.raises(ValueError, match="jitter is the strength"):
        DigitsDataset(tokens=TOKENS, patch_size=4, jitter=-1.0)
    with pytest.raises(ValueError, match="image_size 30 is no multiple of patch_size 16"):
        DigitsDataset(tokens=TOKENS, patch_size=16, image_size=30)
    with pytest.raises(ValueError, match="the budget is 64"):
        DigitsDataset(tokens=TOKENS, patch_size=4, image_size=64)
    with pytest.raises(ValueError, match="needs a vision encoder"):
        DigitsDataset(tokens={})
    with pytest.raises(IndexError):
        DigitsDataset(tokens=TOKENS, length=5)[5]
    with pytest.raises(ValueError, match="no digits in split"):
        DigitsDataset(tokens=TOKENS, length=0)
