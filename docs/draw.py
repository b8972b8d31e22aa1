"""Runs the Python of a page from top to bottom: draws its pictures and writes what it prints under it.

    python docs/draw.py [docs/who-computes-what.md]

Pictures land in docs/images/, since a page names them without a folder. A block's output is the ```text block right
after it. tests/test_docs.py runs the same pages and compares.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
BLOCK = re.compile(r"```python\n(?P<code>.*?)```(?:\n+```text\n(?P<output>.*?)```)?", flags=re.S)


def run(page: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Executes every block in one namespace, in the current folder; yields (block, what it printed)."""
    text, names = page.read_text(), {"__name__": "page"}
    for block in BLOCK.finditer(text):
        above = text.count("\n", 0, block.start("code"))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Line numbers as in the page, so that a traceback leads there.
            exec(compile("\n" * above + block["code"], str(page), "exec"), names)
        yield block, printed.getvalue()


def main(page: Path) -> None:
    text, end, parts = page.read_text(), 0, []
    for block, printed in run(page.resolve()):
        code = f"```python\n{block['code']}```"
        parts += [text[end : block.start()], code + (f"\n\n```text\n{printed}```" if printed else "")]
        end = block.end()
    page.write_text("".join([*parts, text[end:]]))


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else DOCS / "who-computes-what.md").resolve()
    os.chdir(DOCS / "images")
    main(target)
