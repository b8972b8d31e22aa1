"""Pictures (PNG, SVG) and HTML pages of steps and runs, and their style, which `train/report` uses too."""
