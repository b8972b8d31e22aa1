"""Tables of the commands on the terminal, and versions for them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection

from rich.console import Console
from rich.table import Table


def console_of(width: int) -> Console:
    """The terminal. width: number of characters in a line if stdout is a pipe, which has no width."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    return console


def table_of(title: str, *columns: str, left: Collection[str] = ()) -> Table:
    """An empty table. left: columns of text; the others have numbers."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def version_of(package: str) -> str:
    """Version of a package; "missing" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
