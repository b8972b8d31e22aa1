"""README and docs: what they link to exists, and their Python examples are Python."""

from __future__ import annotations

import ast
import json
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.scheduling_report import readme_table

ROOT = Path(__file__).parents[1]
EXECUTED = sorted((ROOT / "docs").glob("attention-in-*.md"))
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


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_examples_run_from_top_to_bottom(page, monkeypatch):
    """All blocks of a page in one namespace, line numbers as in the page."""
    # The default backend takes half a minute here, and what a page shows does not depend on it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    text, names = page.read_text(), {"__name__": "page"}
    examples = list(re.finditer(r"```python\n(.*?)```", text, flags=re.S))
    assert examples
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="interlace:")
        for example in examples:
            above = text.count("\n", 0, example.start(1))
            exec(compile("\n" * above + example.group(1), str(page), "exec"), names)


def test_scheduling_figures_of_the_readme_are_those_of_the_report():
    report = json.loads((ROOT / "bench" / "results" / "scheduling.json").read_text())
    assert readme_table(report) in (ROOT / "README.md").read_text(), "python -m bench.scheduling_report prints it"
    assert not report["settings"]["quick"] and not report["missing_peers"]
    missed = [row["problem"] for row in report["rows"] if not all(row["met"].values())]
    assert missed == [], "the README says that every target is met"


def test_the_first_example_of_the_readme_runs():
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[0]
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape
    names["out"].sum().backward()
    assert names["q"].grad is not None
