"""Bars and deferrals: drawn values equal computed ones, read back from pixels and from the shapes in the figure."""

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.text import Annotation

from interlace import balance
from interlace.simulate import plot_deferral, plot_loads
from interlace.simulate.pictures import loads
from interlace.simulate.pictures.style import IDLE, canvas, module_colours, shade

BLUE, ORANGE = module_colours(["language_model", "vision"]).values()
ENCODER = [1, 3, 1, 0, 1, 1, 1, 3, 1, 1, 0, 1, 2, 0, 2]
LLM = [1, 2, 1, 1, 1, 6, 1, 3, 1, 2, 4, 4, 1, 6, 2]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures drawn from here on."""
    kept: list[Any] = []

    def keep(*size: Any) -> Any:
        kept.append(canvas(*size))
        return kept[-1]

    monkeypatch.setattr(loads, "canvas", keep)
    return kept


def share(image: np.ndarray, colour: Any) -> float:
    return float((np.abs(image[:, :, :3] - np.array(to_rgb(colour))).max(axis=2) < 0.01).mean())


@pytest.mark.parametrize("values", [[4.0, 8.0, 2.0, 6.0], [1] * 63 + [9], np.arange(200) % 7 + 1])
def test_areas_are_loads(values: Any, tmp_path: Path) -> None:
    plot_loads({"a": values}, tmp_path / "a.png", unit="ms")
    plot_loads({"a": np.zeros(4)}, tmp_path / "none.png", unit="ms")  # the legend's share of each colour
    image, none = (matplotlib.image.imread(tmp_path / name) for name in ("a.png", "none.png"))
    blue, orange, grey = (share(image, c) - share(none, c) for c in (shade(BLUE, 0.25), ORANGE, IDLE))
    heaviest, total = float(max(values)), float(sum(values))
    area = blue + orange + grey
    # Edges between bars and the mean's line have colours that are not among these.
    assert (blue + orange) / area == pytest.approx(total / (heaviest * len(values)), abs=0.03)
    assert orange / area == pytest.approx(1 / len(values), abs=0.01)


def test_panels_are_on_one_scale_and_name_the_heaviest(figures: list[Any], tmp_path: Path) -> None:
    panels = {f"way {i}": [1.0, 2.0 + i] for i in range(6)}
    plot_loads(panels, tmp_path / "six.svg", item="stage", title="Six ways")
    axes = figures[0].axes
    assert [a.get_title(loc="left") for a in axes] == list(panels) and len({a.get_ylim() for a in axes}) == 1
    assert [a.texts[0].get_text() for a in axes][:2] == ["1.333 × mean, 25.0% waiting", "1.500 × mean, 33.3% waiting"]
    assert {a.get_xlabel() for a in axes} == {"stage"} and "Six ways" in (tmp_path / "six.svg").read_text()


def boxes(axes: Any) -> np.ndarray:
    """[boxes, 3]: microbatch, foot and height of all filled boxes."""
    result = []
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and len(collection.get_facecolor()):
            for path in collection.get_paths():
                (left, low), (right, high) = path.vertices[:-1].min(axis=0), path.vertices[:-1].max(axis=0)
                result.append(((left + right) / 2, low, high - low))
    return np.array(result)


def test_deferral_stacks_are_the_loads_of_the_plan(figures: list[Any], tmp_path: Path) -> None:
    plan = balance.assign_microbatches(ENCODER, LLM, 6)
    assert plan.deferred
    plot_deferral(plan, ENCODER, LLM, tmp_path / "deferral.png")
    given = np.arange(15) * 6 // 15
    expected = [(LLM, given), (ENCODER, given), (LLM, plan.encoder_of), (ENCODER, plan.encoder_of),
                (LLM, plan.llm_of), (ENCODER, plan.encoder_of)]  # fmt: skip
    for axes, (costs, microbatch_of) in zip(figures[0].axes, expected, strict=True):
        drawn = boxes(axes)
        at = np.rint(drawn[:, 0]).astype(int)
        assert len(drawn) == np.count_nonzero(costs)
        np.testing.assert_allclose(np.bincount(at, drawn[:, 2], 6), np.bincount(microbatch_of, costs, 6))
        for microbatch in range(6):  # stacked without a gap
            own = drawn[at == microbatch]
            own = own[np.argsort(own[:, 1])]
            np.testing.assert_allclose(own[:, 1], np.concatenate([[0.0], np.cumsum(own[:, 2])[:-1]]), atol=1e-12)
        (bottleneck,) = {line.get_ydata()[0] for line in axes.lines}
        assert bottleneck == np.bincount(microbatch_of, costs, 6).max()
    arrows = [text for text in figures[0].axes[4].texts if isinstance(text, Annotation)]
    ends = [(round(arrow.xyann[0] - 0.1), round(arrow.xy[0] + 0.36)) for arrow in arrows]
    assert ends == [(plan.encoder_of[sample], target) for sample, target in plan.deferred.items()]


def test_many_microbatches_are_drawn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    encoder, llm = rng.lognormal(0, 1, 4096), rng.lognormal(0, 1, 4096)
    plan = balance.assign_microbatches(encoder, llm, 64)
    plot_deferral(plan, encoder, llm, tmp_path / "many.png", title="Many")
    height, width, _ = matplotlib.image.imread(tmp_path / "many.png").shape
    assert 1400 <= width <= 4000 and height < width


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ({}, "empty"),
        ({"a": []}, "a: loads must be real numbers"),
        ({"a": [[1.0]]}, r"a: loads must be real numbers \[ranks\], got float64 \[1, 1\]"),
        ({"a": [1.0], "b": [1.0, -2.0]}, "b: load 1 is -2.0"),
        ({"a": [float("nan")]}, "a: load 0 is nan"),
    ],
)
def test_bad_loads_are_refused(panels: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plot_loads(panels, tmp_path / "no.png")
    assert not list(tmp_path.iterdir())


def test_costs_of_another_plan_are_refused(tmp_path: Path) -> None:
    plan = balance.assign_microbatches(ENCODER, LLM, 6)
    with pytest.raises(ValueError, match="the LLM costs differ from those of the plan"):
        plot_deferral(plan, ENCODER, LLM[::-1], tmp_path / "no.png")
    with pytest.raises(ValueError, match="the encoder costs differ from those of the plan"):
        plot_deferral(plan, ENCODER[:-1], LLM, tmp_path / "no.png")
