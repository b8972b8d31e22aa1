"""Fits recover the parameters of generated figures; costs of layers are sums of terms; files round-trip."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.costs.host_overhead import HostOverhead
from interlace.costs.links import Link
from interlace.costs.step import (
    NOTHING,
    Fit,
    FittedCosts,
    LaneTraffic,
    LayerFit,
    ModuleFits,
    ScaledCosts,
    Size,
    costs_text,
    fit,
    read_costs,
    sizes_at_once,
)
from interlace.plan import LayerTimes, LinkModel, ModuleCosts

SIZES = [
    Size(64, 4096, 10),
    Size(256, 20_000, 90),
    Size(256, 65_536, 20),
    Size(1024, 400_000, 500),
    Size(2048, 1e6, 60),
]
terms = st.one_of(st.just(0.0), st.floats(0.1, 10.0))


@given(st.tuples(terms, terms, terms, terms))
def test_a_fit_recovers_the_terms(found: tuple[float, ...]) -> None:
    per_pair, per_row, per_target, fixed = (
        each * scale for each, scale in zip(found, (1e-9, 1e-6, 1e-6, 1e-4), strict=True)
    )
    seconds = [per_pair * s.pairs + per_row * s.rows + per_target * s.targets + fixed for s in SIZES]
    made = fit(SIZES, seconds)
    largest = max(seconds)
    for size, each in zip(SIZES, seconds, strict=True):
        assert made.seconds(size) == pytest.approx(each, rel=1e-6)
    for given_, got, unit in zip((per_pair, per_row, per_target, fixed), made, (1e6, 2048, 500, 1), strict=False):
        assert got * unit == pytest.approx(given_ * unit, rel=1e-5, abs=1e-6 * largest)
    assert made.error == pytest.approx(0.0, abs=1e-6)


def test_the_error_is_that_of_sizes_left_out() -> None:
    sizes, seconds = [Size(1, 0), Size(2, 0), Size(4, 0)], np.array([1.0, 2.0, 8.0])
    made = fit(sizes, seconds)
    errors = []
    for i in range(3):  # by hand, a line through the two that remain; its slope and intercept are above 0 or dropped
        (x, y), (u, v) = ((sizes[j].rows, seconds[j]) for j in range(3) if j != i)
        slope = (v - y) / (u - x)
        start = y - slope * x
        if start < 0:  # then through 0, nearest by relative error
            slope, start = (x / y + u / v) / ((x / y) ** 2 + (u / v) ** 2), 0.0
        errors.append(abs(slope * sizes[i].rows + start - seconds[i]) / seconds[i])
    assert made.error == pytest.approx(np.mean(errors))
    assert math.isnan(fit(sizes[:1], [1.0]).error)


def test_a_difference_counts_by_what_it_is_a_difference_of() -> None:
    """One of four is 0.001 instead of the expected 1.0, in a whole of 10. Its relative error would dominate the fit."""
    sizes = [Size(rows, 0) for rows in (10, 20, 30, 40)]
    made = fit(sizes, [1.0, 1.0, 0.001, 1.0], scale=[10.0] * 4)
    assert 0.6 < made.seconds(sizes[0]) < 1.1


def test_what_took_no_time_has_no_terms() -> None:
    assert fit(SIZES, [0.0] * 5) == NOTHING


@pytest.mark.parametrize("seconds", [[1.0], [1.0, -1.0], [1.0, math.nan], []])
def test_other_measurements_are_refused(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"give at least one|not a number >= 0"):
        fit(SIZES[:2], seconds)


def line(per_row: float) -> Fit:
    return Fit(0.0, per_row, 0.0, 0.0, 0.0)


def costs_of_two() -> FittedCosts:
    """A module of two kinds, a, b, b; with tp = 2 a third of the time and some traffic."""
    traffic = LaneTraffic(2, 10.0, 4, 20.0)
    whole = {
        "a": LayerFit(line(1.0), line(2.0), line(3.0), line(4.0)),
        "b": LayerFit(line(10.0), line(20.0), line(30.0), line(40.0)),
    }
    halves = {name: LayerFit(line(0.5), line(1.0), line(1.5), line(2.0), traffic) for name in whole}
    fits = ModuleFits(
        ("a", "b", "b"), (False, True, True), {1: whole, 2: halves}, collate=line(0.25),
        forward=Fit(fixed=7.0, error=0.0), backward=Fit(fixed=5.0, error=0.0),
        traffic={2: LaneTraffic(1, 0.0, 0, 5.0)},
    )  # fmt: skip
    return FittedCosts({"m": fits}, LinkModel(1.0, 2.0), "by hand")


def test_layers_cost_what_their_kinds_do() -> None:
    costs = costs_of_two()
    result = costs.of("m", Size(2, 0))
    assert result.times.forward.tolist() == [2, 20, 20]
    assert result.times.input_grad.tolist() == [4, 40, 40]
    assert result.times.weight_grad.tolist() == [6, 60, 60]
    assert result.times.weight_only.tolist() == [8, 80, 80]
    assert result.trainable.tolist() == [False, True, True]
    assert costs.beside("m", Size(2, 0)) == (0.5 + 7.0, 5.0)
    # cp = 4: a fourth of 8 rows; tp = 2: over a link of 1 s and 0.1 s a byte 2 + 2 s, and 4 + 4 s back.
    link = Link(message=LinkModel(1.0, 0.1))
    result = costs.of("m", Size(8, 0), tp=2, cp=4, link=link)
    assert result.times.forward.tolist() == [1 + 4] * 3
    assert result.times.input_grad.tolist() == [2 + 8] * 3
    assert result.times.weight_only.tolist() == [4 + 8] * 3
    assert costs.beside("m", Size(8, 0), tp=2, cp=4, link=link) == (2.0 + 7.0 + 1.0, 5.0 + 1.0)


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no costs of module 'n': measured are m"):
        costs_of_two().of("n", Size(1, 1))
    with pytest.raises(ValueError, match="was not measured with tp = 4, only with 1, 2"):
        costs_of_two().of("m", Size(1, 1), tp=4)


def test_one_chunk_is_scaled_by_its_rows() -> None:
    ones = np.ones(3)
    cost = ModuleCosts(np.array([0, 0, 1]), LayerTimes(ones, 2 * ones, 3 * ones, 4 * ones), np.array([True] * 3))
    costs = ScaledCosts({"m": cost}, {"m": 100.0})
    result = costs.of("m", Size(50, 1e9), tp=2)
    assert result.times.weight_only.tolist() == [1.0] * 3 and result.num_layers == 2
    assert costs.beside("m", Size(50, 0)) == (0.0, 0.0)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    costs, path = costs_of_two(), tmp_path / "costs.json"
    around = HostOverhead(0.25, 0.5, {"m": 0.125}, 0.0625)
    costs = replace(costs, modules={"m": replace(costs.modules["m"], key_bytes=12.0)}, host_overhead=around)
    path.write_text(costs_text(costs, links={"a": 1}))
    result, table = read_costs(path)
    assert result == costs and table["links"] == {"a": 1}


def changed(table: dict[str, Any], change: str) -> Any:
    fits = table["modules"]["m"]
    if change == "version":
        return table | {"version": 99}
    if change == "kind":
        del fits["kinds"]["1"]["b"]
    elif change == "negative":
        fits["kinds"]["1"]["b"]["forward"][0] = -1.0
    elif change == "around":
        table["around"]["read"] = -1.0
    elif change == "modules":
        del table["modules"]
    elif change == "list":
        return [1]
    return table


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("version", "measure again"),
        ("kind", "layer kind b has no costs"),
        ("negative", "not a number >= 0"),
        ("around", "read is -1.0"),
        ("modules", "lacks 'modules'"),
        ("list", "not a valid file of costs"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: str, why: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(costs_text(costs_of_two()))
    path.write_text(json.dumps(changed(json.loads(path.read_text()), change)))
    with pytest.raises(ValueError, match=f"costs.json: .*{why}"):
        read_costs(path)
    with pytest.raises(ValueError, match=r"none\.json: cannot read the file"):
        read_costs(tmp_path / "none.json")


NUMBER = st.floats(0.0, 1e4)


@given(
    st.lists(st.builds(Size, NUMBER, NUMBER, NUMBER), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (2, 4)]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_many_chunks_at_once_cost_what_each_does(
    sizes: list[Size], degrees: tuple[int, int], before: bool, recompute: bool
) -> None:
    fitted = costs_of_two()
    fitted = replace(fitted, modules={"m": replace(fitted.modules["m"], key_bytes=12.0)})
    ones = np.array([1.0, 2.0, 3.0, 4.0])
    parts = ModuleCosts(np.array([0, 0, 1, 2]), LayerTimes(ones, 2 * ones, 3 * ones, 4 * ones), ones != 3.0)
    link = Link(message=LinkModel(1.0, 0.1))
    for costs in (fitted, ScaledCosts({"m": parts}, {"m": 100.0})):
        whole = costs.of("m", sizes_at_once(sizes), *degrees, link)
        beside = np.broadcast_to(np.array(costs.beside("m", sizes_at_once(sizes), *degrees, link)).T, (len(sizes), 2))
        for place, size in enumerate(sizes):
            one = costs.of("m", size, *degrees, link)
            for part in ("forward", "input_grad", "weight_grad", "weight_only"):
                np.testing.assert_allclose(getattr(whole.times, part)[:, place], getattr(one.times, part), rtol=1e-12)
            options = {"trainable_before": before, "recompute": recompute}
            np.testing.assert_allclose(whole.per_layer(**options)[:, place], one.per_layer(**options), rtol=1e-12)
            np.testing.assert_allclose(beside[place], costs.beside("m", size, *degrees, link), rtol=1e-12)
