"""``interlace data check``: what is in a config's files, or in files alone, before anything is trained on it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interlace.train.config import ConfigError, load

CLEAN, BROKEN = 0, 1


def check(options: argparse.Namespace) -> int:
    """Reports on the data and writes a page of samples; 0 when all is well, 1 when records or files are broken."""
    from interlace.data import chats_page
    from interlace.data.chats_store import Rules

    if options.samples < 0:
        raise ConfigError(f"--samples {options.samples}: 0 or more")
    configs = [path for path in options.files if path.suffix == ".toml"]
    if configs and len(options.files) > 1:
        raise ConfigError(f"{configs[0]}: give one config, or files of chats")
    if options.set and not configs:
        raise ConfigError("--set changes a config, and none is given")
    chats: Any = None
    if configs:
        splits, chats, rules, cache = _of_config(configs[0], options.set, not options.headers)
    else:
        splits, rules, cache = {"": options.files}, Rules(decode=not options.headers), None
    if options.samples:
        _check_out(options.out, [*options.files, *(file for files in splits.values() for file in files)])
    strict = rules.on_too_long == "error"
    findings = chats_page.Findings(strict)
    shown: list[Any] = []
    for name, files in splits.items():
        own = chats_page.Findings(strict)
        for one in _examined(files, chats, rules, cache):
            own.add(one)
            findings.add(one)
            if one.broken is None and one.chat is not None and len(shown) < options.samples:
                shown.append((one.raw.where, one.chat, one.encoded))
        print("\n".join([f"{name}: " * bool(name) + ", ".join(map(str, files)), *own.lines()]))
    if options.samples:
        title = f"interlace data check {' '.join(map(str, options.files))}"
        temporary = options.out.with_name(f".{options.out.name}.{os.getpid()}")
        try:
            temporary.write_text(chats_page.write(title, findings, shown, chats), encoding="utf-8")
            temporary.replace(options.out)
        except OSError as error:
            raise ConfigError(f"--out {options.out}: cannot write there: {error.strerror}") from None
        print(f"{options.out}: {len(shown)} samples as the model will see them")
    return BROKEN if findings.broken or not findings.usable else CLEAN


def _of_config(path: Path, overrides: list[str], decode: bool) -> tuple[dict[str, list[Path]], Any, Any, str | None]:
    """The files of a config by split, how its model reads chats, and the rules. Raises ConfigError."""
    from dataclasses import replace

    from interlace.train.build import build
    from interlace.train.feed import chat_format, chat_rules
    from interlace.train.texts import tokenizer_of

    config = load(path, overrides)
    if config.data.dataset != "chats":
        raise ConfigError(f"{path}: data.dataset is {config.data.dataset!r}; only files of chats are checked")
    tokenizer = tokenizer_of(config, source=str(path))
    model = build(config, tokenizer, source=str(path))
    named = {"train": config.data.train, "validation": config.data.validation}
    splits = {name: [Path(file) for file in files] for name, files in named.items() if files}
    rules = replace(chat_rules(config, model, str(path)), decode=decode)
    return splits, chat_format(config, model, tokenizer, str(path)), rules, config.data.cache


def _check_out(out: Path, inputs: list[Path]) -> None:
    """Raises ConfigError when the page would be written over a config or data, or into them."""
    place = out.expanduser().resolve()
    for path in inputs:
        there = path.expanduser().resolve()
        if place == there or (there.is_dir() and there in place.parents):
            raise ConfigError(f"--out {out}: is (in) {path}, which is read; give another name for the page")


def _examined(files: list[Path], chats: Any, rules: Any, cache: str | None) -> Iterator[Any]:
    from interlace.data import cache_folder, chats_files, chats_store

    media = cache_folder(cache) / "chats" / "media"
    try:
        found = chats_files.find(files)
        yield from chats_store.examine(found, chats, rules, media)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(str(error)) from None
