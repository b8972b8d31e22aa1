"""Base class of the config sections, and number types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from interlace.train.config.local_paths import local_path

MOST = 2**31 - 1  # maximum of all counts
WEEK = 7 * 86_400.0
IMPORT = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"  # "package.module:name"
Positive = Annotated[int, Field(gt=0, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, le=1e6)]
LocalPath = Annotated[str, Field(min_length=1), AfterValidator(local_path)]
AbsolutePath = Annotated[LocalPath, AfterValidator(lambda name: str(Path(name).expanduser().absolute()))]
"""Absolute, because a run may resume from any folder."""


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, field docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True)

    free: ClassVar[type[Section] | None] = None
    """Section class of the tables with free names; None: free names are not allowed."""
