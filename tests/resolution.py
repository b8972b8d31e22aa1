"""Resolution of the declared requirements for every Python, lowest and newest, from metadata alone.

python -m tests.resolution writes tests/resolution.json and the table in docs/installing.md. It needs uv on the PATH
(pip install uv) and a package index, and takes some minutes. pip itself is unsuitable: it evaluates markers for the
Python that runs it, also under --python-version.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "tests" / "resolution.json"
PAGE = ROOT / "docs" / "installing.md"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PINS = {"lowest": "lowest-direct", "newest": "highest"}
EXTRAS = ("", "data", "video", "lora", "ray", "cuda12", "cuda13", "peers", "docs", "dev")
PLATFORM = "x86_64-manylinux_2_28"
SHOWN = ("numpy", "torch", "triton", "transformers", "pydantic", "rich", "tensorboard", "matplotlib", "safetensors")
BEGIN, END = "<!-- written by tests/resolution.py -->\n", "<!-- end -->"


def requirements() -> dict[str, list[str]]:
    """Extra ("" = none) -> its lines in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def cases() -> Iterator[tuple[str, str, str]]:
    """(Python, lowest or newest, extra) of every resolution."""
    return itertools.product(PYTHONS, PINS, EXTRAS)


def resolve(python: str, pins: str, extra: str) -> dict[str, Any]:
    """One row: the versions of the declared packages, or the error."""
    command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", python, "--python-platform", PLATFORM, "--only-binary", ":all:"]
    command += ["--resolution", PINS[pins], *(["--extra", extra] if extra else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    row: dict[str, Any] = {"python": python, "pins": pins, "extra": extra}
    if done.returncode:
        return {**row, "error": " ".join(done.stderr.split())}
    lines = [line for name in {"", extra} for line in requirements()[name]]
    wanted = {re.split(r"[<>=!;\[ ]", line)[0].lower() for line in lines}
    versions = dict(line.split("==") for line in done.stdout.split() if "==" in line)
    return {**row, "versions": {name: version for name, version in sorted(versions.items()) if name in wanted}}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table: the package's own requirements, then the torch versions for each extra."""
    lines = ["| Python | pins | " + " | ".join(SHOWN) + " |", "|---" * (2 + len(SHOWN)) + "|"]
    for row in rows:
        if not row["extra"]:
            versions = [row["versions"].get(name, "none") for name in SHOWN]
            lines.append(f"| {row['python']} | {row['pins']} | " + " | ".join(versions) + " |")
    lines += ["", "| torch beside the extra, lowest / newest | " + " | ".join(PYTHONS) + " |"]
    lines.append("|---" * (1 + len(PYTHONS)) + "|")
    torch = {(row["python"], row["pins"], row["extra"]): row["versions"]["torch"] for row in rows}
    for extra in EXTRAS[1:]:
        cells = [" / ".join(torch[python, pins, extra] for pins in PINS) for python in PYTHONS]
        lines.append(f"| `{extra}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = []
    for case in cases():
        rows.append(resolve(*case))
        print(*case, rows[-1].get("error", "resolved"), flush=True)
    uv = subprocess.run(["uv", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    how = {"date": str(datetime.date.today()), "uv": uv, "platform": PLATFORM}
    RESULT.write_text(json.dumps({**how, "requirements": requirements(), "resolved": rows}, indent=1) + "\n")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
