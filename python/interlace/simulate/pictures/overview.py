"""Overview of a step of thousands of ranks, as a zoomable page and as a picture, with one row per group of ranks.

The page is one self-contained file. Rows are groups with their utilisation over time. A click opens a group with each
of its lanes and actions (the ranks of a lane run in lock step). The picture has the same rows.
"""

from __future__ import annotations

import base64
import json
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.schedule import Schedule
from interlace.schedule.actions import CHUNK, MODULE, OP, STAGE
from interlace.simulate.arrays import Simulated
from interlace.simulate.groups import RankGroups, Utilisation, compute_rows, spread_over
from interlace.simulate.pictures.page import page
from interlace.simulate.pictures.style import IDLE, INK, QUIET, canvas, module_colours, time_unit

MOST_BOXES = 400_000
"""Most compute actions in a page: 15 bytes each, so 6 MB."""
_DPI = 120


def facts_of(schedule: Schedule, simulated: Simulated, groups: RankGroups) -> str:
    """One-line summary of the step for the page and the picture."""
    lanes, ranks = len(schedule.graph.layout.lanes()), schedule.graph.layout.world
    scale, unit = time_unit(simulated.makespan)
    return (
        f"{ranks:,} ranks in {lanes:,} lanes, {len(groups.names):,} groups · {len(schedule.table.chunks):,} chunks, "
        f"{len(schedule.rows):,} actions · {simulated.makespan * scale:.4g} {unit} · bubble {simulated.bubble:.1%}"
    )


def write_overview(
    schedule: Schedule,
    simulated: Simulated,
    groups: RankGroups,
    used: Utilisation,
    path: str | Path,
    *,
    title: str,
    most_boxes: int = MOST_BOXES,
) -> list[str]:
    """Writes the page (HTML); returns the names of the groups that are included with all actions.

    All groups are included up to `most_boxes` compute actions in total. Beyond that, the busiest group, the least busy
    one, and others evenly spaced between are included, and the page marks the remaining ones.
    """
    modules = schedule.graph.modules
    colours = module_colours(modules)
    boxes = _boxes_of_lanes(schedule)
    lane_group = np.array([groups.of_rank[lane.ranks[0]] for lane in schedule.graph.layout.lanes()])
    size = np.bincount(lane_group, weights=[len(at) for at in boxes], minlength=len(groups.names))
    count = len(size) if size.sum() <= most_boxes else max(int(most_boxes / size.max()), 1)
    full = set(spread_over(used.mean, count))
    rows: list[dict[str, Any]] = []
    for group, name in enumerate(groups.names):
        rows.append({"name": name, "least": used.least[group], "mean": used.mean[group], "most": used.most[group]})
        lanes = np.flatnonzero(lane_group == group).tolist() if group in full else []
        if lanes:
            rows[-1]["full"] = {"lanes": [_lane(schedule, simulated, lane, boxes[lane]) for lane in lanes]}
    shares = np.clip(np.rint(used.over_time * 255), 0, 255).astype(np.uint8)
    data = {
        "makespan": used.makespan,
        "bins": used.over_time.shape[2],
        "heat": _packed(shares),
        "modules": [{"name": name, "colour": colours[name]} for name in modules],
        "groups": rows,
        "facts": facts_of(schedule, simulated, groups),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    body = (resources.files("interlace.simulate") / "overview_page.html").read_text(encoding="utf-8")
    Path(path).write_text(page(title, body.replace("@DATA@", text)), encoding="utf-8")
    return [groups.names[group] for group in sorted(full)]


def _boxes_of_lanes(schedule: Schedule) -> list[NDArray[np.int64]]:
    """For each lane, the compute rows of its first rank in the lane's stages."""
    module_of = schedule.graph.arrays.pipeline_module
    at = compute_rows(schedule)
    rank = np.searchsorted(schedule.first, at, side="right") - 1
    # A rank may be in several lanes, of several stages: the stage of a row determines its lane.
    lanes = schedule.graph.layout.lanes()
    of = {
        (lanes[node.lane].ranks[0], int(module_of[node.pipeline]), node.stage): node.lane
        for node in schedule.graph.nodes
    }
    kinds, number = np.unique(
        np.stack([rank, schedule.rows[at, MODULE], schedule.rows[at, STAGE]], axis=1), axis=0, return_inverse=True
    )
    lane_of = np.array([of.get((a, b, c), -1) for a, b, c in kinds.tolist()])[number.reshape(-1)]
    order = np.argsort(lane_of, kind="stable")
    bounds = np.searchsorted(lane_of[order], np.arange(len(lanes) + 1))
    return [at[order[a:b]] for a, b in pairwise(bounds.tolist())]


def _lane(schedule: Schedule, simulated: Simulated, lane: int, at: NDArray[np.int64]) -> dict[str, str]:
    rows, ranks = schedule.rows[at], schedule.graph.layout.lanes()[lane].ranks
    chunks = schedule.table.chunks
    stages = dict.fromkeys(
        f"{schedule.graph.modules[m]}/{s}"
        for m, s in zip(rows[:, MODULE].tolist(), rows[:, STAGE].tolist(), strict=True)
    )
    where = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}+{len(ranks) - 1}"
    index = np.array([chunks[c].index for c in rows[:, CHUNK].tolist()], np.uint32)
    return {
        "name": f"{', '.join(stages) or 'idle'}   {where}",
        "start": _packed(simulated.start[at].astype(np.float32)),
        "length": _packed((simulated.finish[at] - simulated.start[at]).astype(np.float32)),
        "kind": _packed((4 * rows[:, MODULE] + rows[:, OP]).astype(np.uint8)),
        "chunk": _packed(index),
    }


