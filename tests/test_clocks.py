"""Tests do not depend on machine speed: limits on measured seconds only detect hangs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns"}
LEAST = 30.0  # seconds


def tight_limits(source: str) -> Iterator[int]:
    """Lines that assert an upper limit on elapsed time, written as a number below `LEAST`."""
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Assert):
            for compared in ast.walk(statement.test):
                if isinstance(compared, ast.Compare) and _is_measured(compared.left):
                    limits = [
                        side for op, side in zip(compared.ops, compared.comparators) if isinstance(op, ast.Lt | ast.LtE)
                    ]
                    if any(isinstance(limit, ast.Constant) and limit.value < LEAST for limit in limits):
                        yield statement.lineno


def _is_measured(node: ast.expr) -> bool:
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(
        isinstance(function, ast.Attribute) and ast.unparse(function.value) == "time" and function.attr in CLOCKS
        for function in called
    )


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_limits_on_seconds_are_for_what_hangs(path: Path) -> None:
    lines = list(tight_limits(path.read_text()))
    assert not lines, f"{path}, lines {lines}: count calls, rows or bytes, or give the code a clock of the test's own"


def test_a_tight_limit_is_noticed() -> None:
    start = "import time\nstart = time.monotonic()\n"
    for line, tight in (
        ("assert time.monotonic() - start < 0.5", True),
        ("assert x and time.perf_counter() - start <= 3", True),
        ("assert time.monotonic() - start < 30", False),
        ("assert time.monotonic() - start >= 0.3", False),
        ("assert seconds < 0.5", False),
    ):
        assert list(tight_limits(start + line)) == [3] * tight, line
