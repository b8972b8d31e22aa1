"""Sampling of test cases: a fixed sample of a long sweep, or all cases with INTERLACE_EVERY_CASE=1.

Properties use fewer examples in the fast tier than in the slow one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sample(cases: Sequence[T], most: int) -> list[T]:
    """At most this many of the cases, in their order."""
    if os.environ.get("INTERLACE_EVERY_CASE") or len(cases) <= most:
        return list(cases)
    return [cases[place] for place in sorted(random.Random(0).sample(range(len(cases)), most))]


def given_by_tier(few: int, many: int, *strategies: Any, **named: Any) -> Callable[[Callable[..., None]], Any]:
    """hypothesis's `given`: `few` examples in the fast tier, `many` in the slow one. The test must not have
    fixtures."""
    from hypothesis import given, settings

    def decorate(check: Callable[..., None]) -> Any:
        def test(examples: int) -> None:
            settings(max_examples=examples)(given(*strategies, **named)(check))()

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])(test)

    return decorate
