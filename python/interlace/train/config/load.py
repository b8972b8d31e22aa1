"""Reads a training config: TOML file + ``--set key=value`` -> validated `Config`, or one clear `ConfigError`.

Every error names the file (or the ``--set``), the section and the key, and gives the correction. For an unknown key it
gives the nearest valid one, for a wrong type the required type, for a missing key its meaning.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union, get_args, get_origin

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

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


Table: TypeAlias = dict[str, Any]
"""A TOML table."""
CLUSTER = ("links", "ranks_per_node", "timeout", "threads", "choose", "max_ranks", "memory")
"""Keys of [parallel] that describe the machines and the search for a layout, not the layout itself."""


class ConfigError(ValueError):
    """Error in the user's config or command line. The message contains all that is needed to correct it."""


@contextlib.contextmanager
def blaming(where: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Errors of the block of these kinds become ConfigErrors that begin with `where`."""
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from None


@dataclass(frozen=True)
class _Origin:
    """Origin of keys: a source, and the overrides by the keys that they set."""

    source: str
    overrides: dict[tuple[str, ...], str] = field(default_factory=dict)

    def of(self, *path: str) -> str:
        """The ``--set`` that wrote a key (or a key inside it), else the source."""
        for keys, text in self.overrides.items():
            if path[: len(keys)] == keys or keys[: len(path)] == path:
                return text
        return self.source


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
    table = _parsed(read_text(path, "config"), str(path))
    if (path.parent / "run.json").exists() and isinstance(parallel := table.get("parallel"), dict):
        if parallel.get("plan") == "auto":  # run folders of earlier versions
            parallel["layout"] = parallel.pop("plan")
    return from_table(table, overrides, source=str(path), open_replicas=open_replicas, auto=auto)


def read_text(path: Path, what: str) -> str:
    """The text of a file. Raises ConfigError, with its meaning `what`, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the {what}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None


def loads(text: str, overrides: list[str] | None = None, *, source: str = "config") -> Config:
    """Returns the config of a TOML text. `source` names it in messages. Raises ConfigError as `load` does."""
    return from_table(_parsed(text, source), overrides, source=source)


def _parsed(text: str, source: str) -> Table:
    with blaming(f"{source}: not valid TOML", (tomllib.TOMLDecodeError, RecursionError)):
        return tomllib.loads(text)


def from_table(
    table: Table,
    overrides: list[str] | None = None,
    *,
    source: str = "config",
    open_replicas: bool = False,
    auto: bool = False,
) -> Config:
    """Checks a parsed TOML table and returns its config. `source` names it in messages."""
    origin = _Origin(source)
    for override in overrides or []:
        keys, value = parse_override(override)
        _as_section(table)
        if keys == ("parallel",) and value == "auto":
            _leave_open(table)
        else:
            set_key(table, keys, value, override)
        origin.overrides[keys] = f"--set {override}"
    _open_choices(table)
    if isinstance(parallel := table.get("parallel"), dict) and isinstance(parallel.get("plan"), str):
        raise ConfigError(f"{origin.of('parallel', 'plan')}: parallel.plan is now: parallel.layout")
    _describe_models(table, origin)
    with blaming(origin.of("data", "dataset")):
        read_as_chats(table)
    _check_keys(Config, table, (), origin)
    if auto and not _is_open(table):
        _leave_open(table)
        _open_choices(table)
    try:
        return Config.model_validate(table, context=OPEN_REPLICAS if open_replicas else None)
    except ValidationError as error:
        lines = [_explain(problem, origin) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _as_section(table: Table) -> None:
    """Replaces ``parallel = "auto"`` by the section that it stands for."""
    if table.get("parallel") == "auto":
        table["parallel"] = {"layout": "auto"}


def _leave_open(table: Table) -> None:
    """Sets layout = auto and removes all keys of [parallel] except `CLUSTER`."""
    parallel = table.get("parallel")
    kept = {key: parallel[key] for key in CLUSTER if key in parallel} if isinstance(parallel, dict) else {}
    table["parallel"] = kept | {"layout": "auto"}


def _is_open(table: Table) -> bool:
    return isinstance(table.get("parallel"), dict) and table["parallel"].get("layout") == "auto"


def _open_choices(table: Table) -> None:
    """With layout = auto: adds the keys of [train] that are not given to ``choose``."""
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


def _describe_models(table: Table, origin: _Origin) -> None:
    """Fills in architecture and config of modules with a ``path`` from its config.json. Makes the path absolute."""
    modules = table.get("model")
    if isinstance(modules, dict) and isinstance(modules.get("path"), str):
        _describe_whole(modules, origin)
        return
    for name, section in modules.items() if isinstance(modules, dict) else ():
        path = section.get("path") if isinstance(section, dict) else None
        if not isinstance(path, str):
            continue  # errors are reported below
        folder = _local(path, ("model", name), origin)
        section["path"] = str(folder)
        given, settings = section.get("architecture"), section.get("config", {})
        if ("config" in section and given is not None) or not isinstance(settings, dict):
            continue
        from interlace.train.models.architectures import describe

        with blaming(f"{origin.of('model', name, 'path')}: [model.{name}] path"):
            described = describe(folder, given, encoder=name != "language_model")
        section["architecture"] = described.architecture
        section["config"] = {key: value for key, value in described.config.items() if key not in settings} | settings
        if unset := [key for key in described.unset if key.partition(".")[0] not in settings]:
            section["unset"] = [*section.get("unset", []), *unset]
        if described.pixels is not None:
            _add_pixels(section, described.pixels)


def _describe_whole(modules: Table, origin: _Origin) -> None:
    """Adds missing sections for the modules of a whole model. Makes its path absolute."""
    from interlace.model.whole.model import modules_of
    from interlace.train.models.architectures import pixel_statistics

    folder = _local(modules["path"], ("model",), origin)
    modules["path"] = str(folder)
    with blaming(f"{origin.of('model', 'path')}: [model] path"):
        encoder, kind = modules_of(folder)
        pixels = pixel_statistics(kind, folder)
    for name, section in modules.items():
        if isinstance(section, dict) and name not in (encoder, "language_model"):
            raise ConfigError(
                f"{origin.source}: [model.{name}] is no module of {folder}, whose are {encoder}, language_model"
            )
    modules.setdefault("language_model", {})
    section = modules.setdefault(encoder, {})
    if pixels is not None and isinstance(section, dict):
        _add_pixels(section, pixels)


def _local(path: str, section: tuple[str, ...], origin: _Origin) -> Path:
    """Absolute folder of a section's ``path``. Raises ConfigError for a URL."""
    with blaming(f"{origin.of(*section, 'path')}: {_section(section)} path"):
        return Path(local_path(path)).expanduser().absolute()


def _add_pixels(section: Table, pixels: tuple[list[float], list[float]]) -> None:
    """Sets mean and std of a folder, unless the config gives them; each separately."""
    section["mean"], section["std"] = (section.get(k, p) for k, p in zip(("mean", "std"), pixels, strict=True))


def unsettled(config: Config, source: str, what: str, instead: str) -> None:
    """Raises ConfigError if the config leaves the layout open; `what` needs it. instead: what else to give."""
    if config.parallel.auto:
        raise ConfigError(
            f"{source}: [parallel] layout = 'auto' says no layout yet, which {what} needs: give {instead}, or the "
            "config.toml of a run folder, which has what interlace train chose, or copy into the config what "
            f"interlace plan choose {source} --gpus N --memory GB prints (on CPUs too: N ranks of GB each)"
        )


def parse_override(text: str) -> tuple[tuple[str, ...], object]:
    """``train.lr=1e-3`` -> (("train", "lr"), 0.001). A value that is not valid TOML becomes a string."""
    name, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in name.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {text}: write it as section.key=value, such as --set train.steps=100")
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, value.strip()


def set_key(table: Table, keys: tuple[str, ...], value: object, text: str) -> None:
    """Sets one override in the nested table. Raises ConfigError if a key on its path is not a table."""
    for depth, key in enumerate(keys[:-1], 1):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {text}: {'.'.join(keys[:depth])} is a value, not a section")
        table = inner
    table[keys[-1]] = value


def check_keys(table: Table, source: str) -> None:
    """Raises ConfigError for keys that a config does not have."""
    _check_keys(Config, table, (), _Origin(source))


def _check_keys(model: type[BaseModel], table: Table, path: tuple[str, ...], origin: _Origin) -> None:
    """Raises ConfigError for keys that `model` does not have, in all inner sections, and names the nearest valid
    key."""
    free: type[BaseModel] | None = getattr(model, "free", None)
    named = {key for key, value in table.items() if free is not None and isinstance(value, dict)}
    for key, value in table.items():
        full = (*path, key)
        if key not in model.model_fields and key not in named:
            known = model.model_fields.keys() | named
            raise ConfigError(f"{origin.of(*full)}: {_section(path)} has no key {key!r}; {nearest(key, known)}")
        inner = _section_type(model.model_fields[key].annotation) if key in model.model_fields else free
        for each in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(each, dict):
                _check_keys(inner, each, full, origin)


def imported(path: str, where: str) -> Any:
    """The object at "package.module:name". Raises ConfigError if it does not exist."""
    with blaming():
        return _hints.imported(path, where)


def dumps(config: Config) -> str:
    """Resolved config as TOML, with defaults. `load` reads it back to an equal Config."""
    table = config.model_dump(exclude_none=True)
    if config.parallel.auto:  # keys that are not given stay open
        table["parallel"] = config.parallel.model_dump(exclude_none=True, exclude_unset=True)
    return dumps_table(table)


def dumps_table(table: Table) -> str:
    """Converts a nested table to TOML."""
    lines: list[str] = []
    _write_table(table, (), lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: Table, path: tuple[str, ...], lines: list[str]) -> None:
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


def _value(value: object) -> str:
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


def _section_type(annotation: object) -> type[BaseModel] | None:
    """Section class of ``Encoder``, ``Encoder | None``, ``list[Group]`` and similar types; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list):
        for inner in get_args(annotation):
            section = _section_type(inner)
            if section is not None:
                return section
    return None


def explained(error: ValidationError) -> str:
    """The first problem of a config that was made from parts, in one line, with the name of the key."""
    return _explain(error.errors()[0], _Origin("")).removeprefix(": ")


def _explain(problem: ErrorDetails, origin: _Origin) -> str:
    """Converts a pydantic error to a message with the names of the config file."""
    path = tuple(part for part in problem["loc"] if isinstance(part, str))
    place = origin.of(*path)
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


def _shown(value: object) -> str:
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
