"""Channel between processes, over torch.distributed.

A fixed-size header precedes each payload with its identity, the digest of the step's table, its dtype and its shape.
The receiver allocates from it, so chunks may differ in shape. A wrong schedule is reported instead of ending the
process (gloo aborts on a size mismatch). Sends are asynchronous; handles and tensors are kept until the step ends.

Messages of peers are checked before use. They are never executed, and no allocation exceeds the memory of the device.

On GPUs tensors go over NCCL. Data that the host reads (headers, small numbers, messages) goes over gloo: reading it
from a GPU would wait for all work queued on the GPU. Each directed edge has its own communicator, so a late neighbour
does not delay messages to others. NCCL creates a communicator on first use, and both sides wait for each other there,
which could deadlock a schedule. So each communicator is used once when it is created, edge after edge, in the same
order on all ranks. Between ranks on one GPU, which NCCL refuses, payloads use a transport (see
`interlace.comm.channels.edges`), and sums are not supported. Not yet run on several GPUs, or with several ranks on one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from interlace import _device
from interlace._text import first_line
from interlace.comm.channels.base import Channel, Part, Pending, Tag, check_digest, check_numbers
from interlace.comm.channels.edges import Edge, GroupEdge, TransportEdge, Work
from interlace.comm.channels.star import HEADER, Star, header
from interlace.comm.process.abort_reports import AbortReports, is_slow, named, reason_of
from interlace.comm.process.errors import CommError
from interlace.comm.process.paths import Paths
from interlace.comm.process.reductions import BITS, Reductions, digest_of
from interlace.comm.transports.base import Transport
from interlace.comm.transports.choose import connect, edge_transports, introduction_of, sharing

T = TypeVar("T")
MAGIC = 0x1A7E71ACE  # first number of a tensor header
MAX_DIMS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
EDGES = {"cuda": "nccl"}
"""Device type -> backend of a directed edge, if gloo (of the default group) cannot carry its tensors."""
SUMS = {"cuda": "cpu:gloo,cuda:nccl"}
"""Device type -> backends of a group that sums tensors on that device and gathers numbers on the host."""
PATHS = {"cuda": "NCCL on SMs"}
"""Device type -> description of what moves the bytes of sums, gathers and edges."""
_HOST = torch.device("cpu")
# On flat tensors. The second name is the one before torch 2.13.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_NEVER = 0x7E  # tag that is never sent
_ROOM = 64  # gathers are padded to a multiple of this, so that small differences in count are reported


class _Send(NamedTuple):
    """A message in flight; `works` with their tensors: header and payload."""

    peer: int
    tag: Tag
    works: list[tuple[Work, Tensor]]
    token: int  # recorder token

    def is_taken(self) -> bool:
        """True if the payload is known to have been sent; then its header was read. Gloo never reports this."""
        return len(self.works) == 2 and self.works[1][0].is_completed()


class GroupChannel(Channel):
    """Channel of this process's rank in the default process group; see `interlace.comm.channels.base.Channel`.

    Created by all ranks, in the same order. ``modules`` fixes the numbering of module names in headers and must be
    equal on all ranks; ``timeout`` (seconds) bounds every wait; ``device`` is the device of the tensors; `coordinated`
    as in `AbortReports`.
    """

    def __init__(
        self,
        modules: Sequence[str],
        timeout: float,
        device: torch.device | str = "cpu",
        *,
        coordinated: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise CommError("torch.distributed is not initialised: call init_process_group before parallelize")
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout, device)
        self.modules = list(modules)
        if self.device.type == "cuda" and not dist.is_nccl_available():
            raise CommError(
                "the weights are on a GPU, but this torch has no NCCL: install a torch with NCCL, or move the model to "
                "the CPU"
            )
        world = dist.group.WORLD
        assert world is not None
        self.paths = Paths(self.rank)
        self._reports = AbortReports(world, "pipeline", coordinated=coordinated)
        self._separate = self.device.type in EDGES  # tensors use other connections than data read on the host
        self._host = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if self._separate else None
        self._star = Star(self._host, self._reports)
        self._sends: deque[_Send] = deque()
        # (done, ranks, operation) of each arrival. Not torch's Work, which with NCCL keeps the received tensors alive.
        self._arrivals: list[tuple[Callable[[], bool], tuple[int, ...], str]] = []
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._edges: dict[tuple[int, int], Edge] = {}
        self._prepared: set[tuple[int, int]] = set()  # edges of all ranks
        self._headers = GroupEdge(self._host, self.paths)
        self._introductions: list[dict[str, Any]] = []  # of all ranks
        self._reductions = Reductions()
        self._connected: list[tuple[int, ...]] | None = None

    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        needed = {tuple(group) for group in groups if len(group) > 1}
        for ranks in sorted(needed) if self._separate else ():
            if shared := sharing(self._all_introductions(), ranks):
                raise ValueError(
                    f"{named(shared)} share a GPU, which NCCL does not support: use one GPU per rank, or a layout "
                    "without replicas, shards or weights that several stages share"
                )
        # A separate group of all ranks for gathers: it has the channel's timeout, and a wait that times out closes only
        # its own connections.
        for ranks in sorted(needed | ({tuple(range(self.world))} if self.world > 1 else set())):
            if ranks not in self._groups:
                group = self._groups[ranks] = self._group(ranks, SUMS)
                if self._separate and self.rank in ranks and not sharing(self._all_introductions(), ranks):
                    with self._creating(ranks):
                        dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def add_edges(self, edges: Sequence[tuple[int, int]]) -> None:
        new_edges = sorted(set(edges) - self._prepared)
        if not new_edges:
            return
        transports = edge_transports(self._all_introductions(), new_edges, EDGES.get(self.device.type, "gloo"))
        # Create all groups first: creating one needs every rank, using it only its members.
        separate = [edge for edge in new_edges if self._separate or transports[edge]]
        groups = {edge: self._group(edge, SUMS if transports[edge] else EDGES) for edge in separate}
        for edge in new_edges:
            if self.rank in edge and transports[edge]:  # `connect` chooses the transport as for any other group
                with self._creating(edge):
                    transport = connect(groups[edge], device=self.device, timeout=self.timeout)
                self._edges[edge] = TransportEdge(transport, self.paths)
            elif self.rank in edge:
                self._edges[edge] = self._group_edge(edge, groups.get(edge))
        self._prepared.update(new_edges)

    def _group_edge(self, edge: tuple[int, int], group: dist.ProcessGroup | None) -> GroupEdge:
        """An edge over torch.distributed. If it has its own communicator, the communicator is used once."""
        group_edge = GroupEdge(group, self.paths, PATHS.get(self.device.type, "gloo"))
        if self._separate:
            source, target = edge
            with self._creating(edge):
                probe = torch.zeros(1, device=self.device)
                (group_edge.send(probe, target) if self.rank == source else group_edge.receive(probe, source)).wait()
        return group_edge

    def _all_introductions(self) -> list[dict[str, Any]]:
        """Introductions of all ranks: device, host, transports. The first call is collective."""
        if not self._introductions:
            own = introduction_of(self.device)
            self._introductions = self._star.exchange(own, "choosing transports of pipeline edges", self.timeout)
        return self._introductions

    def connect(self, lanes: Sequence[Sequence[int]]) -> dict[tuple[int, ...], Transport]:
        wanted_lanes = list(dict.fromkeys(map(tuple, lanes)))
        if self._connected is not None:
            if not set(wanted_lanes) <= set(self._connected):  # new groups would need every rank, between two steps
                raise CommError(f"rank {self.rank}: other lanes are connected already: pass all lanes in one call")
            return dict(self._lanes)
        # Create all groups first: creating one needs every rank, connecting it only its members.
        groups = [self._group(lane, SUMS) for lane in wanted_lanes]
        for lane, group in zip(wanted_lanes, groups, strict=True):
            if self.rank in lane:
                self._lanes[lane] = connect(group, device=self.device, timeout=self.timeout)
        self._connected = wanted_lanes
        return dict(self._lanes)

    def connect_all(self) -> Transport:
        group = self._group(tuple(range(self.world)), SUMS)
        return connect(group, device=_HOST, timeout=self.timeout)

    def close(self) -> None:
        super().close()
        while self._edges:
            self._edges.popitem()[1].close()

    def _group(self, ranks: tuple[int, ...], backends: Mapping[str, str]) -> dist.ProcessGroup:
        """A group of these ranks, created by all ranks. Uses the default group's backend if `backends` names none."""
        with self._creating(ranks):
            timeout, backend = timedelta(seconds=self.timeout), backends.get(self.device.type)
            return dist.new_group(sorted(ranks), timeout=timeout, backend=backend)

    @contextlib.contextmanager
    def _creating(self, ranks: tuple[int, ...]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._reports.report_abort(reason_of(error, self.timeout), ranks)
            raise CommError(
                f"rank {self.rank}: not all ranks joined the creation of the group {list(ranks)} within "
                f"{self.timeout:g} s ({first_line(error)})"
            ) from error

    def send(self, tensor: Tensor, peer: int, tag: Tag, rows: int = 0) -> None:
        token = self.recorder.begin("send", tag, (peer,))
        tensor = tensor.detach().contiguous()
        if tensor.dim() > MAX_DIMS:
            raise CommError(f"rank {self.rank}: {tag} has {tensor.dim()} dimensions, at most {MAX_DIMS} are supported")
        if tensor.dtype not in DTYPES:
            raise CommError(f"rank {self.rank}: {tag} is {tensor.dtype}, which is not supported")
        if tensor.device != self.device:
            raise CommError(f"rank {self.rank}: {tag} is on {tensor.device}, but this channel is for {self.device}")
        edge = self._edge(self.rank, peer, f"SEND {tag}")
        identity = (self.modules.index(tag.module), tag.stage, tag.chunk, tag.other, int(tag.grad))
        kind = DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (MAX_DIMS - tensor.dim())
        works: list[tuple[Work, Tensor]] = []
        while self._sends and self._sends[0].is_taken():
            self.recorder.end(self._sends.popleft().token)  # without a wait, which would also block the GPU
        self._sends.append(_Send(peer, tag, works, token))
        head = header(MAGIC, self._digest, *identity, *kind, rows)
        with self._naming_lost((peer,), f"SEND {tag}"):
            works.append((self._headers.send(head, peer), head))
            if tensor.numel():
                works.append((edge.send(tensor, peer), tensor))
        self._sent.note(peer, tag, tensor)

    def receive_part(self, peer: int, tag: Tag, others: Collection[Tag] = ()) -> Part:
        part = super().receive_part(peer, tag, others)
        if tag.grad and not self._separate:
            self._release_send(peer, tag._replace(grad=False))
        return part

    def _next(self, peer: int, tag: Tag, others: Collection[Tag]) -> tuple[Tag, Part]:
        """The next message from ``peer``: ``tag``, or one of the others."""
        edge = self._edge(peer, self.rank, f"RECV {tag}")
        head = header()
        self._receive_into(head, peer, tag, self._headers)
        magic, digest, module, stage, chunk, other, grad, dtype, dims, *shape, rows = head.tolist()
        if magic != MAGIC:
            raise CommError(f"rank {self.rank}: expected the header of {tag} from rank {peer}, got something else")
        valid = 0 <= module < len(self.modules) and 0 <= dtype < len(DTYPES) and 0 <= dims <= MAX_DIMS
        shape = shape[: max(dims, 0)]
        if not valid or min(shape, default=0) < 0 or rows < 0 or not 0 <= digest < 1 << BITS:
            raise CommError(f"rank {self.rank}: the header of {tag} from rank {peer} is damaged")
        received = Tag(self.modules[module], stage, chunk, other, bool(grad))
        self._check_message(peer, tag, others, digest, received)
        kind, size = DTYPES[dtype], torch.Size(shape)
        if math.prod(shape) * kind.itemsize > _device.memory(self.device):
            raise CommError(
                f"rank {self.rank}: {received} from rank {peer} has shape {shape}, too large for {self.device}"
            )
        self._sent.check(self.rank, peer, received, size, kind)
        payload = torch.empty(shape, dtype=kind, device=self.device)
        if payload.numel():
            self._receive_into(payload, peer, received, edge)
        return received, Part(payload, rows)

    def _release_send(self, peer: int, tag: Tag) -> None:
        """Releases the message `tag` to `peer`: its gradient is back, so it was received.

        Gloo reports a send as complete only when it is waited for; NCCL and transports report it earlier (see `send`).
        """
        for index, sent in enumerate(self._sends):
            if (sent.peer, sent.tag) == (peer, tag):
                self._end(sent)
                del self._sends[index]
                return

    def _edge(self, source: int, target: int, operation: str) -> Edge:
        if (source, target) in self._edges:
            return self._edges[source, target]
        if self._separate:
            raise CommError(
                f"rank {self.rank}, {operation}: no edge from rank {source} to {target}: pass it to add_edges first"
            )
        return GroupEdge(None, self.paths, "gloo")

    def _receive_into(self, tensor: Tensor, peer: int, tag: Tag, edge: Edge) -> None:
        with self._naming_lost((peer,), f"RECV {tag}"):
            work = edge.receive(tensor, peer)
            if tensor.device.type == "cpu":
                work.wait(timedelta(seconds=self.timeout))
            else:  # without a timeout only the GPU waits, not the host; the host waits at the end of the step
                work.wait()
                self._arrivals.append((_device.done(self.device), (peer,), f"RECV {tag}"))

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        if len(ranks) == 1:
            return Pending()
        begin = partial(dist.all_reduce, tensor, async_op=True)
        return self._start("all_reduce", tensor, ranks, key, None, begin)

    def start_reduce_scatter(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        own_row = torch.empty_like(tensor[0])
        # One flat tensor: from a list NCCL would make a copy.
        begin = partial(_REDUCE_SCATTER, own_row.view(-1), tensor.contiguous().view(-1), async_op=True)
        return self._start("reduce_scatter", tensor, ranks, key, own_row, begin)

    def start_gather(self, tensor: Tensor, ranks: Sequence[int], key: str) -> Pending:
        gathered = tensor.new_empty(len(ranks), *tensor.shape)
        begin = partial(_ALL_GATHER, gathered.view(-1), tensor.contiguous().view(-1), async_op=True)
        return self._start("gather", tensor, ranks, key, gathered, begin)

    def _start(
        self,
        kind: str,
        tensor: Tensor,
        ranks: Sequence[int],
        key: str,
        result: Tensor | None,
        begin: Callable[..., dist.Work | None],
    ) -> Pending:
        """Starts a collective of some ranks and adds it to their digests; `wait` returns `result`."""
        self._reductions.add(ranks, key, tensor)
        operation = f"{'GATHER' if kind == 'gather' else 'REDUCE'} {key}"
        token = self.recorder.begin(kind, key, tuple(ranks))
        group = self._groups.get(tuple(ranks))
        if group is None:
            raise CommError(
                f"rank {self.rank}, {operation}: no group of ranks {list(ranks)}: pass it to add_groups first"
            )
        with self._naming_lost(ranks, operation):
            work = begin(group=group)
        assert work is not None
        self.paths.note(kind, PATHS.get(tensor.device.type, "gloo"))

        def finish() -> Tensor | None:
            wait_token = self.recorder.begin("wait", key, tuple(ranks))
            with self._naming_lost(ranks, operation):
                if self._separate and kind == "gather":  # only the GPU waits, as in `_receive_into`
                    work.wait()
                    self._arrivals.append((_device.done(self.device), tuple(ranks), operation))
                else:
                    work.wait(timedelta(seconds=self.timeout))
            self.recorder.end(wait_token)
            self.recorder.end(token)
            return result

        return Pending(finish)

    def start_all_gather(self, numbers: Tensor, operation: str, *, compare_sums: bool = False) -> Pending:
        check_numbers(numbers)
        self.collectives += 1
        ranks = range(self.world)
        token = self.recorder.begin("all_gather", operation, tuple(ranks))
        count, own_digest = numbers.numel(), self._digest
        sums_text = self._reductions.text() if compare_sums else ""
        # Prefix: count, digest of the subject, of the step's table and of the sums so far. Each has at most 48 bits, so
        # float64 holds it exactly.
        prefix = [count, digest_of(operation), own_digest, self._reductions.share(self.rank) if compare_sums else 0]
        row = torch.zeros(-(-(len(prefix) + count) // _ROOM) * _ROOM, dtype=torch.float64)
        row[: len(prefix)] = torch.tensor(prefix, dtype=torch.float64)
        row[len(prefix) : len(prefix) + count] = numbers.detach()
        rows = torch.empty(self.world, row.numel(), dtype=torch.float64)
        group = self._groups.get(tuple(ranks), self._host)
        with self._naming_lost(ranks, operation):
            work = dist.all_gather(list(rows.unbind()), row, group=group, async_op=True)
        assert work is not None

        def finish() -> Tensor:
            wait_token = self.recorder.begin("wait", operation, tuple(ranks))
            with self._naming_lost(ranks, operation):
                work.wait(timedelta(seconds=self.timeout))
            for peer, (peer_count, peer_subject, digest, _) in enumerate(rows[:, : len(prefix)].tolist()):
                if (peer_count, peer_subject) != (count, prefix[1]):
                    raise CommError(
                        f"rank {self.rank} gathers {count} numbers in {operation}, but rank {peer} gathers "
                        f"{peer_count:g} or is in another part of its program"
                    )
                check_digest(self.rank, peer, operation, own_digest, int(digest) if 0 <= digest < 1 << BITS else -1)
            if compare_sums and int(rows[:, 3].to(torch.int64).sum()) % (1 << BITS):
                self._compare_sums(self._star.exchange(sums_text, f"sums before {operation}", self.timeout), operation)
            self.recorder.end(wait_token)
            self.recorder.end(token)
            return rows[:, len(prefix) : len(prefix) + count].clone()

        return Pending(finish)

    def exchange(self, value: T, operation: str) -> list[T]:
        self.collectives += 1
        token = self.recorder.begin("exchange", operation, tuple(range(self.world)))
        answers: list[Any] = self._star.exchange([value, self._reductions.text()], operation, self.timeout)
        self._compare_sums([text for _, text in answers], operation)
        self.finish()
        self.recorder.end(token)
        return [value for value, _ in answers]

    def _compare_sums(self, texts: Sequence[str], operation: str) -> None:
        if different := Reductions.disagreement(texts):
            raise CommError(f"rank {self.rank}, {operation}: {different}")

    def finish(self) -> None:
        pending, self._sends = self._sends, deque()
        arrivals, self._arrivals = self._arrivals, []
        self._sent.clear()
        waiting = self.recorder.begin("finish", "", tuple(sorted({sent.peer for sent in pending})))
        until = time.monotonic() + self.timeout
        for done, ranks, operation in arrivals:
            with self._naming_lost(ranks, operation):
                while not done():
                    if time.monotonic() > until:
                        raise RuntimeError(f"timed out after {self.timeout:g} s")
                    time.sleep(1e-4)
        for sent in pending:
            self._end(sent)
        self.recorder.end(waiting)

    def _end(self, sent: _Send) -> None:
        with self._naming_lost((sent.peer,), f"SEND {sent.tag}"):
            for work, _ in sent.works:
                work.wait(timedelta(seconds=self.timeout))
        self.recorder.end(sent.token)

    def leave(self, reason: str, cause: CommError | None = None) -> str:
        missing, cause_reason = (cause.missing, cause.reason) if cause is not None else ((), reason)
        self._disconnect_peers(missing, cause_reason, reason)
        description = ""
        if missing and not self._reports.traced:  # error of a lane, whose transport has no reports of other ranks
            description, culprits = self._reports.trace(cause_reason, missing, self.timeout)
            if set(culprits) == set(missing) and not is_slow(cause_reason):
                description = ""  # `reason` already contains it
        self._reports.leave(reason, self.timeout)
        return description

    def _disconnect_peers(self, missing: Sequence[int], cause_reason: str, reason: str) -> None:
        """Reports that this rank aborts, and closes all connections, so that no peer waits for it."""
        self._reports.report_abort(cause_reason, missing)
        ends: list[Transport | Edge] = [*self._lanes.values(), *self._edges.values()]
        for end in ends:
            end._abort(CommError(f"rank {self.rank} aborted: {reason}", missing, cause_reason))
        for ranks, group in [(range(self.world), self._host), *self._groups.items()]:
            peer = next((rank for rank in ranks if rank != self.rank), self.rank)
            if self.rank in ranks and peer != self.rank:
                # A wait that times out makes gloo close the connections of a group.
                with contextlib.suppress(RuntimeError):
                    work = dist.irecv(torch.empty(1), peer, group=group, tag=_NEVER)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))

    @contextlib.contextmanager
    def _naming_lost(self, ranks: Sequence[int], operation: str) -> Iterator[None]:
        """A wait for `ranks`. If it fails, reports the abort, and raises a CommError that names the lost ranks."""
        try:
            yield
        except RuntimeError as error:
            reason = error.reason if isinstance(error, CommError) else reason_of(error, self.timeout)
            self._disconnect_peers(ranks, reason, f"{operation}: {reason}")
            lost, culprits = self._reports.trace(reason, ranks, self.timeout)
            raise CommError(f"rank {self.rank}, {operation}: {lost}", culprits, reason) from error


assert 10 + MAX_DIMS == HEADER
