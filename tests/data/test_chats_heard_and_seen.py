"""Clips and videos through processors of whole checkpoints, against HuggingFace's own call on samples and frames."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interlace.data.chats.dataset import ChatDataset, load_chats
from interlace.data.chats.encoding.processor import ProcessorFormat
from interlace.data.chats.examine import examine
from interlace.data.chats.files.sources import Rules
from interlace.modalities.audio import read_clip
from interlace.model.whole.positions import GRID, SECONDS
from tests.data import chat_families

Record = dict[str, Any]


def written(folder: Path, records: list[Record]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "a.jsonl"


def dataset(family: chat_families.Family, file: Path, fps: float | None = None) -> ChatDataset:
    made = ProcessorFormat(family.processor, name="template", placeholders=family.placeholders, fps=fps)
    return load_chats([file], [file], made, Rules(), cache=file.parent / "cache")[0]


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_clips_are_those_of_huggingface(tmp_path: Path, count: int) -> None:
    pytest.importorskip("soundfile")
    family = chat_families.qwen2_audio(tmp_path / "model")
    rng = random.Random(0)
    paths = chat_families.clips(tmp_path / "clips", 12)
    records = [chat_families.chat(rng, paths, "audio") for _ in range(count)]
    result = dataset(family, written(tmp_path / "data", records))
    assert len(result) == count
    heard = 0
    for index, record in enumerate(records):
        sample, out = result.sample(index), chat_families.own(family.processor, record)
        assert sample.input_ids.tolist() == out["input_ids"][0].tolist()
        items = sample.media.get("audio", [])
        heard += len(items)
        if not items:
            assert "input_features" not in out
            continue
        assert torch.equal(torch.stack([item.data for item in items if item.data is not None]), out["input_features"])
        lengths = out["feature_attention_mask"].sum(-1)
        assert [item.about["frames"] for item in items] == [(int(length),) for length in lengths]
        assert sum(item.tokens for item in items) == int((out["input_ids"] == family.placeholder).sum())
    assert heard > count / 2


def test_clips_too_long_or_short_for_processor_are_left_out(tmp_path: Path) -> None:
    import soundfile

    family = chat_families.qwen2_audio(tmp_path / "model")
    for name, seconds in (("long", 2.5), ("short", 0.02), ("good", 2.0)):
        soundfile.write(tmp_path / f"{name}.wav", np.zeros(int(16_000 * seconds), np.float32), 16_000)
    (tmp_path / "a.png").write_bytes(chat_families.pictures(tmp_path / "pictures", 1)[0].read_bytes())
    chats = [
        {"messages": [{"role": "user", "content": f"<{kind}>x"}, {"role": "assistant", "content": "y"}], kind: name}
        for kind, name in (("audio", "long.wav"), ("audio", "short.wav"), ("audio", "good.wav"), ("image", "a.png"))
    ]
    made = ProcessorFormat(family.processor, name="template", placeholders=family.placeholders)
    broken = [one.broken for one in examine([written(tmp_path, chats)], made, Rules(), tmp_path)]
    assert [one and one.kind for one in broken] == ["size", "size", None, "no encoder"]
    assert "2.5 s, of which Qwen2AudioProcessor keeps 2" in str(broken[0]) and "too short" in str(broken[1])


def test_clips_are_resampled_as_in_huggingface(tmp_path: Path) -> None:
    [mono, stereo] = chat_families.clips(tmp_path / "clips", 2, rate=11_025)
    try:
        from transformers.audio_utils import load_audio

        wanted = [load_audio(str(path), sampling_rate=16_000, backend="soundfile") for path in (mono, stereo)]
    except ImportError:
        with pytest.raises(ImportError, match=r"11025 Hz.*pip install soxr"):
            read_clip(str(mono), 16_000)
        pytest.skip("resampling needs soxr, which is not installed")
    for path, samples in zip((mono, stereo), wanted, strict=True):
        assert np.array_equal(read_clip(str(path), 16_000), samples)


def test_videos_need_torchvision(tmp_path: Path) -> None:
    family = chat_families.qwen2_vl(tmp_path / "model")
    made = ProcessorFormat(family.processor, name="template", placeholders=family.placeholders)
    record = {"messages": [{"role": "user", "content": "<video>x"}, {"role": "assistant", "content": "y"}]}
    (tmp_path / "a.mp4").write_bytes(b"no video")
    [one] = examine([written(tmp_path, [{**record, "video": "a.mp4"}])], made, Rules(), tmp_path)
    assert one.broken is not None
    if chat_families.VIDEOS:
        assert one.broken.kind == "broken file"
    else:
        assert one.broken.kind == "no encoder" and "pip install torchvision" in str(one.broken)


SEEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm")


def seen(name: str, folder: Path) -> chat_families.Family:
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="SmolVLM's processor needs num2words")
    return getattr(chat_families, name)(folder)


@chat_families.needs_torchvision
@pytest.mark.parametrize(("name", "fps"), [*((name, None) for name in SEEN), ("qwen2_vl", 3.0), ("qwen3_vl", 4.0)])
def test_videos_are_those_of_huggingface(name: str, fps: float | None, tmp_path: Path, count: int = 8) -> None:
    family = seen(name, tmp_path / "model")
    rng = random.Random(name)
    moving, still = chat_families.videos(tmp_path / "videos", 4), chat_families.pictures(tmp_path / "pictures", 6)
    records = []
    for number in range(count):
        records.append(chat_families.chat(rng, [moving[number % 4]], "video"))
        if number % 2 and name != "smolvlm":  # it returns a chat's videos in place of its images
            records[-1]["messages"][-2]["content"].append({"type": "image", "image": str(still[number % 6])})
    result = dataset(family, written(tmp_path / "data", records), fps)
    assert len(result) == count, result.report()
    items = 0
    for index, record in enumerate(records):
        sample, out = result.sample(index), chat_families.own(family.processor, record, fps)
        assert sample.input_ids.tolist() == out["input_ids"][0].tolist()
        media = sample.media.get("vision", [])
        items += len(media)
        check_pixels(media, sample.input_ids, family, out)
    assert items > count / 2


def check_pixels(media: list[Any], ids: torch.Tensor, family: chat_families.Family, out: Any) -> None:
    """Compares images and videos, each in the order of the text."""
    if family.video is None:  # frames are images
        if media:
            stacked = torch.stack([item.data for item in media])
            assert torch.equal(stacked, out["pixel_values"].reshape(stacked.shape))
        return
    places = torch.isin(ids, torch.tensor([family.placeholder, family.video])).nonzero().squeeze(1)
    first = [int(ids[piece[0]]) for piece in places.split([item.tokens for item in media])] if media else []
    for token, pixels, grids in (
        (family.placeholder, "pixel_values", "image_grid_thw"),
        (family.video, "pixel_values_videos", "video_grid_thw"),
    ):
        mine = [item for item, its in zip(media, first, strict=True) if its == token]
        assert bool(mine) == (pixels in out)
        if not mine:
            continue
        assert torch.equal(torch.cat([item.data for item in mine]), out[pixels])
        told = torch.tensor([item.about[GRID] for item in mine], dtype=torch.int64)
        wanted = out[grids]
        if len(told) != len(wanted):  # frame by frame
            wanted = torch.cat([torch.tensor([[1, h, w]] * t) for t, h, w in wanted.tolist()])
        assert torch.equal(told, wanted)
        if token == family.video and "second_per_grid_ts" in out:
            seconds = torch.tensor([item.about[SECONDS][0] for item in mine])
            assert torch.equal(seconds, torch.as_tensor(out["second_per_grid_ts"], dtype=torch.float32))


@chat_families.needs_torchvision
def test_videos_whose_features_are_not_made_here_are_left_out(tmp_path: Path) -> None:
    family = chat_families.llava_onevision(tmp_path / "model")
    [path] = chat_families.videos(tmp_path / "videos", 1)
    record = {"messages": [{"role": "user", "content": "<video>x"}, {"role": "assistant", "content": "y"}]}
    made = ProcessorFormat(family.processor, name="template", placeholders=family.placeholders)
    [one] = examine([written(tmp_path, [{**record, "video": str(path)}])], made, Rules(), tmp_path)
    assert one.broken is not None and one.broken.kind == "no encoder" and "save the frames" in str(one.broken)
