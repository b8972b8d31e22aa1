"""Keys of records: each is read, refused by name or listed as ignored, in all file formats and reading modes."""

from __future__ import annotations

import io
import json
import pickle
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from interlace import cli
from interlace.data.builtin.stamps_folder import SPLITS
from interlace.data.chats.encoding.processor import ProcessorFormat
from interlace.data.chats.encoding.tokens import ChatFormat, TokenizerFormat
from interlace.data.chats.examine import Examined, examine
from interlace.data.chats.files import index as chats_index
from interlace.data.chats.files import records as chats_files
from interlace.data.chats.files.keys import (
    FILE_KEYS,
    REFUSED_FILE,
    REFUSED_RECORD,
    TURNS,
    WEIGHTS,
    record_keys,
    refused_turn,
)
from interlace.data.chats.files.shapes import parse
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.store import prepare
from interlace.data.chats.stream import ChatStream
from interlace.modalities import all_modalities
from interlace.modalities.errors import BrokenSampleError
from interlace.modalities.image import ImageSpec
from tests.data import chat_families
from tests.data.brought_records import cases
from tests.data.chat_faults import TEMPLATE, chats, said, talk, user
from tests.data.templates import QWEN3, TOKENS

KNOWN = {
    *record_keys(),
    *REFUSED_RECORD,
    *refused_turn(),
    *REFUSED_FILE,
    *WEIGHTS,
    *FILE_KEYS,
    *(key for pair in TURNS.values() for key in pair),
    *(key for modality in all_modalities() for key in (*modality.limits, *modality.size_keys)),
    *("type", "text", "image_url", "label", "fps"),
}


def formats(folder: Path) -> dict[str, ChatFormat]:
    made = chats()
    specs: Any = {**made.specs, "vision": ImageSpec(8, 64)}
    tokenizer = chat_families.trained({}, (*TOKENS, "<audio>"))
    family = chat_families.qwen2_vl(folder / "model")
    plain, qwen3 = (
        TokenizerFormat(tokenizer, template, name="the template", tags=made.tags, specs=specs, tokens=made.tokens)
        for template in (TEMPLATE, QWEN3)
    )
    whole = ProcessorFormat(family.processor, name="the template", placeholders=family.placeholders)
    return {"plain": plain, "qwen3": qwen3, "whole": whole}


def learnt(one: Examined, made: ChatFormat) -> list[str]:
    """Learnt text of a record, without the end-of-turn token; tags of thoughts and breaks are spaces."""
    assert one.encoded is not None
    runs: list[list[int]] = []
    pairs = list(zip(one.encoded.ids, one.encoded.targets, strict=True))
    for place, (token, target) in enumerate(pairs):
        if target and not (place and pairs[place - 1][1]):
            runs.append([])
        if target:
            runs[-1].append(token)
    texts = [made.decode(run, skip_special=False) for run in runs]
    assert all(text.endswith("<|im_end|>") for text in texts)
    cut = [text.removesuffix("<|im_end|>").replace("<think>", " ").replace("</think>", " ") for text in texts]
    return [" ".join(text.split()) for text in cut]


def test_records_as_people_bring_them(tmp_path: Path) -> None:
    brought = cases(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(case.record) + "\n" for case in brought))
    for name, made in formats(tmp_path).items():
        for case, one in zip(brought, examine([tmp_path / "a.jsonl"], made, Rules(), tmp_path / "media"), strict=True):
            kind, word = case.refused
            if kind:
                assert one.broken is not None and one.broken.kind == kind and word in str(one.broken), (name, case, one)
                continue
            assert one.broken is None and one.chat is not None, (name, case.name, one.broken)
            assert learnt(one, made) == list(case.learnt), (name, case.name)
            assert one.chat.ignored == case.ignored, (name, case.name)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tools", "[]"), ("objects", {"ref": [], "bbox": []}), ("objects", {"ref": None}), ("bbox", [[]])],
)
def test_a_refused_key_without_content_is_passed_over(key: str, value: Any, tmp_path: Path) -> None:
    """Empty values as tables write them: a struct of empty lists, JSON in a text column."""
    record = {"messages": [user("what?"), said("b")]}
    assert parse(record | {key: value}, tmp_path) == parse(record, tmp_path)


