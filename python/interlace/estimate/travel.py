"""Time of each message of a schedule, vectorised over all SENDs: a step of 10,240 ranks has a million of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from interlace.costs.links import Links
from interlace.parallel.route import pairs
from interlace.schedule import Op, Schedule
from interlace.schedule.actions import CHUNK, CODES, GRAD, OP, OTHER, PEER, STAGE
from interlace.schedule.graph import GraphArrays
from interlace.schedule.step import step_arrays

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def message_seconds(
    schedule: Schedule,
    rows: Sequence[float],
    links: Links,
    row_bytes: Mapping[str, Sequence[float]],
    read_bytes: Sequence[float],
) -> Floats:
    """float64 [SENDs], in the order of the schedule's rows: seconds until the last part has arrived.

    rows: of each chunk, in the layers of its module. row_bytes: module -> [layers + 1], of a row that enters each layer
    and of one that leaves the last. read_bytes: per chunk, bytes of a row that a chunk of another module reads.

    A message between lanes of several ranks consists of equal parts, one per rank of the larger lane (`pairs`). The
    parts that one rank sends are transferred in parallel, so the slowest counts.
    """
    at = np.flatnonzero(schedule.rows[:, OP] == CODES[Op.SEND])
    if not len(at):
        return np.zeros(0)
    graph, arrays = schedule.graph, schedule.graph.arrays
    rank = np.searchsorted(schedule.first, at, side="right") - 1
    stage, chunk, other, peer = (schedule.rows[at, column].astype(np.int64) for column in (STAGE, CHUNK, OTHER, PEER))
    pipeline = step_arrays(graph, schedule.table).chunk_pipeline
    maker = arrays.pipeline_first[pipeline[chunk]] + stage
    apart = other != chunk

    # Size: all rows that leave the stage that made them, or those that another chunk reads.
    stages = [graph.stage_of(node) for node in range(len(graph.nodes))]
    leaving = np.array([row_bytes[each.module][each.stop] for each in stages], np.float64)
    size = np.asarray(rows, np.float64)[chunk] * leaving[maker]
    size[apart] = _rows_read(schedule, chunk[apart], other[apart]) * np.asarray(read_bytes, np.float64)[chunk[apart]]

    # Source: the stage that made the rows, or for their gradient the stage that has read them.
    reader = np.where(apart, arrays.pipeline_first[pipeline[other]], maker + 1)
    node = np.where(schedule.rows[at, GRAD] != 0, reader, maker)
    own = _own_lane(arrays, node, rank)

    host = np.array([links.host_of(r) for r in range(graph.layout.world)])
    seconds = np.empty(len(at))
    ranks_of = np.diff(arrays.lane_first)
    shape = ranks_of[own].astype(np.int64) * (int(ranks_of.max()) + 1) + ranks_of[peer]
    for kind in np.unique(shape).tolist():
        senders, receivers = divmod(kind, int(ranks_of.max()) + 1)
        here = np.flatnonzero(shape == kind)
        members = arrays.lane_rank[arrays.lane_first[own[here]][:, None] + np.arange(senders)]
        place = np.argmax(members == rank[here, None], axis=1)
        met = pairs(senders, receivers)
        to = np.array([[r for s, r in met if s == sender] for sender in range(senders)])
        targets = arrays.lane_rank[arrays.lane_first[peer[here]][:, None] + to[place]]
        parts = np.repeat(size[here, None] / len(met), to.shape[1], axis=1)
        seconds[here] = _travel(links, host, rank[here, None], targets, parts).max(axis=1)
    return seconds


def _rows_read(schedule: Schedule, source: Ints, reader: Ints) -> Floats:
    """Rows of each `source` chunk that the chunk of `reader` at the same index reads."""
    if not len(source):
        return np.zeros(0)
    pieces = np.concatenate([edge.pieces for edge in schedule.table.edges]).astype(np.int64)
    count = len(schedule.table.chunks)
    keys, number = np.unique(pieces[:, 0] * count + pieces[:, 2], return_inverse=True)
    total = np.bincount(number.reshape(-1), weights=pieces[:, 4])
    return np.asarray(total[np.searchsorted(keys, source * count + reader)])


def _own_lane(arrays: GraphArrays, node: Ints, rank: Ints) -> Ints:
    """The lane of `rank` for the stage at `node`: the stage's own lane, or that of a copy; copies follow the stage."""
    lane = arrays.node_lane[node].astype(np.int64)
    if arrays.node_copy.any():
        members = [set(arrays.lane_rank[a:b].tolist()) for a, b in zip(arrays.lane_first, arrays.lane_first[1:])]
        for i, (first, own) in enumerate(zip(node.tolist(), rank.tolist(), strict=True)):
            while own not in members[arrays.node_lane[first]]:
                first += 1
            lane[i] = arrays.node_lane[first]
    return lane


def _travel(links: Links, host: Ints, source: Ints, target: NDArray[np.int32], size: Floats) -> Floats:
    """`Links.message` for arrays of one shape."""
    each = links.ranks_per_process
    kind = np.where(host[source] != host[target], 2, (source // each != target // each).astype(np.int64))
    latency, per_byte = np.array([astuple(link.message) for link in (links.process, links.host, links.network)]).T
    return np.where((source == target) | (size <= 0), 0.0, latency[kind] + size * per_byte[kind])
