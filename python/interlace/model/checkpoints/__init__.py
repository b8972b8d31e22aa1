"""Folders of weights and configs: kinds of folders, config.json, tied weights, single modules."""
