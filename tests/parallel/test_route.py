"""How a message travels between lanes: every row once, to the place that is due, whatever the sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from interlace.parallel.route import pairs, parts, shares

SIZES = st.integers(1, 9)


@given(st.integers(0, 200), SIZES, SIZES)
def test_every_row_arrives_once_and_in_order(rows: int, senders: int, receivers: int) -> None:
    found = parts(rows, senders, receivers)
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(rows))
    assert [part.receiver for part in found] == sorted(part.receiver for part in found)
    assert tuple((part.sender, part.receiver) for part in found) == pairs(senders, receivers)
    counts = shares(found, receivers)
    assert len(counts) == receivers and sum(counts) == rows
    for place, count in enumerate(counts):
        assert count == sum(part.stop - part.start for part in found if part.receiver == place)


@given(st.integers(0, 200), SIZES, SIZES)
def test_work_is_shared_out(rows: int, senders: int, receivers: int) -> None:
    """All places take part, no two meet twice, and parts differ by at most one row."""
    found = parts(rows, senders, receivers)
    assert len(found) == max(senders, receivers) == len(set(pairs(senders, receivers)))
    assert {part.sender for part in found} == set(range(senders))
    assert {part.receiver for part in found} == set(range(receivers))
    sizes = [part.stop - part.start for part in found]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 200), SIZES, SIZES)
def test_a_gradient_goes_back_the_way_its_rows_came(rows: int, senders: int, receivers: int) -> None:
    back = [(part.receiver, part.sender, part.start, part.stop) for part in parts(rows, receivers, senders)]
    assert back == [tuple(part) for part in parts(rows, senders, receivers)]
