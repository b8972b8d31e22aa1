"""How long ranks take to tell each other something: a latency and seconds per byte for each kind of link.

A message costs latency + bytes * per_byte. Collectives follow by formula (rings of n - 1 steps, n ranks, S bytes):

    reduce-scatter, all-gather    (n - 1) (latency + S / n * per_byte)
    all-reduce                    one after the other

Where the ranks of a group are on several hosts, a sum is taken in three parts: a reduce-scatter inside each host, an
all-reduce of a slice between the hosts, an all-gather inside. Of hosts that have different numbers of the ranks the
slowest part counts, with the largest slice. (Thakur, Rabenseifner, Gropp 2005, for the rings.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from interlace.plan.cost_model import FREE, LinkModel


@dataclass(frozen=True)
class Link:
    """One kind of link. message: what one rank sends another; ring: a step of a ring, of all its ranks at once (what a
    library makes of it differs from single messages, so it is measured apart)."""

    message: LinkModel = FREE
    ring: LinkModel = FREE

    def reduce_scatter(self, size: float, ranks: int) -> float:
        """Seconds in which `ranks` sum `size` bytes, of which each then has its part."""
        return (ranks - 1) * self.ring.transfer(size / ranks)

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds in which `ranks` gather `size` bytes in all, of which each has brought its part."""
        return (ranks - 1) * self.ring.transfer(size / ranks)

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds in which `ranks` sum `size` bytes, all of which each then has."""
        return self.ring.all_reduce(size, ranks)


NO_LINK = Link()
"""Nothing travels over it, or takes no time."""


@dataclass(frozen=True)
class Links:
    """The links of a run.

    process: between ranks of one process; host: between processes of a host; network: between hosts. Rank r is in
    process r // ranks_per_process, on host hosts[r], or else r // ranks_per_host (None: all on one). overhead: seconds
    that a rank itself spends on each message, beside waiting for it.

    Raises ValueError for numbers of ranks below 1, and (in use) for a rank that `hosts` does not have.
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
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1")

    def host_of(self, rank: int) -> int:
        """The number of the host that `rank` is on."""
        if self.hosts:
            if rank >= len(self.hosts):
                raise ValueError(f"the links are of {len(self.hosts)} ranks, and there is a rank {rank}: measure anew")
            return self.hosts[rank]
        return 0 if self.ranks_per_host is None else rank // self.ranks_per_host

    def inside(self, ranks: Sequence[int]) -> Link:
        """The slowest kind of link that joins `ranks` of one host."""
        return self.process if len({rank // self.ranks_per_process for rank in ranks}) == 1 else self.host

    def between(self, source: int, target: int) -> Link:
        """The link from one rank to another."""
        if self.host_of(source) != self.host_of(target):
            return self.network
        return self.inside((source, target))

    def slowest(self, ranks: Sequence[int]) -> Link:
        """The slowest kind of link that joins `ranks`."""
        return self.network if len(set(map(self.host_of, ranks))) > 1 else self.inside(ranks)

    def message(self, size: float, source: int, target: int) -> float:
        """Seconds that `size` bytes travel from one rank to another; none to itself."""
        return 0.0 if source == target else self.between(source, target).message.transfer(size)

    def reduce_scatter(self, size: float, ranks: Sequence[int]) -> float:
        """Seconds in which `ranks` sum `size` bytes, of which each then has its part."""
        inside, hosts, least = self._parts(size, ranks)
        return inside + self.network.reduce_scatter(size / least, hosts)

    def all_gather(self, size: float, ranks: Sequence[int]) -> float:
        """Seconds in which `ranks` gather `size` bytes in all."""
        inside, hosts, least = self._parts(size, ranks)
        return inside + self.network.all_gather(size / least, hosts)

    def all_reduce(self, size: float, ranks: Sequence[int]) -> float:
        """Seconds in which `ranks` sum `size` bytes, all of which each then has."""
        return self.reduce_scatter(size, ranks) + self.all_gather(size, ranks)

    def _parts(self, size: float, ranks: Sequence[int]) -> tuple[float, int, int]:
        """Seconds of the part inside hosts, how many hosts there are, and the least of the ranks that one has."""
        counts = Counter(map(self.host_of, ranks))
        most = max(counts.values(), default=1)
        link = self.inside(ranks) if len(counts) == 1 else self._inside_hosts(ranks)
        seconds = max((link.reduce_scatter(size, count) for count in set(counts.values())), default=0.0)
        return (seconds if most > 1 else 0.0), max(len(counts), 1), min(counts.values(), default=1)

    def _inside_hosts(self, ranks: Sequence[int]) -> Link:
        """The slowest kind of link between ranks of one host, of all hosts of a group."""
        by_host: dict[int, set[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.host_of(rank), set()).add(rank // self.ranks_per_process)
        return self.process if all(len(processes) == 1 for processes in by_host.values()) else self.host

    def to_table(self) -> dict[str, Any]:
        """What JSON can hold; `from_table` reads it."""
        return asdict(self)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Links:
        """The links of a table as `to_table` makes it. Raises ValueError for anything else."""
        try:
            kinds = {name: _link(table[name]) for name in ("process", "host", "network")}
            per_host, each = table["ranks_per_host"], int(table["ranks_per_process"])
            overhead, hosts = _number(table["overhead"]), tuple(map(int, table["hosts"]))
            return cls(
                **kinds,
                ranks_per_process=each,
                ranks_per_host=per_host and int(per_host),
                hosts=hosts,
                overhead=overhead,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"these are no links: {error!r}") from None


def _link(table: Mapping[str, Any]) -> Link:
    made = {
        name: LinkModel(_number(table[name]["latency"]), _number(table[name]["per_byte"]))
        for name in ("message", "ring")
    }
    return Link(**made)


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise ValueError(f"{value!r} is no number of seconds from 0 upwards")
    return float(value)
