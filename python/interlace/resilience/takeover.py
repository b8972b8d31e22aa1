"""Layers, moments and averages that a rank needs in a new generation and does not have, copied from ranks that do.

Who has what is known of all ranks, so each finds the same transfers alone (`assign`). All are under way at once, spread
over the sources, on a process group of their own that also has the ranks of leaving nodes. Nothing is copied that is
there. What is large is sent from where it lies and received where it belongs; small tensors share a message, as a
message costs about 0.1 ms however small it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from interlace.resilience.errors import ResilienceError

ALONE = 1 << 20  # bytes from which on a tensor is a message by itself
TOGETHER = 4 << 20  # bytes of small ones that share a message, at most
PIECE = 64 << 20  # bytes of a message, at most: several are under way, so that no end of the link waits
NEARBY = 8.0  # how many times as fast a source on the same host is taken to be

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Name of a parameter -> "weight", "exp_avg", ... -> the tensor."""


@dataclass(frozen=True)
class Transfer:
    """Rank `source` sends all that belongs to the parameters `names` to rank `to`."""

    source: int
    to: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Takeover:
    """transfers: by source, then receiver. orphans: parameters that some rank needs and no rank has."""

    transfers: tuple[Transfer, ...]
    orphans: tuple[str, ...]

    def bytes(self, sizes: Sequence[Mapping[str, int]]) -> int:
        """Of all transfers. sizes: as `assign` takes them."""
        return sum(sizes[each.to % len(sizes)][name] for each in self.transfers for name in each.names)


def assign(
    needed: Mapping[int, Sequence[str]],
    held: Mapping[int, Collection[str]],
    sizes: Sequence[Mapping[str, int]],
    hosts: Mapping[int, str],
) -> Takeover:
    """Which source sends what to whom, so that the last transfer ends early.

    Largest first, each to be sent by the source that would have ended soonest: a source or a receiver sends or takes
    one thing after the other, `NEARBY` times as fast inside a host. (Scheduling on unrelated machines, greedily:
    Graham's list scheduling.)

    Args:
        needed: rank -> the parameters that it is to have.
        held: rank -> those that it has; ranks that only give are in it, too.
        sizes: for each place in a lane: parameter -> bytes of all that a rank there has of it. A rank's place is its
            number modulo that of places, and what it lacks comes from ranks of the same place.
        hosts: rank -> its host.
    """
    lane = len(sizes)
    missing = [
        (name, rank) for rank, names in sorted(needed.items()) for name in names if name not in held.get(rank, ())
    ]
    sources: dict[tuple[str, int], list[int]] = {(name, rank % lane): [] for name, rank in missing}
    for rank, names in sorted(held.items()):
        for name in names:
            if (name, rank % lane) in sources:
                sources[name, rank % lane].append(rank)
    sends = dict.fromkeys(held, 0.0)  # when each would be free again
    takes = dict.fromkeys(needed, 0.0)
    found: dict[tuple[int, int], list[str]] = {}
    order = {name: at for at, name in enumerate(dict.fromkeys(chain(*sizes)))}
    for name, rank in sorted(missing, key=lambda each: (-sizes[each[1] % lane][each[0]], order[each[0]], each[1])):
        if not sources[name, rank % lane]:
            continue

        def end(source: int, name: str = name, rank: int = rank) -> tuple[float, float, int]:
            seconds = sizes[rank % lane][name] / (NEARBY if hosts.get(source) == hosts.get(rank) else 1.0)
            return max(sends[source], takes[rank]) + seconds, sends[source], source

        source = min(sources[name, rank % lane], key=end)
        sends[source] = takes[rank] = end(source)[0]
        found.setdefault((source, rank), []).append(name)
    transfers = tuple(
        Transfer(source, to, tuple(sorted(names, key=order.__getitem__)))
        for (source, to), names in sorted(found.items())
    )
    orphans = dict.fromkeys(name for (name, _), of in sources.items() if not of)
    return Takeover(transfers, tuple(orphans))


def copy(
    takeover: Takeover, rank: int, group: Any, held: Tensors, into: Tensors, *, done: Callable[[], None] = lambda: None
) -> int:
    """Carries out this rank's transfers; returns the bytes that it received.

    group: a `ProcessGroupGloo` of all ranks (also None where there are no transfers). held: what this rank sends from.
    into: what it receives, filled in place; of each parameter the same tensors as its source holds. done: called after
    each message, for who watches that this rank moves.

    Raises ResilienceError where a peer is lost.
    """
    waits: list[tuple[Any, Callable[[], None]]] = []
    received = 0
    try:
        for receives in (True, False):
            for transfer in takeover.transfers:
                if rank != (transfer.to if receives else transfer.source):
                    continue
                tensors = _in_order(transfer.names, into if receives else held)
                for tag, message in enumerate(_messages(tensors)):
                    if receives:
                        flat, put = message.room()
                        received += flat.nbytes
                        waits.append((group.recv([flat], transfer.source, tag), put))
                    else:
                        waits.append((group.send([message.flat()], transfer.to, tag), lambda: None))
        for work, put in waits:
            work.wait()
            put()
            done()
    except RuntimeError as error:
        raise ResilienceError(f"rank {rank}, copying layers: a peer is lost ({str(error).splitlines()[0]})") from error
    return received


class _Message:
    """Tensors that travel together, as bytes; a single one from where it lies."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def flat(self) -> Tensor:
        """What is sent."""
        parts = [_bytes_of(tensor) for tensor in self.tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def room(self) -> tuple[Tensor, Callable[[], None]]:
        """What is received into, and what then puts it where it belongs."""
        if len(self.tensors) == 1 and self.tensors[0].is_contiguous():
            return _bytes_of(self.tensors[0]), lambda: None
        flat = torch.empty(sum(tensor.nbytes for tensor in self.tensors), dtype=torch.uint8)

        def put() -> None:
            parts = flat.split([tensor.nbytes for tensor in self.tensors])
            for tensor, part in zip(self.tensors, parts, strict=True):
                # A part may begin where no number of this dtype may: its own memory does not.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

        return flat, put


def _in_order(names: Sequence[str], tensors: Tensors) -> Iterator[Tensor]:
    for name in names:
        for key in sorted(tensors[name]):
            yield tensors[name][key].detach()


def _messages(tensors: Iterator[Tensor]) -> Iterator[_Message]:
    """The tensors in messages: the same on both sides, as sizes alone decide."""
    small: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes >= ALONE:
            step = max(PIECE // tensor.element_size(), 1)
            flat = tensor.view(-1) if tensor.is_contiguous() else None
            if flat is None:
                yield _Message([tensor])
            else:
                yield from (_Message([part]) for part in flat.split(step))
            continue
        if size + tensor.nbytes > TOGETHER:
            yield _Message(small)
            small, size = [], 0
        if tensor.nbytes:
            small.append(tensor)
            size += tensor.nbytes
    if small:
        yield _Message(small)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
