"""Bars of loads: drawn values equal computed ones, read back from pixels and from the shapes in the figure."""

from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from interlace.simulate import plot_loads
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
