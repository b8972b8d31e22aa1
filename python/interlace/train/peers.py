"""What the ranks of a run tell each other outside the pipeline, with a bound on every wait.

Once ranks train (before that see `startup`), one that does not answer for ``parallel.timeout`` seconds is lost. The
trainer and the checkpoints talk in a process group of their own, and whatever goes wrong in it becomes a
`TrainingError` here: this rank, what it waited for, and who did not answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from interlace.train.errors import TrainingError

T = TypeVar("T")


class Peers:
    """All ranks of the run as this one sees them (only itself without a process group).

    `timeout` is how many seconds one rank may be behind another, `allowance` how many more where a checkpoint is
    written or read. Making one is collective, and so is every method: all ranks call the same in the same order.
    """

    def __init__(self, timeout: float, allowance: float = 0.0) -> None:
        self.timeout, self.allowance = timeout, allowance
        self.distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.world = dist.get_world_size() if self.distributed else 1
        self.group: dist.ProcessGroup | None = None
        if self.distributed:
            with self.waiting("meeting the others"):
                dist.barrier()
                self.group = dist.new_group(timeout=timedelta(seconds=timeout + allowance))

    def exchange(self, what: str, value: float, *, patient: bool = False) -> list[float]:
        """Every rank's `value`, by rank. `what` names the occasion, `patient` grants the allowance as well.

        Rank 0 hears each rank by itself, so that the one that does not answer can be named.
        """
        if not self.distributed:
            return [value]
        seconds = self.timeout + (self.allowance if patient else 0.0)
        mine = torch.tensor([value], dtype=torch.float64)
        here = torch.zeros(1, dtype=torch.float64)
        values = torch.zeros(self.world, dtype=torch.float64)
        others = range(1, self.world)
        if self.rank == 0:
            values[0] = value
            sent = [(peer, self._start(what, peer, here, send=True)) for peer in others]  # "I am here, and listen"
            parts = [torch.zeros(1, dtype=torch.float64) for _ in others]
            heard = [
                (peer, self._start(what, peer, part, send=False)) for peer, part in zip(others, parts, strict=True)
            ]
            for peer, work in heard:
                self._finish(what, peer, work, seconds)
            values[1:] = torch.cat(parts)
            sent += [(peer, self._start(what, peer, values, send=True)) for peer in others]
        else:
            sent = [(0, self._start(what, 0, mine, send=True))]
            self._finish(what, 0, self._start(what, 0, here, send=False), seconds)
            self._finish(what, 0, self._start(what, 0, values, send=False), seconds + 1.0)  # it names the lost one
        for peer, work in sent:
            self._finish(what, peer, work, seconds)
        return [float(number) for number in values]

    def barrier(self, what: str, *, patient: bool = False) -> None:
        """Waits until every rank is here."""
        self.exchange(what, 0.0, patient=patient)

    def together(self, what: str, work: Callable[[], T], *, expected: type[Exception] = TrainingError) -> list[T]:
        """What `work` returns on every rank, by rank (anything that can be pickled). It may take the allowance.

        When it fails on any rank, all of them raise, and say which rank it was and why: an error of the type `expected`
        with its own words, any other as a TrainingError.
        """
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # such as DCP's CheckpointException, which is no Exception
            failure = error
        trouble = "" if failure is None else f"{type(failure).__name__}: {failure}"
        mine = (value, str(failure) if isinstance(failure, expected) else "", trouble)
        everyone = [mine]
        self.barrier(what, patient=True)  # names the rank that does not come, which torch's own gathering cannot
        if self.distributed:
            everyone = [mine] * self.world
            with self.waiting(what):
                dist.all_gather_object(everyone, mine, group=self.group)
        if any(trouble for _, _, trouble in everyone):
            known = next((words for _, words, _ in everyone if words), "")
            if known:
                raise expected(known) from failure
            lines = "; ".join(f"rank {rank}: {trouble}" for rank, (_, _, trouble) in enumerate(everyone) if trouble)
            raise TrainingError(f"{what}: {lines}") from failure
        return [value for value, _, _ in everyone]  # type: ignore[misc]

    def on_first(self, what: str, work: Callable[[], T], *, expected: type[Exception] = TrainingError) -> T:
        """What `work` returns on rank 0, which alone runs it, on every rank; errors as in `together`."""
        results = self.together(what, lambda: work() if self.rank == 0 else None, expected=expected)
        return results[0]  # type: ignore[return-value]

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turns the errors of torch's collectives inside the block into a TrainingError; others pass through."""
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            raise self._lost(what, "another rank", error, self.timeout + self.allowance) from error

    def _start(self, what: str, peer: int, tensor: torch.Tensor, *, send: bool) -> dist.Work:
        try:
            work = (dist.isend if send else dist.irecv)(tensor, peer, group=self.group)
        except RuntimeError as error:
            raise self._lost(what, f"rank {peer}", error, 0.0) from error
        assert work is not None
        return work

    def _finish(self, what: str, peer: int, work: dist.Work, seconds: float) -> None:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise self._lost(what, f"rank {peer}", error, seconds) from error

    def _lost(self, what: str, whom: str, error: RuntimeError, seconds: float) -> TrainingError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if "imeout" in reason or "imed out" in reason:
            reason = f"no answer within {seconds:.1f} s: it hangs, or is slower than parallel.timeout"
        else:
            reason = f"it died or closed the connection: {reason}"
        return TrainingError(f"rank {self.rank}, {what}: lost {whom} ({reason})")
