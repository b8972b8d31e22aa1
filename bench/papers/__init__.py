"""What the papers print beside what Interlace's own libraries give: `python -m bench.papers --list`.

frame.py: a table, its rows and claims. __main__.py: the command. page.py: docs/papers.md, made from the reports.
tables.py: all tables. The others hold the printed figures and the simulations of one paper, or of a part of it.
"""