def _packed(values: NDArray[Any]) -> str:
    """Little-endian bytes of an array, as base64."""
    return base64.b64encode(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()).decode()


def plot_overview(
    schedule: Schedule, simulated: Simulated, groups: RankGroups, used: Utilisation, path: str | Path, *, title: str
) -> None:
    """Writes the picture; the suffix of `path` selects the format (usually PNG).

    Left: a row per group in the colours of the computed modules, grey where idle. Right: utilisation of its ranks, with
    a bar up to the mean and a line from the least to the most busy rank.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    modules, count = schedule.graph.modules, len(groups.names)
    colours = module_colours(modules)
    tall = float(np.clip(count * 0.045, 1.5, 8.0))
    height = tall + 1.5
    figure = canvas(12.0, height, _DPI)
    axes = figure.add_axes((0.12, 0.55 / height, 0.68, tall / height))
    bars = figure.add_axes((0.815, 0.55 / height, 0.17, tall / height))
    hues = np.array([to_rgb(colours[name]) for name in modules])
    idle = np.clip(1.0 - used.over_time.sum(axis=1), 0.0, 1.0)
    image = np.einsum("gmb,mc->gbc", used.over_time, hues) + idle[..., None] * np.array(to_rgb(IDLE))
    scale, unit = time_unit(used.makespan)
    span = used.makespan * scale or 1.0
    axes.imshow(np.clip(image, 0, 1), aspect="auto", interpolation="nearest", extent=(0, span, count - 0.5, -0.5))
    places = np.unique(np.linspace(0, count - 1, min(count, max(int(tall / 0.16), 2))).round().astype(int))
    axes.set_yticks(places, [groups.names[i] for i in places], fontsize=7.5)
    axes.set_xlabel(f"time ({unit})", fontsize=8.5, color=QUIET)
    rows = np.arange(count)
    bars.barh(rows, 100 * used.mean, 0.8 if count <= 64 else 1.0, color="#8fb0dc", linewidth=0)
    bars.hlines(rows, 100 * used.least, 100 * used.most, color=INK, linewidth=min(1.0, 40 / count))
    bars.set_ylim(count - 0.5, -0.5)
    bars.set_xlim(0, 100)
    bars.set_yticks([])
    bars.set_xlabel("busy, %: mean, least to most", fontsize=8.5, color=QUIET)
    for each in (axes, bars):
        each.tick_params(labelsize=7.5, length=2, color=QUIET, labelcolor=INK)
        each.spines[:].set_visible(False)
    figure.text(0.12, 1 - 0.27 / height, title, fontsize=12.5, weight="bold", color=INK, va="center_baseline")
    figure.text(
        0.12, 1 - 0.52 / height, facts_of(schedule, simulated, groups), fontsize=9, color=QUIET, va="center_baseline"
    )
    handles = [Patch(color=colours[name]) for name in modules] + [Patch(color=IDLE)]
    figure.legend(
        handles, [*modules, "idle"], loc="upper left", bbox_to_anchor=(0.115, 1 - 0.58 / height), ncols=len(handles),
        frameon=False, fontsize=8, labelcolor=INK, borderpad=0.2, handlelength=1.2,
    )  # fmt: skip
    figure.savefig(path, dpi=_DPI)
