"""Links between ranks that are threads; two of them report another host."""

from __future__ import annotations

import pytest
import torch

from interlace.comm.channels.local import LocalChannel, LocalNetwork
from interlace.costs.links import NO_LINK, Links
from interlace.estimate.measured_links import measure_links
from interlace.run.process import run_threads


def measured(hosts: list[str]) -> list[Links]:
    world = len(hosts)
    network = LocalNetwork(world, 30.0)
    channels = [LocalChannel(rank, network, device=torch.device("cpu")) for rank in range(world)]
    result: dict[int, Links] = {}

    def play(rank: int) -> None:
        result[rank] = measure_links(channels[rank], ["vision", "language_model"], hosts=hosts)

    run_threads(list(range(world)), play, lambda rank, reason: channels[rank].leave(reason))
    for channel in channels:
        channel.close()
    return [result[rank] for rank in range(world)]


def test_one_process_has_none() -> None:
    assert measure_links(None, ["language_model"]) == Links()


@pytest.mark.parametrize(
    ("hosts", "inside", "outside"),
    [(["a", "a", "a"], True, False), (["a", "b"], False, True), (["a", "b", "b", "a", "b"], True, True)],
)
def test_each_kind_of_link_is_measured_and_all_ranks_know_it(hosts: list[str], inside: bool, outside: bool) -> None:
    first, *others = measured(hosts)
    assert all(other == first for other in others)
    assert first.hosts == tuple(hosts.index(host) for host in hosts)
    assert (first.host != NO_LINK, first.network != NO_LINK) == (inside, outside)
    for link, there in ((first.host, inside), (first.network, outside)):
        assert (link.message.transfer(1 << 20) > 0.0) == there
        assert (link.ring.transfer(1 << 20) > 0.0) == there
    assert first.overhead > 0.0
