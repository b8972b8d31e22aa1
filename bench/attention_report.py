"""Tables and pictures of `bench.attention` and `bench.subblocks`.

python -m bench.attention_report REPORT.json ...      the short tables again, of runs that were cut off too
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLUMNS = ("forward", "backward", "total")
COLOURS = ("#4063d8", "#b5b5b5", "#8c8c8c", "#d2d2d2", "#e69f00", "#cb7a00", "#009e73", "#56b4e9")


def table(case: dict[str, Any]) -> str:
    """Lines of a case: one per contender that was timed, was checked or failed."""
    scale, unit = _unit(case["contenders"].values())
    lines = [f"{case['mask']} {case['length']} ({case['density']:.1%} of pairs)"]
    for name, record in case["contenders"].items():
        if record["status"] == "not applicable":
            continue
        if record["status"] != "ok":
            lines.append(f"  {name:13} {record['status']}: {record['reason']}")
        elif "forward_ms" not in record:
            worst = max(record["difference"].values())
            lines.append(f"  {name:13} right (differs by {worst:.1e} at most)")
        else:
            parts = [
                f"{which} {record[f'{which}_ms']:9.3f} ms {record[f'{which}_tflops'] * scale:7.1f} {unit}"
                for which in COLUMNS
                if f"{which}_ms" in record
            ]
            ratio = case["ratio"].get(name)
            tail = f", x{ratio.get('total', ratio['forward']):.2f}" if ratio else ""
            room = f", +{record['extra_bytes'] / 2**20:.0f} MiB" if "extra_bytes" in record else ""
            lines.append(f"  {name:13} " + ", ".join(parts) + f", build {record['build_ms']:.2f} ms{room}{tail}")
    return "\n".join(lines)


def _unit(records: Iterable[dict[str, Any]]) -> tuple[float, str]:
    """(factor, unit) that makes speeds readable: CPUs do not reach a TFLOP/s."""
    fastest = max((record.get("forward_tflops", 0.0) for record in records), default=0.0)
    return (1.0, "TFLOP/s") if fastest >= 5 else (1e3, "GFLOP/s")


def _short(value: float) -> str:
    """Three digits, or all digits before the decimal point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def summary(report: dict[str, Any]) -> list[str]:
    """The short table of the whole run: our speed per case, the ratio to each peer, and what is missing and why."""
    peak, settings = report["matmul_peak"], report["settings"]
    where = report["machine"].get("gpu") or report["machine"]["cpu"]
    scale, unit = (1.0, "TFLOP/s") if peak["tflops"] >= 5 else (1e3, "GFLOP/s")
    lines = [
        f"{where}, {settings['dtype']}, heads {settings['heads']} x {settings['head_dim']}, "
        f"matmul peak {_short(peak['tflops'] * scale)} {unit}",
        f"{unit} forward / backward; peer's time / ours, forward | backward | both with the plan built for one layer",
    ]
    for case in report["cases"]:
        mine = case["contenders"]["interlace"]
        head = f"{case['mask']:16} {case['length']:6}"
        if "forward_ms" not in mine:
            lines.append(f"{head}  {mine['status']} {mine.get('reason', '')}".rstrip())
            continue
        speed = " / ".join(_short(mine[f"{which}_tflops"] * scale) for which in COLUMNS[:2] if f"{which}_ms" in mine)
        share = f"{mine['forward_share_of_peak']:.0%} of peak"
        keys = ("forward", "backward", "total_with_build")
        peers = [
            f"{name} " + "|".join(f"{ratio[key]:.2f}" for key in keys if key in ratio)
            for name, ratio in case["ratio"].items()
        ]
        lines.append(f"{head}  {speed}, {share};  {', '.join(peers)}")
    for name, reasons in sorted(_left_out(report).items()):
        lines += [f"left out: {name}: {why} ({count} cases)" for why, count in sorted(reasons.items())]
    if report["left_out"]:
        names = [f"{item['mask']} {item['length']}" for item in report["left_out"]]
        lines.append(f"not run ({report['left_out'][0]['reason']}): {', '.join(names)}")
    if "memory" in report:
        memory = report["memory"]
        for name in ("interlace", "sdpa_dense"):
            result = memory[name]
            text = result.get("failed") or (
                f"{result['bytes'] / 2**20:.0f} MiB, its mask {result['mask_bytes'] / 2**20:.1f} MiB"
            )
            lines.append(f"memory over inputs and outputs, {memory['mask']} {memory['length']}: {name} {text}")
    return lines


