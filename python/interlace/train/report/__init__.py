"""Reports of a run: metrics, trackers, terminal, run page and closing summary."""
