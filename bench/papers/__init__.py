"""Figures of the papers beside those of Interlace: `python -m bench.papers --list`.

frame.py: a table, its rows and claims. __main__.py: the command. page.py: docs/papers.md, generated from the reports.
tables.py: all tables. The others contain the printed figures and the simulations of one paper, or of a part of it.
"""
