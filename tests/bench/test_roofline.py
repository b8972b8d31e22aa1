"""Kernel report and roofline sheet: rows by predicted cost, predictions, and GPU measurements beside them."""

from __future__ import annotations

import json

import pytest

from bench import kernel_report, roofline
from bench.compile_worker import Configuration
from tests.bench.loops import used

MAIN = Configuration(90, 128, "bfloat16")
REPORT = {
    MAIN: {"forward_kernel": used(), "query_gradient_kernel": used(instructions=9000), "delta_kernel": {"spills": 0}},
    MAIN._replace(variant="capped"): {"forward_kernel": used()},
}


@pytest.fixture
def times(tmp_path):
    """Results of bench.kernel_times: a full mask, and one with PARTIAL blocks that must not count as FULL."""

    def case(name: str, partial: int, *arms: dict) -> dict:
        return {"case": name, "plan": {"blocks": 100, "partial": partial}, "arms": list(arms)}

    def arm(tflops: float) -> dict:
        return {"kernel": "forward", "arm": "ships", "tile": [64, 64, 4, 2], "tflops": tflops}

    packed, full = case("packed:8192:128", 50, arm(100)), case("full:8192:128", 0, arm(400))
    tuned = {"peak": {"tflops": 800}, "cases": [packed, full]}
    (tmp_path / "kernel_times_tuned.json").write_text(json.dumps(tuned))
    return tmp_path


def test_the_dearest_kernel_comes_first():
    rows = kernel_report.loop_rows(REPORT)
    assert [(row.kernel, row.loop.loop) for row in rows] == [
        ("query_gradient_kernel", "FULL"), ("query_gradient_kernel", "PARTIAL"),
        ("forward_kernel", "FULL"), ("forward_kernel", "PARTIAL"),
    ]  # fmt: skip
    assert [row.configuration.variant for row in kernel_report.loop_rows(REPORT, main=False)] == ["capped", "capped"]


def test_predictions_stand_beside_measurements(times):
    rows = [row for row in kernel_report.loop_rows(REPORT) if row.kernel == "forward_kernel"]
    lines = roofline.page(rows, "3.6.0", times).splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| forward")]
    assert cells[0][4:6] == ["8.4", "2,048"]
    full, partial = cells[-2:]
    # 2,048 clocks of products are the peak; in turns with 1,600 of issue.
    assert full[4:7] == ["555 (56%)", "989 (100%)", "400 (50%, 64 x 64, 4, 2)"]
    assert partial[6] == "–"


def test_unmeasured_kernels_have_no_figure(times):
    rows = [row for row in kernel_report.loop_rows(REPORT) if row.kernel == "query_gradient_kernel"]
    assert roofline.page(rows, "3.6.0", times).splitlines()[-1].endswith("| – |")


def test_hot_loops_are_listed_with_their_figures_before(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_report, "BEFORE", tmp_path / "before.json")
    kernel_report.write_before({"3.9.0": REPORT}, "a command")
    before = kernel_report.read_before()
    rows = {"3.9.0": kernel_report.loop_rows(REPORT)}
    assert before == rows
    line = kernel_report.loop_table(rows, before)[4]
    assert line == (
        "| forward_kernel | 128 | bfloat16 | FULL | 128 x 64, 8, 3 | 8 64x64x16 s, 4 64x128x16 r "
        "| 1.00 / 128 (96) / 2 / 400 / 6,400 (6,400) / 0 |"
    )
