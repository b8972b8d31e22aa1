"""Data of a run: texts and formats for its model, feeds of batches, producers."""
