"""Frames of videos: their number follows from the length of the video and a token budget.

A video of s seconds gives fps * s frames, at least one and at most as many as the budget allows. They are the middle
frames of as many equal parts of the video. Size and length come from headers, so token counts need no decoding. Frames
are decoded from the start to the last one needed (a frame depends on those before it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from interlace.modalities.base import DataSettings, Geometry, Sampled, Shape, Size, Spec
from interlace.modalities.errors import BrokenSampleError, DecodeError
from interlace.modalities.files import check_file, library, opened
from interlace.modalities.image import fitted
from interlace.modalities.limits import FRAMES, NO_LIMITS, PIXELS, Limits

if TYPE_CHECKING:
    from av import VideoFrame, VideoStream
    from av.container import InputContainer
    from PIL.Image import Image as Picture
    from torch import Tensor
    from transformers.video_utils import VideoMetadata

    from interlace.modalities.base import ProcessorPart

MOST_SECONDS = 7 * 86_400.0


@dataclass(frozen=True)
class VideoSpec:
    """fps: frames taken per second; max_tokens: maximum number of language-model tokens for all frames of a video."""

    fps: float = 1.0
    max_tokens: int = 512

    def frames(self, seconds: float, tokens: int, limits: Limits = NO_LIMITS) -> int:
        """Number of frames of a video of this length, with `tokens` tokens each. Raises BrokenSampleError."""
        most = max(1, self.max_tokens // tokens)
        if limits.nframes is None:
            return max(1, min(round(seconds * (limits.fps or self.fps)), most))
        if limits.nframes > most:
            raise BrokenSampleError(
                "key", f"nframes = {limits.nframes}, of which data.max_video_tokens = {self.max_tokens} hold {most}"
            )
        return limits.nframes


def shown(path: str, seconds: float, limits: Limits) -> tuple[float, float]:
    """(start, length) in seconds of the part of a video that is shown. Raises BrokenSampleError."""
    start = limits.video_start or 0.0
    end = seconds if limits.video_end is None else min(limits.video_end, seconds)
    if start >= end:
        raise BrokenSampleError("key", f"{path}: {limits.text()}, and it lasts {seconds:g} s")
    return start, end - start


def video_size(path: str, *, decode: bool) -> tuple[int, int, float]:
    """(width, height, seconds) of a video, upright. decode: also decode all frames. Raises BrokenSampleError."""
    with _video(path) as container:
        stream = container.streams.video[0]
        seconds = _seconds(container, stream)
        frames = container.decode(stream)
        first = next(frames)
        _time(first)
        width, height = _upright(first).size
        if decode:
            for frame in frames:
                _time(frame)
    if not 0 < seconds <= MOST_SECONDS:
        raise BrokenSampleError("broken file", f"{path}: says it lasts {seconds:g} s")
    return width, height, seconds


class Header(NamedTuple):
    """Size of a video, upright; frames: number of frames shown; fps: average frames per second."""

    width: int
    height: int
    frames: int
    fps: float


def read_frames(path: str, count: int, limits: Limits = NO_LIMITS) -> list[Picture]:
    """`count` frames as upright pictures, from the middles of equal parts. Raises DecodeError."""
    with _video(path, decoding=True) as container:
        stream = container.streams.video[0]
        start, seconds = shown(path, _seconds(container, stream), limits)
        times = [start + (part + 0.5) * seconds / count for part in range(count)]
        return _at(container.decode(stream), times)


def _at(frames: Iterator[VideoFrame], times: Sequence[float]) -> list[Picture]:
    """For each time, the last frame that begins no later."""
    taken: list[Picture] = []
    last = begin = None
    for frame in frames:
        now = _time(frame)
        begin = now if begin is None else begin
        while last is not None and len(taken) < len(times) and now - begin > times[len(taken)]:
            taken.append(_upright(last))
        last = frame
        if len(taken) == len(times):
            return taken
    if last is None:
        raise ValueError("no picture in it")
    return [*taken, *[_upright(last)] * (len(times) - len(taken))]


def _time(frame: VideoFrame) -> float:
    if frame.time is None:
        raise ValueError("it has a frame that does not say when it is shown")
    return float(frame.time)


def _upright(frame: VideoFrame) -> Picture:
    """A frame as displayed, with the rotation given in the file."""
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    image_module = library("PIL.Image")
    return image_module.fromarray(np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns)))


def _seconds(container: InputContainer, stream: VideoStream) -> float:
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is not None:
        return float(container.duration) / 1e6
    raise ValueError("it does not say how long it is")


@contextmanager
def _video(path: str, *, decoding: bool = False) -> Iterator[InputContainer]:
    """An opened video. PyAV's errors and ValueErrors inside become BrokenSampleError; decoding: DecodeError."""
    try:
        import av
    except ImportError as error:
        raise ImportError(f"{path}: PyAV is needed to read videos: pip install av ({error})") from error
    try:
        with opened(path) as file, av.open(file) as container:
            yield container
    except (av.FFmpegError, OSError, IndexError, StopIteration, ValueError) as error:
        reason = str(error) or "no picture in it"
        if decoding:
            raise DecodeError(f"{path}: {reason}") from error
        raise BrokenSampleError("broken file", f"{path}: no video that can be read: {reason}") from None


def _told(header: Header, frames: Sequence[int]) -> VideoMetadata:
    """Metadata of a video with these frames, for a processor."""
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=header.frames,
        fps=header.fps,
        width=header.width,
        height=header.height,
        duration=header.frames / header.fps,
        frames_indices=np.array(frames),
    )


