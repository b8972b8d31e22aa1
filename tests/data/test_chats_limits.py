"""Limits that a record sets for an image or a video, against HuggingFace with the same limits, frame by frame."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from interlace.data.chats.dataset import load_chats
from interlace.data.chats.encoding.processor import ProcessorFormat
from interlace.data.chats.examine import Examined, examine
from interlace.data.chats.files.sources import Rules
from interlace.modalities.image import ImageSpec, decode_image
from tests.data import chat_families
from tests.data.chat_faults import chats, said, talk, user

FACTOR = 28  # pixels per side of a token of Qwen2-VL


def asked(*items: Any) -> str:
    return talk(user([*items, {"type": "text", "text": "what?"}]), said("b"))


def picture(**limits: Any) -> dict[str, Any]:
    return {"type": "image", "image": "a.png", **limits}


def video(**limits: Any) -> dict[str, Any]:
    return {"type": "video", "video": "a.mp4", **limits}


def looked(folder: Path, line: str, made: Any) -> Examined:
    (folder / "a.jsonl").write_text(line)
    [one] = examine([folder / "a.jsonl"], made, Rules(), folder / "media")
    return one


def refused(folder: Path, line: str, made: Any) -> str:
    broken = looked(folder, line, made).broken
    assert broken is not None
    return f"{broken.kind}: {broken}"


def noise(folder: Path, width: int, height: int) -> Image.Image:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
    image.save(folder / "a.png")
    return image


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> chat_families.Family:
    return chat_families.qwen2_vl(tmp_path_factory.mktemp("qwen"))


def of(family: chat_families.Family) -> ProcessorFormat:
    return ProcessorFormat(family.processor, name="template", placeholders=family.placeholders)


def test_pixel_limits_of_each_picture_are_those_of_huggingface(tmp_path: Path, qwen: chat_families.Family) -> None:
    image = noise(tmp_path, 150, 110)
    limits = [
        {},
        {"max_pixels": 4 * FACTOR**2},
        {"min_pixels": 40 * FACTOR**2},
        {"min_pixels": 3 * FACTOR**2, "max_pixels": 6 * FACTOR**2},
        {"max_pixels": FACTOR**2},
    ]
    resized = {"resized_height": 60, "resized_width": 100}
    lines = [asked(*(picture(**each) for each in limits), picture(**resized))]
    # The same limits of a listed file, and of an item that inherits them.
    lines.append(talk(user("<image>what?"), said("b"), images=[{"path": "a.png", **limits[1]}]))
    lines.append(talk(user([{"type": "image", **limits[1]}]), said("b"), images=["a.png"]))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    result, _ = load_chats([tmp_path / "a.jsonl"], [tmp_path / "a.jsonl"], of(qwen), Rules(), cache=tmp_path / "cache")
    assert len(result) == len(lines), result.report()

    reader = type(qwen.processor.image_processor)  # the torchvision version, if installed

    def own(image: Image.Image, **said: Any) -> Any:
        size = chat_families.SIZE
        given = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]} | said
        given["min_pixels"] = min(given["min_pixels"], said.get("max_pixels", given["min_pixels"]))
        given["max_pixels"] = max(given["max_pixels"], given["min_pixels"])
        return reader(**given)([image], return_tensors="pt")

    wanted = [own(image, **each) for each in limits]
    wanted.append(own(image.resize((4 * FACTOR, 2 * FACTOR), Image.Resampling.BICUBIC)))  # the nearest multiples
    sample = result.sample(0)
    for item, other in zip(sample.media["vision"], wanted, strict=True):
        assert list(item.about["grid_thw"]) == other["image_grid_thw"][0].tolist()
        assert torch.equal(item.data, other["pixel_values"])
    tokens = [int(other["image_grid_thw"].prod()) // 4 for other in wanted]
    assert [item.tokens for item in sample.media["vision"]] == tokens and len(set(tokens)) > 4
    assert int((sample.input_ids == qwen.placeholder).sum()) == sum(tokens)
    for index in (1, 2):
        [item] = pickle.loads(pickle.dumps(result)).sample(index).media["vision"]  # as in a worker process
        assert torch.equal(item.data, wanted[1]["pixel_values"])


@pytest.mark.parametrize("name", ["llava", "gemma3"])
@pytest.mark.parametrize("limits", [{"max_pixels": 784}, {"resized_height": 56, "resized_width": 56}])
def test_processors_of_one_size_refuse_limits_by_name(name: str, limits: dict[str, int], tmp_path: Path) -> None:
    noise(tmp_path, 90, 60)
    words = refused(tmp_path, asked(picture(**limits)), of(chat_families.FAMILIES[name](tmp_path / "model")))
    assert words.startswith("key: ") and next(iter(limits)) in words and "Processor takes no such limits" in words


def test_limits_of_pictures_for_modules(tmp_path: Path) -> None:
    noise(tmp_path, 60, 40)
    made = chats()
    made.specs["vision"] = ImageSpec(8, 64)

    def shape(**limits: int) -> Any:
        one = looked(tmp_path, asked(picture(**limits)), made)
        assert one.broken is None and one.chat is not None and one.encoded is not None, one.broken
        [data] = made.load(one.chat, one.encoded)
        [item] = one.encoded.items
        whole = torch.from_numpy(decode_image(tmp_path / "a.png", item.shape).astype(np.float32) / 255)
        assert torch.allclose(data, (whole - 0.5) / 0.5, atol=1e-6)
        return item.shape[1:]

    assert shape() == (40, 64)
    assert shape(max_pixels=24 * 40) == (24, 32) and shape(max_pixels=128) == (8, 8)
    assert shape(max_pixels=10**6, min_pixels=40 * 64) == (40, 64)
    assert shape(resized_height=16, resized_width=50) == (16, 48)
    for limits, words in (
        ({"max_pixels": 63}, "max_pixels = 63: too few for 60x40 in patches of 8"),
        ({"min_pixels": 40 * 64 + 1}, "pictures are never made larger here"),
        ({"resized_height": 80, "resized_width": 80}, "the budget is 64"),
    ):
        assert words in refused(tmp_path, asked(picture(**limits)), made)


def film(path: Path, count: int, rate: int = 8) -> list[int]:
    """A video of gray frames, each darker than the one before; returns the shades."""
    av = pytest.importorskip("av")
    shades = [250 - 240 * number // max(1, count - 1) for number in range(count)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for shade in shades:
            frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return shades


def seen(folder: Path, line: str) -> list[float]:
    """The shades of the frames that a model of modules gets."""
    made = chats()
    one = looked(folder, line, made)
    assert one.broken is None and one.chat is not None and one.encoded is not None, one.broken
    return [float(data.mean() * 127.5 + 127.5) for data in made.load(one.chat, one.encoded)]


def test_video_options_select_the_time_range_and_frames(tmp_path: Path) -> None:
    shades = film(tmp_path / "a.mp4", 32)  # 4 s
    everything = seen(tmp_path, asked(video()))
    assert len(everything) == 4  # one per second, from the middle of each
    assert np.allclose(everything, [shades[8 * second + 4] for second in range(4)], atol=4)
    second = seen(tmp_path, asked(video(video_start=2, video_end=3, nframes=4)))
    assert np.allclose(second, [shades[16 + 1], shades[16 + 3], shades[16 + 5], shades[16 + 7]], atol=4)
    assert len(seen(tmp_path, asked(video(fps=2)))) == 8 and len(seen(tmp_path, asked(video(fps=0.1)))) == 1
    assert np.allclose(seen(tmp_path, asked(video(video_start=3.5, nframes=1))), [shades[30]], atol=4)
    listed = talk(user("<video>what?"), said("b"), videos=[{"path": "a.mp4", "video_end": 1, "fps": 2}])
    assert np.allclose(seen(tmp_path, listed), [shades[2], shades[6]], atol=4)
    for limits, words in (
        ({"video_start": 4}, "video_start = 4, and it lasts 4 s"),
        ({"nframes": 65}, "nframes = 65, of which data.max_video_tokens"),
        ({"max_pixels": 63}, "max_pixels = 63: too few for 64x32 in patches of 8"),
    ):
        assert words in refused(tmp_path, asked(video(**limits)), chats())


@chat_families.needs_torchvision
def test_videos_of_processors_show_what_is_asked_for(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", 32)
    family = chat_families.qwen2_5_vl(tmp_path / "model")
    frames, _ = chat_families.watched(str(tmp_path / "a.mp4"))
    cases: list[tuple[dict[str, Any], slice, dict[str, Any]]] = [
        ({"video_start": 2, "video_end": 3}, slice(16, 24), {}),
        ({"video_start": 1.01}, slice(9, 32), {}),
        ({"nframes": 6}, slice(0, 32), {"num_frames": 6}),
        ({"fps": 4}, slice(0, 32), {"fps": 4}),
        ({"video_end": 2, "fps": 4, "max_pixels": 2 * FACTOR**2}, slice(0, 16), {"fps": 4, "max": 2 * FACTOR**2}),
    ]
    line = asked(*(video(**limits) for limits, _, _ in cases))
    (tmp_path / "a.jsonl").write_text(line)
    result, _ = load_chats(
        [tmp_path / "a.jsonl"], [tmp_path / "a.jsonl"], of(family), Rules(), cache=tmp_path / "cache"
    )
    items = result.sample(0).media["vision"]
    assert result.report().endswith("every sample could be used") and len(items) == len(cases)
    for item, (_, part, said_) in zip(items, cases, strict=True):
        reader = family.processor.video_processor
        settings = {**chat_families.SIZE, **({"longest_edge": said_["max"]} if "max" in said_ else {})}
        own = type(reader)(
            size={"shortest_edge": min(settings.values()), "longest_edge": settings["longest_edge"]},
            cap_pixels_per_frame=True,
            do_sample_frames=True,
            fps=None if "num_frames" in said_ else said_.get("fps", 2),
            num_frames=said_.get("num_frames"),
        )
        shown = frames[part]
        told = {"total_num_frames": len(shown), "fps": 8.0, "duration": len(shown) / 8}
        out = own([shown], video_metadata=[told], return_tensors="pt")
        assert list(item.about["grid_thw"]) == out["video_grid_thw"][0].tolist()
        assert torch.equal(item.data, out["pixel_values_videos"])


def test_a_video_of_one_frame(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", 1)
    assert len(seen(tmp_path, asked(video()))) == 1
    if chat_families.VIDEOS:
        made = of(chat_families.qwen2_5_vl(tmp_path / "model"))
        words = refused(tmp_path, asked(video()), made)
        assert words == (
            "size: a video has 1 of the 2 frames that Qwen2_5_VLProcessor makes one of: give it as a picture"
        )


def test_torn_limits_are_noticed_in_json(tmp_path: Path) -> None:
    noise(tmp_path, 60, 40)
    line = json.dumps(json.loads(asked(picture(max_pixels=1)))).replace('"max_pixels": 1', '"max_pixels": Infinity')
    assert "max_pixels = inf; a whole number above 0 is wanted" in refused(tmp_path, line, chats())
