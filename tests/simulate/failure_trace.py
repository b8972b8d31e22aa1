"""Random node traces for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from interlace.simulate.failure_trace import (
    Change,
)


@st.composite
def traces(draw: st.DrawFn) -> list[Change]:
    """Nodes of any name that alternate between present and absent; several may change at one time."""
    names = draw(st.lists(st.text("abc019-.", min_size=1, max_size=4), min_size=1, max_size=5, unique=True))
    there = {name: draw(st.booleans()) for name in names}
    times = sorted(draw(st.lists(st.integers(0, 20).map(float) | st.floats(0, 1e6), max_size=12)))
    result = []
    for time in times:
        name = draw(st.sampled_from(names))
        warning = draw(st.sampled_from([0.0, 30.0, 120.0])) if there[name] else 0.0
        result.append(Change(time, name, "fail" if there[name] else "join", warning))
        there[name] = not there[name]
    return result
