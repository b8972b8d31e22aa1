"""The channel between processes, over torch.distributed.

A header of fixed size precedes each payload and says what it is, of which step's table, its dtype and its shape: the
receiver allocates from it, so chunks may differ in shape, and a schedule that went wrong is reported instead of ending
the process (gloo aborts on a size mismatch). Sends are asynchronous; handles and tensors are kept until the step ends.

What a peer says is checked before it is used: nothing is executed, and nothing allocated that this device cannot hold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.comm.channel import Sent, Tag, check_digest, check_numbers, check_tag
from interlace.comm.lost import RollCall, first_line, reason_of
from interlace.comm.recorder import FlightRecorder
from interlace.comm.reductions import BITS, Reductions, digest_of
from interlace.comm.star import HEADER, Star, header
from interlace.comm.transports.base import CommError

MAGIC = 0x1A7E71ACE  # begins the header of a tensor
MAX_DIMS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_ROOM = 64  # numbers of a gather are filled up to a multiple of this: ranks that differ by a few are told so


class GroupPending:
    """A collective under way, with the tensors that it uses."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


class GroupChannel:
    """Channel of this process's rank in the default process group; see `interlace.comm.channel.Channel`.

    Made by all ranks, in the same order. ``modules`` fixes the numbering of module names in headers and must be equal
    on all ranks; ``timeout`` (seconds) bounds every wait; ``device`` is what the group's backend moves.
    """

    def __init__(
        self,
        modules: Sequence[str],
        timeout: float,
        device: torch.device | str = "cpu",
        *,
        recorder: FlightRecorder | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise CommError("torch.distributed is not initialised: call init_process_group before parallelize")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.modules, self.timeout, self.device = list(modules), timeout, torch.device(device)
        if self.device.type == "cuda" and dist.get_backend() == "gloo":
            raise CommError("parameters are on a GPU but the process group is gloo, for CPU tensors: use nccl")
        world = dist.group.WORLD
        assert world is not None
        self.collectives = 0
        self.recorder = recorder or FlightRecorder(self.rank, world=self.world)
        self._roll = RollCall(world, "pipeline")
        self._star = Star(None, self.device, self._roll)
        self._digest = 0
        self._sends: list[tuple[list[tuple[dist.Work, Tensor]], int, str, int]] = []  # peer, what, recorder's token
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._reductions = Reductions()
        self._sent = Sent()

    def begin(self, digest: int) -> None:
        self._digest = digest

    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        # Of all ranks too, for what is gathered: this group has the channel's timeout, and a wait that runs out closes
        # its connections alone.
        for ranks in sorted({tuple(group) for group in (*groups, range(self.world)) if len(group) > 1}):
            if ranks in self._groups:
                continue
            try:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout))
            except RuntimeError as error:
                self._roll.gave_up(reason_of(error, self.timeout))
                raise CommError(
                    f"rank {self.rank}: not every rank came to make the group of ranks {list(ranks)} within "
                    f"{self.timeout:g} s ({first_line(error)})"
                ) from error

    def send(self, tensor: Tensor, peer: int, tag: Tag) -> None:
        token = self.recorder.begin("send", tag, (peer,))
        tensor = tensor.detach().contiguous()
        if tensor.dim() > MAX_DIMS:
            raise CommError(f"rank {self.rank}: {tag} has {tensor.dim()} dimensions, at most {MAX_DIMS} travel")
        if tensor.dtype not in DTYPES:
            raise CommError(f"rank {self.rank}: {tag} is {tensor.dtype}, which does not travel")
        what = (self.modules.index(tag.module), tag.stage, tag.chunk, tag.other, int(tag.grad))
        kind = DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape
        works: list[tuple[dist.Work, Tensor]] = []
        self._sends.append((works, peer, f"SEND {tag}", token))
        for part in (header(self.device, MAGIC, self._digest, *what, *kind), tensor):
            if part.numel():
                try:
                    work = dist.isend(part, peer)
                except RuntimeError as error:
                    raise self._lost_peer(peer, f"SEND {tag}", error) from error
                assert work is not None
                works.append((work, part))
        self._sent.note(peer, tag, tensor)

    def receive(self, peer: int, tag: Tag) -> Tensor:
        token = self.recorder.begin("receive", tag, (peer,))
        head = header(self.device)
        self._receive_into(head, peer, tag)
        magic, digest, module, stage, chunk, other, grad, dtype, dims, *shape = head.tolist()
        if magic != MAGIC:
            raise CommError(f"rank {self.rank}: no header from rank {peer} where {tag} was due")
        whole = 0 <= module < len(self.modules) and 0 <= dtype < len(DTYPES) and 0 <= dims <= MAX_DIMS
        shape = shape[: max(dims, 0)]
        if not whole or min(shape, default=0) < 0 or not 0 <= digest < 1 << BITS:
            raise CommError(f"rank {self.rank}: the header from rank {peer} where {tag} was due is damaged")
        check_digest(self.rank, peer, f"RECV {tag}", self._digest, digest)
        check_tag(self.rank, peer, tag, Tag(self.modules[module], stage, chunk, other, bool(grad)))
        kind, size = DTYPES[dtype], torch.Size(shape)
        if math.prod(shape) * kind.itemsize > _memory(self.device):
            raise CommError(
                f"rank {self.rank}: {tag} from rank {peer} would have shape {shape}, more than fits on {self.device}"
            )
        self._sent.check(self.rank, peer, tag, size, kind)
        payload = torch.empty(shape, dtype=kind, device=self.device)
        if payload.numel():
            self._receive_into(payload, peer, tag)
        self.recorder.end(token)
        return payload

    def _receive_into(self, tensor: Tensor, peer: int, tag: Tag) -> None:
        try:
            work = dist.irecv(tensor, peer)
            assert work is not None
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._lost_peer(peer, f"RECV {tag}", error) from error

    def start_all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> GroupPending:
        if len(ranks) == 1:
            return GroupPending(lambda: None)
        self._reductions.add(ranks, key, tensor)
        what, token = f"REDUCE {key}", self.recorder.begin("all_reduce", key, tuple(ranks))
        group = self._groups.get(tuple(ranks))
        if group is None:
            raise CommError(f"rank {self.rank}, {what}: no group of ranks {list(ranks)}: pass it to add_groups first")
        try:
            work = dist.all_reduce(tensor, group=group, async_op=True)
        except RuntimeError as error:
            raise self._lost_some(ranks, what, error) from error
        assert work is not None

        def finish() -> None:
            waiting = self.recorder.begin("wait", key, tuple(ranks))
            try:
                work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise self._lost_some(ranks, what, error) from error
            self.recorder.end(waiting)
            self.recorder.end(token)

        return GroupPending(finish)

    def start_all_gather(self, numbers: Tensor, what: str, *, compare_sums: bool = False) -> GroupPending:
        check_numbers(numbers)
        self.collectives += 1
        everyone = range(self.world)
        token = self.recorder.begin("all_gather", what, tuple(everyone))
        count, mine = numbers.numel(), self._digest
        said = self._reductions.text() if compare_sums else ""
        # Before the numbers: how many, what they are about, the step's table and the sums made so far. None of it has
        # more than 48 bits, so that float64 holds it.
        first = [count, digest_of(what), mine, self._reductions.share(self.rank) if compare_sums else 0]
        row = torch.zeros(-(-(len(first) + count) // _ROOM) * _ROOM, dtype=torch.float64)
        row[: len(first)] = torch.tensor(first, dtype=torch.float64)
        row[len(first) : len(first) + count] = numbers.detach()
        row = row.to(self.device)
        rows = torch.empty(self.world, row.numel(), dtype=torch.float64, device=self.device)
        try:
            work = dist.all_gather(list(rows.unbind()), row, group=self._groups.get(tuple(everyone)), async_op=True)
        except RuntimeError as error:
            raise self._lost_some(everyone, what, error) from error
        assert work is not None

        def finish() -> Tensor:
            waiting = self.recorder.begin("wait", what, tuple(everyone))
            try:
                work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise self._lost_some(everyone, what, error) from error
            heard = rows.cpu()
            for peer, (its_count, about, digest, _) in enumerate(heard[:, : len(first)].tolist()):
                if (its_count, about) != (count, first[1]):
                    raise CommError(
                        f"rank {self.rank} gathers {count} numbers in {what}, but rank {peer} is elsewhere in its "
                        f"program, or gathers {its_count:g}"
                    )
                check_digest(self.rank, peer, what, mine, int(digest) if 0 <= digest < 1 << BITS else -1)
            if compare_sums and int(heard[:, 3].to(torch.int64).sum()) % (1 << BITS):
                self._compare_sums(self._star.exchange(said, f"sums before {what}", self.timeout), what)
            self.recorder.end(waiting)
            self.recorder.end(token)
            return heard[:, len(first) : len(first) + count].clone()

        return GroupPending(finish)

    def exchange(self, value: Any, what: str) -> list[Any]:
        self.collectives += 1
        token = self.recorder.begin("exchange", what, tuple(range(self.world)))
        said = self._star.exchange([value, self._reductions.text()], what, self.timeout)
        self._compare_sums([text for _, text in said], what)
        self.finish()
        self.recorder.end(token)
        return [value for value, _ in said]

    def _compare_sums(self, texts: Sequence[str], what: str) -> None:
        if different := Reductions.disagreement(texts):
            raise CommError(f"rank {self.rank}, {what}: {different}")

    def finish(self) -> None:
        pending, self._sends = self._sends, []
        self._sent.clear()
        waiting = self.recorder.begin("finish", "", tuple(sorted({peer for _, peer, *_ in pending})))
        for works, peer, what, token in pending:
            for work, _ in works:
                try:
                    work.wait(timedelta(seconds=self.timeout))
                except RuntimeError as error:
                    raise self._lost_peer(peer, what, error) from error
            self.recorder.end(token)
        self.recorder.end(waiting)

    def leave(self, reason: str) -> None:
        self._roll.leave(reason)

    def _lost_peer(self, peer: int, what: str, error: RuntimeError) -> CommError:
        """At once: whom this rank waited for is known."""
        reason = reason_of(error, self.timeout)
        self._roll.gave_up(reason)
        return CommError(f"rank {self.rank}, {what}: lost rank {peer} ({reason})")

    def _lost_some(self, ranks: Sequence[int], what: str, error: RuntimeError) -> CommError:
        return CommError(f"rank {self.rank}, {what}: {self._roll.lost(ranks, error, self.timeout)}")


def _memory(device: torch.device) -> int:
    """Bytes that a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


assert 9 + MAX_DIMS == HEADER
