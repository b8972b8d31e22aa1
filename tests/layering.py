"""Modules of the package and their imports, from the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


PACKAGE = ROOT / "python" / "interlace"


def imported(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """All modules that a source imports, at any depth, and torch.distributed if it is used as an attribute.

    `from a import b` yields a.b, since b may be a module. Blocks under `if TYPE_CHECKING:` are left out: they import
    nothing at runtime.
    """
    nodes = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            nodes.extend(node.orelse)
            continue
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".") if is_package else module.split(".")[:-1]
            start = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def modules() -> Iterator[tuple[Path, str, bool]]:
    # kernels is a symlink, which rglob does not follow in every version of Python.
    for path in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")}):
        parts = ("interlace", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package
