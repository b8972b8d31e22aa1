"""HTML pages in one style: one file each that needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from importlib import resources
from string import Template


def page(title: str, body: str) -> str:
    """A whole page. title: text, also its heading; body: HTML below the heading."""
    frame = (resources.files("interlace.simulate") / "page.html").read_text(encoding="utf-8")
    return Template(frame).substitute(title=html.escape(title), body=body)


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = (), kind: str = "") -> str:
    """An HTML table of texts and numbers; "" without rows. kind: its class in the style."""
    body = "".join("\n<tr>" + "".join(f"<td>{html.escape(str(cell))}" for cell in row) for row in rows)
    names = "".join(f"<th>{html.escape(name)}" for name in head)
    return f'<table class="{kind}"><tr>{names}{body}\n</table>' if body else ""


def image(data: bytes, kind: str, alt: str) -> str:
    """An HTML element with a picture in it. kind: the media type, without "image/"."""
    return f'<img src="data:image/{kind};base64,{base64.b64encode(data).decode()}" alt="{html.escape(alt)}">'
