"""Chats about the digits, and the tokenizer that has bytes as tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from interlace.data import ByteTokenizer
from interlace.data.builtin import stamps_folder
from interlace.data.builtin.byte_tokenizer import write_byte_tokenizer
from interlace.data.builtin.digits import WORDS, digit_pictures
from interlace.data.builtin.stamps import Settings

EARLIER = {"byte_encoders": (), "side": 8}


def made(folder: Path, **settings: Any) -> list[list[Any]]:
    """Records of both splits."""
    stamps_folder.make(folder, Settings(held_out=0.2, **settings), source="digits")
    return [[json.loads(line) for line in (folder / name).open()] for name in stamps_folder.SPLITS]


def picture(folder: Path, record: Any) -> np.ndarray:
    return np.asarray(Image.open(folder / record["messages"][0]["content"][0]["image"]))


def number_of(record: Any) -> int:
    return int(Path(record["messages"][0]["content"][0]["image"]).stem.partition("-")[0])


@pytest.mark.parametrize("form", [{"records": 1600}, EARLIER | {"looks": 1}])
def test_every_digit_is_in_one_split_with_its_word(form: dict[str, Any], tmp_path: Path) -> None:
    splits, (pictures, targets) = made(tmp_path / "digits", **form), digit_pictures()
    train, held_out = ({number_of(record) for record in split} for split in splits)
    assert train | held_out == set(range(1797)) and not train & held_out
    assert 0.17 < len(held_out) / 1797 < 0.23 and len(splits[1]) == len(held_out)
    assert not {pictures[i].tobytes() for i in train} & {pictures[i].tobytes() for i in held_out}
    for record in splits[1][::37]:
        number, shown = number_of(record), picture(tmp_path / "digits", record)
        assert record["messages"][1]["content"] == WORDS[targets[number]] and record["kind"] == "digit"
        ink = np.minimum(pictures[number] * 16.0, 255).astype(np.uint8)
        if form == {"records": 1600}:
            assert shown.shape == (64, 64, 3) and abs(255 - shown.mean() - ink.mean()) < 4  # black on white
        else:
            assert np.array_equal(shown, np.repeat(ink[:, :, None], 3, axis=2))


def test_copies_for_training_are_distorted_a_little(tmp_path: Path) -> None:
    train, _ = made(tmp_path / "digits", **EARLIER, looks=2)
    assert len(train) == 2 * len({number_of(record) for record in train})
    plain = {number_of(record): picture(tmp_path / "digits", record) / 255.0 for record in train[: len(train) // 2]}
    for record in train[len(train) // 2 :][:20]:
        result = picture(tmp_path / "digits", record) / 255.0
        distances = {number: np.square(result - other).mean() for number, other in plain.items()}
        assert 0 < distances[number_of(record)] < np.median(list(distances.values()))


@pytest.mark.parametrize("encoders", [(), ("vision", "wide", "sharp")])
def test_the_written_tokens_are_bytes(encoders: tuple[str, ...], tmp_path: Path) -> None:
    own = ByteTokenizer(encoders)
    assert write_byte_tokenizer(tmp_path, encoders) == own.vocab_size
    written = AutoTokenizer.from_pretrained(tmp_path)
    assert len(written) == own.vocab_size and written.eos_token_id == own.EOS
    for text in ("seven", " What's it?  ", "été Ж 五\n", "<lang", "don't 12"):
        assert written(text, add_special_tokens=False)["input_ids"] == own.encode(text)
        assert written.decode(own.encode(text)) == text
    for token in range(256, own.vocab_size):
        assert written.convert_ids_to_tokens(token) == own.decode([token], skip_special=False)
    assert {name: written.convert_tokens_to_ids(f"<{name}>") for name in encoders if name != "vision"} == {
        name: own.placeholders[name] for name in encoders if name != "vision"
    }
