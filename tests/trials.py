"""Shared probe results: each model structure is probed once per test run instead of once per process.

A probe takes some tenths of a second, and a rank of tiny modules makes several. Results do not depend on weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = "INTERLACE_TEST_TRIALS"  # an environment variable: inherited by the processes of a run


def share_trials() -> None:
    """Stores probe results in the folder of this run from now on, once the module that stores them is loaded."""
    module = sys.modules.get("interlace.model.probe.cache")
    if module is not None and FOLDER in os.environ:
        module.use_cache_folder(Path(os.environ[FOLDER]))
