"""The picture: written for every size, with the colours of every rank at their place."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from interlace.schedule import Action, Op, StageGraph, StepTable, one_f_one_b
from interlace.simulate import Timeline, simulate
from interlace.simulate.pictures.style import module_colours
from tests.simulate.timelines import timeline_of

LLM = "language_model"


def timeline(vision: int, llm: int, microbatches: int) -> Timeline:
    graph = StageGraph.build({"vision": list(range(vision)), LLM: list(range(vision, vision + llm))}, [("vision", LLM)])
    table = StepTable.aligned(graph.links, [graph.modules] * microbatches)
    return simulate(one_f_one_b(graph, table), {Op.FORWARD: 1.0, Op.BACKWARD: 2.0})


@pytest.mark.parametrize(
    ("vision", "llm", "microbatches"), [(1, 2, 8), pytest.param(4, 12, 64, marks=pytest.mark.slow)]
)
def test_small_and_large_pictures_are_written(vision: int, llm: int, microbatches: int, tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    timeline(vision, llm, microbatches).plot(path)
    image = matplotlib.image.imread(path)[:, :, :3]
    height, width, _ = image.shape
    assert 900 <= width <= 3400 and 1.2 <= width / height <= 4.5
    # The backward of each module appears in its own colour.
    for colour in module_colours(["vision", LLM]).values():
        assert (np.abs(image - np.array(to_rgb(colour))).max(axis=2) < 0.02).mean() > 0.02


def test_the_title_counts_chunks_of_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], Figure.text
    monkeypatch.setattr(
        Figure, "text", lambda self, x, y, text, **more: written.append(text) or write(self, x, y, text, **more)
    )
    timeline(1, 2, 8).plot(tmp_path / "timeline.png")
    assert written[0] == "1F1B" and written[1].startswith("3 ranks × 8 microbatches   ·   ")


def test_modules_keep_their_colours() -> None:
    colours = module_colours(["audio", "depth", LLM, "vision", "touch"])
    assert len(set(colours.values())) == 5
    assert colours["vision"] == module_colours(["vision"])["vision"]


def test_measured_odd_timelines_are_drawn(tmp_path: Path) -> None:
    records = [
        (0, Action(Op.FORWARD, "a_module_with_a_long_name", 11, 123), 5.0, 5.0),
        (2, Action(Op.BACKWARD_INPUT, "b", 0, 0), 5.0, 5.001),
        (2, Action(Op.BACKWARD_WEIGHT, "b", 0, 0), 5.001, 5.0010001),
    ]
    path = tmp_path / "odd.png"
    timeline_of(records).plot(path, title="A measured step")
    assert path.read_bytes().startswith(b"\x89PNG")
