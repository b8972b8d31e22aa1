"""report.html: self-contained, complete for long, resumed, stopped and unusual runs, consistent with metrics.jsonl."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.data import Media, Sample
from interlace.train.report import curves as page_curves
from interlace.train.report.closing import Accuracy, Answer
from interlace.train.report.metrics import HELD_OUT, LOSS
from interlace.train.report.page import Page
from tests.train.one_process import toy_config
from tests.train.page import FACTS

VOID = {"meta", "img", "br"}
TOP, BOTTOM = 11.9, 113.9  # of a curve, in the units of its chart


class Checker(HTMLParser):
    """Checks that every element is closed, and that nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                assert value is not None and value.startswith("data:"), (tag, value)
        if tag not in VOID | {"td", "tr", "th"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def written(folder: Path, lines: list[dict[str, Any]], status: str = "Finished", **given: Any) -> str:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    rows = {"steps": 3, "train_loss": 0.5, "digit_accuracy": 0.25}
    page = Page(folder, toy_config("run.name=a-name"), FACTS).write(status, rows, **given)
    text = page.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "http:" not in text and "https:" not in text
    return text


def test_the_page_has_all_that_a_stranger_asks(tmp_path: Path) -> None:
    lines = [{"step": step, LOSS: 2.0 / step, "lr": 0.1, "busy(%)/vision": 40.0, "own": 1.0} for step in range(1, 4)]
    lines[2][HELD_OUT] = 0.75
    picture = Media((3, 8, 8), 4, torch.zeros(3, 8, 8))
    sample = Sample(torch.arange(5), torch.arange(1, 6), {"vision": [picture]}, "the <name>")
    text = written(
        tmp_path,
        lines,
        answers=[Answer(sample, "which <two>?", "one & two", "one & two"), Answer(sample, "", "three", "<b>")],
        scalings={"vision": ("image", ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))},
        counted=[Accuracy("digit", 60, 0.5, 0.25, 0.125), Accuracy("a<b", 2, 1.0, 1.0, None)],
    )
    assert "<td>digit<td>60<td>50.0 %<td>25.0 %<td>12.5 %" in text and "<td>a&lt;b<td>2<td>100.0 %" in text
    assert "one &amp; two" in text and "&lt;b&gt;" in text and "the &lt;name&gt;" in text
    assert "<b>asked</b> which &lt;two&gt;?" in text
    assert text.count('<img src="data:image/png') == 2 and (tmp_path / "samples.png").stat().st_size > 1000
    for words in (
        "held out",
        "own",
        "SiglipVisionModel",
        "replica 0 of 2",
        "and 1 ranks more",
        "50 % trained",
        "25.0 %",
    ):
        assert words in text, words
    assert "[train]" in text and "Python" in text and "0.500 nats per token" in text


@pytest.mark.parametrize(
    "lines", [[], [{"step": 1, LOSS: math.nan}], [{"step": 7, LOSS: 1.0}]], ids=["no", "nan", "one"]
)
def test_runs_with_next_to_nothing_have_a_page(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    text = written(tmp_path, lines, "Stopped by SIGTERM after step 1")
    assert "Stopped by SIGTERM" in text
    assert ("no finite number was logged" in text) == any(math.isnan(line[LOSS]) for line in lines)


def test_a_long_curve_is_thinned_and_keeps_its_peaks(tmp_path: Path) -> None:
    lines = [{"step": step, LOSS: 1.0} for step in range(1, 5_001)]
    lines[3_123][LOSS], lines[4_000][LOSS], lines[4_499][LOSS] = 9.0, -3.0, math.nan
    text = written(tmp_path, lines)
    assert len(text) < 100_000 and "no finite number at step 4500" in text
    result = re.search(r'data:image/svg\+xml;base64,([^"]*)', text)
    assert result is not None
    drawn = points_of(base64.b64decode(result[1]))
    heights = [y for _, y in drawn]
    assert len(drawn) <= 1000 and min(heights) < 40 and max(heights) > heights[0] + 20


def points_of(picture: bytes) -> list[tuple[float, float]]:
    """The drawn points of the blue curve of a chart, in its units from its top left: of its lines, then its dots."""
    lines = re.findall(r'<path d="([^"]*)" clip-path=[^>]*stroke: #3b6fb6', picture.decode())
    dots = re.findall(r'<use [^>]* x="(\S+)" y="(\S+)" style="fill: #3b6fb6', picture.decode())
    result = [point for line in lines for point in re.findall(r"[ML] (\S+) (\S+)", line)]
    return [(float(x), float(y)) for x, y in result + dots]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, 1e308])), max_size=60),
    st.integers(1, 100),
)
def test_a_drawn_curve_keeps_its_peaks(values: list[float], times: int) -> None:
    points = [(float(step), value) for step, value in enumerate(values * times)]
    drawn = points_of(page_curves.svg(page_curves.Chart("t", "", [page_curves.Curve("a", "#3b6fb6", points)])))
    finite = [value for value in values if abs(value) < 1e300]
    if finite and max(finite) - min(finite) > 1e-3 * max(map(abs, finite)):
        assert min(y for _, y in drawn) == pytest.approx(TOP, abs=1)
        assert max(y for _, y in drawn) == pytest.approx(BOTTOM, abs=1)


def test_the_status_says_how_a_run_ended(tmp_path: Path) -> None:
    page = Page(tmp_path, toy_config(), FACTS)
    assert page.status({"step": 12, "finished": True, "signal": 0}) == "Finished after 12 steps"
    assert "early_stop after step 7 of 12" in page.status({"step": 7, "finished": True, "signal": 0})
    stopped = page.status({"step": 7, "finished": False, "signal": 15})
    assert "SIGTERM after step 7 of 12" in stopped and f"--resume {tmp_path}" in stopped
