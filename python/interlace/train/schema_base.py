"""What all sections of a training config are made of: the class of a section, and the numbers that keys hold."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from interlace.train.local_paths import local_path

MOST = 2**31 - 1  # of anything that is counted
WEEK = 7 * 86_400.0
Positive = Annotated[int, Field(gt=0, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, le=1e6)]
LocalPath = Annotated[str, Field(min_length=1), AfterValidator(local_path)]


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, field docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True)

    free: ClassVar[type[Section] | None] = None
    """Of which section tables under names of their own are, where there may be such."""
