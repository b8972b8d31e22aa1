"""Exchange of small values of all ranks through rank 0: slow, but an error names the rank that does not answer.

Messages are JSON behind a header of fixed size, checked before use. They are never executed, and no memory is allocated
for a size above the limit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.comm.process.abort_reports import AbortReports, reason_of
from interlace.comm.process.errors import CommError
from interlace.comm.process.messages import decode, encode
from interlace.comm.process.recorder import page_in_use

T = TypeVar("T")
HEADER = 18  # numbers in a header; tensors of `channels.process_group` on the same edges use the same size
MESSAGE = 0x1A7E71ACF  # first number of a message header
LONGEST = 1 << 28  # bytes of a message


def header(*numbers: int) -> Tensor:
    return torch.tensor([*numbers, *(0,) * (HEADER - len(numbers))])


class Star:
    """All ranks of a process group (None: the default one) with gloo, and rank 0 at the centre.

    Errors are CommErrors.
    """

    def __init__(self, group: dist.ProcessGroup | None, reports: AbortReports) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.reports = group, reports
        self._in_flight: list[tuple[dist.Work, Tensor, int]] = []

    def exchange(self, value: T, operation: str, timeout: float) -> list[T]:
        """Every rank's ``value`` by rank; JSON-serializable, with the same types, keys and lengths on every rank.

        timeout: seconds that one rank may be behind another. Raises CommError, on all ranks that still answer.
        """
        deadline = time.monotonic() + timeout
        if self.rank > 0:
            self._send(operation, value, 0, timeout)
            # Rank 0 may be waiting for a lost rank and never receive this message: give it time to report that.
            patience = timeout + min(timeout / 2, 10.0)
            failure, values = self._receive_value(operation, ["", [value] * self.world], 0, patience, timeout)
            if failure:
                raise CommError(f"{failure}; reported by rank 0 to rank {self.rank}, in {operation}")
        else:
            values = [value]
            try:
                for peer in range(1, self.world):
                    # Receiving a message that has arrived also takes time.
                    remaining = max(deadline - time.monotonic(), 1.0)
                    values.append(self._receive_value(operation, value, peer, remaining, timeout))
            except CommError as error:
                for peer in range(1, self.world):
                    with contextlib.suppress(CommError):
                        self._send(operation, [str(error), [value] * self.world], peer, timeout)
                for work, *_ in self._in_flight:
                    with contextlib.suppress(RuntimeError):
                        work.wait(timedelta(seconds=1))
                raise
            for peer in range(1, self.world):
                self._send(operation, ["", values], peer, timeout)
        sent, self._in_flight = self._in_flight, []
        for work, _, peer in sent:
            with self._waiting_for(peer, operation, timeout):
                work.wait(timedelta(seconds=timeout))
        return values

    def _send(self, operation: str, value: object, peer: int, timeout: float) -> None:
        raw = encode(operation, value)
        if len(raw) > LONGEST:
            raise CommError(
                f"rank {self.rank}, {operation}: a message has {len(raw)} bytes, at most {LONGEST} are supported"
            )
        for tensor in (header(MESSAGE, len(raw)), torch.frombuffer(bytearray(raw), dtype=torch.uint8)):
            with self._waiting_for(peer, operation, timeout):
                work = dist.isend(tensor, peer, group=self.group)
            assert work is not None
            self._in_flight.append((work, tensor, peer))

    def _receive_value(self, operation: str, like: object, peer: int, patience: float, timeout: float) -> Any:
        """The message of `peer`, of the form of `like`, within `patience` seconds; errors mention `timeout` seconds."""
        head = header()
        self._receive(head, peer, operation, patience, timeout)
        magic, size, *_ = head.tolist()
        if magic != MESSAGE or not 0 < size <= LONGEST:
            raise CommError(
                f"rank {self.rank}, {operation}: rank {peer} sent something else than a message: its program differs"
            )
        payload = torch.empty(size, dtype=torch.uint8)
        self._receive(payload, peer, operation, patience, timeout)
        try:
            return decode(payload.numpy().tobytes(), operation, like)
        except ValueError as error:
            raise CommError(f"rank {self.rank}, {operation}: rank {peer} {error}") from error

    def _receive(self, tensor: Tensor, peer: int, operation: str, patience: float, timeout: float) -> None:
        with self._waiting_for(peer, operation, timeout):
            work = dist.irecv(tensor, peer, group=self.group)
            assert work is not None
            work.wait(timedelta(seconds=patience))

    @contextlib.contextmanager
    def _waiting_for(self, peer: int, operation: str, timeout: float) -> Iterator[None]:
        """Converts errors of torch into a CommError that names the lost rank.

        Rank 0 waits for one peer and names it at once. The others wait for rank 0, which may have ended because of
        another rank. So they look for the lost rank in the reports.
        """
        page = page_in_use()
        try:
            if page is not None:
                page.waiting((peer,))
            yield
            if page is not None:
                page.computing()
        except RuntimeError as error:
            reason = reason_of(error, timeout)
            if self.rank == 0:
                self.reports.report_abort(reason, [peer])
                lost = f"lost rank {peer} ({reason})"
            else:
                lost, _ = self.reports.trace(reason, range(self.world), timeout)
            raise CommError(f"rank {self.rank}, {operation}: {lost}") from error