# --- any key ----------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "system": "be kind",
    "messages": [
        user([{"type": "image", "image": {"path": "a.png"}}, {"type": "text", "text": "what?"}]),
        said("b"),
        user("<image>and?"),
        said("c", loss=False),
    ],
    "images": [{"path": "b.png"}],
    "kind": "colour",
}
PLACES = {
    "": lambda record: record,
    "messages[]": lambda record: record["messages"][0],
    "messages[].content[]": lambda record: record["messages"][0]["content"][0],
    "messages[].content[].image": lambda record: record["messages"][0]["content"][0]["image"],
    "images[]": lambda record: record["images"][0],
}
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.lists(st.integers(), max_size=2), st.just({"a": 1})
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(PLACES)), st.text(min_size=1, max_size=12), VALUES)
def test_an_unknown_key_anywhere_is_listed(where: str, key: str, value: Any) -> None:
    if key in KNOWN or (where == "messages[].content[]" and key == "image"):
        return
    record = json.loads(json.dumps(BASE))
    PLACES[where](record)[key] = value
    assert parse(record, Path("/")).ignored == (f"{where}.{key}" if where else key,)
    PLACES[where](record).pop(key)
    assert parse(record, Path("/")).ignored == ()


@pytest.mark.parametrize("where", sorted(PLACES))
def test_a_known_key_anywhere_is_read_refused_or_listed(where: str) -> None:
    """With a meaningful value, the chat changes or the key is reported."""
    before = parse(BASE, Path("/"))
    for key in sorted(KNOWN):
        for value in (False, True, 0, 3, "x", [1], {"a": 1}):
            record = json.loads(json.dumps(BASE))
            had = PLACES[where](record).get(key)
            if type(had) is type(value) and had == value:
                continue
            PLACES[where](record)[key] = value
            try:
                chat = parse(record, Path("/"))
            except BrokenSampleError as error:
                assert str(error)
                continue
            listed = any(name.rpartition(".")[2] == key for name in chat.ignored)
            harmless = key in WEIGHTS and not value  # a turn that is not learnt in any case
            assert chat != before or listed or harmless, (where, key, value)
            assert listed or chat.turns != before.turns or chat.kind != before.kind or harmless, (where, key, value)


# --- all file formats ---------------------------------------------------------------------------------------

ROW = {
    "messages": [user("<image>what?"), {**said("b"), "loss": True, "mood": "glad"}],
    "images": [{"path": "a.png", "colour": "red", "max_pixels": 256}],
    "licence": "CC0",
}
IGNORED = {"licence", "messages[].mood", "images[].colour"}


def written(kind: str, folder: Path) -> Path:
    """A file of this kind with ROW in it, 20 times."""
    Image.new("RGB", (40, 24), "red").save(folder / "a.png")
    rows = [ROW] * 20
    if kind == "json":
        (folder / "a.json").write_text(json.dumps(rows))
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "tar":
        with tarfile.open(folder / "a.tar", "w") as tar:
            for number, row in enumerate(rows):
                for ending, data in (("json", json.dumps(row).encode()), ("png", (folder / "a.png").read_bytes())):
                    info = tarfile.TarInfo(f"{number}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    else:
        inside = {**ROW["images"][0], "bytes": (folder / "a.png").read_bytes()}  # type: ignore[index]
        table = [{**row, "images": [inside]} for row in rows]
        if kind == "parquet":
            pyarrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(table), folder / "a.parquet")
        else:
            datasets = pytest.importorskip("datasets")
            datasets.Dataset.from_list(table).save_to_disk(str(folder / "a.datasets"))
    return folder / f"a.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "datasets", "tar"])
