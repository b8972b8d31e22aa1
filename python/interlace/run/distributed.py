"""Channel between processes, over torch.distributed point-to-point calls.

A header of fixed size precedes each payload and says what it is, its dtype and its shape: the receiver allocates from
it, so microbatches may differ in shape, and a schedule that went wrong is reported instead of aborting the process
(gloo aborts on a size mismatch). Sends are asynchronous; handles and tensors are kept until the step ends.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.run.channel import PipelineError, Tag

_MAGIC = 0x1A7E71ACE
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
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[:7] = torch.tensor(
            [
                _MAGIC,
                self.modules.index(tag.module),
                tag.stage,
                tag.microbatch,
                int(tag.grad),
                _DTYPES.index(tensor.dtype),
                tensor.dim(),
            ]
        )
        if tensor.dim():
            header[7 : 7 + tensor.dim()] = torch.tensor(tensor.shape)
        self._post(header.to(self.device), peer, f"SEND {tag}")
        if tensor.numel():
            self._post(tensor, peer, f"SEND {tag}")

    def _post(self, tensor: Tensor, peer: int, what: str) -> None:
        try:
            work = dist.isend(tensor, peer)
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank}, {what}: lost rank {peer} ({_first_line(error)})") from error
        assert work is not None
        self._pending.append((work, tensor, peer, what))

    def receive(self, peer: int, tag: Tag) -> Tensor:
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
        self._receive_into(header, peer, f"RECV {tag}", self.timeout)
        magic, module, stage, microbatch, grad, dtype, dims, *shape = header.tolist()
        if magic != _MAGIC:
            raise PipelineError(f"rank {self.rank}: no header from rank {peer} where {tag} was due")
        found = Tag(self.modules[module], stage, microbatch, bool(grad))
        if found != tag:
            raise PipelineError(f"rank {self.rank} expected {tag} from rank {peer} but received {found}")
        payload = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=self.device)
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
        """Every rank's ``value`` (a small object) in rank order, on every rank.

        Through rank 0, each wait for one peer: so a rank that is lost is named, also to those who did not wait for it.
        """
        world = dist.get_world_size()
        if self.rank > 0:
            self._send_object(value, 0, what)
            # Rank 0 may itself wait for a lost rank first, and then never takes what was sent: give it time to say so.
            lost, values = self._receive_object(0, what, self.timeout + min(self.timeout / 2, 10.0))
            if lost:
                raise PipelineError(f"{lost}; rank 0 told rank {self.rank}, in {what}")
            self.finish()
            return values
        values = [value]
        try:
            values += [self._receive_object(peer, what, self.timeout) for peer in range(1, world)]
        except PipelineError as error:
            for peer in range(1, world):
                with contextlib.suppress(PipelineError):
                    self._send_object((str(error), []), peer, what)
            for work, *_ in self._pending:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=1))
            raise
        for peer in range(1, world):
            self._send_object(("", values), peer, what)
        self.finish()
        return values

    def _send_object(self, value: Any, peer: int, what: str) -> None:
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._post(torch.tensor([len(payload)], device=self.device), peer, what)
        self._post(payload.to(self.device), peer, what)

    def _receive_object(self, peer: int, what: str, timeout: float) -> Any:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._receive_into(size, peer, what, timeout)
        payload = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self._receive_into(payload, peer, what, timeout)
        return pickle.loads(payload.cpu().numpy().tobytes())

    def all_reduce(self, tensor: Tensor, ranks: Sequence[int], key: str) -> bool:
        if len(ranks) == 1:
            return True
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
