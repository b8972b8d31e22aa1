"""README and docs: link targets exist, and Python examples are valid Python."""

from __future__ import annotations

import ast
import json
import re
import runpy
import warnings
from functools import partial
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

import interlace
from bench.scheduling_report import readme_table
from interlace.train.config.sections import Config

ROOT = Path(__file__).parents[1]
DRAWN = [ROOT / "docs" / "who-computes-what.md", ROOT / "docs" / "schedules.md"]
COPIES = ROOT / "docs" / "where-the-copy-goes.md"
EXECUTED = [
    *sorted((ROOT / "docs").glob("attention-in-*.md")),
    COPIES,
    *DRAWN,
    ROOT / "docs" / "what-ranks-hold.md",
    ROOT / "docs" / "encoders.md",
]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "reference.py"))
DRAW = runpy.run_path(str(ROOT / "docs" / "draw.py"))
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
def test_examples_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Runs all blocks of a page in one namespace; the output equals the output shown on the page."""
    # The default backend takes half a minute here, and the output does not depend on it.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="interlace:")
        blocks = list(DRAW["run"](page))
    assert blocks
    for block, printed in blocks:
        if block["output"] is not None or page in DRAWN:
            assert printed == (block["output"] or ""), f"run python docs/draw.py {page.name} and look at the difference"
    for name in re.findall(r"\(images/(.*?)\)", page.read_text()) if page in DRAWN else ():
        drawn, committed = (matplotlib.image.imread(folder / name) for folder in (tmp_path, page.parent / "images"))
        assert drawn.shape == committed.shape and np.abs(drawn - committed).mean() < 0.03, (
            f"{name} is not what is drawn"
        )
        assert (page.parent / "images" / name).stat().st_size < 150_000


def test_drawing_a_page_writes_its_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nx = 1\n```\n\nb\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n\nc\n")
    DRAW["main"](page)
    once = page.read_text()
    assert once == "# A\n\n```python\nx = 1\n```\n\nb\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n\nc\n"
    DRAW["main"](page)
    assert page.read_text() == once


def test_the_config_reference_is_that_of_the_schema():
    assert REFERENCE["PAGE"].read_text() == REFERENCE["render"](Config.model_json_schema()), "run docs/reference.py"


def test_every_page_has_its_place_on_the_site():
    places = re.findall(r"^ +- (?:[\w ]+: )?([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    assert sorted(places) == sorted(page.name for page in PAGES if page.name != "README.md")


def test_the_page_of_the_api_has_all_public_names():
    listed = set(re.findall(r"^::: interlace\.(\w+)[\w.]*\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.M))
    public = {("masks", "Segment"), ("masks", "BitfieldMask"), ("masks", "word")}
    for part in ("attention", "model", "run", "layout"):
        home = getattr(interlace, part)
        public |= {(part, name) for name in home.__all__ if hasattr(getattr(home, name), "__module__")}
    assert listed == public - {("model", "Checkpointing")}  # the type of an argument


def test_readme_scheduling_figures_match_the_report():
    report = json.loads((ROOT / "bench" / "results" / "scheduling.json").read_text())
    assert readme_table(report) in (ROOT / "README.md").read_text(), "python -m bench.scheduling_report prints it"
    assert not report["settings"]["quick"] and not report["missing_peers"]
    missed = [row["problem"] for row in report["rows"] if not all(row["met"].values())]
    assert missed == [], "the README says that every target is met"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_readme_attention_figures_match_the_reports(dtype):
    name = "attention_cpu.json" if dtype == "float32" else f"attention_cpu_{dtype}.json"
    report = json.loads((ROOT / "bench" / "results" / name).read_text())
    assert report["settings"]["dtype"] == dtype and report["complete"]
    ratios = {case["mask"]: case["ratio"] for case in report["cases"]}
    dense, causal = ratios["packed_images"]["sdpa_dense"], ratios["causal"]["sdpa_causal"]
    both, forward = dense["total"], dense["forward"]
    quoted = [
        f"{both:.1f}x faster than SDPA with the dense mask, forward and backward ({forward:.1f}x forward)",
        f"{causal['total']:.2f}x faster than SDPA's own `is_causal`",
    ]
    if dtype == "float32":
        others = [ratios[mask]["sdpa_dense"]["total"] for mask in ratios.keys() - {"packed_images", "causal", "full"}]
        peaks = [f"{report['memory'][who]['bytes'] / 2**20:,.0f} MiB" for who in ("interlace", "sdpa_dense")]
        quoted += [
            f"{min(others):.1f}x to {max(others):.1f}x faster than SDPA with the dense mask",
            f"{peaks[0]}; SDPA with the dense mask: {peaks[1]}",
        ]
    for figure in quoted:
        assert figure in (ROOT / "README.md").read_text(), figure


def test_hidden_communication_on_the_page_is_that_of_the_report():
    report = json.loads((ROOT / "bench" / "results" / "overlap.json").read_text())
    hidden = {(row["operation"], row["chunks"]): f"{row['hidden']:.0%}" for row in report["rows"]}
    for operation in {operation for operation, _ in hidden}:
        line = f"| {operation} | " + " | ".join(hidden[operation, chunks] for chunks in (2, 4, 8)) + " |"
        assert line in COPIES.read_text()
    ends = {
        chunks: [f"{end(row['hidden'] for row in report['rows'] if row['chunks'] == chunks):.0%}" for end in (min, max)]
        for chunks in (4, 8)
    }
    quoted = f"{' to '.join(ends[4])} at 4 chunks, {' to '.join(ends[8])} at 8"
    assert quoted in (ROOT / "README.md").read_text(), quoted


def test_documented_hidden_communication_matches_the_report():
    report = json.loads((ROOT / "bench" / "results" / "overlapped_step.json").read_text())
    assert not report["settings"]["quick"] and len(report["rows"]) == 3
    for row in report["rows"]:
        edges = 1 - row["in_layers"]
        line = f"| {row['layout']} | {row['hidden']:.0%} | {row['single_hidden']:.0%} | {abs(edges):.0%} |"
        assert line in COPIES.read_text(), line
        assert row["gap_points"] <= 10, "the page says so"


def test_the_simulators_error_is_that_of_the_report():
    report = json.loads((ROOT / "bench" / "results" / "simulated_step.json").read_text())
    rows = list(report["layouts"].values())
    single = [error for row in rows for error in row["errors"]]
    errors = [row["error"] for row in rows]
    quoted = f"{min(errors):+.1%} to {max(errors):+.1%} (single rounds {min(single):+.1%} to {max(single):+.1%})"
    within = sum(abs(error) < 0.08 for error in errors)
    for page, said in (
        ("README.md", f"{within} of {len(rows)} within 8 %"),
        ("docs/how-a-step-flows.md", "all eleven within 8 %"),
    ):
        text = " ".join((ROOT / page).read_text().split())
        assert quoted in text and said in text, (page, quoted, said)
    assert (within, len(rows)) == (11, 11)


def test_the_first_example_of_the_readme_runs():
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[0]
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == names["q"].shape
    names["out"].sum().backward()
    assert names["q"].grad is not None
