"""Makes Markdown lists of the parameters that a docstring explains line by line, for the page of the Python API.

Docstrings here are plain text, which help() shows as it is: a line that begins with the name of a parameter or field
and a colon explains it. Markdown would join such lines. Used by mkdocs.yml.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe

ENTRY = re.compile(r"^\s*(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*)(?P<call>\([\w, ]*\))?(?P<rest>:? .*)$")


class Lists(griffe.Extension):
    """Rewrites the docstring of every function and class."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None or not (obj.is_function or obj.is_class):
            return
        names = {each.name for each in getattr(obj, "parameters", ())}
        if obj.is_class:
            names |= {name for name, member in obj.members.items() if not member.is_alias and member.is_attribute}
            if "__init__" in obj.members:
                names |= {each.name for each in getattr(obj.members["__init__"], "parameters", ())}
        obj.docstring.value = listed(obj.docstring.value, names - {"self", "cls"})


def listed(text: str, names: Collection[str]) -> str:
    """`text` with an item of a list where a line begins with some of `names` and then a colon or a signature."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        entry = ENTRY.match(line)
        if not line.strip():
            inside = False
        elif entry and set(entry["names"].split(", ")) <= set(names) and (entry["call"] or entry["rest"][0] == ":"):
            lines += [] if inside else [""]
            inside = True
            line = f"- `{entry['names']}{entry['call'] or ''}`{entry['rest']}"
        elif inside:
            line = f"  {line.strip()}"
        lines.append(line)
    return "\n".join(lines)
