"""Template trees: nodes, stages, GPUs and layers of the picture match the templates."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from interlace import plan
from interlace.simulate import plot_templates, templates
from interlace.simulate.pictures.style import INK, canvas

COSTS = np.array([[6.0, 6.0, 6.0]] * 12 + [[10.0, 5.5, 3.0]] * 12)
TEMPLATES = [plan.pipeline_template(COSTS, nodes, 4, widths=[1, 2, 4]) for nodes in (2, 3, 4)]
TIMES = [template.iteration_time / (4 * len(template.gpus)) for template in TEMPLATES]
MODULES = {"vision": 12, "language_model": 12}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    kept: list[Any] = []

    def keep(*size: Any) -> Any:
        kept.append(canvas(*size))
        return kept[-1]

    monkeypatch.setattr(templates, "canvas", keep)
    return kept


def words(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_tree_has_all_nodes_stages_gpus_and_layers(figures: list[Any], tmp_path: Path) -> None:
    plot_templates(TEMPLATES, tmp_path / "trees.png", modules=MODULES)
    written = words(figures[0])
    for nodes in (2, 3, 4):
        assert f"{nodes} nodes" in written
    for index in range(6):
        assert written.count(f"stage {index}") == sum(len(template.gpus) > index for template in TEMPLATES)
    for layer in range(24):
        assert written.count(str(layer)) == 3
    rectangles = [patch for patch in figures[0].axes[0].patches if isinstance(patch, Rectangle)]
    gpus = [patch for patch in rectangles if to_hex(patch.get_facecolor()) == INK]
    assert len(gpus) == 4 * (2 + 3 + 4) + 1  # and the legend's


def test_children_lie_below_their_parents(figures: list[Any], tmp_path: Path) -> None:
    plot_templates(TEMPLATES[2:], tmp_path / "tree.png")
    boxes = {
        (patch.get_x(), patch.get_x() + patch.get_width(), round(patch.get_y(), 3)): patch
        for patch in figures[0].axes[0].patches
        if isinstance(patch, Rectangle) and patch.get_height() == templates._BOX
    }
    rows = sorted({y for _, _, y in boxes}, reverse=True)
    nodes, stages, layers = ([(left, right) for left, right, y in boxes if y == row] for row in rows)
    assert (len(nodes), len(stages), len(layers)) == (4, len(TEMPLATES[2].gpus), 24)

    def inside(children: Any, parents: Any) -> list[int]:
        near = 1e-9
        homes = [
            [p for p, (low, high) in enumerate(parents) if low - near <= a and b <= high + near]
            for a, b in sorted(children)
        ]
        assert all(len(home) == 1 for home in homes)
        return [home[0] for home in homes]

    assert inside(layers, sorted(stages)) == np.repeat(range(6), np.diff(TEMPLATES[2].boundaries)).tolist()
    gpus_before = np.cumsum(TEMPLATES[2].gpus) - TEMPLATES[2].gpus
    assert inside(stages, sorted(nodes)) == (gpus_before // 4).tolist()


def test_fastest_combination_is_the_one_of_instantiate(figures: list[Any], tmp_path: Path) -> None:
    plot_templates(TEMPLATES, tmp_path / "all.png", modules=MODULES, nodes=7, pipelines=2, times=TIMES, microbatches=32)
    chosen = plan.instantiate([2, 3, 4], TIMES, 7, faults=1, microbatches=32)
    sizes = np.repeat([2, 3, 4], chosen.counts)
    written = words(figures[0])
    assert [text for text in written if "fastest" in text] == [f"{chosen.time:.4g} ms, fastest"]
    for size, share in zip(sizes, chosen.microbatches, strict=True):
        assert f"{size} nodes, {share} microbatches" in written
    assert sum(text.endswith("microbatches") for text in written) == 5  # 2 + 2 + 3 and 3 + 4, as in Figure 2.7


def test_without_times_combinations_are_drawn_bare(figures: list[Any], tmp_path: Path) -> None:
    plot_templates(TEMPLATES, tmp_path / "bare.png", nodes=20)
    assert not any("microbatches" in text or " ms" in text for text in words(figures[0]))


def test_a_deep_model_and_wide_stages_fit(tmp_path: Path) -> None:
    costs = np.ones((96, 4)) / np.arange(1, 5) ** 0.8
    path = tmp_path / "deep.png"
    plot_templates([plan.pipeline_template(costs, 24, 8, widths=[1, 2, 4, 8])], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, "templates is empty"),
        ([TEMPLATES[0], plan.pipeline_template(COSTS[:8], 2, 4)], {}, "different depth"),
        (TEMPLATES, {"modules": {"vision": 12}}, "the modules have 12 layers, but the templates 24"),
        (TEMPLATES, {"nodes": 1}, "no combination"),
        (TEMPLATES, {"nodes": 7, "times": [1.0]}, "one number per template"),
        (TEMPLATES, {"nodes": 7, "times": TIMES, "microbatches": 1}, "microbatches"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plot_templates(given, tmp_path / "no.png", **options)
    assert not list(tmp_path.iterdir())
