"""Chats through a tokenizer and separate encoders: shapes, targets, truncation, files, caching and rereading."""

from __future__ import annotations

import importlib.util
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from interlace.data import IGNORE, DecodeError, load_chats
from interlace.data.chats.encoding.tokens import Encoded, Item, MediaSettings, TokenizerFormat
from interlace.data.chats.examine import examine, shortened
from interlace.data.chats.files.shapes import Chat, Part, Turn, parse
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.store import prepare
from interlace.modalities.errors import BrokenSampleError
from interlace.modalities.image import ImageSpec, load_image
from tests.data.chat_families import trained
from tests.data.chat_faults import TEMPLATE, chats, image, said, talk, user

MARKED = TEMPLATE.replace(
    "{{ m['content'] }}<|im_end|>",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}",
)


def _format(template: str) -> TokenizerFormat:
    made = chats()
    return TokenizerFormat(
        made.tokenizer, template, name="the template", tags=made.tags, specs=made.specs, tokens=made.tokens
    )


def _sizes(chat: Chat) -> list[tuple[int, int]]:
    return [(40, 24)] * len(chat.media)


# --- the two formats --------------------------------------------------------------------------------------


def test_all_shapes_say_the_same(tmp_path: Path) -> None:
    typed = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    bare = [{"type": "image"}, {"type": "text", "text": "what?"}]
    openai = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "what?"}]
    records = [
        {"messages": [user(typed), said("b")]},
        {"messages": [user(typed), said([{"type": "text", "text": "b"}])]},
        {"messages": [user("<image>what?"), said("b")], "images": ["a.png"]},
        {"messages": [user("<image>what?"), said("b")], "image": "a.png"},
        {"messages": [user(bare), said("b")], "images": [{"path": "a.png"}]},
        {"messages": [user(openai), said("b")]},
        {
            "conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "b"}],
            "image": "a.png",
        },
    ]
    parsed = [parse(record, tmp_path) for record in records]
    assert all(chat == parsed[0] for chat in parsed)
    assert parsed[0].media == [Part("image", path=str(tmp_path / "a.png"))]
    absolute = parse({"messages": [user("<image>"), said("b")], "images": ["/else/a.png"]}, tmp_path)
    assert absolute.media[0].path == "/else/a.png"
    system = parse({"system": "be kind", **records[0]}, tmp_path)
    assert system.turns == (Turn("system", (Part("text", "be kind"),), False), *parsed[0].turns)


def test_media_stand_where_the_text_has_them() -> None:
    record = {"messages": [user("a <image> b <image>"), said("c"), user("<image>"), said("d")], "images": list("xyz")}
    chat = parse(record, Path("/"))
    assert [(part.kind, part.text or part.path) for turn in chat.turns for part in turn.parts] == [
        ("text", "a "),
        ("image", "/x"),
        ("text", " b "),
        ("image", "/y"),
        ("text", "c"),
        ("image", "/z"),
        ("text", "d"),
    ]


# --- targets ----------------------------------------------------------------------------------------------

TALK = {
    "messages": [
        {"role": "system", "content": "be kind"},
        user("<image>what is it?"),
        said("a cat, \u732b"),
        user("and this? <image>"),
        said("nothing", weight=0),
        user("sure?"),
        said("yes"),
    ],
    "images": ["x", "y"],
}


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "marks"])
def test_targets_are_the_answers_that_are_learnt(template: str) -> None:
    made = _format(template)
    chat = parse(TALK, Path("/"))
    encoded = made.encode(chat, _sizes(chat))
    learnt = [token for token, target in zip(encoded.ids, encoded.targets) if target]
    assert made.decode(learnt, skip_special=False) == "a cat, \u732b<|im_end|>yes<|im_end|>"
    assert [item.tokens for item in encoded.items] == [15, 15]
    for item in encoded.items:
        run = encoded.ids[item.start : item.start + item.tokens]
        assert set(run) == {made.placeholders["vision"][0]}
        assert encoded.ids[item.start - 1] != run[0] != encoded.ids[item.start + item.tokens]
    # With a placeholder for each image the result equals HuggingFace's for the same messages.
    flat = [{**m, "content": m["content"]} for m in TALK["messages"]]
    expected = made.tokenizer.apply_chat_template(
        flat, chat_template=template, return_assistant_tokens_mask=template is MARKED, return_dict=True
    )
    kept = [i for i in range(len(encoded.ids)) if not any(0 < i - item.start < item.tokens for item in encoded.items)]
    assert [encoded.ids[i] for i in kept] == expected["input_ids"]
    if template is MARKED:
        learnable = parse(
            {**TALK, "messages": [{k: v for k, v in m.items() if k != "weight"} for m in flat]}, Path("/")
        )
        everything = made.encode(learnable, _sizes(chat)).targets
        assert [int(everything[i]) for i in kept] == expected["assistant_masks"]


