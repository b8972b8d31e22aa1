from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch

from interlace.data import IGNORE, DecodeError, ImageTooLarge, StampsDataset, summary
from interlace.data.stamps import KINDS, WEIGHTS
from tests.data.package import BROKEN, LANGUAGES, TOKENS, WORDS, make_stamps


def media_files(dataset: StampsDataset, epochs: int = 1) -> set[str]:
    return {m.source for e in range(epochs) for i in range(len(dataset)) for m in dataset.recipe(i, e).media}


def same(a, b) -> bool:
    return (
        torch.equal(a.input_ids, b.input_ids)
        and torch.equal(a.labels, b.labels)
        and a.name == b.name
        and {k: [(m.shape, m.tokens) for m in v] for k, v in a.media.items()}
        == {k: [(m.shape, m.tokens) for m in v] for k, v in b.media.items()}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_equal_the_decoded_truth(tree, kind):
    dataset = make_stamps(tree, weights={kind: 1.0}, length=40)
    tokenizer = dataset.tokenizer
    for i in range(len(dataset)):
        sample, lengths, layout = dataset[i], dataset.lengths(i), dataset.layout(i)
        assert set(lengths) == {"text", "vision", "audio"}
        assert {m for m in ("vision", "audio") if lengths[m]} == set(KINDS[kind]) == set(sample.media)
        for modality, items in sample.media.items():
            assert lengths[modality] == [m.tokens for m in items]
            for item in items:
                assert tuple(item.data.shape) == item.shape and item.data.dtype == torch.float32
                assert torch.isfinite(item.data).all() and item.data.std() > 0
                assert item.tokens == TOKENS[modality](tuple(item.data.shape))
        # The layout, read off the tokens themselves: each item is a run of its placeholder.
        expected = []
        for modality, count in layout:
            expected += [tokenizer.placeholders.get(modality)] * count
        assert len(sample.input_ids) == len(expected) == sum(map(sum, lengths.values()))
        placeholders = set(tokenizer.placeholders.values())
        actual = [t if t in placeholders else None for t in sample.input_ids.tolist()]
        assert actual == expected
        assert lengths["text"] == [n for m, n in layout if m == "text"]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_the_shifted_answer_and_nothing_else(tree, kind):
    dataset = make_stamps(tree, weights={kind: 1.0}, length=40)
    for i in range(len(dataset)):
        sample, recipe = dataset[i], dataset.recipe(i)
        valid = sample.labels != IGNORE
        answer = sample.labels[valid].tolist()
        assert answer == dataset.answer(i) == [*recipe.answer.encode(), dataset.tokenizer.EOS]
        first = int(valid.nonzero()[0])
        assert valid[first:].all() and not valid[:first].any()
        assert sample.input_ids[first] == dataset.tokenizer.SEP
        assert torch.equal(sample.labels[first:-1], sample.input_ids[first + 1 :])
        assert sample.input_ids.dtype == sample.labels.dtype == torch.int64


def test_the_answer_is_determined_by_the_prompt(tree):
    """Captions come from the stamp's file, in the language of the tag, which for speech is the speech's."""
    dataset = make_stamps(tree, length=200)
    questions = dataset.questions()
    by_key = {s.key: s for s in dataset.index.stamps}
    seen = Counter()
    for i in range(len(dataset)):
        recipe, sample = dataset.recipe(i), dataset[i]
        seen[recipe.kind] += 1
        tokens = sample.input_ids.tolist()
        tag = tokens[tokens.index(dataset.tokenizer.LANG) + 1 : tokens.index(dataset.tokenizer.SEP)]
        assert bytes(tag).decode() == recipe.language
        keys = [m.source.split("_desc")[0].rsplit(".", 1)[0] for m in recipe.media] or [recipe.stamp]
        if recipe.kind in questions:
            [item] = recipe.media
            spoken = item.source.partition("_desc")[2].split(".")[0].lstrip("_") or "en"
            assert recipe.answer == {"category": item.source.split("/")[0], "language": spoken}[recipe.kind]
            assert recipe in questions[recipe.kind] and keys == [recipe.stamp]
            continue
        for m in recipe.media:
            if m.modality == "audio":
                suffix = m.source.split("_desc")[1]
                assert suffix.startswith("." if recipe.language == "en" else f"_{recipe.language}.")
        if recipe.kind == "images":
            assert 2 <= len(keys) == len(set(keys)) <= dataset.max_images
        else:
            assert set(keys) == {recipe.stamp}
            keys = keys[:1]
        assert recipe.answer == "\n".join(by_key[k].captions[recipe.language] for k in keys)
        if recipe.kind == "text":
            others = {c for lang, c in by_key[recipe.stamp].captions.items() if lang != recipe.language}
            assert recipe.text in others or (not recipe.text and not others)
    assert set(seen) == set(KINDS)


def test_mixture_follows_the_weights_exactly(tree):
    for weights in ({**WEIGHTS}, {"image": 3, "text": 1}, {"speech": 2, "images": 1, "text": 0}):
        dataset = make_stamps(tree, weights=weights, length=61)
        counts = Counter(dataset.recipe(i, 2).kind for i in range(61))
        total = sum(weights.values())
        assert all(abs(counts[kind] - 61 * w / total) < 1 for kind, w in weights.items())


def test_every_file_comes_once_before_any_comes_twice(tree):
    dataset = make_stamps(tree, weights={"speech": 1.0}, length=10)
    clips = [dataset.recipe(i, epoch).media[0].source for epoch in range(40) for i in range(10)]
    assert len(set(clips)) == sum(len(entry.clips) for entry in dataset.entries)
    assert max(Counter(clips).values()) - min(Counter(clips).values()) <= 1


def test_deterministic_per_seed_epoch_and_index(tree, stamps):
    again = make_stamps(tree)
    assert all(same(stamps[i], again[i]) for i in range(len(stamps)))
    again.set_epoch(3)
    assert any(not same(stamps[i], again[i]) for i in range(len(stamps)))
    assert all(same(stamps.sample(i, 3), again[i]) for i in range(len(stamps)))
    assert stamps.fingerprint() == make_stamps(tree).fingerprint() != make_stamps(tree, seed=1).fingerprint()
    assert any(stamps.recipe(i) != make_stamps(tree, seed=1).recipe(i) for i in range(20))
    assert same(stamps[-1], stamps[len(stamps) - 1])
    with pytest.raises(IndexError, match="sample 80 of 80"):
        stamps[80]


def test_split_by_stamp_without_any_leak(tree):
    train, heldout = make_stamps(tree, length=400), make_stamps(tree, length=400, split="heldout")
    assert not set(train.stamp_keys()) & set(heldout.stamp_keys())
    assert not media_files(train, 3) & media_files(heldout, 3)
    bytes_of = [{(tree / f).read_bytes() for f in media_files(d, 3)} for d in (train, heldout)]
    assert not bytes_of[0] & bytes_of[1]
    for dataset, other in ((train, heldout), (heldout, train)):
        mine = {dataset.recipe(i, e).stamp for i in range(400) for e in range(3)}
        assert mine <= set(dataset.stamp_keys()) and not mine & set(other.stamp_keys())
        assert len(dataset.stamp_keys()) >= 5
    # The split depends on nothing else.
    other = make_stamps(tree, seed=9, languages=("fr",), weights={"text": 1}, split="heldout")
    assert set(other.stamp_keys()) <= set(heldout.stamp_keys())


def test_samples_are_made_without_decoding_and_each_item_is_read_once_when_asked_for(tree, monkeypatch):
    dataset, read = make_stamps(tree), []
    real = StampsDataset.read
    monkeypatch.setattr(StampsDataset, "read", lambda self, item: read.append(item.source) or real(self, item))
    samples = [dataset[i] for i in range(len(dataset))]
    assert not read and dataset.read_items == 0
    pictures = [item for sample in samples for item in sample.media.get("vision", [])]
    assert len(pictures) > 10 and all(item.data is item.data for item in pictures)
    assert len(read) == dataset.read_items == len(pictures)
    assert all(name.endswith((".png", ".svg")) for name in read)
    again = make_stamps(tree)
    assert again.fingerprint() == dataset.fingerprint() and again.failures == dataset.failures
    assert all(same(sample, again[i]) for i, sample in enumerate(samples))
    other = next(item for i in range(len(again)) for item in again[i].media.get("vision", []))
    assert torch.equal(other.data, pictures[0].data)


def test_broken_files_are_named_counted_and_never_used(tree, stamps):
    assert set(stamps.failures) == BROKEN
    assert not media_files(stamps, 5) & BROKEN
    assert "odd/both.svg" in media_files(make_stamps(tree, length=400, held_out=0.001))
    line = stamps.report()
    pictures = sum(
        p.suffix in (".png", ".svg") and p.stem not in ("both_mirror", "uncaptioned") for p in tree.rglob("*")
    )
    assert line.startswith("stamps/train: 2 of ") and "\n" not in line and len(line) < 700
    assert f"4 of {pictures} pictures cannot be decoded, e.g. broken/fonts.svg (" in line
    listing = stamps.listing().splitlines()
    assert all(any(f"cannot be decoded: {path}: " in entry for entry in listing) for path in BROKEN)
    assert len(listing) == len(stamps.failures) + len(stamps.skipped)
    assert "1 skipped (longer than 4 s)" in line and "1 skipped (too elongated for 64 image tokens)" in line
    # The SVG that draws nothing is stood in for by the PNG of the same stamp.
    everything = make_stamps(tree, length=600, held_out=0.001)
    assert "broken/fonts.png" in media_files(everything)
    # Of a stamp whose recording is broken the rest is used.
    assert {everything.recipe(i).stamp for i in range(600)} >= {"broken/middle", "broken/pixels"}


def test_long_clips_are_skipped_not_cut(tree):
    short = make_stamps(tree, max_audio_seconds=0.55, length=300)
    long_ones = {p for p, why in short.skipped.items() if why == "longer than 0.55 s"}
    assert len(long_ones) > 10 and not long_ones & media_files(short)
    for i in range(len(short)):
        for item in short[i].media.get("audio", []):
            assert item.shape[1] <= 55


def test_long_captions_are_skipped(tree):
    dataset = make_stamps(tree, length=600, held_out=0.001)
    assert dataset.skipped["odd/wordy.txt [en]"] == "caption longer than 256 bytes"
    assert all(len(dataset.recipe(i).answer.encode()) <= 4 * 257 for i in range(600))
    assert any(dataset.recipe(i).answer == "Un mot." for i in range(600))


def test_image_too_large_for_the_budget(tree):
    with pytest.raises(ImageTooLarge, match=r"\d+ images exceed .*; the first: .*\.(png|svg): .*budget is 8"):
        make_stamps(tree, max_image_tokens=8, on_too_large="error")
    with pytest.raises(ImageTooLarge, match=r"odd/long\.png.*too elongated"):
        make_stamps(tree, max_image_tokens=300, on_too_large="error")
    small = make_stamps(tree, max_image_tokens=8)
    assert max(n for i in range(len(small)) for n in small.lengths(i)["vision"]) <= 8
    assert small.skipped["odd/long.png"] == "too elongated for 8 image tokens"


def test_a_file_lost_after_verification_keeps_the_sequence_and_is_reported(own_tree, caplog):
    settings = {"limit_bytes": 0, "weights": {"image": 1.0}, "length": 60}
    dataset, blind = make_stamps(own_tree, **settings), make_stamps(own_tree, **settings)
    lost = dataset.recipe(0).media[0].source
    (own_tree / lost).unlink()
    with caplog.at_level(logging.ERROR, "interlace.data"):
        samples = [dataset[i] for i in range(60)]
        assert dataset.blank_items == 0  # nobody has looked yet
        for sample in samples:
            assert sample.media["vision"][0].data is not None
    assert all(same(s, blind[i]) for i, s in enumerate(samples))
    assert (samples[0].media["vision"][0].data == 0).all()
    assert lost in dataset.failures and lost in dataset.listing()
    assert sum(lost in message for message in caplog.messages) == 1  # said once
    assert dataset.blank_items == sum(lost in dataset.recipe(i).media[0].source for i in range(60)) > 0
    assert dataset.read_items == 60 and not blind.read_items


def test_data_that_are_lost_under_the_run_end_it(own_tree):
    dataset = make_stamps(own_tree, limit_bytes=0, weights={"image": 1.0}, length=60)
    for picture in (own_tree / "things").glob("*.png"):
        picture.write_bytes(b"")
    with pytest.raises(
        DecodeError, match=r"9 of \d+ items that were verified before the run can no longer be read, the"
    ):
        for i in range(60):
            dataset[i].media["vision"][0].data  # noqa: B018


def test_models_with_one_encoder_or_none(tree):
    vision = make_stamps(tree, tokens={"vision": TOKENS["vision"]})
    assert set(vision.weights) == {"image", "images", "text", "category"}
    assert set(vision.lengths(0)) == {"text", "vision"}
    assert set(make_stamps(tree, tokens={}).weights) == {"text"}
    with pytest.raises(ValueError, match=r"'speech' samples need an encoder for \['audio'\]"):
        make_stamps(tree, tokens={"vision": TOKENS["vision"]}, weights={"speech": 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"video": 1}}, "unknown kind of sample 'video'; known: image, speech"),
        ({"weights": {"image": -1}}, "weights are at least 0"),
        ({"weights": {"image": 0}}, "all weights are 0"),
        ({"held_out": 1.5}, "between 0 and 1"),
        ({"languages": ()}, "languages is empty"),
        ({"languages": ("xx",)}, "no train sample of kind"),
        ({"split": "test"}, 'split must be "train" or "heldout"'),
        ({"tokens": {"video": len}}, "no modality 'video'"),
        ({"on_too_large": "crop"}, 'must be "downscale" or "error"'),
        ({"max_images": 1}, "max_images must be at least 2"),
        ({"length": 0}, "length is the number of samples per epoch"),
        ({"patch_size": 0}, "patch_size and max_tokens must be at least 1"),
    ],
)
def test_bad_settings_are_refused_with_what_to_do(tree, settings, message):
    with pytest.raises(ValueError, match=message):
        make_stamps(tree, **settings)


