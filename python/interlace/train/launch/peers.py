"""Gathers and broadcasts of the trainer outside the pipeline, with a timeout on every wait.

During training (before that see `startup`), a rank that does not answer for ``parallel.timeout`` seconds is lost. The
trainer and the checkpoints use a process group of their own. Messages are JSON and go through rank 0
(`interlace.comm.channels.star`). Errors there become a `TrainingError` here: this rank, the operation it waited for,
and the ranks that did not answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from interlace.comm.channels.star import Star
from interlace.comm.process.abort_reports import AbortReports, reason_of
from interlace.comm.process.errors import CommError
from interlace.train.errors import TrainingError

T = TypeVar("T")


class Peers:
    """All ranks of the run, as seen by this one (only itself without a process group).

    `timeout` is the maximum delay of one rank behind another, in seconds. `allowance` is added to it while a checkpoint
    is written or read. `coordinated` as in `AbortReports`. The constructor and every method are collective: all ranks
    make the same calls in the same order.
    """

    def __init__(self, timeout: float, allowance: float = 0.0, *, coordinated: bool = False) -> None:
        self.timeout, self.allowance = timeout, allowance
        distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if distributed else 0
        self.world = dist.get_world_size() if distributed else 1
        self._star: Star | None = None
        if distributed:
            with self.waiting("meeting the others"):
                dist.barrier()
                group = dist.new_group(timeout=timedelta(seconds=timeout + allowance), backend="gloo")
                self._star = Star(group, AbortReports(group, "run", coordinated=coordinated))

    def exchange(self, what: str, value: T, *, patient: bool = False) -> list[T]:
        """Every rank's `value`, by rank: JSON, with the same types and lengths on every rank.

        `what` names the operation; `patient` adds the allowance.
        """
        if self._star is None:
            return [value]
        try:
            return self._star.exchange(value, what, self.timeout + (self.allowance if patient else 0.0))
        except CommError as error:
            raise TrainingError(str(error)) from error

    def barrier(self, what: str) -> None:
        """Waits for all ranks."""
        self.exchange(what, 0.0)

    def together(self, what: str, work: Callable[[], T], *, expected: type[Exception] = TrainingError) -> list[T]:
        """Result of `work` on every rank, by rank (any JSON value). It may use the allowance.

        If it fails on any rank, all of them raise, with that rank and the reason. An error of type `expected` keeps its
        message; any other becomes a TrainingError.
        """
        mine, failure = ["null", "", ""], None  # result, message of an expected error, any error
        try:
            mine[0] = json.dumps(work())  # as text: results may differ in form between ranks
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # such as DCP's CheckpointException, which is not a subclass of Exception
            failure = error
            mine[1:] = [str(error) if isinstance(error, expected) else "", f"{type(error).__name__}: {error}"]
        everyone = self.exchange(what, mine, patient=True)
        if any(trouble for _, _, trouble in everyone):
            known = next((words for _, words, _ in everyone if words), "")
            if known:
                raise expected(known) from failure
            lines = "; ".join(f"rank {rank}: {trouble}" for rank, (_, _, trouble) in enumerate(everyone) if trouble)
            raise TrainingError(f"{what}: {lines}") from failure
        return [json.loads(text) for text, _, _ in everyone]

    def on_first(self, what: str, work: Callable[[], T], *, expected: type[Exception] = TrainingError) -> T:
        """Result of `work` on rank 0, which alone runs it, on every rank; errors as in `together`."""
        results: list[Any] = self.together(what, lambda: work() if self.rank == 0 else None, expected=expected)
        return results[0]

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Converts the errors of torch's collectives inside the block to a TrainingError; others pass through."""
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            reason = reason_of(error, self.timeout + self.allowance)
            raise TrainingError(f"rank {self.rank}, {what}: lost another rank ({reason})") from error
