"""The papers' tables and figures, simulated again: printed figures beside ours, and if both show the same direction.

    python -m bench.papers --list
    python -m bench.papers oobleck-2.2 entrain-4.2     # prints them, writes bench/results/papers/NAME.json and the page
    python -m bench.papers --all
    python -m bench.papers --page                      # docs/papers.md alone, from the existing reports
    python -m bench.papers entrain-4.13 --pictures build/papers

--all runs tables with wall-clock times last. They should run while the machine is otherwise idle.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.papers.frame import RESULTS, run_table, store, text
from bench.papers.page import PAGE, render
from bench.papers.tables import TABLES


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables to run, as --list names them")
    parser.add_argument("--list", action="store_true", help="name all tables")
    parser.add_argument("--all", action="store_true", help="run all tables")
    parser.add_argument("--small", action="store_true", help="a size of a second each, to try out; writes nothing")
    parser.add_argument("--out", type=Path, help=f"folder of the reports (default: {RESULTS.name} of bench/results)")
    parser.add_argument("--page", action="store_true", help="write docs/papers.md from the stored reports")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures of the figures that have some")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in TABLES]
    if unknown:
        parser.error(f"no table {unknown[0]!r}: python -m bench.papers --list names them")
    if not (arguments.names or arguments.list or arguments.all or arguments.page):
        parser.error("name a table, or use --list, --all or --page")
    if arguments.list:
        for table in TABLES.values():
            print(f"{table.name:24}{table.about}")
        return
    names = sorted(TABLES, key=lambda name: TABLES[name].timed) if arguments.all else arguments.names
    for name in names:
        report = run_table(TABLES[name], arguments.small)
        print(text(report), end="\n\n", flush=True)
        if not arguments.small:
            store(report, arguments.out or RESULTS)
        draw = TABLES[name].draw
        if arguments.pictures and draw:
            arguments.pictures.mkdir(parents=True, exist_ok=True)
            draw(arguments.pictures)
    if arguments.page or (names and not arguments.small and arguments.out is None):
        PAGE.write_text(render())


if __name__ == "__main__":
    main()
