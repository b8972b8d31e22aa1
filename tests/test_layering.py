"""Imports point one way, files stay small. On the syntax tree: torch may load torch.distributed by itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "interlace"

# What a part of the package may not import. Parts are modules or folders directly under interlace.
BELOW = {"comm", "parallel", "model", "run", "data", "resilience", "train", "cli", "__main__"}
PURE = ("masks", "balance", "layout", "plan", "schedule", "simulate")
FORBIDDEN = {
    **{part: {"torch.distributed", *(f"interlace.{name}" for name in BELOW)} for part in PURE},
    "run": {"interlace.train", "interlace.data", "interlace.cli"},
}
# A layout is made by plan, so its constructors import that, but only when called: everybody else asks it alone.
FORBIDDEN_ON_LOADING = {"layout": {f"interlace.{name}" for name in PURE if name != "layout"}}
FORBIDDEN_ELSEWHERE = {"interlace.train", "interlace.cli"}
MAY_IMPORT_TRAIN = {"train", "cli", "__main__"}
# The rooms of train: what of train each of the lower ones may import. Only the command line imports the commands.
ROOMS_OF_TRAIN = {"launch": {"config", "schema", "errors"}, "checkpoint": {"launch", "errors"}}
KERNELS_MAY_IMPORT = {"torch", "triton", "interlace.kernels", *sys.stdlib_module_names}


def imported(source: str, module: str, is_package: bool = False, on_loading: bool = False) -> Iterator[str]:
    """Every module that a source names in an import, and torch.distributed where it is an attribute; at any depth, or
    with `on_loading` outside of functions alone.

    `from a import b` yields a.b, since b may be a module. Blocks under `if TYPE_CHECKING:` are left out: they import
    nothing when the program runs.
    """
    nodes = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            nodes.extend(node.orelse)
            continue
        if on_loading and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
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


def within(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of a module of the package that its part may not have."""
    part = module.split(".")[1] if "." in module else ""
    names = list(imported(source, module, is_package))
    if part == "kernels":
        return [name for name in names if not within(name, KERNELS_MAY_IMPORT)]
    forbidden = FORBIDDEN.get(part, set())
    if part not in MAY_IMPORT_TRAIN:
        forbidden = forbidden | FORBIDDEN_ELSEWHERE
    late = FORBIDDEN_ON_LOADING.get(part, set())
    early = imported(source, module, is_package, on_loading=True) if late else ()
    found = [*(name for name in names if within(name, forbidden)), *(name for name in early if within(name, late))]
    room = module.split(".")[2] if part == "train" and module.count(".") > 1 else ""
    if part == "train" and room != "commands":
        found += [name for name in names if within(name, {"interlace.train.commands"})]
    if room in ROOMS_OF_TRAIN:
        allowed = {f"interlace.train.{other}" for other in {*ROOMS_OF_TRAIN[room], room}}
        found += [name for name in names if within(name, {"interlace.train"}) and not within(name, allowed)]
    return found


def modules() -> Iterator[tuple[Path, str, bool]]:
    # kernels is a symlink, which rglob does not follow in every version of Python.
    for path in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")}):
        parts = ("interlace", *path.relative_to(PACKAGE).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


@pytest.mark.parametrize(("path", "module", "is_package"), [pytest.param(*m, id=m[1]) for m in modules()])
def test_imports_point_one_way(path, module, is_package):
    assert violations(path.read_text(), module, is_package) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("interlace.masks", "import torch\nimport torch.distributed as dist", ["torch.distributed"]),
        ("interlace.masks", "from torch import distributed", ["torch.distributed"]),
        ("interlace.plan.cost", "import torch\ndef f():\n    torch.distributed.barrier()", ["torch.distributed"]),
        ("interlace.plan.cost", "def f():\n    from ..model import mllm", ["interlace.model.mllm"]),
        ("interlace.plan.cost", "from interlace import run", ["interlace.run"]),
        ("interlace.plan.cost", "if TYPE_CHECKING:\n    from interlace.model import mllm", []),
        ("interlace.plan.cost", "from . import partitioning\nfrom interlace.balance import assign", []),
        ("interlace.layout.layout", "class A:\n    def f(self):\n        from interlace.plan import place", []),
        ("interlace.layout.layout", "class A:\n    from ..plan import place", ["interlace.plan.place"]),
        ("interlace.layout", "from interlace import layout, schedule", ["interlace.schedule"]),
        ("interlace.layout.layout", "def f():\n    from interlace import run", ["interlace.run"]),
        ("interlace.run.step", "from interlace.parallel import mesh\nimport torch.distributed", []),
        ("interlace.run.step", "import interlace.data.loader", ["interlace.data.loader"]),
        ("interlace.data", "from .train import config", []),  # of interlace.data itself
        ("interlace.data.loader", "from interlace.train import config", ["interlace.train.config"]),
        ("interlace.cli", "from interlace.train import config", []),
        ("interlace.train.trainer", "from interlace.train.commands import crash", ["interlace.train.commands.crash"]),
        ("interlace.train.launch.lock", "from interlace.train import config, rank", ["interlace.train.rank"]),
        ("interlace.train.checkpoint.folder", "from interlace.train.launch import peers", []),
        ("interlace.kernels.forward", "import math\nimport torch\nfrom triton import language", []),
        ("interlace.kernels.forward", "import numpy\nfrom interlace import masks", ["interlace.masks", "numpy"]),
    ],
)
def test_the_check_sees_every_spelling(module, source, found):
    is_package = module == "interlace.data"
    assert sorted(violations(source, module, is_package)) == found


def sources() -> list[Path]:
    return [
        path
        for folder in ("python", "kernels", "csrc", "bench", "tests", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".pyi", ".cpp", ".h", ".cu"}
    ]


def test_files_stay_small():
    long = {str(path.relative_to(ROOT)): lines for path in sources() if (lines := _lines(path)) > 500}
    assert long == {}, "split these files: would two rooms be clearer than one?"


def test_nothing_is_left_to_be_written():
    for path in [*(ROOT / "python").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        assert "NotImplementedError" not in path.read_text(), path


def test_packages_say_what_lives_there():
    for path, module, is_package in modules():
        if is_package:
            assert ast.get_docstring(ast.parse(path.read_text())), f"{module} has no docstring"


def test_kernels_is_no_regular_package():
    """With an __init__.py, kernels/ would shadow HuggingFace's `kernels` when Python starts in the repository."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (PACKAGE / "kernels").resolve() == (ROOT / "kernels").resolve()


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())
