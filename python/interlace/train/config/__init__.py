"""Config of a run: sections as pydantic models, loading, overrides, paths.

- `load`: TOML and --set to a validated Config. `sections`: the Config; a module for each larger section. `base`: types.
"""
