"""bench.papers: every table runs, stored reports match computed ones, and the page matches the reports."""

from __future__ import annotations

import random

import pytest

from bench.papers import __main__ as command
from bench.papers.frame import (
    MARGIN,
    Claim,
    Row,
    Rows,
    Table,
    ahead,
    behind,
    claims_of,
    rises,
    rows_of,
    run_table,
    stored,
    text,
)
from bench.papers.page import PAGE, render
from bench.papers.tables import TABLES

NAMES = list(TABLES)
STORED = [name for name in NAMES if stored(name)]
SAMPLE = random.Random(0).sample([(name, case) for name in STORED for case in TABLES[name].cases], 6)


def same(stored_rows: list[Row], computed: list[Row]) -> bool:
    """Rows are equal: texts exactly, numbers up to the last digits of sums in another order."""
    key = [(row.case, row.what, row.theirs, row.unit) for row in stored_rows]
    if key != [(row.case, row.what, row.theirs, row.unit) for row in computed]:
        return False
    return all(
        a.ours == pytest.approx(b.ours, rel=1e-9) if isinstance(a.ours, float) else a.ours == b.ours
        for a, b in zip(stored_rows, computed)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_small_size_runs_and_makes_claims(name):
    report = run_table(TABLES[name], small=True)
    rows, claims = rows_of(report), claims_of(report)
    assert {row.case for row in rows} == set(TABLES[name].cases)
    assert claims and all(isinstance(claim.holds, bool) for claim in claims)
    assert len(set((row.case, row.what) for row in rows)) == len(rows)
    printed = text(report)
    assert all(claim.says in printed for claim in claims) and all(row.what in printed for row in rows)


def test_every_table_has_a_report_but_those_of_a_clock():
    assert {name for name in NAMES if not TABLES[name].timed} <= set(STORED)


@pytest.mark.parametrize("name", STORED)
def test_stored_claims_follow_from_stored_rows(name):
    report = stored(name)
    assert report is not None
    assert claims_of(report) == TABLES[name].conclude(Rows(rows_of(report)))
    assert report["assumed"] == list(TABLES[name].assumed) and report["missing"] == list(TABLES[name].missing)
    assert all(claim.why for claim in claims_of(report) if not claim.holds), "what differs is explained"
    assert report["command"] == f"python -m bench.papers {name}"


@pytest.mark.slow
@pytest.mark.parametrize("name, case", SAMPLE)
def test_a_stored_case_comes_out_again(name, case):
    report = stored(name)
    assert report is not None
    assert same([row for row in rows_of(report) if row.case == case], TABLES[name].run(case, False))


def test_two_small_runs_are_the_same():
    for name in random.Random(1).sample([name for name in NAMES if not TABLES[name].timed], 4):
        case = TABLES[name].cases[-1]
        assert TABLES[name].run(case, True) == TABLES[name].run(case, True)


def test_the_page_says_what_the_reports_say():
    assert PAGE.read_text() == render(), "run python -m bench.papers --page"


def test_a_small_difference_is_none():
    assert not any(ahead(ratio) or behind(ratio) for ratio in (1 - 0.9 * MARGIN, 0.998, 1.0, 1.0026, 1 + 0.9 * MARGIN))
    assert ahead(1 + 1.1 * MARGIN) and behind(1 - 1.1 * MARGIN)
    assert rises([1.07, 1.13, 1.12, 1.14]) and not rises([1.0, 1.01]) and not rises([1.0, 1.2, 1.1])


def test_claims_that_follow_from_assumptions_are_not_evidence():
    assert [Claim("", "", "", holds, "", assumed).verdict for holds, assumed in
            ((True, False), (True, True), (False, True))] == ["holds", "follows", "differs"]  # fmt: skip
    table = Table("one", "s", "a", ("a",), lambda *_: [], lambda _: [Claim("x", "1", "2", True, "", True)])
    assert "  follows x: theirs 1, ours 2" in text(run_table(table))
    verdicts = [claim.verdict for name in STORED for claim in claims_of(stored(name) or {})]
    hold, follow, differ = (verdicts.count(word) for word in ("holds", "follows", "differs"))
    assert f"{hold} of {len(verdicts)} lines hold, {follow} follow, {differ} differ." in PAGE.read_text() and follow


def test_the_command(capsys, tmp_path, monkeypatch):
    command.main(["--list"])
    assert capsys.readouterr().out.split()[0] == NAMES[0]
    before = PAGE.read_text()
    command.main([NAMES[0], "--small", "--out", str(tmp_path)])
    assert "theirs" in capsys.readouterr().out and not list(tmp_path.iterdir())
    row, claim = Row("a", "b", 1.0, 2.0, "s"), Claim("x", "", "", True)
    table = Table(
        "one", "s", "a", ("a",), lambda *_: [row], lambda _: [claim], draw=lambda folder: (folder / "x.png").touch()
    )
    monkeypatch.setattr(command, "TABLES", {"one": table})
    command.main(["--all", "--out", str(tmp_path), "--pictures", str(tmp_path / "pictures")])
    assert (tmp_path / "pictures" / "x.png").exists()
    assert stored("one", tmp_path)["rows"][0]["ours"] == 2.0
    assert PAGE.read_text() == before
    with pytest.raises(SystemExit):
        command.main(["none-such"])
    assert "no table 'none-such'" in capsys.readouterr().err
