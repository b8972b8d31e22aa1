"""Reads a training config: TOML file + ``--set key=value`` -> validated `Config`, or one clear `ConfigError`.

Every error names the file (or the ``--set``), the section and the key, and gives the correction. For an unknown key it
gives the nearest valid one, for a wrong type the required type, for a missing key its meaning.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from interlace import _hints
from interlace._hints import nearest
from interlace.train.config.earlier import read_as_chats
from interlace.train.config.local_paths import local_path
from interlace.train.config.sections import OPEN_REPLICAS, Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


CLUSTER = ("links", "ranks_per_node", "timeout", "threads", "choose", "max_ranks", "memory")
"""Keys of [parallel] that describe the machines and the search for a layout, not the layout itself."""


class ConfigError(ValueError):
    """Error in the user's config or command line. The message contains all that is needed to correct it."""


def load(
    path: str | Path, overrides: list[str] | None = None, *, open_replicas: bool = False, auto: bool = False
) -> Config:
    """Reads `path`, applies ``a.b=value`` overrides and validates the result.

    open_replicas: without ``parallel.dp``, skip the checks that depend on the number of replicas, instead of assuming
    one replica. For ranks of torchrun, which count the replicas (`rank.with_replicas`), and for commands that only
    need the model of a run.
    auto: choose the layout, and ignore the keys of [parallel] except those of the cluster (`CLUSTER`).

    Raises ConfigError for an unreadable file, bad TOML, unknown keys, wrong types, missing keys, impossible values.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    return loads(text, overrides, source=str(path), open_replicas=open_replicas, auto=auto)


def loads(
    text: str,
    overrides: list[str] | None = None,
    *,
    source: str = "config",
    open_replicas: bool = False,
    auto: bool = False,
) -> Config:
    """Returns the config of a TOML text. `source` names it in messages. Raises ConfigError as `load` does."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from None
    return from_table(table, overrides, source=source, open_replicas=open_replicas, auto=auto)


