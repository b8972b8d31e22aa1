"""layout.toml: the choice for a config as TOML, and the reasons. `interlace train --layout` repeats the choice.

    version = 1
    [asked]                     digests of the sections that the choice depends on
    [asked_keys.SECTION]        digests of the keys of each section
    [chosen.parallel]           keys as in a config, and [chosen.parallel.NAME]
    [chosen.train]              batch_size, microbatches, activation_checkpointing
    [predicted]                 seconds of a step and of its parts; bytes on the fullest rank, and the limit
    [reasons]                   source of the costs, number of candidates, refused candidates with reasons
    [[runners_up]]              the next best

Only `version`, `asked`, `asked_keys` (which files of earlier versions lack) and `chosen` are read back.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from interlace.train.auto.candidates import with_tables
from interlace.train.config.load import ConfigError, check_keys, dumps_table, explained
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.train.auto.choose import Decision
    from interlace.train.auto.evaluate import Outcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "layout.toml"
_OLD_NAME = "plan.lock"  # in run folders of earlier versions
VERSION = 1
_RUNNERS_UP = 10
_AGAIN = "remove the file (or omit --layout) to choose again"
_TRAIN = (
    "batch_size", "microbatches", "activation_checkpointing", "freeze", "train", "lora", "optimizer",
    "offload_optimizer", "precision", "frozen_dtype", "ema", "assign", "balance",
)  # fmt: skip
_DATA = ("dataset", "max_tokens", "pack")


def text_of(config: Config, decision: Decision, origin: str, data: str) -> str:
    """Text of the file for `config` as asked. origin, data: sources of costs and lengths."""
    best, parts = decision.best, _asked(config)
    table: dict[str, Any] = {
        "version": VERSION,
        "asked": digests(config),
        "asked_keys": {name: {key: digest_of(value) for key, value in part.items()} for name, part in parts.items()},
        "chosen": {"train": best.candidate.train(), "parallel": best.candidate.parallel()},
        "predicted": _numbers(best),
        "reasons": {
            "candidates": decision.considered,
            "simulated": len(decision.outcomes),
            "costs": origin,
            "data": data,
            "notes": list(decision.notes),
            "refused": dict(decision.refused),
            "examples": dict(decision.examples),
        },
    }
    others = [each for each in decision.outcomes if each is not best][:_RUNNERS_UP]
    table["runners_up"] = {
        str(number): {"layout": str(each.candidate), **_numbers(each)} for number, each in enumerate(others, 1)
    }
    head = (
        f"# Chosen by parallel.layout = 'auto': {best.candidate}.\n# interlace train CONFIG --layout FILE repeats it.\n"
    )
    return head + dumps_table(table)


def table_of(text: str) -> dict[str, Any]:
    """Parsed content of a layout file."""
    return tomllib.loads(text)


def section_of(text: str) -> str:
    """The choice as config sections."""
    chosen = table_of(text)["chosen"]
    return dumps_table({"train": chosen["train"], "parallel": chosen["parallel"]}).rstrip()


def _numbers(outcome: Outcome) -> dict[str, float]:
    return {
        "ranks": outcome.candidate.world,
        "seconds": outcome.seconds,
        "compute_seconds": outcome.compute,
        "communication_seconds": outcome.communication,
        "bubble_seconds": outcome.bubble,
        "peak_bytes": outcome.peak,
        "memory_bytes": int(outcome.limit),
    }


def of_run(folder: Path) -> Path | None:
    """The layout file of a run folder; None if it has none."""
    return next((folder / name for name in (NAME, _OLD_NAME) if (folder / name).exists()), None)


def with_layout(config: Config, text: str, where: str) -> Config:
    """The config with the choice of the layout file `text`.

    Raises ConfigError, naming its source `where` and the key, for an invalid file and for one of another config.
    """
    try:
        table = tomllib.loads(text)
        if table.get("version") != VERSION:
            found = table.get("version", "missing")
            raise ValueError(f"version is {found}, but this version of Interlace reads {VERSION}")
        asked, parallel, train = (
            _section(table, *keys) for keys in (("asked",), ("chosen", "parallel"), ("chosen", "train"))
        )
    except ValueError as error:
        raise ConfigError(f"{where}: invalid layout file: {error}; {_AGAIN}") from None
    if other := _differing(config, asked, table.get("asked_keys")):
        raise ConfigError(
            f"{where} was chosen for another config, with other settings of {', '.join(other)}: {_AGAIN}, or restore "
            "the config"
        )
    check_keys({"parallel": parallel, "train": train}, where)
    try:
        return with_tables(config, parallel, train)
    except ValidationError as error:
        raise ConfigError(f"{where}: invalid layout file: {explained(error)}; {_AGAIN}") from None


def _section(table: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """An inner table of the file. Raises ValueError."""
    inner: Any = table
    for depth, key in enumerate(path, 1):
        inner = inner.get(key)
        if not isinstance(inner, dict):
            raise ValueError(f"it has no section [{'.'.join(path[:depth])}]")
    return dict(inner)


def _differing(config: Config, asked: Mapping[str, object], keys: object) -> list[str]:
    """Settings of `config` that are not those of the file: keys, or sections where the file has no digests of keys."""
    found = []
    for name, part in _asked(config).items():
        if asked.get(name) == digest_of(part):
            continue
        known = keys.get(name) if isinstance(keys, dict) else None
        theirs: dict[str, Any] = known if isinstance(known, dict) else {}
        mine = {key: digest_of(value) for key, value in part.items()}
        other = [key for key in sorted({*theirs, *mine}) if theirs.get(key) != mine.get(key)] if theirs else []
        found += [f"{name}.{key}" for key in other] or [f"[{name}]"]
    return found


def digests(config: Config) -> dict[str, str]:
    """Section -> digest of its keys that a layout depends on."""
    return {name: digest_of(part) for name, part in _asked(config).items()}


def _asked(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> its keys that a layout depends on."""
    train = {key: value for key, value in config.train.model_dump().items() if key in _TRAIN}
    for key in config.parallel.choose or ():
        train.pop(key, None)
    data = {key: value for key, value in config.data.model_dump().items() if key in _DATA}
    if config.data.of_earlier_version:
        data["dataset"] = "digits"  # as in the digests of the version that had this kind
    skipped = {"timeout", "max_ranks", "memory"}
    parallel = config.parallel.model_dump(exclude_unset=True, exclude_none=True, exclude=skipped)
    parallel["plan"] = parallel.pop("layout")  # its name in the digests of earlier versions
    return {"model": config.model.model_dump(), "train": train, "data": data, "parallel": parallel}


def digest_of(value: object) -> str:
    """Digest of a section or of the value of a key."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
