"""Imports point one way. Checked on the syntax tree, since torch may load torch.distributed by itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Container

import pytest

from tests.layering import PACKAGE, ROOT, imported, modules

# From the bottom up: a room imports only itself and those before it. Rooms are modules or folders directly under
# interlace.
ROOMS = (
    *(
        "_core",
        "_files",
        "_cores",
        "_device",
        "_text",
        "_hints",
        "kernels",
        "masks",
        "attention",
        "balance",
        "costs",
        "layout",
        "schedule",
    ),
    *(
        "plan",
        "simulate",
        "comm",
        "parallel",
        "modalities",
        "model",
        "run",
        "estimate",
        "data",
        "resilience",
        "train",
        "cli",
    ),
    "__main__",
)
PURE = ("masks", "balance", "costs", "layout", "plan", "schedule", "simulate")  # nor torch.distributed
# The rooms of train: the parts of train that each lower room may import. Only the command line imports the commands.
ROOMS_OF_TRAIN = {"launch": {"config", "errors"}, "checkpoint": {"launch", "errors"}}
KERNELS_MAY_IMPORT = {"torch", "triton", "interlace.kernels", *sys.stdlib_module_names}


def within(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports of a package module that are forbidden for its part."""
    part = module.split(".")[1] if "." in module else ""
    names = list(imported(source, module, is_package))
    if part == "kernels":
        return [name for name in names if not within(name, KERNELS_MAY_IMPORT)]
    above = {f"interlace.{room}" for room in ROOMS[ROOMS.index(part) + 1 :]} if part else set()
    result = [name for name in names if within(name, above | ({"torch.distributed"} if part in PURE else set()))]
    room = module.split(".")[2] if part == "train" and module.count(".") > 1 else ""
    if part == "train" and room != "commands":
        result += [name for name in names if within(name, {"interlace.train.commands"})]
    if room in ROOMS_OF_TRAIN:
        allowed = {f"interlace.train.{other}" for other in {*ROOMS_OF_TRAIN[room], room}}
        result += [name for name in names if within(name, {"interlace.train"}) and not within(name, allowed)]
    return result


@pytest.mark.parametrize(("path", "module", "is_package"), [pytest.param(*m, id=m[1]) for m in modules()])
def test_imports_point_one_way(path, module, is_package):
    assert violations(path.read_text(), module, is_package) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("interlace.masks", "import torch\nimport torch.distributed as dist", ["torch.distributed"]),
        ("interlace.masks", "from torch import distributed", ["torch.distributed"]),
        (
            "interlace.costs.layer",
            "import torch\ndef f():\n    torch.distributed.barrier()",
            ["torch.distributed"],
        ),
        ("interlace.costs.layer", "def f():\n    from ..model import mllm", ["interlace.model.mllm"]),
        ("interlace.costs.layer", "from interlace import run", ["interlace.run"]),
        ("interlace.costs.layer", "if TYPE_CHECKING:\n    from interlace.model import mllm", []),
        ("interlace.costs.layer", "from . import links\nfrom interlace.balance import assign", []),
        (
            "interlace.layout.layout",
            "def f():\n    from ..plan import search",
            ["interlace.plan.search"],
        ),
        ("interlace.layout", "from interlace import layout, schedule", ["interlace.schedule"]),
        ("interlace.layout.layout", "def f():\n    from interlace import run", ["interlace.run"]),
        ("interlace.run.execute.step", "from interlace.parallel import mesh\nimport torch.distributed", []),
        ("interlace.run.execute.step", "import interlace.data.loader", ["interlace.data.loader"]),
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


def test_no_two_modules_import_each_other():
    """Checks imports inside of functions and indirect imports too."""
    names = {module: (path, is_package) for path, module, is_package in modules()}
    arrows = {
        module: {_module_of(name, names) for name in imported(path.read_text(), module, is_package)} - {module, ""}
        for module, (path, is_package) in names.items()
    }
    while ends := [module for module, others in arrows.items() if not others & arrows.keys()]:
        for module in ends:
            del arrows[module]
    assert arrows == {}, "each of these is imported by what it imports, or imports such a module"


def _module_of(name: str, names: Container[str]) -> str:
    """The package module that an imported name is, or is in; "" for another package."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def test_every_imported_module_exists() -> None:
    """Also inside functions and under TYPE_CHECKING, in the package, its tests and bench/."""
    sources = [path for folder in ("tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    names = {"interlace._core", "interlace.kernels", *(module for _, module, _ in modules())}
    missing = []
    for path in [*sources, *(path for path, _, _ in modules())]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("interlace."):
                if node.module not in names:
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}")
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("interlace.") and alias.name not in names:
                        missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {alias.name}")
    assert not missing