def from_table(
    table: dict[str, Any],
    overrides: list[str] | None = None,
    *,
    source: str = "config",
    open_replicas: bool = False,
    auto: bool = False,
) -> Config:
    """Checks a parsed TOML table and returns its config. `source` names it in messages."""
    where: dict[tuple[str, ...], str] = {}
    for override in overrides or []:
        keys, value = parse_override(override)
        _as_section(table)
        if keys == ("parallel",) and value == "auto":
            _leave_open(table)
        else:
            set_key(table, keys, value, override)
        where[keys] = f"--set {override}"
    _open_plan(table)
    _describe_models(table, where, source)
    try:
        read_as_chats(table)
    except ValueError as error:
        raise ConfigError(f"{_place(('data', 'dataset'), where, source)}: {error}") from None
    check_keys(Config, table, (), where, source)
    if auto and not _is_open(table):
        _leave_open(table)
        _open_plan(table)
    try:
        return Config.model_validate(table, context=OPEN_REPLICAS if open_replicas else None)
    except ValidationError as error:
        lines = [_explain(problem, where, source) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _as_section(table: dict[str, Any]) -> None:
    """Replaces ``parallel = "auto"`` by the section that it stands for."""
    if table.get("parallel") == "auto":
        table["parallel"] = {"plan": "auto"}


def _leave_open(table: dict[str, Any]) -> None:
    """Sets plan = auto and removes all keys of [parallel] except `CLUSTER`."""
    parallel = table.get("parallel")
    kept = {key: parallel[key] for key in CLUSTER if key in parallel} if isinstance(parallel, dict) else {}
    table["parallel"] = kept | {"plan": "auto"}


def _is_open(table: dict[str, Any]) -> bool:
    return isinstance(table.get("parallel"), dict) and table["parallel"].get("plan") == "auto"


def _open_plan(table: dict[str, Any]) -> None:
    """With plan = auto: adds the keys of [train] that are not given to ``choose``."""
    _as_section(table)
    train = table.get("train")
    if not _is_open(table) or not isinstance(train, dict):
        return
    parallel = table["parallel"]
    keys = ("batch_size", "microbatches", "activation_checkpointing")
    parallel.setdefault("choose", [key for key in keys if key not in train])
    if isinstance(parallel["choose"], list) and "batch_size" in parallel["choose"]:
        least = train.get("microbatches", 1)  # placeholder until it is chosen
        train.setdefault("batch_size", least if isinstance(least, int) else 1)


def _describe_models(table: dict[str, Any], where: dict[tuple[str, ...], str], source: str) -> None:
    """Fills in architecture and config of modules with a ``path`` from its config.json. Makes the path absolute."""
    modules = table.get("model")
    if isinstance(modules, dict) and isinstance(modules.get("path"), str):
        _describe_whole(modules, where, source)
        return
    for name, section in modules.items() if isinstance(modules, dict) else ():
        path = section.get("path") if isinstance(section, dict) else None
        if not isinstance(path, str):
            continue  # errors are reported below
        folder = _local(path, ("model", name), where, source)
        section["path"] = str(folder)
        given, said = section.get("architecture"), section.get("config", {})
        if ("config" in section and given is not None) or not isinstance(said, dict):
            continue
        from interlace.train.models.architectures import describe

        try:
            found = describe(folder, given, encoder=name != "language_model")
        except ValueError as error:
            raise ConfigError(
                f"{_place(('model', name, 'path'), where, source)}: [model.{name}] path: {error}"
            ) from None
        section["architecture"] = found.architecture
        section["config"] = {key: value for key, value in found.config.items() if key not in said} | said
        if unset := [key for key in found.unset if key.partition(".")[0] not in said]:
            section["unset"] = [*section.get("unset", []), *unset]
        if found.pixels is not None:
            _add_pixels(section, found.pixels)


def _describe_whole(modules: dict[str, Any], where: dict[tuple[str, ...], str], source: str) -> None:
    """Adds missing sections for the modules of a whole model. Makes its path absolute."""
    from interlace.model.whole.model import modules_of
    from interlace.train.models.architectures import pixel_statistics

    folder = _local(modules["path"], ("model",), where, source)
    modules["path"] = str(folder)
    try:
        encoder, kind = modules_of(folder)
        pixels = pixel_statistics(kind, folder)
    except ValueError as error:
        raise ConfigError(f"{_place(('model', 'path'), where, source)}: [model] path: {error}") from None
    for name, section in modules.items():
        if isinstance(section, dict) and name not in (encoder, "language_model"):
            raise ConfigError(f"{source}: [model.{name}] is no module of {folder}, whose are {encoder}, language_model")
    modules.setdefault("language_model", {})
    section = modules.setdefault(encoder, {})
    if pixels is not None and isinstance(section, dict):
        _add_pixels(section, pixels)


def _local(path: str, section: tuple[str, ...], where: dict[tuple[str, ...], str], source: str) -> Path:
    """Absolute folder of a section's ``path``. Raises ConfigError for a URL."""
    try:
        return Path(local_path(path)).expanduser().absolute()
    except ValueError as error:
        raise ConfigError(f"{_place((*section, 'path'), where, source)}: {_section(section)} path: {error}") from None


def _add_pixels(section: dict[str, Any], pixels: tuple[list[float], list[float]]) -> None:
    """Sets mean and std of a folder, unless the config gives them; each separately."""
    section["mean"], section["std"] = (section.get(k, p) for k, p in zip(("mean", "std"), pixels, strict=True))


def unsettled(config: Config, source: str, what: str) -> None:
    """Raises ConfigError if the config leaves the layout open; `what` needs it."""
    if config.parallel.auto:
        raise ConfigError(
            f"{source}: [parallel] plan = 'auto' says no layout yet, which {what} needs: use interlace plan choose, or "
            "the config.toml of a run folder, which has what was chosen"
        )


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """``train.lr=1e-3`` -> (("train", "lr"), 0.001). A value that is not valid TOML becomes a string."""
    name, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in name.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write it as section.key=value, such as --set train.steps=100")
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def set_key(table: dict[str, Any], keys: tuple[str, ...], value: Any, text: str) -> None:
    """Sets one override in the nested table. Raises ConfigError if a key on its path is not a table."""
    for depth, key in enumerate(keys[:-1], 1):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {text}: {'.'.join(keys[:depth])} is a value, not a section")
        table = inner
    table[keys[-1]] = value


def check_keys(
    model: type[BaseModel],
    table: dict[str, Any],
    path: tuple[str, ...],
    where: dict[tuple[str, ...], str],
    source: str,
) -> None:
    """Raises ConfigError for keys that `model` does not have, in all inner sections, and names the nearest valid
    key."""
    free: type[BaseModel] | None = getattr(model, "free", None)
    known = {*model.model_fields, *(key for key, value in table.items() if free and isinstance(value, dict))}
    for key, value in table.items():
        full = (*path, key)
        if free is not None and key not in model.model_fields and isinstance(value, dict):
            check_keys(free, value, full, where, source)
            continue
        if key not in model.model_fields:
            place = _place(full, where, source)
            raise ConfigError(f"{place}: {_section(path)} has no key {key!r}; {nearest(key, known)}")
        inner = _section_type(model.model_fields[key].annotation)
        if inner is not None:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    check_keys(inner, each, full, where, source)


def imported(path: str, where: str) -> Any:
    """The object at "package.module:name". Raises ConfigError if it does not exist."""
    try:
        return _hints.imported(path, where)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def dumps(config: Config) -> str:
    """Resolved config as TOML, with defaults. `load` reads it back to an equal Config."""
    table = config.model_dump(exclude_none=True)
    if config.parallel.auto:  # keys that are not given stay open
        table["parallel"] = config.parallel.model_dump(exclude_none=True, exclude_unset=True)
    return dumps_table(table)


def dumps_table(table: dict[str, Any]) -> str:
    """Converts a nested table to TOML."""
    lines: list[str] = []
    _write_table(table, (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if path and (values or not table):
        lines.extend(["", f"[{'.'.join(_key(part) for part in path)}]"])
    lines.extend(f"{_key(key)} = {_value(value)}" for key, value in values.items())
    for key, value in table.items():
        if isinstance(value, dict):
            _write_table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    # TOML has all escapes of JSON, and also wants one for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, (bool, int, float)):
        return str(value).lower()  # also nan, inf and -inf are TOML's
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    return _string(str(value))  # also dates and times in a HuggingFace table


def _section(path: tuple[str, ...]) -> str:
    return f"[{'.'.join(path)}]" if path else "the top level"


def _section_at(path: tuple[str, ...]) -> type[BaseModel] | None:
    """Class of the section at a path of keys; None for a key of a section."""
    model: type[BaseModel] | None = Config
    for part in path:
        field = None if model is None else model.model_fields.get(part)
        model = getattr(model, "free", None) if field is None else _section_type(field.annotation)
    return model


def _place(path: tuple[str, ...], where: dict[tuple[str, ...], str], source: str) -> str:
    """Origin of a key: the ``--set`` that wrote it (or a key inside it), else the file."""
    for keys, text in where.items():
        if path[: len(keys)] == keys or keys[: len(path)] == path:
            return text
    return source


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """Section class of ``Encoder``, ``Encoder | None``, ``list[Group]`` and similar types; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list):
        for inner in get_args(annotation):
            found = _section_type(inner)
            if found is not None:
                return found
    return None


def _explain(problem: Any, where: dict[tuple[str, ...], str], source: str) -> str:
    """Converts a pydantic error to a message with the names of the config file."""
    path = tuple(part for part in problem["loc"] if isinstance(part, str))
    place = _place(path, where, source)
    if problem["type"] == "missing":
        return f"{place}: {_section(path[:-1])} misses the key {path[-1]!r}{_meaning(path)}"
    if problem["type"] == "value_error":
        named = f"{_section(path) if _section_at(path) else '.'.join(path)}: " if path else ""
        return f"{place}: {named}{problem['ctx']['error']}"
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{place}: {'.'.join(path)} must be a section (a table), not {_shown(problem['input'])}"
    message, hint = problem["msg"].removeprefix("Input "), ""
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = problem["ctx"]["expected"].replace(" or ", ", ").split(", ")
        close = difflib.get_close_matches(repr(problem["input"]), choices, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else ""
    name = ".".join(str(part) for part in problem["loc"])
    return f"{place}: {name} {message}, not {_shown(problem['input'])}{hint}"


def _shown(value: Any) -> str:
    text = repr(value)
    kind = {"str": "string", "int": "integer", "bool": "boolean", "dict": "table"}.get(
        type(value).__name__, type(value).__name__
    )
    return f"the {kind} {text if len(text) <= 60 else text[:57] + '...'}"


def _meaning(path: tuple[str, ...]) -> str:
    """`` (meaning of the key)``, from the field's docstring."""
    model = _section_at(path[:-1])
    field = None if model is None else model.model_fields.get(path[-1])
    text = " ".join((field.description or "").split()) if field is not None else ""
    return f" ({text.rstrip('.')})" if text else ""
