"""Channel between processes, over torch.distributed point-to-point calls.

A header of fixed size precedes each payload and says what it is, its dtype and its shape: the receiver allocates from
it, so microbatches may differ in shape, and a schedule that went wrong is reported instead of aborting the process
(gloo aborts on a size mismatch). Sends are asynchronous; handles and tensors are kept until the step ends.

What a peer says is checked before it is used: nothing is executed, and nothing allocated that this device cannot hold.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.comm.transports.messages import decode, encode
from interlace.run.agreement import Reductions
from interlace.run.channel import PipelineError, Tag

_MAGIC, _MESSAGE = 0x1A7E71ACE, 0x1A7E71ACF  # begin the header of a tensor, and of what `exchange` sends
_LONGEST = 1 << 28  # bytes of a message
_MAX_DIMS = 8
_HEADER = 7 + _MAX_DIMS
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)


class DistributedChannel:
    """Channel of this process's rank in the default process group.

    ``modules`` fixes the numbering of module names in headers and must be equal on all ranks; ``timeout`` (seconds)
    bounds every wait.
    """

    def __init__(self, modules: Sequence[str], timeout: float, device: torch.device | str = "cpu"):
        if not dist.is_initialized():
            raise PipelineError("torch.distributed is not initialised: call init_process_group before parallelize")
        self.rank = dist.get_rank()
        self.modules = list(modules)
        self.timeout = timeout
        self.device = torch.device(device)
        if self.device.type == "cuda" and dist.get_backend() == "gloo":
            raise PipelineError("parameters are on a GPU but the process group is gloo, for CPU tensors: use nccl")
        self._pending: list[tuple[dist.Work, Tensor, int, str]] = []
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._reductions = Reductions()
        self._sent: dict[Tag, tuple[torch.Size, torch.dtype]] = {}  # activations of this step

    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Create the process groups for `all_reduce`; collective: every rank passes the same list.

        Raises PipelineError when not all ranks come within the timeout.
        """
        world = tuple(range(dist.get_world_size()))
        for ranks in sorted({tuple(group) for group in groups if len(group) > 1}):
            if ranks not in self._groups:
                if ranks == world:
                    self._groups[ranks] = dist.group.WORLD
                    continue
                try:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout))
                except RuntimeError as error:
                    raise PipelineError(
                        f"rank {self.rank}: not every rank came to make the group of ranks {list(ranks)} within "
                        f"{self.timeout:g} s ({_first_line(error)})"
                    ) from error

    def send(self, tensor: Tensor, peer: int, tag: Tag) -> None:
        tensor = tensor.detach().contiguous()
        if tensor.dim() > _MAX_DIMS:
            raise PipelineError(f"rank {self.rank}: {tag} has {tensor.dim()} dimensions, at most {_MAX_DIMS} travel")
        what = (self.modules.index(tag.module), tag.stage, tag.microbatch, int(tag.grad), _DTYPES.index(tensor.dtype))
        self._post(self._header(_MAGIC, *what, tensor.dim(), *tensor.shape), peer, f"SEND {tag}")
        if tensor.numel():
            self._post(tensor, peer, f"SEND {tag}")
        if not tag.grad:
            self._sent[tag] = tensor.shape, tensor.dtype

    def _header(self, *values: int) -> Tensor:
        return torch.tensor([*values, *(0,) * (_HEADER - len(values))], device=self.device)

    def _post(self, tensor: Tensor, peer: int, what: str) -> None:
        try:
            work = dist.isend(tensor, peer)
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank}, {what}: lost rank {peer} ({_first_line(error)})") from error
        assert work is not None
        self._pending.append((work, tensor, peer, what))

    def receive(self, peer: int, tag: Tag) -> Tensor:
        header = self._header()
        self._receive_into(header, peer, f"RECV {tag}", self.timeout)
        magic, module, stage, microbatch, grad, dtype, dims, *shape = header.tolist()
        if magic != _MAGIC:
            raise PipelineError(f"rank {self.rank}: no header from rank {peer} where {tag} was due")
        whole = 0 <= module < len(self.modules) and 0 <= dtype < len(_DTYPES) and 0 <= dims <= _MAX_DIMS
        shape = shape[: max(dims, 0)]
        if not whole or min(shape, default=0) < 0:
            raise PipelineError(f"rank {self.rank}: the header from rank {peer} where {tag} was due is damaged")
        found = Tag(self.modules[module], stage, microbatch, bool(grad))
        if found != tag:
            raise PipelineError(f"rank {self.rank} expected {tag} from rank {peer} but received {found}")
        kind, size = _DTYPES[dtype], torch.Size(shape)
        if math.prod(shape) * kind.itemsize > _memory(self.device):
            raise PipelineError(
                f"rank {self.rank}: {tag} from rank {peer} would have shape {shape}, more than fits on {self.device}"
            )
        if tag.grad and (sent := self._sent.get(tag._replace(grad=False), (size, kind))) != (size, kind):
            raise PipelineError(
                f"rank {self.rank}: {tag} from rank {peer} is {kind} {shape}, but {sent[1]} {list(sent[0])} was sent"
            )
        payload = torch.empty(shape, dtype=kind, device=self.device)
        if payload.numel():
            self._receive_into(payload, peer, f"RECV {tag}", self.timeout)
        return payload

    def _receive_into(self, tensor: Tensor, peer: int, what: str, timeout: float) -> None:
        try:
            work = dist.irecv(tensor, peer)
            assert work is not None
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise PipelineError(self._lost(peer, what, error, timeout)) from error

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every rank's ``value`` (small, what JSON can hold, of one form everywhere) in rank order, on every rank.

        Through rank 0, each wait for one peer: so a rank that is lost is named, also to those who did not wait for it.
        On the way it is compared whether the ranks of each group have summed the same since they came together.
        """
        world, mine = dist.get_world_size(), [value, self._reductions.text()]
        answer: list[Any] = ["", [mine] * world]
        if self.rank > 0:
            self._tell(what, mine, 0)
            # Rank 0 may itself wait for a lost rank first, and then never takes what was sent: give it time to say so.
            wrong, said = self._hear(what, answer, 0, self.timeout + min(self.timeout / 2, 10.0))
            if wrong:
                raise PipelineError(f"{wrong}; rank 0 told rank {self.rank}, in {what}")
            self.finish()
            return [value for value, _ in said]
        try:
            said = [mine, *(self._hear(what, mine, peer, self.timeout) for peer in range(1, world))]
            if different := Reductions.disagreement([text for _, text in said]):
                raise PipelineError(f"rank 0, {what}: {different}")
        except PipelineError as error:
            for peer in range(1, world):
                with contextlib.suppress(PipelineError):
                    self._tell(what, [str(error), answer[1]], peer)
            for work, *_ in self._pending:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=1))
            raise
        for peer in range(1, world):
            self._tell(what, ["", said], peer)
        self.finish()
        return [value for value, _ in said]

    def _tell(self, what: str, value: Any, peer: int) -> None:
        raw = encode(what, value)
        if len(raw) > _LONGEST:
            raise PipelineError(f"rank {self.rank}, {what}: a message has {len(raw)} bytes, at most {_LONGEST} travel")
        self._post(self._header(_MESSAGE, len(raw)), peer, what)
        self._post(torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.device), peer, what)

    def _hear(self, what: str, like: Any, peer: int, timeout: float) -> Any:
        header = self._header()
        self._receive_into(header, peer, what, timeout)
        magic, size, *_ = header.tolist()
        if magic != _MESSAGE or not 0 < size <= _LONGEST:
            raise PipelineError(f"rank {self.rank}, {what}: what rank {peer} sent is no message: its program differs")
        payload = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._receive_into(payload, peer, what, timeout)
        try:
            return decode(payload.cpu().numpy().tobytes(), what, like)
        except ValueError as error:
            raise PipelineError(f"rank {self.rank}, {what}: rank {peer} {error}") from error

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> bool:
        if len(ranks) == 1:
            return True
        self._reductions.add(ranks, key, tensor)
        try:
            work = dist.all_reduce(tensor, group=self._groups[tuple(ranks)], async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in ranks if rank != self.rank)
            raise PipelineError(self._lost(others, f"REDUCE {key}", error)) from error
        return True

    def finish(self) -> None:
        pending, self._pending = self._pending, []
        self._sent.clear()
        for work, _, peer, what in pending:
            try:
                work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise PipelineError(self._lost(peer, what, error)) from error

    def _lost(self, peer: int | str, what: str, error: RuntimeError, timeout: float | None = None) -> str:
        reason = _first_line(error)
        if "imeout" in reason or "imed out" in reason:
            reason = f"no answer within {timeout or self.timeout:g} s: it hangs, or is slower than the timeout"
        else:
            reason = f"it died or closed the connection: {reason}"
        return f"rank {self.rank}, {what}: lost rank {peer} ({reason})"


def _memory(device: torch.device) -> int:
    """Bytes that a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
