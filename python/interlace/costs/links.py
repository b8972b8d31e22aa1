"""Cost of messages and collectives: a latency and seconds per byte for each kind of link.

A message costs latency + bytes * per_byte. Costs of collectives use these formulas (rings of n - 1 steps, n ranks, S
bytes; Thakur, Rabenseifner, Gropp 2005):

    reduce-scatter, all-gather    (n - 1) (latency + S / n * per_byte)
    all-reduce                    a reduce-scatter, then an all-gather

If the ranks of a group are on several hosts, a sum has three parts: a reduce-scatter inside each host, an all-reduce of
a slice between the hosts, an all-gather inside. If hosts have different numbers of the ranks, the slowest part counts,
with the largest slice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from interlace.costs.fitted import FREE, LinkModel


@dataclass(frozen=True)
class Link:
    """One kind of link. message: from one rank to another; ring: one step of a ring, by all its ranks at once (measured
    separately, because libraries implement it differently from single messages)."""

    message: LinkModel = FREE
    ring: LinkModel = FREE

    def reduce_scatter(self, size: float, ranks: int) -> float:
        """Seconds of a reduce-scatter of `size` bytes over `ranks` ranks."""
        return (ranks - 1) * self.ring.transfer(size / ranks)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds of an all-gather over `ranks` ranks. size: total bytes of the result."""
        return (ranks - 1) * self.ring.transfer(size / ranks)

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of an all-reduce of `size` bytes over `ranks` ranks."""
        return self.ring.all_reduce(size, ranks)


NO_LINK = Link()
"""A link without traffic, or whose transfers take no time."""


@dataclass(frozen=True)
class Links:
    """The links of a run.

    process: between ranks of one process; host: between processes of a host; network: between hosts. Rank r is in
    process r // ranks_per_process, on host hosts[r], or without `hosts` on r // ranks_per_host (None: all on one).
    overhead: seconds that a rank itself spends on each message, excluding the wait.

    Raises ValueError for numbers of ranks below 1, and (in use) for a rank that is not in `hosts`.
    """

    process: Link = NO_LINK
    host: Link = NO_LINK
    network: Link = NO_LINK
    ranks_per_process: int = 1
    ranks_per_host: int | None = None
    hosts: tuple[int, ...] = ()
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ranks_per_process", "ranks_per_host"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")

    def host_of(self, rank: int) -> int:
        """Index of the host of `rank`."""
        if self.hosts:
            if rank >= len(self.hosts):
                raise ValueError(
                    f"rank {rank} is not among the {len(self.hosts)} ranks of the measured links: measure again"
                )
            return self.hosts[rank]
        return 0 if self.ranks_per_host is None else rank // self.ranks_per_host

    def inside(self, ranks: Sequence[int]) -> Link:
        """The slowest kind of link between `ranks` of one host."""
        return self.process if len({rank // self.ranks_per_process for rank in ranks}) == 1 else self.host

    def between(self, source: int, target: int) -> Link:
        """The link from one rank to another."""
        if self.host_of(source) != self.host_of(target):
            return self.network
        return self.inside((source, target))

    def slowest(self, ranks: Sequence[int]) -> Link:
        """The slowest kind of link between `ranks`."""
        return self.network if len(set(map(self.host_of, ranks))) > 1 else self.inside(ranks)

    def message(self, size: float, source: int, target: int) -> float:
        """Seconds of a message of `size` bytes from one rank to another; 0 to itself."""
        return 0.0 if source == target else self.between(source, target).message.transfer(size)

    def reduce_scatter(self, size: float, ranks: Sequence[int]) -> float:
        """Seconds of a reduce-scatter of `size` bytes over `ranks`."""
        by_host: dict[int, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.host_of(rank), []).append(rank)
        counts = [len(members) for members in by_host.values()] or [1]
        one_process = all(self.inside(members) is self.process for members in by_host.values())
        link = self.process if one_process else self.host
        inside = max(link.reduce_scatter(size, count) for count in counts)
        return inside + self.network.reduce_scatter(size / min(counts), len(counts))

    def all_gather(self, size: float, ranks: Sequence[int]) -> float:
        """Seconds of an all-gather over `ranks`. Takes as long as a reduce-scatter. size: bytes of the result."""
        return self.reduce_scatter(size, ranks)

    def all_reduce(self, size: float, ranks: Sequence[int]) -> float:
        """Seconds of an all-reduce of `size` bytes over `ranks`."""
        return self.reduce_scatter(size, ranks) + self.all_gather(size, ranks)

    def to_table(self) -> dict[str, Any]:
        """JSON-compatible table; `from_table` reads it."""
        return asdict(self)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Links:
        """The links of a table made by `to_table`. Raises ValueError for an invalid table."""
        try:
            process, host, network = (_link(table[name]) for name in ("process", "host", "network"))
            per_host, per_process = table["ranks_per_host"], int(table["ranks_per_process"])
            overhead, hosts = _number(table["overhead"]), tuple(map(int, table["hosts"]))
            return cls(process, host, network, per_process, per_host and int(per_host), hosts, overhead)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the table of links is invalid: {error!r}") from None


def _link(table: Mapping[str, Any]) -> Link:
    message, ring = (table[name] for name in ("message", "ring"))
    return Link(*(LinkModel(_number(each["latency"]), _number(each["per_byte"])) for each in (message, ring)))


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a number of seconds >= 0")
    return float(value)
