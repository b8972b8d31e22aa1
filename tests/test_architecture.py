"""docs/architecture.md matches the code: folders and imports."""

from __future__ import annotations

import re
from pathlib import Path

from tests.layering import PACKAGE, ROOT, imported, modules

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PARTS = {module.split(".")[1] for _, module, _ in modules() if "." in module} | {"_core"}


def imports() -> set[tuple[str, str]]:
    """(part, part that it imports), also inside of functions. Parts are those of the drawing."""
    result = set()
    for path, module, is_package in modules():
        for name in imported(path.read_text(), module, is_package):
            if name.startswith("interlace.") and name.split(".")[1] in PARTS and module != "interlace":
                result.add((_part(module), _part(name)))
    return {(a, b) for a, b in result if a != b}


def _part(module: str) -> str:
    name = module.split(".")[1] if "." in module else module
    return {"__main__": "cli", "_core": "csrc"}.get(name, name)


def reachable(start: str, arrows: set[tuple[str, str]]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        here = todo.pop()
        for a, b in arrows:
            if a == here and b not in seen:
                seen.add(b)
                todo.append(b)
    return seen


def test_the_drawing_is_what_imports_what():
    real = imports()
    circles = {a for a, _ in real if a in reachable(a, real)}
    assert circles == set(), "these import each other"
    direct = {(a, b) for a, b in real if b not in reachable(a, real - {(a, b)})}
    drawn = set(re.findall(r"^    (\w+) --> (\w+)$", PAGE, flags=re.M))
    assert drawn == direct


def test_every_folder_is_named_and_none_that_is_not_there():
    there = {"kernels"}
    for path, _, is_package in modules():
        if is_package and path.parent != PACKAGE:
            there.add(path.parent.relative_to(PACKAGE).as_posix())
    rooms = PAGE.partition("## Rooms")[2].partition("\n\n`masks/`")[0]
    rows = {
        name.rstrip("/") for row in re.findall(r"^\|.*", rooms, flags=re.M) for name in re.findall(r"`([\w/]+/)`", row)
    }
    assert rows == there
    for name in re.findall(r"`([\w/]+/|[\w/]+\.py)`", PAGE):
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), f"the page names {name}, which is not there"


def test_links_to_the_page() -> None:
    for page in ("README.md", "docs/how-a-step-flows.md"):
        assert "architecture.md)" in Path(ROOT / page).read_text(), page
