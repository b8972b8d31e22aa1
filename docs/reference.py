"""Writes docs/config-reference.md, every key of a training config, from the schema.

    python docs/reference.py

tests/test_docs.py compares: run it when a key, its bounds or its docstring change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interlace.train.config.sections import Config

PAGE = Path(__file__).parent / "config-reference.md"
Schema = dict[str, Any]

INTRODUCTION = """# Config reference

<!-- written by docs/reference.py from the docstrings of the schema: change those -->

A training config is a TOML file. `interlace train CONFIG --set train.lr=1e-4` changes one key from the command line.
Types are strict (`"100"` is no number), an unknown key is refused with the nearest one that exists, and so is what
cannot work together. A key without a default must be given.
"""
WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "table"}
UNBOUNDED = 2**31 - 1  # what merely keeps counts inside of an int32 is not worth a reader's time


def render(schema: Schema) -> str:
    """The whole page for pydantic's JSON schema of `Config`."""
    parts = [INTRODUCTION]
    for name, field in schema["properties"].items():
        parts += _section(name, _without_null(field), schema["$defs"], name not in schema["required"])
    return "\n".join(parts)


def _section(path: str, field: Schema, definitions: Schema, optional: bool, repeated: bool = False) -> Iterator[str]:
    """The heading, text and table of one section, then those inside of it."""
    section = definitions[field["$ref"].rpartition("/")[2]]
    inner: list[tuple[str, Schema, bool, bool]] = []
    rows: list[str] = []
    for key, value in section["properties"].items():
        known = _without_null(value)
        needed = key in section.get("required", ())
        if "$ref" in known:
            inner.append((f"{path}.{key}", known, not needed, False))
        elif "$ref" in known.get("items", {}):
            inner.append((f"{path}.{key}", known["items"], True, True))
        else:
            default = "" if needed else f"`{_value(value, known)}`" if _value(value, known) else "none"
            rows.append(f"| `{key}` | {_cell(_kind(known))} | {default} | {_cell(value['description'])} |")
    named = section.get("additionalProperties")
    if isinstance(named, dict):
        inner.append((f"{path}.NAME", named, True, False))
    title = f"[[{path}]]" if repeated else f"[{path}]"
    yield f"## `{title}`\n"
    yield _text(section["description"]) + (" May be repeated." if repeated else "" if optional else " Required.") + "\n"
    if rows:
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        yield "\n".join(rows) + "\n"
    for each in inner:
        yield from _section(each[0], each[1], definitions, *each[2:])


def _without_null(field: Schema) -> Schema:
    """What a field may hold besides nothing."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind.get("type") != "null"]
    return {**field, **kinds[0]} if len(kinds) == 1 else field


def _kind(field: Schema) -> str:
    """The type of a value in words, with its bounds."""
    if "anyOf" in field:
        return " or ".join(_kind(kind) for kind in field["anyOf"] if kind.get("type") != "null")
    if "enum" in field or "const" in field:
        return ", ".join(f"`{json.dumps(each)}`" for each in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        count = field.get("minItems")
        exactly = f"{count} x " if count is not None and count == field.get("maxItems") else ""
        return f"list of {exactly}{_kind(field['items'])}"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"table of {_kind(field['additionalProperties'])}"
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {field[name]:g}" for name, sign in signs.items() if _tells(field.get(name))]
    return " ".join([WORDS[field["type"]], ", ".join(bounds)]).strip()


def _tells(bound: float | None) -> bool:
    return bound is not None and math.isfinite(bound) and abs(bound) < 1e6 and bound != UNBOUNDED


def _value(field: Schema, known: Schema) -> str:
    """A default as TOML says it; "" where there is none."""
    empty = {"object": {}, "array": []}.get(known.get("type", ""))
    value = field.get("default", empty)
    return "" if value is None else json.dumps(value)


def _text(docstring: str) -> str:
    """A docstring on one line of Markdown: its asterisks are meant as such."""
    pieces = " ".join(docstring.split()).split("``")
    return "`".join(piece if at % 2 else piece.replace("*", "\\*") for at, piece in enumerate(pieces))


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(Config.model_json_schema()))
