"""Fixtures with the synthetic package (tests/data/package.py), written once per session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from interlace.data.builtin.stamps_folder import make
from tests.data.package import SETTINGS, build_tree, cached


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, shared by all tests: read-only."""
    return build_tree(tmp_path_factory.mktemp("package") / "stamps")


@pytest.fixture()
def own_tree(tree: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tree, tmp_path / "own" / "stamps"))


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that contains the package: read-only."""
    cache = tmp_path_factory.mktemp("cache")
    cached(cache)
    return cache


@pytest.fixture(scope="session")
def folder(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chats made of the package: read-only."""
    made = tmp_path_factory.mktemp("chats") / "stamps"
    make(made, SETTINGS, cache=package)
    return made
