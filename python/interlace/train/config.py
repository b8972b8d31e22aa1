"""Reads a training config: TOML file + ``--set key=value`` -> checked `Config`, or one clear `ConfigError`.

Every error names the file (or the ``--set``), the section and the key, and says what would be right: an unknown key is
answered with the nearest valid one, a wrong type with the type wanted, a missing key with its meaning.
"""

from __future__ import annotations

import difflib
import importlib
import math
import sys
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from interlace.train.local_paths import local_path
from interlace.train.schema import OPEN_REPLICAS, Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


CLUSTER = ("links", "ranks_per_node", "timeout", "threads", "choose", "max_ranks", "memory")
"""Keys of [parallel] that are not of a layout, but of the machines and of how one is chosen."""


class ConfigError(ValueError):
    """The user's config (or command line) is wrong; the message is all they need to mend it."""


def load(
    path: str | Path, overrides: list[str] | None = None, *, open_replicas: bool = False, auto: bool = False
) -> Config:
    """Reads `path`, applies ``a.b=value`` overrides, checks all of it.

    With `open_replicas` a config without ``parallel.dp`` is not one of one replica: what depends on their number is not
    checked. So for ranks of torchrun, which count them (`rank.with_replicas`), and for who asks the model of a run.
    auto: the layout is to be chosen, whatever [parallel] says of it; what it says of the cluster (`CLUSTER`) stays.

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
    """The config that a TOML text says; `source` names it in messages. Raises ConfigError as `load` does."""
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
    """Checks a parsed TOML table; `source` names it in messages."""
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
    """``parallel = "auto"`` becomes the section that it stands for."""
    if table.get("parallel") == "auto":
        table["parallel"] = {"plan": "auto"}


def _leave_open(table: dict[str, Any]) -> None:
    """Has the layout chosen: keeps of [parallel] what says nothing of it."""
    parallel = table.get("parallel")
    kept = {key: parallel[key] for key in CLUSTER if key in parallel} if isinstance(parallel, dict) else {}
    table["parallel"] = kept | {"plan": "auto"}


def _is_open(table: dict[str, Any]) -> bool:
    return isinstance(table.get("parallel"), dict) and table["parallel"].get("plan") == "auto"


def _open_plan(table: dict[str, Any]) -> None:
    """Where the layout is to be chosen: which keys of [train] are chosen, too."""
    _as_section(table)
    train = table.get("train")
    if not _is_open(table) or not isinstance(train, dict):
        return
    parallel = table["parallel"]
    keys = ("batch_size", "microbatches", "activation_checkpointing")
    parallel.setdefault("choose", [key for key in keys if key not in train])
    if isinstance(parallel["choose"], list) and "batch_size" in parallel["choose"]:
        least = train.get("microbatches", 1)  # until it is chosen
        train.setdefault("batch_size", least if isinstance(least, int) else 1)


def _describe_models(table: dict[str, Any], where: dict[tuple[str, ...], str], source: str) -> None:
    """What modules that name a folder leave to it, as its config.json says; the folder becomes absolute."""
    modules = table.get("model")
    if isinstance(modules, dict) and isinstance(modules.get("path"), str):
        _describe_whole(modules, where, source)
        return
    for name, section in modules.items() if isinstance(modules, dict) else ():
        path = section.get("path") if isinstance(section, dict) else None
        if not isinstance(path, str):
            continue  # what is wrong with it is found below
        folder = _local(path, ("model", name), where, source)
        section["path"] = str(folder)
        given, said = section.get("architecture"), section.get("config", {})
        if ("config" in section and given is not None) or not isinstance(said, dict):
            continue
        from interlace.train.architectures import describe

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
    """The tables of a whole model's modules, where the config has none; the folder becomes absolute."""
    from interlace.model.whole import modules_of
    from interlace.train.architectures import pixel_statistics

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
    """The folder that ``path`` of a section names, absolute. Raises ConfigError for a URL."""
    try:
        return Path(local_path(path)).expanduser().absolute()
    except ValueError as error:
        raise ConfigError(f"{_place((*section, 'path'), where, source)}: {_section(section)} path: {error}") from None