class Video(Sampled):
    """Videos, seen by encoders of pictures. Size: (width, height) in pixels, upright, and seconds. Items: frames."""

    name = "video"
    suffixes = (".mp4", ".webm", ".mkv", ".mov", ".avi")
    question = "Describe the video."
    wanted = "frames"
    size_keys = ("width", "height", "seconds")
    size_number = float
    limits = (*PIXELS, *FRAMES)
    encoder = "vision"
    encoded_by = "image"
    processor_parts = ("video_processor",)
    processor_library = "torchvision"
    processor_data = ("pixel_values_videos",)
    processor_about: ClassVar[Mapping[str, str]] = {
        "video_grid_thw": "grid_thw",
        "second_per_grid_ts": "second_per_grid_ts",
    }

    def probe(self, path: str, *, decode: bool) -> Size:
        """See Modality."""
        check_file(path)
        return video_size(path, decode=decode)

    def settings(self, data: DataSettings) -> VideoSpec:
        """See Modality."""
        return VideoSpec(data.video_fps or VideoSpec.fps, data.max_video_tokens)

    def count(self, path: str, size: Size, limits: Limits, tokens: int, settings: VideoSpec | None) -> int:
        """Number of frames taken."""
        _, length = shown(path, size[2], limits)
        return (settings or VideoSpec()).frames(length, tokens, limits)

    def load(self, path: str, spec: Spec, shapes: Sequence[Shape], limits: Limits) -> list[np.ndarray]:
        """uint8 [3, H, W] of each frame."""
        frames = read_frames(path, len(shapes), limits)
        return [fitted(frame, (shape[0], shape[1], shape[2])) for frame, shape in zip(frames, shapes, strict=True)]

    def spec(self, geometry: Geometry, data: DataSettings) -> None:
        """None: encoders of pictures take its frames."""

    def header(self, path: str, *, decode: bool) -> Header:
        """Header for processors, which choose frames by number. See Sampled.

        Frames are counted by packets, without decoding. A file's own frame count may include frames that its edit list
        leaves out.
        """
        width, height, _ = self.probe(path, decode=False)
        with _video(path) as container:
            stream = container.streams.video[0]
            fps = float(stream.average_rate or stream.guessed_rate or 0)
            frames = sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)
        if decode:
            with _video(path) as container:
                decoded = sum(1 for _ in container.decode(container.streams.video[0]))
                if decoded != frames:
                    raise ValueError(f"{decoded} of its {frames} frames can be decoded")
        if not fps or not frames:
            raise BrokenSampleError("broken file", f"{path}: says it has {frames} frames, {fps:g} a second")
        return Header(int(width), int(height), frames, fps)

    def clip(self, path: str, header: Header, limits: Limits) -> tuple[int, Header]:
        """See Sampled. Frames are shown that begin in the part."""
        start, length = shown(path, header.frames / header.fps, limits)
        first, end = (math.ceil(round(seconds * header.fps, 6)) for seconds in (start, start + length))
        if first >= min(end, header.frames):
            raise BrokenSampleError("key", f"{path}: {limits.text()}: no frame begins in there")
        return first, header._replace(frames=min(end, header.frames) - first)

    def check(self, header: Header, part: ProcessorPart, who: str) -> None:
        """Raises BrokenSampleError for fewer frames than are merged into one. Processors would take zero frames then,
        and divide by their number."""
        merged = getattr(part, "temporal_patch_size", 1)
        if header.frames < merged:
            raise BrokenSampleError(
                "size",
                f"a video has {header.frames} of the {merged} frames that {who} makes one of: give it as a picture",
            )

    def choosing(self, headers: Sequence[Header], fps: float | None) -> dict[str, Any]:
        """See Sampled."""
        every = [_told(header, range(header.frames)) for header in headers]
        made: dict[str, Any] = {"videos_kwargs": {"return_tensors": "pt", "video_metadata": every}}
        return made if fps is None else made | {"fps": fps}

    def chosen(self, headers: Sequence[Header], frames: Sequence[Sequence[int]]) -> dict[str, Any]:
        """See Sampled."""
        metadata = [_told(header, numbers) for header, numbers in zip(headers, frames, strict=True)]
        return {"do_sample_frames": False, "videos_kwargs": {"return_tensors": "pt", "video_metadata": metadata}}

    def blank(self, path: str, size: Size, limits: Limits, part: ProcessorPart, who: str) -> Tensor:
        """uint8 [frames, 3, H, W] on the meta device. size: a Header."""
        import torch

        assert isinstance(size, Header)
        _, shown = self.clip(path, size, limits)
        return torch.empty((shown.frames, 3, shown.height, shown.width), dtype=torch.uint8, device="meta")

    def frames(self, path: str, numbers: Sequence[int]) -> Tensor:
        """uint8 [n, 3, H, W], upright. The first frame of a file has number 0."""
        import torch

        wanted, images = set(numbers), dict[int, np.ndarray]()
        with _video(path, decoding=True) as container:
            for number, frame in enumerate(container.decode(container.streams.video[0])):
                if number in wanted:
                    images[number] = np.asarray(_upright(frame)).transpose(2, 0, 1)
                if len(images) == len(wanted):
                    break
            if len(images) < len(wanted):
                raise ValueError(f"has no frame {min(wanted - images.keys())}")
        return torch.from_numpy(np.stack([images[number] for number in numbers]))
