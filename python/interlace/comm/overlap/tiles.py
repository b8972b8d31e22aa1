"""Overlap of transfers with matrix products on the same rows: gather -> product, product -> reduce-scatter, sum.

A transfer is cut into chunks of rows. While the transport moves one, the products of another run (DistTrain section 7,
StepCCL; Figures 13 and 14). Two things go beyond the paper:

    The rows of this rank need no transfer. A gather starts with their product and a reduce-scatter ends with it, so
    the first and the last transfer are hidden too. The paper's schedule hides at most 1 - 1/C of the communication.

    A chunk holds rows of every rank, but in the result the rows of a rank must be together. Layout "remap" is the
    paper's: chunks are contiguous, a product is one product, and its result (C, W, m/C, N) is copied to (W, C, m/C, N).
    Here that happens chunk by chunk, on a `SideStream` concurrently with the next product. Layout "direct" lets the
    transfers write each piece to its final place and multiplies strided views, rank by rank, into the final result: no
    copy at all, but smaller products.

Chunks cut rows only: an element of a product is one dot product, for any number of chunks.

Shapes: B leading dimensions in one, W ranks, m rows of a rank, K and N columns before and after a product.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from interlace import _device
from interlace.comm.collectives.rows import reduce_in_order, reduce_pieces, reduce_whole
from interlace.comm.process.agreement import NO_ARGUMENTS, Arguments
from interlace.comm.process.trace import computing
from interlace.comm.transports.base import Copy, Ticket, Transport, peers_of, swap

T = TypeVar("T")
Wait = Callable[[], None]


class Chunking(NamedTuple):
    """Chunking of an operation: `chunks` of each rank's rows; the layout of a chunk's pieces; its label in traces;
    arguments that must be equal on all ranks.
    """

    chunks: int
    direct: bool
    label: str
    arguments: Arguments = NO_ARGUMENTS

    def cuts(self, rows: int) -> list[slice]:
        """`rows` in `chunks` pieces, the longer ones first; lengths differ by one at most."""
        size, longer = divmod(rows, self.chunks)
        starts = [i * size + min(i, longer) for i in range(self.chunks + 1)]
        return [slice(start, stop) for start, stop in pairwise(starts)]

    def chunk(self, i: int) -> str:
        return f"{self.label}, chunk {i} of {self.chunks}"


def multiply(rows: Tensor, matrix: Tensor, out: Tensor, add: bool = False) -> None:
    """out = rows @ matrix, or out += with `add`: rows [P, B, m, K] and out [P, B, m, N], views whose rows are dense.

    One product if both are contiguous. Otherwise, on CPUs one product per [m, K] (their batched product copies strided
    input: 2 to 5 times as slow in bfloat16). On GPUs one per rank, or one for all if B is 1.
    """
    if rows.is_contiguous() and out.is_contiguous():
        pairs = [(rows.flatten(0, 2), out.flatten(0, 2))]
    elif rows.device.type == "cpu":
        pairs = [(r, o) for rs, os in zip(rows.unbind(), out.unbind()) for r, o in zip(rs.unbind(), os.unbind())]
    elif rows.shape[1] == 1:
        pairs = [(rows[:, 0], out[:, 0])]
    else:
        pairs = list(zip(rows.unbind(), out.unbind()))
    for r, o in pairs:
        if r.dim() == 2:
            torch.addmm(o, r, matrix, out=o) if add else torch.mm(r, matrix, out=o)
        else:
            matrices = matrix.expand(r.shape[0], *matrix.shape)
            torch.baddbmm(o, r, matrices, out=o) if add else torch.bmm(r, matrices, out=o)


# ---------------------------------------------------------------------- side stream and buffers


class SideStream:
    """Runs copies concurrently with the products, in order: a stream on GPUs, a thread on CPUs."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device) if _device.on_gpu(device) else None
        self._thread = ThreadPoolExecutor(1, "interlace-copies") if self.stream is None else None

    @staticmethod
    def of(transport: Transport) -> SideStream:
        """The side stream of a transport; closed with it."""
        if transport not in _side_streams:
            _side_streams[transport] = side = SideStream(transport.device)
            transport.closed_with_it.callback(side.end)
        return _side_streams[transport]

    def end(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # on this thread itself, if it held the last reference
                self._thread.shutdown()

    def run(self, function: Callable[[], None]) -> Wait:
        """Starts `function`; the returned call waits for it (on a GPU: makes the current stream wait)."""
        if self._thread is not None:
            inference = torch.is_inference_mode_enabled()

            def run_in_modes() -> None:  # these modes are thread-local
                with torch.inference_mode(inference), torch.no_grad():
                    function()

            return self._thread.submit(run_in_modes).result
        assert self.stream is not None
        device = self.stream.device
        self.stream.wait_stream(torch.accelerator.current_stream(device))
        with self.stream:
            function()
            event = self.stream.record_event()

        def wait(_: Callable[[], None] = function) -> None:  # keeps tensors that the stream reads alive until then
            torch.accelerator.current_stream(device).wait_event(event)

        return wait


_side_streams: weakref.WeakKeyDictionary[Transport, SideStream] = weakref.WeakKeyDictionary()


class BufferRing(Generic[T]):
    """Buffers used in turn: chunk i uses buffer i % len. A buffer is rewritten only after it has been consumed."""

    def __init__(self, transport: Transport, buffers: Sequence[T], label: str) -> None:
        self.transport, self.buffers, self.label = transport, buffers, label
        self._in_use: dict[int, tuple[int, Wait]] = {}  # buffer -> (its chunk, the wait until it is consumed)
        self._start = [0.0] * len(buffers)

    def take(self, i: int) -> T:
        """The buffer for chunk i, to be written."""
        index = i % len(self.buffers)
        self._release(index)
        self._start[index] = time.perf_counter()
        return self.buffers[index]

    def filled(self, i: int, consumed: Wait) -> None:
        """Marks chunk i as written. Its buffer must not be modified until `consumed` returns."""
        self._note("write", i)
        index = i % len(self.buffers)
        self._in_use[index], self._start[index] = (i, consumed), time.perf_counter()

    def finish(self) -> None:
        """Returns when everything has been consumed."""
        for index in range(len(self.buffers)):
            self._release(index)

    def _release(self, index: int) -> None:
        if index in self._in_use:
            i, consumed = self._in_use.pop(index)
            consumed()
            self._note("read", i)

    def _note(self, kind: str, i: int) -> None:
        if self.transport.trace is not None:
            index = i % len(self.buffers)
            label = f"{self.label}, buffer {index}, chunk {i}"
            self.transport.trace.add(kind, label, self._start[index], time.perf_counter())


# ---------------------------------------------------------------------- gather -> product


class Gathered(NamedTuple):
    """rows [B, W, m, K] of all ranks and the products [B, W, m, N]; to be used after their waits."""

    rows: Tensor
    products: list[Tensor]
    wait_rows: Wait
    wait: Wait


def gather_products(transport: Transport, x: Tensor, matrices: Sequence[Tensor], chunking: Chunking) -> Gathered:
    """All ranks' x, and its products with each of `matrices`; the gather of chunk i + 1 is in flight during chunk i.

    Args:
        x: [B, m, K], contiguous, of one shape on all ranks.
        matrices: [K, N] each, of any strides.
    """
    (batch, rows, width), world = x.shape, transport.world
    gathered = x.new_empty(batch, world, rows, width)
    products = [x.new_empty(batch, world, rows, matrix.shape[1]) for matrix in matrices]
    if chunking.chunks == 1:
        _gather_whole(transport, x, gathered, chunking)
        with computing(transport, chunking.chunk(0)):
            for matrix, product in zip(matrices, products):
                multiply(gathered, matrix, product)
        return Gathered(gathered, products, _nothing, _nothing)
    body = _gather_direct if chunking.direct else _gather_remapped
    waits = body(transport, x, gathered.transpose(0, 1), matrices, [p.transpose(0, 1) for p in products], chunking)
    return Gathered(gathered, products, *waits)


def _gather_whole(transport: Transport, x: Tensor, gathered: Tensor, chunking: Chunking) -> None:
    """gathered [B, W, m, K] = all ranks' x, in one transfer."""
    ranks = gathered.transpose(0, 1)
    received = ranks if ranks.is_contiguous() else torch.empty_like(ranks, memory_format=torch.contiguous_format)
    ticket = swap(transport, lambda _: [x], lambda peer: [received[peer]], chunking.chunk(0), chunking.arguments)
    received[transport.rank].copy_(x)
    ticket.wait()
    if received is not ranks:
        ranks.copy_(received)


def _gather_direct(
    transport: Transport, x: Tensor, gathered: Tensor, matrices: Sequence[Tensor], products: list[Tensor],
    chunking: Chunking,
) -> tuple[Wait, Wait]:  # fmt: skip
    """Fills gathered [W, B, m, K] and products [W, B, m, N] in place; no buffer is reused."""
    peers, cuts = peers_of(transport.rank, transport.world), chunking.cuts(x.shape[1])
    tickets = []
    for i, cut in enumerate(cuts):
        outgoing = [Copy(peer, piece) for peer in peers for piece in x[:, cut].unbind()]
        incoming = [Copy(peer, piece) for peer in peers for piece in gathered[peer, :, cut].unbind()]
        tickets.append(transport.copy_batch(outgoing, incoming, chunking.chunk(i), None, chunking.arguments))
    _own_rows(transport, x, gathered, matrices, products, chunking)
    for i, (cut, ticket) in enumerate(zip(cuts, tickets)):
        ticket.wait()
        with computing(transport, chunking.chunk(i)):
            for ranks in _others(transport):
                for matrix, product in zip(matrices, products):
                    multiply(gathered[ranks, :, cut], matrix, product[ranks, :, cut])
    return _nothing, _nothing


def _gather_remapped(
    transport: Transport, x: Tensor, gathered: Tensor, matrices: Sequence[Tensor], products: list[Tensor],
    chunking: Chunking,
) -> tuple[Wait, Wait]:  # fmt: skip
    """As `_gather_direct`, over contiguous buffers: one is received, one is multiplied, one is copied to its place."""
    peers, side, cuts = peers_of(transport.rank, transport.world), SideStream.of(transport), chunking.cuts(x.shape[1])
    buffer_shape = (len(peers), x.shape[0], cuts[0].stop)
    buffers = [
        [destination.new_empty(*buffer_shape, destination.shape[-1]) for destination in (gathered, *products)]
        for _ in range(min(3, chunking.chunks))
    ]
    ring = BufferRing(transport, buffers, f"{chunking.label}, remap")

    def issue(i: int) -> tuple[Ticket, list[Tensor]]:
        buffer = [_first_rows(part, cuts[i]) for part in ring.take(i)]
        source = x[:, cuts[i]].contiguous()
        outgoing = [Copy(peer, source) for peer in peers]
        incoming = [Copy(peer, buffer[0][_slot(transport, peer)]) for peer in peers]
        return transport.copy_batch(outgoing, incoming, chunking.chunk(i), None, chunking.arguments), buffer

    def place(i: int, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> Wait:
        def copy() -> None:
            with computing(transport, f"{chunking.chunk(i)}, remap"):
                for source, destination in zip(sources, destinations):
                    destination[: transport.rank, :, cuts[i]].copy_(source[: transport.rank])
                    destination[transport.rank + 1 :, :, cuts[i]].copy_(source[transport.rank :])

        return side.run(copy)

    issued = [issue(0), issue(1)]
    _own_rows(transport, x, gathered, matrices, products, chunking)
    for i in range(chunking.chunks):
        ticket, (received, *results) = issued[i]
        ticket.wait()
        rows_placed = place(i, [received], [gathered])
        with computing(transport, chunking.chunk(i)):
            for matrix, result in zip(matrices, results):
                multiply(received, matrix, result)
        ring.filled(i, place(i, results, products))
        if i + 2 < chunking.chunks:
            issued.append(issue(i + 2))
    return rows_placed, ring.finish  # keeps the buffers alive until their last copy ends


def _own_rows(
    transport: Transport, x: Tensor, gathered: Tensor, matrices: Sequence[Tensor], products: list[Tensor],
    chunking: Chunking,
) -> None:  # fmt: skip
    with computing(transport, f"{chunking.label}, own rows"):
        gathered[transport.rank].copy_(x)
        for matrix, product in zip(matrices, products):
            multiply(x[None], matrix, product[transport.rank, None])


# ---------------------------------------------------------------------- product -> reduce-scatter


def scatter_products(
    transport: Transport,
    terms: Sequence[tuple[Tensor, Tensor]],
    extra: Tensor | None,
    out: Tensor,
    chunking: Chunking,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """out = this rank's rows of the sum over ranks of (rows @ matrix summed over `terms`) + extra.

    Chunk i is in flight while the product of chunk i + 1 runs, and during `meanwhile`. Sums over ranks are made in
    float32 in rank order. With a `meanwhile` to hide the last transfer, they are made chunk by chunk on arrival,
    concurrently with the products. Otherwise the product of this rank's own rows hides the last transfer, in one piece.
    Then all received chunks are kept (the size of the whole product without this rank's rows) and added at the end,
    without overlap.

    Args:
        terms: (rows [B, W, m, K] for all ranks, contiguous; matrix [K, N] of any strides).
        extra: [B, W, m, N] or None.
        out: [B, m, N], contiguous.
        meanwhile: other computation to overlap with. Without it the rows of this rank come last.
    """
    if chunking.chunks == 1:
        _scatter_whole(transport, terms, extra, out, chunking, meanwhile or _nothing)
        return
    rank, peers, cuts = transport.rank, peers_of(transport.rank, transport.world), chunking.cuts(out.shape[1])
    by_rank = [(rows.transpose(0, 1), matrix) for rows, matrix in terms]
    extra = None if extra is None else extra.transpose(0, 1)
    own_last = meanwhile is None
    ranks = _others(transport) if own_last else [slice(0, transport.world)]
    buffer_shape = (len(peers) if own_last else transport.world, out.shape[0], cuts[0].stop, out.shape[2])
    buffers = [transport.allocate(buffer_shape, out.dtype) for _ in range(2)]
    ring = BufferRing(transport, buffers, f"{chunking.label}, send")
    all_received = []
    for i, cut in enumerate(cuts):
        sends = _first_rows(ring.take(i), cut)
        with computing(transport, chunking.chunk(i)):
            _produce(by_rank, extra, ranks, cut, sends, chunking.direct)
        received = out.new_empty(len(peers), *sends.shape[1:])
        outgoing = [Copy(peer, sends[_slot(transport, peer) if own_last else peer]) for peer in peers]
        incoming = [Copy(peer, received[_slot(transport, peer)]) for peer in peers]
        then = None if own_last else partial(_sum, transport, received, sends[rank], out[:, cut])
        ticket = transport.copy_batch(outgoing, incoming, chunking.chunk(i), then, chunking.arguments)
        ring.filled(i, ticket.wait)
        all_received.append(received)
    if meanwhile is not None:
        meanwhile()
        ring.finish()
        return
    own_rows = torch.empty_like(out)
    with computing(transport, f"{chunking.label}, own rows"):
        _produce(by_rank, extra, [slice(rank, rank + 1)], slice(None), own_rows[None], chunking.direct)
    ring.finish()
    with computing(transport, f"{chunking.label}, sum"):
        for received, cut in zip(all_received, cuts):
            _sum(transport, received, own_rows[:, cut], out[:, cut])


def _scatter_whole(
    transport: Transport, terms: Sequence[tuple[Tensor, Tensor]], extra: Tensor | None, out: Tensor,
    chunking: Chunking, meanwhile: Wait,
) -> None:  # fmt: skip
    """`scatter_products` with one product per term and one transfer."""
    sends = transport.allocate((transport.world, *out.shape), out.dtype)
    by_rank = sends.transpose(0, 1)
    result = by_rank if by_rank.is_contiguous() else torch.empty_like(by_rank, memory_format=torch.contiguous_format)
    with computing(transport, chunking.chunk(0)):
        _produce(terms, extra, [slice(None)], slice(None), result, True)  # everything, the leading dimension first
        if result is not by_rank:
            by_rank.copy_(result)
    ticket = reduce_pieces(transport, list(sends.unbind()), out, chunking.chunk(0), chunking.arguments)
    meanwhile()
    ticket.wait()


def _produce(
    terms: Sequence[tuple[Tensor, Tensor]], extra: Tensor | None, ranks: Sequence[slice], cut: slice, out: Tensor,
    direct: bool,
) -> None:  # fmt: skip
    """out [P, B, n, N] = the rows `cut` of `ranks` of the sum of all products and `extra`."""

    def picked(tensor: Tensor) -> list[Tensor]:
        parts = [tensor[part_ranks, :, cut] for part_ranks in ranks]
        return parts if direct else [torch.cat(parts)]

    outs = list(out.split([part.shape[0] for part in picked(terms[0][0])])) if terms else []
    add = extra is not None
    if extra is not None:
        torch.cat([extra[part_ranks, :, cut] for part_ranks in ranks], out=out)
    elif not terms:
        out.zero_()
    for rows, matrix in terms:
        for part, target in zip(picked(rows), outs):
            multiply(part, matrix, target, add)
        add = True


def _sum(transport: Transport, received: Tensor, own_rows: Tensor, out: Tensor) -> None:
    parts = list(received.unbind())
    parts.insert(transport.rank, own_rows)
    reduce_in_order(parts, out)


# ---------------------------------------------------------------------- product -> sum on every rank


def sum_products(
    transport: Transport,
    terms: Sequence[tuple[Tensor, Tensor]],
    extra: Tensor | None,
    out: Tensor,
    chunking: Chunking,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """out = the sum over ranks of (rows @ matrix summed over `terms`) + extra, all rows of it on every rank.

    The sum of chunk i is in flight while the product of chunk i + 1 runs, and during `meanwhile`. Without `meanwhile`
    nothing hides the last one. Sums over ranks are made in float32 in rank order.

    Args:
        terms: (rows [n, K], contiguous; matrix [K, N] of any strides).
        extra: [n, N] or None.
        out: [n, N], contiguous.
    """
    tickets: list[Ticket] = []
    for i, cut in enumerate(chunking.cuts(len(out))):
        piece = out[cut]
        with computing(transport, chunking.chunk(i)):
            if extra is not None:
                piece.copy_(extra[cut])
            for number, (rows, matrix) in enumerate(terms):
                multiply(rows[None, None, cut], matrix, piece[None, None], add=number > 0 or extra is not None)
        tickets += reduce_whole(transport, piece.view(-1), chunking.chunk(i), chunking.arguments)
    if meanwhile is not None:
        meanwhile()
    for ticket in tickets:
        ticket.wait()


# ---------------------------------------------------------------------- ranks and rows


def _others(transport: Transport) -> list[slice]:
    """The ranks before and after this one."""
    return [slice(0, transport.rank), slice(transport.rank + 1, transport.world)]


def _slot(transport: Transport, peer: int) -> int:
    """The index of a peer among the other ranks, in rank order."""
    return peer - (peer > transport.rank)


def _first_rows(buffer: Tensor, cut: slice) -> Tensor:
    """A contiguous [P, B, rows of cut, N] at the start of a contiguous [P, B, n, N]."""
    shape = (*buffer.shape[:2], cut.stop - cut.start, buffer.shape[3])
    return buffer.view(-1)[: math.prod(shape)].view(shape)


def _nothing() -> None:
    pass
