"""Records in the formats of other trainers, and their expected results: learnt or refused."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.data.chat_faults import said, user


class Case(NamedTuple):
    """A record. learnt: its answers; or refused: (kind of broken, a word of the reason). ignored: keys not read."""

    name: str
    record: dict[str, Any]
    learnt: tuple[str, ...] = ()
    refused: tuple[str, str] = ("", "")
    ignored: tuple[str, ...] = ()


def cases(folder: Path) -> list[Case]:
    """Writes the images into `folder` and returns the records."""
    _pictures(folder)
    buffer = io.BytesIO()
    _noise(30, 30).save(buffer, "PNG")
    inline = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    cat = ("A cat.",)
    result = [Case(name, _ask(name), cat) for name in ("one.png", "cmyk.jpg", "rgb48.png", "moving.gif", "turned.jpg")]
    result.append(Case("rgba.png", _ask("rgba.png"), cat))
    for name, kind in (
        ("grey16.png", "broken file"),
        ("cut.jpg", "broken file"),
        ("page.png", "broken file"),
        ("empty.png", "broken file"),
        ("gone.png", "missing file"),
    ):
        result.append(Case(name, _ask(name), refused=(kind, name)))
    rounds = [user("One?"), said("Yes."), user("Two?"), said("No.")]
    bad = [user("a"), said("Bad.", loss=False), user("b"), said("Good.")]
    light = [user("a"), said("Bad.", weight=0), user("b"), said("Good.")]
    called = said("", tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome"}}}])
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    told = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A bee."}]
    record = ("record", "has neither messages nor conversations")
    return [
        *result,
        Case("two rounds", {"messages": rounds}, ("Yes.", "No.")),
        Case("turn not to be learnt", {"messages": bad}, ("Good.",)),
        Case("turn of weight 0", {"messages": light}, ("Good.",)),
        Case(
            "thought beside the answer",
            {"messages": [user("a"), said("Five.", reasoning_content="2 + 3")]},
            refused=("key", "turn 2 has reasoning_content"),
        ),
        Case("thought in the answer", {"messages": [user("a"), said("<think>2 + 3</think>Five.")]}, ("2 + 3 Five.",)),
        Case(
            "tools",
            {"tools": tools, "messages": [user("Rome?"), called, {"role": "tool", "content": "sun"}, said("Sun.")]},
            refused=("key", "has tools"),
        ),
        Case(
            "boxes",
            {**_ask("one.png", "Find <ref-object>", "<bbox>"), "objects": {"ref": ["cat"], "bbox": [[1, 2, 30, 40]]}},
            refused=("key", "has objects"),
        ),
        Case(
            "rejected answer",
            {"messages": [user("a"), said("b")], "rejected_response": "c"},
            refused=("key", "has rejected_response"),
        ),
        Case(
            "picture without a tag", {"image": "one.png", "conversations": told}, refused=("media count", "put <image>")
        ),
        Case(
            "alpaca", {"instruction": "<image>What?", "input": "", "output": "b", "images": ["one.png"]}, refused=record
        ),
        Case("query and response", {"query": "What?", "response": "b", "history": []}, refused=record),
        Case("prompt and completion", {"prompt": [user("Hi")], "completion": [said("Ho")]}, refused=record),
        Case("texts", {"texts": [{"user": "What?", "assistant": "b"}], "images": ["one.png"]}, refused=record),
        Case("question and answer", {"question": "What?", "answer": "b", "image": "one.png"}, refused=record),
        Case("document", {"text": "Once upon a time there was a cat."}, refused=record),
        Case("interleaved document", {"texts": ["A cat:", None], "images": [None, "one.png"]}, refused=record),
        Case("image_url, path", _by_url("one.png"), cat),
        Case("image_url, file://", _by_url((folder / "one picture.png").resolve().as_uri()), cat),
        Case("image_url, data", _by_url(inline), refused=("url", "inline data")),
        Case("picture in an answer", _ask("one.png", "", "<image>"), refused=("type", "answer with image in it")),
        Case(
            "tag that is text",
            {"messages": [user("What is <image> in HTML?"), said("b")]},
            refused=("media count", '{"type": "text"'),
        ),
        Case(
            "frames",
            {"messages": [user([{"type": "video", "video": ["one.png", "rgba.png"], "fps": 2}]), said("b")]},
            refused=("media key", "video is a list"),
        ),
        Case("unknown key", {"colour": "red", **_ask("one.png")}, cat, ignored=("colour",)),
        Case(
            "unknown key of a turn",
            {"messages": [{"role": "user", "content": "a", "mood": 1}, said("b")]},
            ("b",),
            ignored=("messages[].mood",),
        ),
        # Further cases: empty columns of tables, and two lists of turns.
        Case("empty list of conversations", {"messages": [user("a"), said("b")], "conversations": None}, ("b",)),
        Case(
            "two lists of turns", {"messages": [user("a"), said("b")], "conversations": told}, refused=("key", "both")
        ),
    ]


def _ask(file: str, question: str = "What is it?", answer: str = "A cat.") -> dict[str, Any]:
    tag = "" if answer == "<image>" else "<image>"
    return {"messages": [user(f"{tag}{question or 'Draw'}"), said(answer)], "images": [file]}


def _by_url(url: str) -> dict[str, Any]:
    item = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [user([{"type": "text", "text": "What?"}, item]), said("A cat.")]}


def _noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)


def _pictures(folder: Path) -> None:
    _noise(49, 57).save(folder / "one.png")
    _noise(49, 57).save(folder / "one picture.png")
    _noise(50, 40).convert("CMYK").save(folder / "cmyk.jpg")
    _noise(50, 50, "RGBA").save(folder / "rgba.png")
    Image.fromarray(np.full((40, 40), 9000, np.uint16)).save(folder / "grey16.png")
    (folder / "rgb48.png").write_bytes(_deep(30))
    frames = [_noise(30, 30 + number) for number in range(3)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:], duration=50)
    turned = Image.Exif()
    turned[0x0112] = 6
    _noise(60, 30).save(folder / "turned.jpg", exif=turned)
    (folder / "cut.jpg").write_bytes((folder / "turned.jpg").read_bytes()[:300])
    (folder / "page.png").write_text("<html>404 not found</html>")
    (folder / "empty.png").touch()


def _deep(side: int) -> bytes:
    """A PNG with 16 bits per colour channel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = np.random.default_rng(0).integers(0, 65536, (side, side, 3), np.uint16).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
