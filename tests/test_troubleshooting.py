"""docs/troubleshooting.md: the messages that it explains exist in the program."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.layering import PACKAGE, ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [
    message for line in re.findall(r"^### (.*)$", PAGE, flags=re.M) for message in re.findall("`([^`]+)`", line)
]


@cache
def texts() -> list[str]:
    """Every string of the package; placeholders of f-strings are replaced by `…`."""
    result = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                result.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                result.append(node.value)
    return result


@pytest.mark.parametrize("message", MESSAGES)
def test_the_program_says_it(message):
    pieces = [piece for piece in message.split("…") if piece.strip()]
    assert any(_has(text, pieces) for text in texts()), "no message of the program reads so any more"


def _has(text: str, pieces: list[str]) -> bool:
    """True if the text contains the pieces in this order."""
    at = 0
    for piece in pieces:
        at = text.find(piece, at) + len(piece)
        if at < len(piece):
            return False
    return True


def test_the_page_explains_messages():
    assert len(MESSAGES) > 20
