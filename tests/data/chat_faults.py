"""Invalid records and files of every kind, and unusual ones that are valid."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from interlace.data.chats.encoding.tokens import TokenizerFormat
from interlace.modalities.audio import AudioSpec
from interlace.modalities.image import ImageSpec
from tests.data.chat_families import trained

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def image(value: Any) -> list[dict[str, Any]]:
    return [{"type": "image", "image": value}, {"type": "text", "text": "what?"}]


def talk(*messages: Any, **more: Any) -> str:
    return json.dumps({"messages": list(messages), **more})


def sound(path: str) -> list[dict[str, Any]]:
    return [{"type": "audio", "audio": path}, {"type": "text", "text": "what?"}]


def film(path: str) -> list[dict[str, Any]]:
    return [{"type": "video", "video": path}, {"type": "text", "text": "what?"}]


# (kind, words of the error, the line in the file)
FAULTS: list[tuple[str, str, str | bytes]] = [
    (
        "encoding",
        "no text in UTF-8 (invalid continuation byte at byte",
        b'{"messages": [{"role": "user", "content": "caf\xe9"}]}',
    ),
    ("encoding", "is half a character, without its other half", talk(user("half \ud83d a frog"), said("b"))),
    ("json", "no JSON: ", '{"messages": [{"role": "user", '),
    ("json", "no JSON: Expecting value", "just words"),
    ("json", "no JSON: ", "[" * 100_000),
    ("json", "an object names 'messages' twice", '{"messages": [], "messages": [{"role": "user", "content": "a"}]}'),
    ("record", "the record is a list, not an object", "[1, 2]"),
    ("record", "has neither messages nor conversations, but ['answer', 'prompt']", '{"prompt": "a", "answer": "b"}'),
    ("turns", "messages is an empty list", '{"messages": []}'),
    ("turns", "messages is a text", '{"messages": "hello"}'),
    ("turns", "turn 1 is a text, not an object", '{"messages": ["hello", "you"]}'),
    ("turns", "turn 1 has no content", '{"messages": [{"role": "user"}]}'),
    ("turns", "turn 1 has no from and no value", '{"conversations": [{"role": "user", "content": "a"}]}'),
    ("role", "turn 1 is from 'alien'; known: system, user", talk({"role": "alien", "content": "hello"}, said("yes"))),
    ("order", "turn 1 is the assistant's, where the user's was due", talk(said("I begin"))),
    ("order", "turn 2 is the user's, where the assistant's was due", talk(user("a"), user("b"), said("c"))),
    ("order", "turn 3 is the system's", talk(user("a"), said("b"), {"role": "system", "content": "late"})),
    ("order", "there is no answer to learn", talk(user("a"), said("b"), user("and now?"))),
    ("order", "there is no answer to learn", talk(user("a"))),
    ("content", "turn 1 has content a number; text or a list is wanted", talk(user(5), said("b"))),
    ("content", "turn 1 has an item without a type", talk(user(["plain"]), said("b"))),
    (
        "content",
        "turn 1 has a text item whose text is missing",
        talk(user([{"type": "text", "text": None}]), said("b")),
    ),
    ("type", "turn 1 has an item of type 'smell'", talk(user([{"type": "smell", "smell": "x"}]), said("b"))),
    ("empty", "turn 2 (assistant) is empty", talk(user("a"), said("   "))),
    ("empty", "turn 1 (user) is empty", talk(user(""), said("b"))),
    ("weight", "a turn is learnt (1) or not (0)", talk(user("a"), said("b", weight=0.5))),
    ("weight", "only answers can be", talk({"role": "user", "content": "a", "train": True}, said("b"))),
    ("weight", "has loss 0.5; a turn is learnt (1) or not (0)", talk(user("a"), said("b", loss=0.5))),
    ("weight", "which contradict each other", talk(user("a"), said("b", loss=True, weight=0))),
    ("weight", "only answers can be", talk({"role": "user", "content": "a", "loss": True}, said("b"))),
    ("targets", "every answer has weight 0: nothing is left to learn", talk(user("a"), said("b", weight=0))),
    ("media count", "the text has 1 image tags, but 0 files are listed", talk(user("<image> what?"), said("b"))),
    ("media count", "has 2 image tags, but 1 files", talk(user("<image><image>"), said("b"), images=["good.png"])),
    ("media count", "has 0 image tags, but 1 files", talk(user("what?"), said("b"), images=["good.png"])),
    ("media key", "image is a number; the path of a file is wanted", talk(user("<image>"), said("b"), images=[7])),
    ("media key", "has both image and images", talk(user("<image>"), said("b"), images=["good.png"], image="good.png")),
    ("media key", "image is missing; the path of a file is wanted", talk(user(image(None)), said("b"))),
    ("media key", "has both image and url", talk(user([{"type": "image", "image": "a", "url": "b"}]), said("b"))),
    ("media key", "has both path and url", talk(user(image({"path": "a.png", "url": "b.png"})), said("b"))),
    ("type", "turn 2 is an answer with image in it", talk(user("a"), said(image("good.png")))),
    ("url", "training reads local files only", talk(user(image("https://example.org/a.png")), said("b"))),
    ("url", "save it to a file and give its path", talk(user(image("data:image/png;base64,AAAA")), said("b"))),
    ("url", "local files only", talk(user(image("file://host/a.png")), said("b"))),
    ("missing file", "gone.png: no such file", talk(user(image("gone.png")), said("b"))),
    ("missing file", "good.png/a.png: no such file", talk(user(image("good.png/a.png")), said("b"))),
    ("missing file", "gone.wav: no such file", talk(user(sound("gone.wav")), said("b"))),
    ("no file", "folder: not a file", talk(user(image("folder")), said("b"))),
    ("no file", "inline data have to be saved to a file", talk(user(image("iVBORw0KGgo" * 500)), said("b"))),
    ("no file", "no path", talk(user(image("a\0.png")), said("b"))),
    ("broken file", "loop.png: cannot be read: Too many levels", talk(user(image("loop.png")), said("b"))),
    ("broken file", "text.png: cannot identify image file", talk(user(image("text.png")), said("b"))),
    ("broken file", "torn.png: image file is truncated", talk(user(image("torn.png")), said("b"))),
    ("broken file", "torn.jpg: image file is truncated", talk(user(image("torn.jpg")), said("b"))),
    ("broken file", "torn.svg", talk(user(image("torn.svg")), said("b"))),
    ("broken file", "empty.png: cannot identify image file", talk(user(image("empty.png")), said("b"))),
    ("broken file", "deep.png: has pixels of 16 or 32 bits", talk(user(image("deep.png")), said("b"))),
    ("broken file", "floats.tiff: has pixels of 16 or 32 bits", talk(user(image("floats.tiff")), said("b"))),
    ("broken file", "bomb.png: ", talk(user(image("bomb.png")), said("b"))),
    ("broken file", "good.png: ", talk(user(sound("good.png")), said("b"))),
    ("broken file", "empty.wav: ", talk(user(sound("empty.wav")), said("b"))),
    ("broken file", "torn.wav: ", talk(user(sound("torn.wav")), said("b"))),
    ("broken file", "nan.wav: samples are not finite", talk(user(sound("nan.wav")), said("b"))),
    ("broken file", "good.png: ", talk(user("<video>"), said("b"), videos=["good.png"])),
    ("broken file", "empty.mp4: no video that can be read", talk(user(film("empty.mp4")), said("b"))),
    ("broken file", "text.mp4: no video that can be read", talk(user(film("text.mp4")), said("b"))),
    ("broken file", "torn.mp4: no video that can be read", talk(user(film("torn.mp4")), said("b"))),
    ("size", "long.png: 400x8 pixels is too elongated", talk(user(image("long.png")), said("b"))),
    ("size", "endless.wav: 5.0 s, longer than max_audio_seconds", talk(user(sound("endless.wav")), said("b"))),
    ("size", "click.wav: shorter than 20 ms", talk(user(sound("click.wav")), said("b"))),
    (
        "placeholder",
        "the text has them as words",
        talk(user([{"type": "text", "text": "the word <image> itself"}]), said("b")),
    ),
    ("too long", "more than data.max_tokens", talk(user("word " * 900), said("b"))),
]

BESIDE: dict[str, Any] = {
    "tools": [{"type": "function"}],
    "functions": [{"name": "f"}],
    "objects": {"bbox": [[1, 2, 3, 4]]},
    "bbox": [1, 2, 3, 4],
    "rejected_response": "c",
    "chosen": [user("a")],
    "rejected": "c",
    "kto_tag": True,
    "label": True,
    "history": [["a", "b"]],
    "max_pixels": 784,
    "video_start": 1,
    "chat_template_kwargs": {"enable_thinking": False},
    "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
}
"""Keys of a record that change what its messages mean."""
OF_TURN: dict[str, Any] = {
    "tool_calls": [{"function": {"name": "f"}}],
    "function_call": {"name": "f"},
    "reasoning_content": "2 + 3",
    "thinking": "2 + 3",
    "images": ["good.png"],
    "audio": "stereo.wav",
    "objects": {"bbox": [[1, 2, 3, 4]]},
    "train_detail": [{"begin_offset": 0}],
}
OF_FILE: dict[str, Any] = {
    "detail": "low",
    "bbox": [1, 2, 3, 4],
    "total_pixels": 784,
    "max_frames": 4,
    "text": "what?",
    "bytes": "iVBORw0KGgo",
    "max_pixels": -1,
    "min_pixels": True,
    "resized_height": 28,
}
PICTURE = {"type": "image", "image": "good.png"}
FAULTS += [("key", key, talk(user("a"), said("b"), **{key: value})) for key, value in BESIDE.items()]
FAULTS += [("key", f"has {key}: ", talk(user("a"), said("b", **{key: value}))) for key, value in OF_TURN.items()]
FAULTS += [("key", key, talk(user([{**PICTURE, key: value}]), said("b"))) for key, value in OF_FILE.items()]
FAULTS += [
    (
        "key",
        "has detail: ",
        talk(user([{"type": "image_url", "image_url": {"url": "a", "detail": "high"}}]), said("b")),
    ),
    (
        "key",
        "both fps and nframes",
        talk(user([{"type": "video", "video": "film.mp4", "fps": 1, "nframes": 4}]), said("b")),
    ),
    ("key", "the least is more", talk(user([{**PICTURE, "min_pixels": 900, "max_pixels": 90}]), said("b"))),
    (
        "key",
        "the end does not come after the start",
        talk(user([{"type": "video", "video": "film.mp4", "video_start": 2, "video_end": 1}]), said("b")),
    ),
]

# Unusual, but valid.
RIGHT: dict[str, str] = {
    "line ends of Windows": talk(user("a"), said("b")) + "\r",
    "a palette with a transparent colour": talk(user(image("palette.png")), said("b")),
    "inks of a printer": talk(user(image("inks.jpg")), said("b")),
    "one bit": talk(user(image("bit.png")), said("b")),
    "grey with transparency": talk(user(image("grey.png")), said("b")),
    "a moving picture, of which the first is taken": talk(user(image("moving.gif")), said("b")),
    "a picture that its camera turned": talk(user(image("turned.jpg")), said("b")),
    "16 bits of each colour": talk(user(image("colours16.png")), said("b")),
    "a wrong ending": talk(user(image("really_a_jpeg.png")), said("b")),
    "a drawing": talk(user(image("drawing.svg")), said("b")),
    "two channels": talk(user(sound("stereo.wav")), said("b")),
    "8 kHz": talk(user(sound("8k.flac")), said("b")),
    "a film": talk(user(film("film.mp4")), said("b")),
    "a picture in an answer that is not learnt": talk(
        user("draw"),
        said([{"type": "image", "image": "good.png"}, *image("good.png")[1:]], loss=False),
        user("and now?"),
        said("no"),
    ),
    "the other list of turns is empty": talk(user("a"), said("b"), conversations=None, tools=[], rejected_response=""),
    "no detail asked for": talk(
        user([{"type": "image_url", "image_url": {"url": "good.png", "detail": "auto"}}]), said("b", tool_calls=None)
    ),
}


def write_files(folder: Path) -> None:
    """Writes valid and broken files."""
    import soundfile

    Image.new("RGB", (40, 24), "red").save(folder / "good.png")
    Image.effect_noise((80, 80), 50).save(folder / "torn.png")
    data = (folder / "torn.png").read_bytes()
    (folder / "torn.png").write_bytes(data[: len(data) // 2])
    Image.effect_noise((80, 80), 50).save(folder / "torn.jpg")
    data = (folder / "torn.jpg").read_bytes()
    (folder / "torn.jpg").write_bytes(data[: len(data) // 2])
    Image.new("RGB", (400, 8)).save(folder / "long.png")
    Image.new("I;16", (40, 24), 9000).save(folder / "deep.png")
    Image.new("F", (40, 24), 0.5).save(folder / "floats.tiff")
    (folder / "text.png").write_text("no picture")
    (folder / "torn.svg").write_text('<svg width="20" height="20"><rect')
    (folder / "loop.png").symlink_to(folder / "loop.png")
    for name in ("empty.png", "empty.wav", "empty.mp4"):
        (folder / name).write_bytes(b"")
    (folder / "folder").mkdir()
    (folder / "bomb.png").write_bytes(_png(30_000, 30_000, 8, 2))
    # Valid.
    Image.new("P", (40, 24), 3).save(folder / "palette.png", transparency=3)
    Image.new("CMYK", (40, 24), (9, 90, 9, 9)).save(folder / "inks.jpg")
    Image.new("1", (40, 24), 1).save(folder / "bit.png")
    Image.new("LA", (40, 24), (90, 128)).save(folder / "grey.png")
    frames = [Image.new("RGB", (40, 24), colour) for colour in ("red", "green")]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (40, 24), "red").save(folder / "turned.jpg", exif=turned)
    (folder / "colours16.png").write_bytes(_png(40, 24, 16, 2, pixel=struct.pack(">3H", 60_000, 300, 9_000)))
    Image.new("RGB", (40, 24), "red").save(folder / "really_a_jpeg.png", format="JPEG")
    (folder / "drawing.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="24"><rect width="30" height="9" fill="#a03"/></svg>'
    )
    # Valid.
    noise = 0.1 * np.random.default_rng(0).standard_normal((48_000, 2))
    soundfile.write(folder / "stereo.wav", noise[:22_050], 44_100)
    soundfile.write(folder / "8k.flac", noise[:4_000, 0], 8_000)
    soundfile.write(folder / "endless.wav", np.zeros(40_000), 8_000)
    soundfile.write(folder / "click.wav", noise[:100, 0], 16_000)
    (folder / "torn.wav").write_bytes((folder / "stereo.wav").read_bytes()[:30])
    soundfile.write(folder / "nan.wav", np.full(8_000, np.nan, np.float32), 16_000, subtype="FLOAT")
    _write_film(folder / "film.mp4")
    (folder / "torn.mp4").write_bytes((folder / "film.mp4").read_bytes()[:400])
    (folder / "text.mp4").write_text("no film")


def _png(width: int, height: int, depth: int, colours: int, pixel: bytes = b"") -> bytes:
    """A PNG of one colour, or only its header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = (b"\0" + pixel * width) * height if pixel else b""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _write_film(path: Path) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for shade in (0, 90, 180, 250):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def chats(**tokens: Any) -> TokenizerFormat:
    tokenizer = trained({}, ("<|im_start|>", "<|im_end|>", "<image>", "<audio>"))
    specs: dict[str, Any] = {"vision": ImageSpec(8, 16), "audio": AudioSpec(8, 2.0)}
    count = {"vision": lambda shape: shape[1] * shape[2] // 64, "audio": lambda shape: -(-shape[1] // 8)} | tokens
    tags = {"vision": "<image>", "audio": "<audio>"}
    return TokenizerFormat(tokenizer, TEMPLATE, name="the template", tags=tags, specs=specs, tokens=count)
