"""The synthetic package (tests/data/package.py), written once per session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from interlace.data import StampsDataset
from tests.data.package import build_tree, make_stamps


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, shared by all tests: do not change it."""
    return build_tree(tmp_path_factory.mktemp("package") / "stamps")


@pytest.fixture()
def own_tree(tree: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tree, tmp_path / "own" / "stamps"))


@pytest.fixture(scope="session")
def stamps(tree: Path) -> StampsDataset:
    return make_stamps(tree)