def test_every_kind_of_file_keeps_the_keys(kind: str, tmp_path: Path) -> None:
    path, made = written(kind, tmp_path), chats()
    for one in examine([path], made, Rules(), tmp_path / "media"):
        assert one.broken is None and one.chat is not None and one.encoded is not None, one.broken
        assert set(one.chat.ignored) == IGNORED
        assert one.encoded.items[0].shape == (3, 8, 16)  # at most 256 pixels
    store = prepare([path], made, Rules(), tmp_path / "cache")
    assert store.chat(3).media[0].limits.max_pixels == 256 and store.encoded(3).items[0].shape == (3, 8, 16)
    sent = pickle.loads(pickle.dumps(store))  # as in worker processes and tasks of Ray
    assert made.load(sent.chat(3), sent.encoded(3))[0].shape == (3, 8, 16)
    stream = ChatStream([path], made, Rules(), tmp_path / "cache")
    samples = [sample for shard in range(stream.shards) for sample in stream.read(shard, 0)]
    assert len(samples) == 20 and samples[0].media["vision"][0].data.shape == (3, 8, 16)
    index = chats_index.load(chats_files.find([path]), Rules(), tmp_path / "media", processes=1)
    raws, known = next(index.blocks(20))
    assert len(raws) == 20 and index.totals["broken"] == 0 and known[0][0][1] == (40, 24)


def test_what_a_tar_has_beside_its_caption_is_listed(tmp_path: Path) -> None:
    data = {"json": b'{"caption": "a cat", "url": "x", "exif": {"a": 1}}', "cls": b"3", "png": b""}
    Image.new("RGB", (40, 24)).save(tmp_path / "a.png")
    data["png"] = (tmp_path / "a.png").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for ending, content in data.items():
            info = tarfile.TarInfo(f"0.{ending}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    [one] = examine([tmp_path / "a.tar"], chats(), Rules(), tmp_path / "media")
    assert one.broken is None and one.chat is not None and set(one.chat.ignored) == {".cls", "json.url", "json.exif"}


def test_what_the_project_writes_itself_has_no_unknown_key(folder: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures" / "red"
    pictures.mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 24), (200, number, 9)).save(pictures / f"{number}.png")
    assert cli.main(["data", "folder", str(pictures.parent), "--out", str(tmp_path / "a.jsonl")]) == 0
    for file in (tmp_path / "a.jsonl", folder / SPLITS[0]):
        result = [one for one in examine([file], None, Rules(decode=False), tmp_path / "media")]
        assert result and all(one.broken is None and one.chat is not None and not one.chat.ignored for one in result)


def test_the_docs_records_have_no_unknown_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "your-own-data.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("{") and line.endswith("}")]
    assert len(lines) > 5
    for line in lines:
        assert parse(json.loads(line), Path("/")).ignored == ()


# --- data check -------------------------------------------------------------------------------------------


def test_check_lists_what_is_ignored_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    lines = [talk(user("a"), said("b"), **{f"key{number}": 1}) for number in range(30)]
    lines += [talk(user("a"), said("b"), key3=2, tools=[{"name": "f"}])]  # left out: its other keys are irrelevant
    lines += [talk(user("a"), said("b", mood=1)) for _ in range(3)]
    lines += ['{"text": "x"}'] * 250
    rng.shuffle(lines)
    path, page = tmp_path / "a.jsonl", tmp_path / "a.html"
    path.write_text("\n".join(lines))
    assert cli.main(["data", "check", str(path), "--out", str(page)]) == 1
    output = capsys.readouterr().out
    assert "keys that are ignored (records): messages[].mood (3), key" in output and " and 19 more, e.g. " in output
    assert "250 x record" in output and "1 x key" in output and len(output.splitlines()) < 20
    assert cli.main(["data", "check", str(path), "--samples", "0", "--list"]) == 1
    output = capsys.readouterr().out
    for number, line in enumerate(lines, 1):
        record = json.loads(line)
        if "text" in record:
            assert f"{path}:{number}: record: has neither" in output
        elif "tools" in record:
            assert f"{path}:{number}: key: has tools: " in output
        elif "mood" not in record["messages"][1]:
            [key] = record.keys() - {"messages"}
            assert f"{path}:{number}: key that is ignored: {key} (records: 1)" in output
    assert "key that is ignored: messages[].mood (records: 3)" in output
    rows = page.read_text()
    assert rows.count("<td>record<td>") == 250 and rows.count("<td>key<td>") == 1
