"""Clips and videos in chats: lengths from headers, frames by rate and budget, unreadable files are found."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from interlace.data.chats.dataset import load_chats
from interlace.data.chats.encoding.tokens import MediaSettings, TokenizerFormat
from interlace.data.chats.examine import examine
from interlace.data.chats.files.shapes import parse
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.store import prepare
from interlace.modalities import named
from interlace.modalities.audio import AudioSpec, load_audio
from interlace.modalities.errors import BrokenSampleError, DecodeError
from interlace.modalities.image import ImageSpec
from interlace.modalities.video import VideoSpec, _time, read_frames, video_size
from tests.data.chat_families import trained
from tests.data.chat_faults import TEMPLATE, said, talk, user

COLOURS = [(250, 10, 10), (10, 250, 10), (10, 10, 250), (240, 240, 20), (20, 240, 240)]


def _format(**video: Any) -> TokenizerFormat:
    tokenizer = trained({}, ("<|im_start|>", "<|im_end|>", "<image>", "<audio>"))
    return TokenizerFormat(
        tokenizer,
        TEMPLATE,
        name="the template",
        tags={"vision": "<image>", "audio": "<audio>"},
        specs={"vision": ImageSpec(8, 16), "audio": AudioSpec(16, 4.0)},
        tokens={"vision": lambda shape: shape[1] * shape[2] // 64, "audio": lambda shape: -(-shape[1] // 4)},
        media=MediaSettings({"video": VideoSpec(**video)}),
    )


def _sound(path: Path, seconds: float, rate: int = 16_000) -> Path:
    import soundfile

    soundfile.write(path, np.sin(np.arange(int(seconds * rate)) / 9).astype(np.float32) / 2, rate)
    return path


def _video(path: Path, seconds: int, rate: int = 4) -> Path:
    """A video with one colour per second."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = 40, 24, "yuv420p"
        for number in range(seconds * rate):
            image = Image.new("RGB", (40, 24), COLOURS[number // rate])
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return path


def test_clips_become_mel_frames(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    clip = _sound(tmp_path / "a.wav", 0.5)
    line = talk(user("<audio>what?"), said("b"), audios=["a.wav"])
    (tmp_path / "t.jsonl").write_text(line)
    (tmp_path / "v.jsonl").write_text(line)
    train, _ = load_chats([tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], _format(), Rules(), cache=tmp_path / "c")
    [item] = train.sample(0).media["audio"]
    assert item.shape == (16, 50) and item.tokens == 13
    assert torch.equal(item.data, load_audio(clip, AudioSpec(16, 4.0)))


def test_clips_that_cannot_be_used(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    _sound(tmp_path / "long.wav", 5)
    _sound(tmp_path / "short.wav", 0.012)
    (tmp_path / "text.wav").write_text("no sound")
    whole = _sound(tmp_path / "torn.flac", 2).read_bytes()
    (tmp_path / "torn.flac").write_bytes(whole[: len(whole) // 2])
    names = ["long.wav", "short.wav", "text.wav", "torn.flac", "gone.wav"]
    lines = [talk(user("<audio>"), said("b"), audios=[name]) for name in names]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    kinds = [one.broken and one.broken.kind for one in examine([tmp_path / "t.jsonl"], _format(), Rules(), tmp_path)]
    assert kinds == ["size", "size", "broken file", "broken file", "missing file"]


@pytest.mark.parametrize(
    ("seconds", "rule", "frames"),
    [(5, {}, 5), (5, {"fps": 2.0}, 10), (5, {"max_tokens": 45}, 3), (2, {"max_tokens": 1}, 1), (1, {"fps": 0.1}, 1)],
)
def test_frames_follow_the_rate_and_the_budget(tmp_path: Path, seconds: int, rule: dict[str, Any], frames: int) -> None:
    _video(tmp_path / "a.mp4", seconds)
    line = talk(user("<video>what?"), said("b"), videos=["a.mp4"])
    (tmp_path / "t.jsonl").write_text(line)
    (tmp_path / "v.jsonl").write_text(line)
    train, _ = load_chats(
        [tmp_path / "t.jsonl"], [tmp_path / "v.jsonl"], _format(**rule), Rules(), cache=tmp_path / "c"
    )
    sample = train.sample(0)
    items = sample.media["vision"]
    assert [item.shape for item in items] == [(3, 24, 40)] * frames
    assert int((sample.input_ids == train.format.placeholders["vision"][0]).sum()) == 15 * frames
    # Frame k shows the second that contains the middle of its part.
    for number, item in enumerate(items):
        colour = COLOURS[int((number + 0.5) * seconds / frames)]
        assert item.data is not None
        seen = (item.data.mean((1, 2)) * 0.5 + 0.5) * 255
        assert torch.allclose(seen, torch.tensor(colour, dtype=torch.float32), atol=12), (number, seen)


def test_frames_of_a_video_are_those_at_their_times(tmp_path: Path) -> None:
    path = str(_video(tmp_path / "a.mp4", 5))
    assert video_size(path, decode=True) == (40, 24, 5.0)
    for count in (1, 2, 5, 7, 20, 33):
        result = [np.asarray(image).mean((0, 1)) for image in read_frames(path, count)]
        wanted = [COLOURS[int((k + 0.5) * 5 / count)] for k in range(count)]
        assert np.abs(np.array(result) - wanted).max() < 12


def test_videos_that_cannot_be_read(tmp_path: Path) -> None:
    whole = _video(tmp_path / "a.mp4", 3).read_bytes()
    (tmp_path / "torn.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.mp4").write_text("no video")
    pytest.importorskip("soundfile")
    _sound(tmp_path / "sound.wav", 1)
    for name in ("torn.mp4", "text.mp4", "sound.wav"):
        with pytest.raises(BrokenSampleError) as raised:
            named("video").probe(str(tmp_path / name), decode=True)
        assert raised.value.kind == "broken file" and name in str(raised.value)


def test_frames_without_a_time_are_a_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _video(tmp_path / "a.mp4", 2)
    monkeypatch.setattr("interlace.modalities.video._time", _refused)
    with pytest.raises(BrokenSampleError, match="does not say when"):
        video_size(str(path), decode=False)
    with pytest.raises(DecodeError, match="does not say when"):
        read_frames(str(path), 2)
    monkeypatch.undo()
    assert _time(SimpleNamespace(time=1)) == 1.0
    with pytest.raises(ValueError, match="does not say when"):
        _time(SimpleNamespace(time=None))


def _refused(frame: Any) -> float:
    return _time(SimpleNamespace(time=None))


def test_a_cut_takes_the_whole_video(tmp_path: Path) -> None:
    _video(tmp_path / "a.mp4", 3)
    (tmp_path / "t.jsonl").write_text(
        json.dumps({"messages": [user("a"), said("b"), user("<video>"), said("c")], "videos": ["a.mp4"]})
    )
    store = prepare([tmp_path / "t.jsonl"], _format(), Rules(max_tokens=50, on_too_long="cut"), tmp_path / "c")
    assert store.encoded(0).items == [] and len(parse({"messages": [user("a"), said("b")]}, tmp_path).turns) == 2
