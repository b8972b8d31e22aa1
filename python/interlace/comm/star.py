"""Small values of all ranks, through rank 0: slow, and the one that does not answer is named.

Messages are JSON behind a header of fixed size, checked before they are used: nothing is executed, and nothing
allocated for a size that no message has.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.comm.lost import RollCall, reason_of
from interlace.comm.recorder import page_in_use
from interlace.comm.transports.base import CommError
from interlace.comm.transports.messages import decode, encode

HEADER = 18  # numbers in a header, of a message as of the tensors that `channel_group` sends on the same edges
MESSAGE = 0x1A7E71ACF  # begins the header of a message
LONGEST = 1 << 28  # bytes of a message


def header(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor([*numbers, *(0,) * (HEADER - len(numbers))], device=device)


class Star:
    """All ranks of a process group (None: the default one), with rank 0 in the middle.

    device: where messages lie on their way; what the group's backend moves. Errors are CommErrors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, roll: RollCall) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.device, self.roll = group, device, roll
        self._told: list[tuple[dist.Work, Tensor, int]] = []

    def exchange(self, value: Any, what: str, timeout: float) -> list[Any]:
        """Every rank's ``value`` by rank; what JSON can hold, with the same types, keys and lengths on every rank.

        timeout: seconds that one rank may be behind another. Raises CommError, on all ranks that still answer.
        """
        deadline = time.monotonic() + timeout
        if self.rank > 0:
            self._tell(what, value, 0, timeout)
            # Rank 0 may itself wait for a lost rank first, and then never takes what was sent: give it time to say so.
            patience = timeout + min(timeout / 2, 10.0)
            wrong, values = self._hear(what, ["", [value] * self.world], 0, patience, timeout)
            if wrong:
                raise CommError(f"{wrong}; rank 0 told rank {self.rank}, in {what}")
        else:
            values = [value]
            try:
                for peer in range(1, self.world):
                    left = max(deadline - time.monotonic(), 1.0)  # a message that is there takes its time too
                    values.append(self._hear(what, value, peer, left, timeout))
            except CommError as error:
                for peer in range(1, self.world):
                    with contextlib.suppress(CommError):
                        self._tell(what, [str(error), [value] * self.world], peer, timeout)
                for work, *_ in self._told:
                    with contextlib.suppress(RuntimeError):
                        work.wait(timedelta(seconds=1))
                raise
            for peer in range(1, self.world):
                self._tell(what, ["", values], peer, timeout)
        told, self._told = self._told, []
        for work, _, peer in told:
            with self._waiting_for(peer, what, timeout):
                work.wait(timedelta(seconds=timeout))
        return values

    def _tell(self, what: str, value: Any, peer: int, timeout: float) -> None:
        raw = encode(what, value)
        if len(raw) > LONGEST:
            raise CommError(f"rank {self.rank}, {what}: a message has {len(raw)} bytes, at most {LONGEST} travel")
        text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.device)
        for tensor in (header(self.device, MESSAGE, len(raw)), text):
            with self._waiting_for(peer, what, timeout):
                work = dist.isend(tensor, peer, group=self.group)
            assert work is not None
            self._told.append((work, tensor, peer))

    def _hear(self, what: str, like: Any, peer: int, patience: float, timeout: float) -> Any:
        """What `peer` says, of the form of `like`, within `patience` seconds; errors speak of `timeout` seconds."""
        head = header(self.device)
        self._receive(head, peer, what, patience, timeout)
        magic, size, *_ = head.tolist()
        if magic != MESSAGE or not 0 < size <= LONGEST:
            raise CommError(f"rank {self.rank}, {what}: what rank {peer} sent is no message: its program differs")
        payload = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._receive(payload, peer, what, patience, timeout)
        try:
            return decode(payload.cpu().numpy().tobytes(), what, like)
        except ValueError as error:
            raise CommError(f"rank {self.rank}, {what}: rank {peer} {error}") from error

    def _receive(self, tensor: Tensor, peer: int, what: str, patience: float, timeout: float) -> None:
        with self._waiting_for(peer, what, timeout):
            work = dist.irecv(tensor, peer, group=self.group)
            assert work is not None
            work.wait(timedelta(seconds=patience))

    @contextlib.contextmanager
    def _waiting_for(self, peer: int, what: str, timeout: float) -> Iterator[None]:
        """Makes the errors of torch a CommError that names whom this rank lost.

        Rank 0 waits for one peer, which it names at once. The others wait for rank 0, which may have ended because of
        another one: they ask who is left.
        """
        page = page_in_use()
        try:
            if page is not None:
                page.waiting((peer,))
            yield
            if page is not None:
                page.computing()
        except RuntimeError as error:
            if self.rank == 0:
                reason = reason_of(error, timeout)
                self.roll.gave_up(reason, [peer])
                lost = f"lost rank {peer} ({reason})"
            else:
                lost, _ = self.roll.lost(range(self.world), error, timeout)
            raise CommError(f"rank {self.rank}, {what}: {lost}") from error
