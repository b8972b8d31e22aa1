"""StepOptions: one definition of the options of steps."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from interlace.run import parallelize
from interlace.run.options import StepOptions
from tests.run.parity import make_layout
from tests.tiny import tiny_mllm


def test_unknown_option_is_a_type_error() -> None:
    mllm = tiny_mllm()
    with pytest.raises(TypeError, match="'schedul'"):
        parallelize(mllm, make_layout(mllm, "colocated", 1), schedul="gpipe")


def test_single_options_change_given_ones() -> None:
    mllm = tiny_mllm()
    given = StepOptions(schedule="gpipe", checkpointing="full")
    parallel = parallelize(mllm, make_layout(mllm, "colocated", 1), options=given, checkpointing="none")
    assert parallel.options == replace(given, checkpointing="none")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'; did you mean '1f1b'"),
        ({"assign": "token"}, "unknown assign 'token': use one of 'tokens'"),
        ({"balance": "all"}, "unknown balance 'all'"),
        ({"context_order": "zag"}, "unknown context_order 'zag'"),
    ],
)
def test_unknown_values_are_refused_by_name(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepOptions(**option)


def test_ranks_compare_every_option_of_the_step() -> None:
    """Only how long a rank waits, and where it writes a crash, may differ."""
    names = {field.name for field in fields(StepOptions)}
    options = StepOptions(schedule_options={"in_flight": 2})
    assert set(options.compared()) == names - {"timeout", "crash_folder"}
