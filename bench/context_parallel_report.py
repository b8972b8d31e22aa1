"""Tables and charts of `bench.context_parallel`.

python -m bench.context_parallel_report REPORT.json [PNG]      the lines again, and the chart
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {"contiguous": "#b5b5b5", "zigzag": "#8c8c8c", "random": "#e69f00", "lpt": "#4063d8"}


def lines(part: str, found: Any) -> list[str]:
    """The short table of one part."""
    if part == "counted":
        head = "slowest rank / mean, counted blocks"
        rows = [
            f"{_where(row)}  {_ratios(row['slowest_over_mean'])}  (lpt {row['lpt_above_bound']:.2%} above its bound)"
            for row in found
        ]
    elif part == "random":
        head = "slowest rank / LPT's, counted blocks, mean of the draws (most) and as printed in Cornstarch 2025-03"
        rows = [
            f"{_where(row)}  "
            + ", ".join(
                f"{method} {mean:.3f} ({row['most_over_lpt'][method]:.3f}), printed "
                f"{row['printed_time_over_lpt'][method]:.3f}"
                for method, mean in row["slowest_over_lpt"].items()
                if method != "lpt"
            )
            for row in found
        ]
    elif part == "ablation":
        head = "speed of the slowest rank against zigzag with whole rows, modelled"
        rows = [
            f"{_where(row)}  heads {row['heads']:4} {_ratios(row['speedup_over_zigzag_whole'])}  "
            f"({row['multiprocessors']} multiprocessors)"
            for row in found
        ]
    elif part == "ranks":
        head = "slowest rank / mean, measured alone one after the other (counted)"
        rows = [
            f"{_where(row)}  heads {row['heads']:4} "
            + ", ".join(
                f"{arm} {ratio:.3f} ({row['counted_slowest_over_mean'][arm.split(',')[0]]:.3f}) "
                f"{row['slowest_ms'][arm]:.1f} ms"
                for arm, ratio in row["slowest_over_mean"].items()
            )
            for row in found
        ]
    else:
        head = f"slowest rank / mean, two processes over {found['transport']} (counted); the whole with communication"
        rows = [
            f"{_where(row)}  "
            + ", ".join(
                f"{method} {ratio:.3f} ({row['counted_slowest_over_mean'][method]:.3f}) "
                f"{row['slowest_ms'][method]:.1f} ms, whole {row['whole_ms'][method]:.1f} ms"
                for method, ratio in row["slowest_over_mean"].items()
            )
            for row in found["rows"]
        ]
    return [head, *(f"  {row}" for row in rows)]


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['mask']} {row['length']:8,} tokens {row['ranks']:3} ranks"


def _ratios(found: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())


def chart(report: Mapping[str, Any], path: Path) -> None:
    """Counted slowest rank / mean at the longest length, a panel per mask, a group of bars per number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    counted = report["parts"]["counted"]
    longest = max(row["length"] for row in counted)
    rows = [row for row in counted if row["length"] == longest]
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    figure, panels = plt.subplots(1, len(masks), figsize=(3.4 * len(masks), 3.2), sharey=True, squeeze=False)
    for panel, mask in zip(panels[0], masks):
        here = [row for row in rows if row["mask"] == mask]
        for number, (method, colour) in enumerate(COLOURS.items()):
            places = [group + 0.2 * (number - 1.5) for group in range(len(here))]
            above = [row["slowest_over_mean"][method] - 1 for row in here]
            panel.bar(places, above, 0.2, bottom=1, color=colour, label=method)
        panel.set_xticks(range(len(here)), [str(row["ranks"]) for row in here])
        panel.set_title(mask)
        panel.set_xlabel("context-parallel ranks")
    panels[0][0].set_ylim(bottom=1)
    panels[0][0].set_ylabel(f"slowest rank / mean\n(blocks, {longest:,} tokens)")
    panels[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    report = json.loads(Path(arguments[0]).read_text())
    for part, result in report["parts"].items():
        print("\n".join(lines(part, result)))
    if len(arguments) > 1:
        chart(report, Path(arguments[1]))


if __name__ == "__main__":
    main()
