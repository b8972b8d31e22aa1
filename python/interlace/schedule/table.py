"""StepTable: contents of a step. It lists chunks of samples, and the rows that chunks read from other chunks.

Pure data, computed from lengths alone (`interlace.run.tables.table`), identical on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Pieces = NDArray[np.int32]
"""int32 [n, 5]: source chunk, source row, destination chunk, destination row, count."""


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """Chunk `index` of a replica of a module: one FORWARD on each of its stages, and its backward.

    samples: int32 [n], indices in the step's batch, in collation order.
    """

    module: str
    replica: int
    index: int
    samples: NDArray[np.int32]

    def __str__(self) -> str:
        return f"{self.module}, replica {self.replica}, chunk {self.index}"


@dataclass(frozen=True, eq=False, slots=True)
class Edge:
    """Rows of `producer` that `consumer` reads at `port` ("embeds", or the layer that they are added to).

    pieces: chunks are indices in `StepTable.chunks`. A source row counts rows after the projector, without padding. A
        destination row is the index among that module's placeholders in the destination chunk.
    """

    producer: str
    consumer: str
    port: str
    pieces: Pieces


@dataclass(frozen=True, eq=False)
class StepTable:
    """Work of one step.

    chunks: chunks of a replica are in the order of their index. targets: int64 [chunks], valid targets of each chunk (0
    for a chunk without a loss). place: (epoch, position, step) of the batch in the run. work: int64 [chunks], estimated
    costs in a common unit; None without an estimate. deferred: int32, ascending, samples that the language model reads
    one microbatch later than they are encoded.

    Raises ValueError with the chunk if chunks, pieces and targets are inconsistent.
    """

    chunks: tuple[Chunk, ...]
    edges: tuple[Edge, ...] = ()
    targets: NDArray[np.int64] | None = None
    place: tuple[int, int, int] = (0, 0, 0)
    work: NDArray[np.int64] | None = None
    deferred: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if not self.chunks:
            raise ValueError("a step needs at least one chunk")
        following: dict[tuple[str, int], int] = {}
        for chunk in self.chunks:
            key = (chunk.module, chunk.replica)
            expected = following.get(key, 0)
            if chunk.index != expected:
                raise ValueError(f"got {chunk}, expected chunk {expected} of its replica")
            following[key] = expected + 1
        if self.targets is not None and self.targets.shape != (len(self.chunks),):
            raise ValueError(f"targets has shape {self.targets.shape}, expected ({len(self.chunks)},)")
        if self.work is not None and (self.work.shape != (len(self.chunks),) or self.work.min() < 0):
            raise ValueError(f"work must have a number >= 0 for each of {len(self.chunks)} chunks, got {self.work}")
        modules = np.array([chunk.module for chunk in self.chunks])
        for edge in self.edges:
            pieces = edge.pieces
            if pieces.dtype != np.int32 or pieces.ndim != 2 or pieces.shape[1] != 5:
                raise ValueError(f"pieces must be int32 [n, 5], got {pieces.dtype} {list(pieces.shape)}")
            if len(pieces) == 0:
                continue
            if pieces.min() < 0 or pieces[:, 4].min() < 1 or pieces[:, [0, 2]].max() >= len(self.chunks):
                raise ValueError(f"a piece from {edge.producer} to {edge.consumer} has a chunk or rows out of range")
            for column, module in ((0, edge.producer), (2, edge.consumer)):
                wrong = (modules != module)[pieces[:, column]]  # compares names once per chunk, not per piece
                if wrong.any():
                    chunk = self.chunks[int(pieces[wrong.argmax(), column])]
                    raise ValueError(f"a piece from {edge.producer} to {edge.consumer} has {chunk}, of another module")

    @cached_property
    def links(self) -> NDArray[np.int32]:
        """Pairs of chunks (producer, consumer), int32 [m, 2], sorted: the second reads rows of the first."""
        count = len(self.chunks)
        pairs = [edge.pieces[:, 0].astype(np.int64) * count + edge.pieces[:, 2] for edge in self.edges]
        if not sum(map(len, pairs)):
            return np.zeros((0, 2), np.int32)
        keys = np.concatenate(pairs)
        keys = np.sort(keys.astype(np.uint32)) if count**2 <= 2**32 else np.sort(keys)  # uint32 sorts faster
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])].astype(np.int64)
        return np.stack([keys // count, keys % count], axis=1).astype(np.int32)

    @cached_property
    def digest(self) -> int:
        """Hash of 48 bits, which fits in a float64. Equal only for tables with equal contents."""
        parts = hashlib.blake2b(digest_size=6)
        names = ";".join(f"{c.module},{c.replica},{len(c.samples)}" for c in self.chunks)
        parts.update(f"{self.place} {names}".encode())
        parts.update(np.concatenate([chunk.samples for chunk in self.chunks]).tobytes())
        for edge in self.edges:
            parts.update(f"{edge.producer}>{edge.consumer}:{edge.port}".encode())
            parts.update(np.ascontiguousarray(edge.pieces).tobytes())
        if self.targets is not None:
            parts.update(np.ascontiguousarray(self.targets).tobytes())
        if self.work is not None:  # schedules may depend on it
            parts.update(np.ascontiguousarray(self.work).tobytes() + self.deferred.tobytes())
        return int.from_bytes(parts.digest(), "little")

    def of(self, module: str, replica: int) -> list[int]:
        """Indices of the chunks of a replica, in order."""
        return [i for i, c in enumerate(self.chunks) if c.module == module and c.replica == replica]

    @classmethod
    def aligned(
        cls,
        links: Sequence[tuple[str, str]],
        presence: Sequence[Collection[str]],
        *,
        replicas: int = 1,
    ) -> StepTable:
        """Table with one chunk per module and microbatch; linked chunks of a microbatch read one row of one sample.

        links: (producer, consumer) modules. presence: per microbatch, the modules that have a chunk in it. replicas:
            replicas of every module, each with these microbatches.
        """
        chunks: list[Chunk] = []
        at: dict[tuple[int, int, str], int] = {}
        following: dict[tuple[str, int], int] = {}
        order = list(
            dict.fromkeys([name for pair in links for name in pair] + [n for p in presence for n in sorted(p)])
        )
        for replica in range(replicas):
            for k, present in enumerate(presence):
                for name in (name for name in order if name in present):
                    index = following.get((name, replica), 0)
                    following[name, replica] = index + 1
                    at[replica, k, name] = len(chunks)
                    place = np.array([replica * len(presence) + k], np.int32)
                    chunks.append(Chunk(name, replica, index, place))
        edges = []
        for producer, consumer in links:
            pairs = [
                (at[replica, k, producer], 0, at[replica, k, consumer], 0, 1)
                for replica in range(replicas)
                for k in range(len(presence))
                if (replica, k, producer) in at and (replica, k, consumer) in at
            ]
            edges.append(Edge(producer, consumer, "embeds", np.array(pairs, np.int32).reshape(-1, 5)))
        return cls(tuple(chunks), tuple(edges))


def merged(pieces: Pieces) -> Pieces:
    """`pieces` sorted by destination; pieces that are adjacent on both sides are joined."""
    place = pieces[:, 2].astype(np.int64) << 32 | pieces[:, 3]
    if (place[1:] < place[:-1]).any():
        pieces = pieces[np.argsort(place, kind="stable")]
    if len(pieces) < 2:
        return pieces
    before, after = pieces[:-1], pieces[1:]
    joined = (before[:, 0] == after[:, 0]) & (before[:, 2] == after[:, 2])
    at = np.flatnonzero(joined)
    before, after = before[at], after[at]
    joined[at] = (before[:, 1] + before[:, 4] == after[:, 1]) & (before[:, 3] + before[:, 4] == after[:, 3])
    if not joined.any():
        return pieces
    starts = np.flatnonzero(np.concatenate([[True], ~joined]))
    out = pieces[starts].copy()
    out[:, 4] = np.add.reduceat(pieces[:, 4], starts)
    return out