def test_white_space_behind_a_marked_answer_is_not_learnt() -> None:
    """As for an answer found without marks: generation stops at the end token."""
    chat = parse(TALK, Path("/"))
    learnt = []
    for template in (MARKED, MARKED.replace("<|im_end|>{% endgen", "<|im_end|>\n{% endgen")):
        made = _format(template).encode(chat, _sizes(chat))
        learnt.append([token for token, wanted in zip(made.ids, made.targets, strict=True) if wanted])
    assert learnt[0] == learnt[1]


@pytest.mark.parametrize(("written", "says"), [("m['content'] | length", "generation"), ("''", "left out is 'a cat,")])
def test_templates_that_rewrite_earlier_turns_are_refused(written: str, says: str) -> None:
    forgetful = TEMPLATE.replace("{{ m['content'] }}", f"{{{{ m['content'] if loop.last else {written} }}}}")
    chat = parse(TALK, Path("/"))
    with pytest.raises(BrokenSampleError, match=f"the template .*{says}") as refused:
        _format(forgetful).encode(chat, _sizes(chat))
    assert refused.value.kind == "template"


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match=r"slow tokenizer.*tokenizer\.json"):
        TokenizerFormat(Slow(), TEMPLATE, name="x", tags={}, specs={}, tokens={})


