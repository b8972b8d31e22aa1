"""Energon's datasets as stored on disk. If the energon package is installed, its own reading is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlace.data.chats.examine import examine
from interlace.data.chats.files.records import ChatFileError, find
from interlace.data.chats.files.sources import Rules
from interlace.modalities import IMAGE
from interlace.modalities.files import member_of, read_head
from tests.data.chat_faults import chats
from tests.data.tars import captioned, picture, text, write_tar

yaml = pytest.importorskip("yaml")
CAPTIONS = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
    "field_map": {"image": "jpg,png", "caption": "txt"},
}


def energon(folder: Path, dataset: dict[str, Any], splits: dict[str, Any], shards: list[dict[str, bytes]]) -> Path:
    """A dataset in Energon's format, with the shards shards/s-0.tar, ..."""
    for number, members in enumerate(shards):
        write_tar(folder / "shards" / f"s-{number}.tar", members)
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    (meta / "dataset.yaml").write_text(yaml.safe_dump(dataset))
    (meta / "split.yaml").write_text(yaml.safe_dump(splits))
    return folder


def _texts(path: Path, prompt: str | None = None) -> list[list[str]]:
    result = list(examine(find([path]), chats(), Rules(prompt=prompt), path.parent.parent / "media"))
    assert all(one.broken is None for one in result), [str(one.broken) for one in result]
    return [
        [part.text or member_of(part.path).name for turn in one.chat.turns for part in turn.parts] for one in result
    ]


def test_parts_have_their_tars_and_leave_out_what_is_excluded(tmp_path: Path) -> None:
    splits = {
        "split_parts": {"train": ["shards/s-{0..1}.tar", "shards/s-2.tar"], "val": ["shards/s-3.tar"]},
        "exclude": ["shards/s-1.tar", "shards/s-2.tar/0007"],
    }
    folder = energon(tmp_path / "set", CAPTIONS, splits, [captioned(3, start) for start in (0, 3, 6, 9)])
    names = [said[0] for said in _texts(folder / "train")]
    assert names == ["0000.png", "0001.png", "0002.png", "0006.png", "0008.png"]
    assert _texts(folder / "val")[0] == ["0009.png", IMAGE.question, "this is number 9"]
    assert _texts(folder / "val", prompt="What?")[0][1] == "What?"
    (folder / "val").mkdir()  # as in folders of tars that have the names of splits
    assert len(_texts(folder / "val")) == 3
    with pytest.raises(ChatFileError, match=r"name one of them: .*/train, .*/val"):
        list(examine([folder], None, Rules(), tmp_path / "media"))
    with pytest.raises(ChatFileError, match="has no part 'test'"):
        list(examine([folder / "test"], None, Rules(), tmp_path / "media"))


def test_questions_choices_and_crude_samples(tmp_path: Path) -> None:
    said = {"q": "what?", "a": ["red", "blue"], "c": ["one", "two"], "n": 1}
    shard = {"a.png": picture(), "a.json": text(said)}
    splits = {"split_parts": {"train": ["shards/s-0.tar"]}}
    fields = {"image": "png", "context": "json[q]"}
    asks = {"sample_type": {"__class__": "VQASample"}, "field_map": fields | {"answers": "json[a]"}}
    assert _texts(energon(tmp_path / "asks", asks, splits, [shard]) / "train") == [["a.png", "what?", "red"]]
    picks = {
        "sample_type": {"__class__": "MultiChoiceVQASample"},
        "field_map": fields | {"choices": "json[c]", "correct_choice_idx": "json[n]"},
    }
    result = _texts(energon(tmp_path / "picks", picks, splits, [shard]) / "train")
    assert result == [["a.png", "what?\nA. one\nB. two", "B. two"]]
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}]
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    shard = {"a.jpg": picture(kind="JPEG"), "a.json": text(turns)}
    assert _texts(energon(tmp_path / "crude", crude, splits, [shard]) / "train") == [["a.jpg", "what?", "red"]]


@pytest.mark.parametrize(
    ("dataset", "splits", "words"),
    [
        (CAPTIONS | {"sample_loader": "sample_loader.py:load"}, None, "sample_loader is code"),
        ({"sample_type": {"__class__": "SimilaritySample"}, "field_map": {}}, None, "'SimilaritySample' are not known"),
        ({"sample_type": {"__class__": "VQASample"}}, None, "field_map"),
        (CAPTIONS, {"other": 1}, "no split_parts"),
        (CAPTIONS, {"split_parts": {"train": []}}, "has no tar"),
        (CAPTIONS, {"split_parts": {"train": ["shards/s-9.tar"]}}, "s-9.tar: no such file"),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, dataset: Any, splits: Any, words: str) -> None:
    splits = splits or {"split_parts": {"train": ["shards/s-0.tar"]}}
    folder = energon(tmp_path / "set", dataset, splits, [captioned(1)])
    with pytest.raises(ChatFileError, match=words):
        list(examine(find([folder / "train"]), None, Rules(), tmp_path / "media"))


def test_energon_itself_reads_the_same(tmp_path: Path) -> None:
    """Oracle: the package, on a dataset described by its own preparation."""
    pytest.importorskip("megatron.energon")
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    folder = tmp_path / "set"
    names = [f"s-{number}.tar" for number in range(4)]
    for number, name in enumerate(names):
        write_tar(folder / name, captioned(5, 5 * number))
    WebdatasetPreparator.prepare_dataset(folder, names, split_parts_ratio=[("train", 0.5), ("val", 0.5)], workers=1)
    (folder / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump(CAPTIONS))
    data = get_val_dataset(
        folder,
        split_part="val",
        batch_size=1,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        task_encoder=DefaultTaskEncoder(),
    )
    theirs = {}
    for batch in get_loader(data):
        pixels = np.asarray(batch.image[0])
        theirs[batch.caption[0]] = (np.round(pixels * 255) if pixels.max() <= 1 else pixels).astype(np.uint8)
    ours = {}
    for one in examine(find([folder / "val"]), chats(), Rules(), tmp_path / "media"):
        assert one.chat is not None and one.broken is None
        import io

        from PIL import Image

        image = Image.open(io.BytesIO(read_head(one.chat.media[0].path, -1)))
        ours[one.chat.turns[-1].parts[0].text] = np.asarray(image).transpose(2, 0, 1)
    assert ours.keys() == theirs.keys() and len(ours) == 10
    assert all(np.array_equal(ours[caption], theirs[caption]) for caption in ours)
