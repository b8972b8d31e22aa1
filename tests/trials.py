"""Shared answers of trials: each structure of a model is tried once in a test run, and not once in every process.

A trial takes some tenths of a second, and a rank of tiny modules makes several. Their answers do not depend on weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = "INTERLACE_TEST_TRIALS"  # an environment variable, which processes of a run inherit


def share_trials() -> None:
    """Keep answers in the folder of this run from now on, once the module that keeps them is loaded."""
    module = sys.modules.get("interlace.model.remembered")
    if module is not None and FOLDER in os.environ:
        module.keep_in(Path(os.environ[FOLDER]))
