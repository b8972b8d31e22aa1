"""Inputs of encoders: pixels, patches, tiles, spectrograms and clips, packed for each model family."""
