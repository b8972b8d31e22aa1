"""Links and collectives against figures computed by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.costs.links import Link, Links
from interlace.plan import LinkModel

FAST, SLOW = Link(LinkModel(1.0, 0.5), LinkModel(2.0, 0.25)), Link(LinkModel(10.0, 1.0), LinkModel(20.0, 4.0))
CLUSTER = Links(host=FAST, network=SLOW, ranks_per_host=4)


def test_a_message_takes_the_link_of_its_ranks() -> None:
    assert CLUSTER.message(8, 0, 3) == 1.0 + 8 * 0.5
    assert CLUSTER.message(8, 3, 4) == 10.0 + 8 * 1.0
    assert CLUSTER.message(8, 2, 2) == 0.0
    assert CLUSTER.message(0, 3, 4) == 0.0
    threads = Links(process=Link(LinkModel(0.5)), host=FAST, ranks_per_process=2)
    assert threads.message(8, 0, 1) == 0.5
    assert threads.message(8, 1, 2) == 1.0 + 8 * 0.5


def test_collectives_inside_a_host_are_rings() -> None:
    ranks = (0, 1, 2, 3)  # 3 steps, each of 32 of 128 bytes: 2 + 8 seconds
    assert CLUSTER.reduce_scatter(128, ranks) == 3 * (2.0 + 32 * 0.25) == 30.0
    assert CLUSTER.all_gather(128, ranks) == 30.0
    assert CLUSTER.all_reduce(128, ranks) == 60.0
    assert CLUSTER.all_reduce(128, (5,)) == 0.0


def test_sums_over_hosts_have_three_parts() -> None:
    # 2 hosts of 4: 30 s inside, then slices of 32 bytes between 2 hosts: one step of 16 bytes, 20 + 64 s, each way.
    ranks = tuple(range(8))
    assert CLUSTER.reduce_scatter(128, ranks) == 30.0 + 84.0
    assert CLUSTER.all_reduce(128, ranks) == 2 * (30.0 + 84.0)
    # One rank on each of 3 hosts: a ring between them alone, of 2 steps of 64 of 192 bytes.
    assert CLUSTER.all_reduce(192, (0, 4, 8)) == 2 * 2 * (20.0 + 64 * 4.0)
    # Hosts with 3 and 1 of the ranks: 2 steps of 64 bytes inside the first, and then all 192 bytes between them.
    assert CLUSTER.reduce_scatter(192, (0, 1, 2, 4)) == 2 * (2.0 + 64 * 0.25) + (20.0 + 96 * 4.0)


def test_hosts_may_be_named_rank_by_rank() -> None:
    links = Links(host=FAST, network=SLOW, hosts=(0, 1, 0))
    assert links.message(8, 0, 2) == 5.0 and links.message(8, 0, 1) == 18.0
    with pytest.raises(ValueError, match="rank 3 is not among the 3 ranks of the measured links"):
        links.message(8, 0, 3)


lines = st.builds(LinkModel, st.floats(0, 10), st.floats(0, 10))
links_ = st.builds(
    Links,
    process=st.builds(Link, lines, lines),
    host=st.builds(Link, lines, lines),
    network=st.builds(Link, lines, lines),
    ranks_per_process=st.integers(1, 3),
    ranks_per_host=st.none() | st.integers(1, 5),
    overhead=st.floats(0, 1),
)


@given(links_, st.sets(st.integers(0, 20), min_size=1).map(sorted), st.floats(0, 1e6), st.floats(0, 1e6))
def test_all_reduce_cost_is_two_halves_and_grows_with_bytes(
    links: Links, ranks: list[int], size: float, more: float
) -> None:
    assert links.all_reduce(size, ranks) == links.reduce_scatter(size, ranks) + links.all_gather(size, ranks)
    assert links.all_reduce(size + more, ranks) >= links.all_reduce(size, ranks) * (1 - 1e-12)
    assert links.all_reduce(0, ranks) == 0.0


@given(links_)
def test_a_table_is_read_back(links: Links) -> None:
    assert Links.from_table(json.loads(json.dumps(links.to_table()))) == links


def faulty(change: dict[str, Any]) -> dict[str, Any]:
    return CLUSTER.to_table() | change


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({}, "the table of links is invalid"),
        (faulty({"host": None}), "the table of links is invalid"),
        (faulty({"overhead": -1.0}), "not a number of seconds >= 0"),
        (faulty({"overhead": float("nan")}), "not a number of seconds >= 0"),
        (faulty({"ranks_per_process": 0}), "at least 1"),
    ],
)
def test_other_tables_are_refused(table: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Links.from_table(table)