def test_a_picture_goes_to_every_encoder_that_sees() -> None:
    tokenizer = trained({}, ("<|im_start|>", "<|im_end|>", "<image>", "<eye>"))
    specs = {"vision": ImageSpec(8, 16), "eye": ImageSpec(4, 8)}
    count = {"vision": lambda shape: shape[1] * shape[2] // 64, "eye": lambda shape: 3}
    tags = {"vision": "<image>", "eye": "<eye>"}
    made = TokenizerFormat(tokenizer, TEMPLATE, name="x", tags=tags, specs=specs, tokens=count)
    chat = parse(TALK, Path("/"))
    items = made.encode(chat, _sizes(chat)).items
    assert [(item.encoder, item.medium, item.tokens) for item in items] == [
        ("vision", 0, 15),
        ("eye", 0, 3),
        ("vision", 1, 15),
        ("eye", 1, 3),
    ]
    assert items[1].before == items[0].start


# --- lengths ----------------------------------------------------------------------------------------------


@st.composite
def encoded_samples(draw: st.DrawFn) -> Encoded:
    """Texts and media of any lengths, media of one to three items with text between."""
    ids: list[int] = []
    targets: list[bool] = []
    items: list[Item] = []

    def text(count: int, learnt: bool) -> None:
        ids.extend(draw(st.lists(st.integers(10, 20), min_size=count, max_size=count)))
        targets.extend([learnt] * count)

    for medium in range(draw(st.integers(0, 3))):
        text(draw(st.integers(0, 4)), draw(st.booleans()))
        before = len(ids)
        for _ in range(draw(st.integers(1, 3))):
            text(draw(st.integers(0, 2)), False)
            count = draw(st.integers(1, 5))
            items.append(Item("vision", medium, len(ids), count, before, (3, 8, 8)))
            ids.extend([1] * count)
            targets.extend([False] * count)
    text(draw(st.integers(1, 6)), True)
    return Encoded(ids, targets, items)


@settings(max_examples=200, deadline=None)
@given(encoded_samples(), st.integers(1, 40))
def test_a_cut_leaves_whole_media_and_something_to_learn(encoded: Encoded, most: int) -> None:
    cut = shortened(encoded, most)
    # By brute force: the longest prefix that ends with a target and cuts no medium.
    spans: dict[int, tuple[int, int]] = {}
    for item in encoded.items:
        spans[item.medium] = (item.before, item.start + item.tokens)
    ends = [
        end
        for end in range(2, min(most, len(encoded.ids)) + 1)
        if encoded.targets[end - 1] and not any(first < end < last for first, last in spans.values())
    ]
    if not ends:
        assert cut is None
        return
    assert cut is not None and len(cut.ids) == max(ends)
    assert cut.ids == encoded.ids[: len(cut.ids)] and cut.targets == encoded.targets[: len(cut.ids)]
    assert cut.items == [item for item in encoded.items if item.start + item.tokens <= len(cut.ids)]
    assert sum(item.tokens for item in cut.items) == cut.ids.count(1)


def test_lengths_are_followed_and_told(tmp_path: Path) -> None:
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    long = talk(user(image("a.png")), said("one"), user(image("a.png")), said("two"))
    (tmp_path / "t.jsonl").write_text(f"{long}\n{talk(user('hi'), said('ho'))}\n")
    whole = [one.length for one in examine([tmp_path / "t.jsonl"], chats(), Rules(), tmp_path)]
    rules = Rules(max_tokens=whole[0] - 20, on_too_long="cut")
    store = prepare([tmp_path / "t.jsonl"], chats(), rules, tmp_path / "cache")
    assert [store.where(place) for place in store.cut] == [f"{tmp_path / 't.jsonl'}:1"] and len(store) == 2
    (tmp_path / "v.jsonl").write_text(talk(user("hi"), said("ho")))
    train, _ = load_chats([tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], chats(), rules, cache=tmp_path / "cache")
    sample = train.sample(0)
    assert len(sample.input_ids) < whole[0] and len(sample.media["vision"]) == 1
    assert sample.labels[-2] != IGNORE and sample.labels[-1] == IGNORE
    assert torch.equal(sample.media["vision"][0].data, load_image(tmp_path / "a.png", ImageSpec(8, 16)))
    assert "1 cut to" in train.report() and "t.jsonl:1: cut to" in train.listing()


@pytest.mark.parametrize("turn", range(1, 9))
def test_pictures_are_the_right_way_up(tmp_path: Path, turn: int) -> None:
    told = Image.Exif()
    told[0x0112] = turn
    Image.effect_noise((56, 24), 90).convert("RGB").save(tmp_path / "a.jpg", exif=told, quality=95)
    with Image.open(tmp_path / "a.jpg") as taken:
        ImageOps.exif_transpose(taken).save(tmp_path / "upright.png")
    lines = [talk(user(image(name)), said("b")) for name in ("a.jpg", "upright.png")]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    (tmp_path / "v.jsonl").write_text(lines[0])
    wide = _format(TEMPLATE)
    wide.specs["vision"] = ImageSpec(8, 64)
    train, _ = load_chats([tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], wide, Rules(), cache=tmp_path / "cache")
    turned, upright = (train.sample(i).media["vision"][0] for i in range(2))
    assert turned.shape == upright.shape == ((3, 56, 24) if turn > 4 else (3, 24, 56))
    assert torch.equal(turned.data, upright.data)
    assert torch.equal(turned.data, load_image(tmp_path / "a.jpg", ImageSpec(8, 64)))


@pytest.mark.parametrize("strict", [False, True])
def test_pictures_over_their_budget_are_scaled_down_or_refused(tmp_path: Path, strict: bool) -> None:
    Image.new("RGB", (80, 80), "red").save(tmp_path / "a.png")
    (tmp_path / "t.jsonl").write_text(talk(user(image("a.png")), said("b")))
    made = chats()
    made.media = MediaSettings(strict=strict)
    [one] = examine([tmp_path / "t.jsonl"], made, Rules(), tmp_path)
    if strict:
        assert one.broken is not None and one.broken.kind == "size" and "max_image_tokens" in str(one.broken)
    else:
        assert one.encoded is not None and one.encoded.items[0].shape == (3, 32, 32)


# --- files and caches -------------------------------------------------------------------------------------


def _records(count: int) -> list[dict[str, Any]]:
    return [{"messages": [user(f"question {n}"), said(f"answer {n}")]} for n in range(count)]


def _texts(dataset: Any, made: Any) -> list[str]:
    return [made.decode(dataset.answer(i)) for i in range(len(dataset))]


def test_json_and_json_lines_give_the_same(tmp_path: Path) -> None:
    records = _records(5)
    lines = "\n\n".join(json.dumps(record) for record in records)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "c.json").write_text(lines)
    made = chats()
    result = [prepare([tmp_path / name], made, Rules(), tmp_path / "cache") for name in ("a.jsonl", "b.json", "c.json")]
    assert len({store.fingerprint for store in result}) == 1
    assert [store.where(2).rpartition(":")[2] for store in result] == ["5", "3", "5"]
    for store in result:
        assert store.chat(4) == parse(records[4], tmp_path)
        assert pickle.loads(pickle.dumps(store)).chat(0) == parse(records[0], tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_with_pictures_inside(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    inside = {"bytes": (tmp_path / "a.png").read_bytes(), "path": "a.png"}
    rows = [{"messages": [user("<image>what?"), said(f"b{n}")], "images": [inside]} for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    store = prepare([tmp_path / "a.parquet"], chats(), Rules(), tmp_path / "cache")
    [part] = store.chat(1).media
    assert len(store) == 3 and Path(part.path).read_bytes() == inside["bytes"]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_folders_of_datasets(tmp_path: Path) -> None:
    import datasets

    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    rows = {
        "messages": [[user("<image>what?"), said("b")]] * 3,
        "images": [[{"path": str(tmp_path / "a.png"), "bytes": None}]] * 3,
    }
    table = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    table.save_to_disk(str(tmp_path / "saved"))
    store = prepare([tmp_path / "saved"], chats(), Rules(), tmp_path / "cache")
    assert len(store) == 3 and len(store.encoded(0).items) == 1


def test_prepared_chats_are_cached_until_data_or_rules_change(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text("\n".join(map(json.dumps, _records(4))))
    made = chats()
    first = prepare([path], made, Rules(), cache)
    again = prepare([path], made, Rules(), cache)
    assert (
        again.folder == first.folder
        and (again.folder / "ids.bin").stat().st_ino == (first.folder / "ids.bin").stat().st_ino
    )
    assert prepare([path], made, Rules(max_tokens=64), cache).folder != first.folder
    assert prepare([path], _format(MARKED), Rules(), cache).folder != first.folder
    path.write_text("\n".join(map(json.dumps, _records(5))))
    assert len(prepare([path], made, Rules(), cache)) == 5
    (first.folder / "ids.bin").write_bytes(b"")  # a torn folder is rebuilt
    path.write_text("\n".join(map(json.dumps, _records(4))))
    assert len(prepare([path], made, Rules(), cache)) == 4


def test_media_are_compared_with_what_they_were(tmp_path: Path) -> None:
    lines = [talk(user(image(f"{name}.png")), said("b")) for name in "ab"]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    assert len(prepare([tmp_path / "t.jsonl"], chats(), Rules(), tmp_path / "cache")) == 1
    Image.new("RGB", (40, 24), "red").save(tmp_path / "b.png")  # the missing file exists now
    result = prepare([tmp_path / "t.jsonl"], chats(), Rules(), tmp_path / "cache")
    assert len(result) == 2 and not result.left_out
    inode = (result.folder / "ids.bin").stat().st_ino
    Image.new("RGB", (24, 40), "red").save(tmp_path / "a.png")
    again = prepare([tmp_path / "t.jsonl"], chats(), Rules(), tmp_path / "cache")
    assert [item.shape for i in range(2) for item in again.encoded(i).items] == [(3, 40, 24), (3, 24, 40)]
    assert (again.folder / "ids.bin").stat().st_ino != inode
    assert result.encoded(0).items[0].shape == (3, 24, 40)  # a reader of the old one keeps it


def test_other_counts_of_tokens_are_prepared_anew(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    (tmp_path / "t.jsonl").write_text(talk(user(image("a.png")), said("b")))

    def refuses(shape: tuple[int, ...]) -> int:
        raise ValueError("no such shape")

    counts: list[Any] = [lambda shape: 16, lambda shape: 4, refuses, lambda shape: 4]
    for count in counts:
        made = chats(vision=count)
        if count is refuses:
            with pytest.raises(ValueError, match="no such shape"):
                prepare([tmp_path / "t.jsonl"], made, Rules(), tmp_path / "cache")
            continue
        [item] = prepare([tmp_path / "t.jsonl"], made, Rules(), tmp_path / "cache").encoded(0).items
        assert item.tokens == count(item.shape)


def test_image_resized_after_preparation_is_replaced_by_blank(tmp_path: Path) -> None:
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    for name in "tv":
        (tmp_path / f"{name}.jsonl").write_text(talk(user(image("a.png")), said("b")))
    train, _ = load_chats([tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], chats(), Rules(), cache=tmp_path / "cache")
    Image.new("RGB", (24, 40), "red").save(tmp_path / "a.png")
    assert not train.sample(0).media["vision"][0].data.any()
    assert train.blank_items == 1 and "when it was prepared" in train.report()


def test_record_changed_after_preparation_yields_blank_image(tmp_path: Path) -> None:
    for name, color in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (40, 24), color).save(tmp_path / f"{name}.png")
    for name in "tv":
        (tmp_path / f"{name}.jsonl").write_text(talk(user(image("a.png")), said("b")))
    train, _ = load_chats([tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], chats(), Rules(), cache=tmp_path / "cache")
    (tmp_path / "t.jsonl").write_text(talk(user(image("b.png")), said("b")))
    assert not train.sample(0).media["vision"][0].data.any()
    assert "is another record" in train.report()


def test_a_store_that_is_pruned_stays_readable_for_who_uses_it(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(talk(user("a"), said("b")))
    stores = [prepare([tmp_path / "t.jsonl"], chats(), Rules(max_tokens=64 + n), tmp_path / "c") for n in range(10)]
    assert not stores[0].folder.exists()
    assert stores[0].encoded(0).ids == stores[9].encoded(0).ids and stores[0].chat(0) == stores[9].chat(0)


def test_held_out_records_are_the_same_every_time_and_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [*_records(60), *_records(60)])))
    made = chats()
    pairs = [load_chats([path], [], made, Rules(), held_out=0.2, cache=tmp_path / "cache") for _ in range(2)]
    (train, held), (other, _) = pairs
    assert train.fingerprint() == other.fingerprint() != held.fingerprint()
    assert len(train) + len(held) == 120 and not set(_texts(train, made)) & set(_texts(held, made))
    assert np.array_equal(train.token_lengths, [len(train.sample(i)) for i in range(len(train))])


def test_a_picture_that_changes_is_noticed_and_read_as_blank(tmp_path: Path) -> None:
    for name in "ab":
        Image.new("RGB", (40, 24), "red").save(tmp_path / f"{name}.png")
    lines = [talk(user(image(f"{name}.png")), said("b")) for name in "ab"]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    (tmp_path / "v.jsonl").write_text(lines[0])
    train, _ = load_chats([tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], chats(), Rules(), cache=tmp_path / "cache")
    (tmp_path / "b.png").write_bytes(b"gone")
    good, bad = (train.sample(i).media["vision"][0] for i in range(2))
    assert good.data is not None and bool(good.data.any())
    assert bad.data is not None and not bool(bad.data.any())
    assert train.blank_items == 1 and train.read_items == 2 and "b.png" in train.report()


def test_a_worker_process_reads_the_same_without_the_encoders(tmp_path: Path) -> None:
    Image.effect_noise((40, 24), 60).convert("RGB").save(tmp_path / "a.png")
    for name in "tv":
        (tmp_path / f"{name}.jsonl").write_text(talk(user(image("a.png")), said("b")))
    train, _ = load_chats([tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], chats(), Rules(), cache=tmp_path / "cache")
    assert train.format.tokens
    sent = pickle.loads(pickle.dumps(train))
    assert sent.format.tokens == {} and train.format.tokens
    ours, theirs = train.sample(0), sent.sample(0)
    assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.labels, theirs.labels)
    assert torch.equal(ours.media["vision"][0].data, theirs.media["vision"][0].data)
    assert sent.fingerprint() == train.fingerprint()


def test_missing_file_counts_one_blank_item_per_sample(tmp_path: Path) -> None:
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    line = json.dumps({"messages": [user("<image>" * 12), said("b")], "images": ["a.png"] * 12})
    for name in "tv":
        (tmp_path / f"{name}.jsonl").write_text(f"{line}\n" * 40)
    train, _ = load_chats([tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], chats(), Rules(), cache=tmp_path / "cache")
    (tmp_path / "a.png").unlink()
    for index in range(8):
        assert not any(item.data.any() for item in train.sample(index).media["vision"])
    assert train.blank_items == 8
    with pytest.raises(DecodeError, match="9 of 9 items that were verified"):
        train.sample(8).media["vision"][0].data  # noqa: B018