def _left_out(report: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Peer -> reason -> number of cases, without cases in which the mask is not one of the peer's own."""
    result: dict[str, dict[str, int]] = {}
    for case in report["cases"]:
        for name, record in case["contenders"].items():
            if record["status"] != "ok" and not record["reason"].startswith(("says the", "cannot say")):
                why = f"{record['status']}, {record['reason']}"
                result.setdefault(name, {}).setdefault(why, 0)
                result[name][why] += 1
    return result


def chart(report: dict[str, Any], path: Path) -> str | None:
    """TFLOP/s over visible pairs, forward and backward together, a panel per length. None, or why not drawn."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"matplotlib cannot be imported ({error})"
    cases = [case for case in report["cases"] if "total_tflops" in case["contenders"]["interlace"]]
    if not cases:
        return "nothing was timed"
    lengths = sorted({case["length"] for case in cases})
    names = [
        name for name in cases[0]["contenders"] if any("total_tflops" in c["contenders"].get(name, {}) for c in cases)
    ]
    widest = max(sum(case["length"] == length for case in cases) for length in lengths)
    figure = Figure(figsize=(max(6.0, 1.1 * widest + 2), 2.6 * len(lengths) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, length in zip(figure.subplots(len(lengths), 1, squeeze=False)[:, 0], lengths):
        here = [case for case in cases if case["length"] == length]
        for n, name in enumerate(names):
            speeds = [case["contenders"].get(name, {}).get("total_tflops", 0.0) for case in here]
            places = [at + (n - (len(names) - 1) / 2) * 0.8 / len(names) for at in range(len(here))]
            axes.bar(places, speeds, 0.8 / len(names), label=name, color=COLOURS[n % len(COLOURS)])
        axes.set_xticks(range(len(here)), [case["mask"].replace("_", "\n") for case in here], fontsize=7)
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"{length:,} tokens", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=7, ncols=len(names), frameon=False, loc="upper right", bbox_to_anchor=(1, 1.25))
    where = report["machine"].get("gpu") or report["machine"]["cpu"]
    figure.suptitle(f"Forward and backward over visible pairs, {report['settings']['dtype']}, {where}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return None


def subblock_lines(case: dict[str, Any]) -> list[str]:
    """A case of the subblock ablation, a line per variant."""
    lines = []
    for variant, record in case["variants"].items():
        head = f"{case['mask']:14} {case['queries']:6} x {case['keys']:6} heads {case['heads']:5} {variant:16}"
        if "same_plan_as" in record:
            lines.append(f"{head} same plan as {record['same_plan_as']}")
            continue
        lines.append(
            f"{head} {record['forward_ms']:8.3f} / {record['backward_ms']:8.3f} ms, x{record['speedup']['forward']:.2f}"
            f" / x{record['speedup']['backward']:.2f}, {record['work_items']} items; modelled {record['model_ms']:.3f}"
            f" ms, utilisation {record['utilisation']:.0%}, spread {record['spread']:.0%}"
        )
    return lines


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        print(f"-- {path.name}")
        if not path.exists():
            print("missing: its phase wrote nothing")
            continue
        report = json.loads(path.read_text())
        if report["benchmark"] == "attention":
            print("\n".join(summary(report)))
        else:
            print("forward / backward, speed against none; busy time per SM or core is modelled")
            print("\n".join(line for case in report["cases"] for line in subblock_lines(case)))
        if not report["complete"]:
            print(f"incomplete: {len(report['cases'])} cases were run")


if __name__ == "__main__":
    main(sys.argv[1:])
