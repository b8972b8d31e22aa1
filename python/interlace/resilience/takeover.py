"""State transfer: layers, moments and averages that a rank lacks in a new generation, copied from other ranks.

The contents of all ranks are known everywhere, so each rank computes the same transfers without communication
(`assign`). All transfers run concurrently, spread over the sources. They use their own process group, which includes
the ranks of leaving nodes. Tensors that a rank already has are not copied. Large tensors are sent and received in
place. Small tensors share a message, because each message costs about 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from interlace.resilience.errors import ResilienceError

ALONE = 1 << 20  # bytes: tensors of at least this size get their own message
TOGETHER = 4 << 20  # bytes: largest message of small tensors
PIECE = 64 << 20  # bytes: largest message; several are in flight, so that neither end of the link waits
NEARBY = 8.0  # assumed speed of a source on the same host, relative to one on another host

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
    """Set of transfers.

    transfers: sorted by source, then receiver. orphans: parameters that a rank needs and no rank has.
    """

    transfers: tuple[Transfer, ...]
    orphans: tuple[str, ...]

    def bytes(self, sizes: Sequence[Mapping[str, int]]) -> int:
        """Bytes of all transfers. sizes: as in `assign`."""
        return sum(sizes[each.to % len(sizes)][name] for each in self.transfers for name in each.names)


def assign(
    needed: Mapping[int, Sequence[str]],
    held: Mapping[int, Collection[str]],
    sizes: Sequence[Mapping[str, int]],
    hosts: Mapping[int, str],
) -> Takeover:
    """Transfers with a source and a receiver each, chosen so that the last transfer ends early.

    Parameters are assigned largest first, each to the source that would finish earliest. A source sends, and a receiver
    receives, one parameter at a time, `NEARBY` times as fast inside a host. (Greedy scheduling on unrelated machines:
    Graham's list scheduling.)

    Args:
        needed: rank -> parameters that it needs.
        held: rank -> parameters that it has; includes ranks that only send.
        sizes: for each place in a lane: parameter -> bytes of all tensors that a rank there has of it. A rank's place
            is its number modulo the number of places. Missing parameters come from ranks of the same place.
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
    sends = dict.fromkeys(held, 0.0)  # time at which each is free again
    takes = dict.fromkeys(needed, 0.0)
    assigned: dict[tuple[int, int], list[str]] = {}
    order = {name: at for at, name in enumerate(dict.fromkeys(chain(*sizes)))}
    for name, rank in sorted(missing, key=lambda each: (-sizes[each[1] % lane][each[0]], order[each[0]], each[1])):
        if not sources[name, rank % lane]:
            continue

        def end(source: int, name: str = name, rank: int = rank) -> tuple[float, float, int]:
            seconds = sizes[rank % lane][name] / (NEARBY if hosts.get(source) == hosts.get(rank) else 1.0)
            return max(sends[source], takes[rank]) + seconds, sends[source], source

        source = min(sources[name, rank % lane], key=end)
        sends[source] = takes[rank] = end(source)[0]
        assigned.setdefault((source, rank), []).append(name)
    transfers = tuple(
        Transfer(source, to, tuple(sorted(names, key=order.__getitem__)))
        for (source, to), names in sorted(assigned.items())
    )
    orphans = dict.fromkeys(name for (name, _), of in sources.items() if not of)
    return Takeover(transfers, tuple(orphans))


def copy(
    takeover: Takeover, rank: int, group: Any, held: Tensors, into: Tensors, *, done: Callable[[], None] = lambda: None
) -> int:
    """Executes this rank's transfers; returns the bytes received.

    group: a `ProcessGroupGloo` of all ranks (may be None if there are no transfers). held: tensors to send from.
    into: tensors to receive, filled in place; for each parameter the same tensors as its source holds.
    done: called after each message, as a sign of progress.

    Raises ResilienceError if a peer is lost.
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
                        flat, put = _room(message)
                        received += flat.nbytes
                        waits.append((group.recv([flat], transfer.source, tag), put))
                    else:
                        waits.append((group.send([_flat(message)], transfer.to, tag), lambda: None))
        for work, put in waits:
            work.wait()
            put()
            done()
    except RuntimeError as error:
        raise ResilienceError(f"rank {rank}, copying layers: a peer is lost ({str(error).splitlines()[0]})") from error
    return received


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors that are sent together; of a single tensor without a copy."""
    parts = [_bytes_of(tensor) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _room(tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Receive buffer for `_flat` of a peer's tensors, and a function that then copies it into these tensors."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return _bytes_of(tensors[0]), lambda: None
    flat = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)

    def put() -> None:
        parts = flat.split([tensor.nbytes for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            # A part may be misaligned for this dtype; its clone is aligned.
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    return flat, put


def _in_order(names: Sequence[str], tensors: Tensors) -> Iterator[Tensor]:
    for name in names:
        for key in sorted(tensors[name]):
            yield tensors[name][key].detach()


def _messages(tensors: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors into messages. Both sides agree, because grouping depends on sizes only."""
    small: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes >= ALONE:
            step = max(PIECE // tensor.element_size(), 1)
            parts = tensor.view(-1).split(step) if tensor.is_contiguous() else [tensor]
            yield from ([part] for part in parts)
            continue
        if size + tensor.nbytes > TOGETHER:
            yield small
            small, size = [], 0
        if tensor.nbytes:
            small.append(tensor)
            size += tensor.nbytes
    if small:
        yield small


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
