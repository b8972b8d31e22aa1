"""Results of the sweep over architectures: bench/results/architectures.json."""

from __future__ import annotations

import json
from pathlib import Path

REPORT = json.loads((Path(__file__).parents[2] / "bench" / "results" / "architectures.json").read_text())
ROWS = {(row["kind"], row["model_type"]): row for row in REPORT["rows"]}
CASES = [(kind, name, variant) for (kind, name), row in ROWS.items() for variant in row["variants"]]


def cases(outcome: str) -> list[tuple[str, str, str]]:
    """(kind, model type, variant) of those with this outcome."""
    return [case for case in CASES if ROWS[case[:2]]["variants"][case[2]]["outcome"] == outcome]
