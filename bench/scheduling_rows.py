"""Rows of the scheduling benchmark: measurement in alternation, and verdict.

A row is one problem and all its solvers, ours first. Calls of all solvers alternate, so that load on the machine
affects them equally; medians are reported. Values are computed from the answers, outside of the timed calls. A row with
a target records if it was met: in time, in the gap between our value and a proven bound, in required properties of the
answer, and in our value beside a peer's.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from bench.measure import Clock, reason

PACKAGES = ("prtpy", "scipy", "ortools", "cvxpy", "clarabel", "pyomo", "highspy")
EQUAL = 1e-6  # relative: exact peers may differ by this, since solvers stop at tolerances
CLOCK = Clock(torch.device("cpu"))

Record = dict[str, Any]


@dataclass(frozen=True)
class Solver:
    """One solver of a row's problem.

    solve: the timed call; returns the answer. value: of its answer, if the row's `value` does not apply. proves: a
        lower bound on every answer's value, from its answer. needs: required package; left out without it.
    ours: required relation of our value to this one's. "equal" to an exact solver's, "at most" a heuristic's or that of
        an exact one that was stopped; "" if neither is exact and nothing is claimed.
    """

    name: str
    solve: Callable[[], Any]
    value: Callable[[Any], float] | None = None
    proves: Callable[[Any], float] | None = None
    ours: Literal["", "equal", "at most"] = ""
    needs: str = ""


class Solved(NamedTuple):
    """Result of an exact peer at its limit, and its proven bound; value is infinite if it found nothing."""

    value: float
    bound: float


def milp(solve: Callable[[], Solved], ours: Literal["", "equal", "at most"] = "at most") -> Solver:
    """HiGHS, stopped at a limit: its value may be above the optimum then, but its bound is valid for all solvers."""
    return Solver("scipy milp (HiGHS)", solve, _value, _bound, ours, "scipy")


def cp_sat(solve: Callable[[], Solved], ours: Literal["", "equal", "at most"] = "at most") -> Solver:
    """CP-SAT, likewise."""
    return Solver("OR-tools CP-SAT", solve, _value, _bound, ours, "ortools")


def _value(solved: Solved) -> float:
    return solved.value


def _bound(solved: Solved) -> float:
    return solved.bound


def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) for package in packages)


@dataclass(frozen=True)
class Row:
    """One problem.

    solvers: ours first. minimised: name of the value that `value` computes ("" and None: only time counts).
    bound: no answer has a value below it, above 0; solvers may prove a higher one.
    target_ms, target_gap: limits for our median time and for our value / bound - 1.
    properties: required of an answer beside a low value; peers' are reported too.
    quoted_ms: times that papers print for their own machines. notes: other figures for the report.
    """

    problem: str
    solvers: Sequence[Solver]
    minimised: str = ""
    value: Callable[[Any], float] | None = None
    bound: float | None = None
    target_ms: float | None = None
    target_gap: float | None = None
    properties: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    quoted_ms: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, float | str] = field(default_factory=dict)


def measure(row: Row, repeats: int, seconds: float) -> Record:
    """A row's record: every solver timed in alternation, its value, and if ours meets the row's requirements.

    repeats: calls of each solver at most, after one warm-up call; seconds: limit of call time per solver, after which
        it skips further rounds. A solver whose first call takes longer is not called again, and that call counts.
    """
    present = [solver for solver in row.solvers if not solver.needs or installed(solver.needs)]
    samples, answers, failed = _alternate(present, repeats, seconds)
    solvers = {
        solver.name: _record(row, solver, samples[solver.name], answers[solver.name])
        if solver.name in answers
        else {"failed": failed[solver.name]}
        for solver in present
    }
    bounds = [row.bound, *(record.get("proved_bound") for record in solvers.values())]
    bound = max((float(b) for b in bounds if b is not None and b > 0), default=None)
    first = solvers[present[0].name]
    for record in solvers.values():
        if bound is not None and "value" in record:
            record["gap"] = record["value"] / bound - 1
        if record is not first and "ms" in record:
            record["ratio"] = record["ms"] / first["ms"]
    return {
        "problem": row.problem,
        "minimised": row.minimised,
        "bound": bound,
        "target_ms": row.target_ms,
        "target_gap": row.target_gap,
        "solvers": solvers,
        "quoted": {name: {"ms": ms, "ratio": ms / first["ms"]} for name, ms in row.quoted_ms.items()},
        "notes": dict(row.notes),
        "met": _met(row, first, solvers, bound),
    }


def _alternate(
    solvers: Sequence[Solver], repeats: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, Any], dict[str, str]]:
    """(milliseconds, last answer, error) by solver. A peer's exception is its result; ours must not raise."""
    samples: dict[str, list[float]] = {solver.name: [] for solver in solvers}
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    budget = 1e3 * seconds
    for turn in range(repeats + 1):
        for solver in solvers:
            times = samples[solver.name]
            if solver.name in failed or sum(times) >= budget:
                continue
            try:
                answers[solver.name], taken = CLOCK(solver.solve)
            except Exception as error:
                if solver is solvers[0]:
                    raise
                failed[solver.name] = reason(error)
                answers.pop(solver.name, None)
                continue
            if turn or taken >= budget:
                times.append(taken)
    return samples, answers, failed


def _record(row: Row, solver: Solver, times: list[float], answer: Any) -> Record:
    value = solver.value or row.value
    record: Record = {"ms": statistics.median(times), "best_ms": min(times), "runs": len(times)}
    if value is not None:
        record["value"] = float(value(answer))
    if solver.proves is not None:
        record["proved_bound"] = float(solver.proves(answer))
    for name in ("value", "proved_bound"):  # a stopped peer may have found or proved nothing
        if not math.isfinite(record.get(name, 0.0)):
            if solver is row.solvers[0]:
                raise ValueError(f"{row.problem}: our {name} is {record[name]}")
            del record[name]
    if row.properties:
        record["properties"] = {name: bool(holds(answer)) for name, holds in row.properties.items()}
    return record


def _met(row: Row, first: Record, solvers: Mapping[str, Record], bound: float | None) -> dict[str, bool]:
    """Requirements of the row on our answer, and if each is met. Only "time" depends on the machine."""
    met: dict[str, bool] = {}
    if row.target_ms is not None:
        met["time"] = first["ms"] <= row.target_ms
    if bound is not None:
        met["not below the bound"] = first["value"] >= bound - EQUAL * abs(bound)
    if row.target_gap is not None:
        met["gap"] = first["gap"] <= row.target_gap
    met |= first.get("properties", {})
    for solver in row.solvers:
        theirs = solvers.get(solver.name, {}).get("value")
        if solver.ours and theirs is not None:
            slack = EQUAL * abs(theirs)
            close = math.isclose(first["value"], theirs, rel_tol=EQUAL, abs_tol=1e-9)
            met[f"{solver.ours} {solver.name}"] = close if solver.ours == "equal" else first["value"] <= theirs + slack
    return met