def _add_pixels(section: dict[str, Any], pixels: tuple[list[float], list[float]]) -> None:
    """A folder's mean and std; what the config says of one leaves the other as the folder has it."""
    section["mean"], section["std"] = (section.get(k, p) for k, p in zip(("mean", "std"), pixels, strict=True))


def unsettled(config: Config, source: str, what: str) -> None:
    """Raises ConfigError where `what` needs a layout and the config leaves it open."""
    if config.parallel.auto:
        raise ConfigError(
            f"{source}: [parallel] plan = 'auto' says no layout yet, which {what} needs: use interlace plan --auto, or "
            "the config.toml of a run folder, which has what was chosen"
        )


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """``train.lr=1e-3`` -> (("train", "lr"), 0.001). A value that is no TOML is taken as a bare word (a string)."""
    name, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in name.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write it as section.key=value, such as --set train.steps=100")
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def set_key(table: dict[str, Any], keys: tuple[str, ...], value: Any, text: str) -> None:
    """Puts one override into the nested table; refuses to go through a key that is not a table."""
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
    """Refuses keys that `model` does not have, section by section, naming the nearest one that it has."""
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


def nearest(name: str, valid: Any) -> str:
    """``did you mean 'steps'?`` or, when nothing is near, the list of what there is."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "valid: " + ", ".join(names)


def imported(path: str, where: str) -> Any:
    """The object at "package.module:name". Raises ConfigError where there is none."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever the user's own code raises
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{where} = {path!r}: cannot import {module}: {text}; it must be installed, or its folder in PYTHONPATH"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{where} = {path!r}: {module} has no {name!r}; {nearest(part, _public(found))}")
        found = getattr(found, part)
    return found


def _public(module: Any) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")] or ["nothing"]


def dumps(config: Config) -> str:
    """The resolved config, defaults written out, as TOML that `load` reads back to an equal Config."""
    table = config.model_dump(exclude_none=True)
    if config.parallel.auto:  # which leaves open what is not given
        table["parallel"] = config.parallel.model_dump(exclude_none=True, exclude_unset=True)
    return dumps_table(table)


def dumps_table(table: dict[str, Any]) -> str:
    """A nested table as TOML."""
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
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else _string(key)


def _string(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(c, c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}") for c in text) + '"'


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    return _string(str(value))  # dates and times, should a HuggingFace table ever hold one


def _section(path: tuple[str, ...]) -> str:
    return f"[{'.'.join(path)}]" if path else "the top level"


def _is_section(path: tuple[str, ...]) -> bool:
    """Whether a path of keys leads to a section, and not to a key of one."""
    model: type[BaseModel] | None = Config
    for part in path:
        field = None if model is None else model.model_fields.get(part)
        model = getattr(model, "free", None) if field is None else _section_type(field.annotation)
    return model is not None


def _place(path: tuple[str, ...], where: dict[tuple[str, ...], str], source: str) -> str:
    """The ``--set`` that wrote this key (or something inside it), else the file."""
    for keys, text in where.items():
        if path[: len(keys)] == keys or keys[: len(path)] == path:
            return text
    return source


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """The section class behind ``Encoder``, ``Encoder | None``, ``list[Group]`` and the like; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list):
        for inner in get_args(annotation):
            found = _section_type(inner)
            if found is not None:
                return found
    return None


def _explain(problem: Any, where: dict[tuple[str, ...], str], source: str) -> str:
    """One pydantic error in the words of the config file."""
    path = tuple(part for part in problem["loc"] if isinstance(part, str))
    place = _place(path, where, source)
    if problem["type"] == "missing":
        return f"{place}: {_section(path[:-1])} misses the key {path[-1]!r}{_meaning(path)}"
    if problem["type"] == "value_error":
        named = f"{_section(path) if _is_section(path) else '.'.join(path)}: " if path else ""
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
    """`` (what the key is for)``, from the field's docstring."""
    model: type[BaseModel] | None = Config
    for part in path[:-1]:
        field = model.model_fields.get(part) if model is not None else None
        model = _section_type(field.annotation) if field is not None else getattr(model, "free", None)
    field = model.model_fields.get(path[-1]) if model is not None else None
    text = " ".join((field.description or "").split()) if field is not None else ""
    return f" ({text.rstrip('.')})" if text else ""
