"""README and docs: what they link to exists, and their Python examples are Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    assert "@@" not in text, "a placeholder was left"
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_parse(page):
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
        ast.parse(example)


def test_the_first_example_of_the_readme_runs():
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[0]
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape
    names["out"].sum().backward()
    assert names["q"].grad is not None
