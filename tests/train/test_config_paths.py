"""Keys and options that are paths accept local paths only. URLs are refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interlace.cli import main
from interlace.train.config import load as configs
from interlace.train.config.load import ConfigError
from tests.train.build import TABLE

PATHS = {
    "run.folder": "run.folder",
    "data.cache": "data.cache",
    "data.media": "data.media",
    "data.tokenizer": "data.tokenizer",
    "data.chat_template": "data.chat_template",
    "data.train": "data.train",
    "data.validation": "data.validation",
    "data.sources": "data.sources.train",
    "model.vision.path": "[model.vision] path",
    "model.language_model.path": "[model.language_model] path",
    "model.path": "[model] path",
}


@pytest.mark.parametrize("key", PATHS)
def test_a_url_is_no_path(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value: Any = "s3://bucket/runs"
    value = [value] if key in ("data.train", "data.validation") else value
    value = [{"name": "a", "train": [value]}] if key == "data.sources" else value
    table = copy.deepcopy(TABLE)
    configs.set_key(table, tuple(key.split(".")), value, key)
    with pytest.raises(ConfigError) as error:
        configs.from_table(table, source="mine.toml")
    assert str(error.value) == (
        f"mine.toml: {PATHS[key]}: 's3://bucket/runs' is a URL, and only local paths are read and written: mount that "
        "store, or copy its files, and give the local path"
    )
    assert not list(tmp_path.iterdir())


def test_every_key_that_is_a_path_is_known() -> None:
    """By name: each key for a folder or files is in the list above."""

    def keys(section: Any, path: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            inner, place = configs._section_type(field.annotation), f"{path}{name}"
            if inner is not None:
                yield from keys(inner, f"{place}.")
            elif "str" in str(field.annotation) and re.match(r"(Folder|Files?)\b", str(field.description)):
                yield place
        if (own := getattr(section, "free", None)) is not None:
            yield from keys(own, f"{path}vision.")

    assert {re.sub(r"^data.sources.*", "data.sources", key) for key in keys(configs.Config, "")} == PATHS.keys()


@pytest.mark.parametrize(
    ("url", "instead"), [("file:///data/a.jsonl", "write '/data/a.jsonl'"), ("GS://b/c", "mount that store")]
)
def test_what_to_give_in_place_of_a_url(url: str, instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "mine.toml", "--picture", url])
    assert f"argument --picture: {url!r} is a URL" in (output := capsys.readouterr().err) and instead in output