def test_an_item_without_tokens_is_refused(tree):
    dataset = make_stamps(tree, tokens={"vision": lambda s: 0}, weights={"image": 1})
    with pytest.raises(ValueError, match=r"tokens\['vision'\]\(.*\) gave 0"):
        dataset.lengths(0)


def test_summary_counts_what_is_there(stamps):
    report = summary(stamps)
    assert report["samples"] == 80 and sum(report["kinds"].values()) == sum(report["languages"].values()) == 80
    assert set(report["languages"]) == set(LANGUAGES) and set(report["kinds"]) == set(KINDS)
    samples = [stamps[i] for i in range(80)]
    assert report["tokens"]["sample"]["total"] == sum(len(s.input_ids) for s in samples)
    assert report["tokens"]["sample"]["max"] == max(len(s.input_ids) for s in samples)
    for modality in ("vision", "audio"):
        items = [m for s in samples for m in s.media.get(modality, [])]
        assert report["items"][modality] == len(items)
        assert report["tokens"][modality]["total"] == sum(m.tokens for m in items)
    assert report["answer_tokens"] == sum(int((s.labels != IGNORE).sum()) for s in samples)
    assert set(report["failed"]) == BROKEN and report["skipped"]["longer than 4 s"] == 1
    import json

    json.dumps(report)


def test_captions_are_what_the_package_says(stamps):
    assert any(
        WORDS[r.language].format(int(r.stamp[-2:])) == r.answer
        for r in map(stamps.recipe, range(80))
        if r.kind == "speech" and r.stamp.startswith("things/")
    )


@pytest.mark.parametrize("kind", ["image", "speech", "image+speech", "images", "text"])
@pytest.mark.parametrize("languages", [("en", "fr", "ru"), ("ru",)])
def test_the_longest_sample_and_prompt_are_the_longest_of_all_that_are_drawn(tree, kind, languages):
    dataset = make_stamps(tree, weights={kind: 1.0}, languages=languages, max_images=2, length=400)
    sample, prompt = dataset.longest()
    drawn = [dataset.recipe(i, epoch) for epoch in range(12) for i in range(len(dataset))]
    totals = [sum(count for _, count in dataset._layout(recipe)) for recipe in drawn]
    assert max(totals) == sample
    assert max(t - len(r.answer.encode()) for t, r in zip(totals, drawn, strict=True)) == prompt
