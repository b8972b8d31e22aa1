"""Lost peers: finds the ranks that are gone when a wait fails, and the reason.

A gloo wait that times out closes all connections of its group, and a failed collective does not name the faulty rank.
So every rank that notices a failure reports it in the store of the group. A rank without a report after a few seconds
is lost. A rank that left on its own has reported its reason.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from interlace._text import first_line
from interlace.comm.process.messages import decode, encode

T = TypeVar("T")

SLOW = "no answer within {:g} s: it hangs, or is slower than the timeout"
_POLL = 0.05  # seconds
_WHAT = "roll call"
_DONE = "done"
_LONGEST = 60.0  # extra seconds for ranks that have not noticed the failure yet
_AT_ONCE = 2.0  # seconds in which a live rank that closed a connection reports the reason


def reason_of(error: BaseException, timeout: float) -> str:
    """The reason why a wait on a peer failed, from torch's error message."""
    reason = first_line(error)
    if "imeout" in reason or "imed out" in reason:
        return SLOW.format(timeout)
    return f"it died or closed the connection: {reason}"


def is_slow(reason: str) -> bool:
    """True if a reason of `reason_of` means that a wait timed out."""
    return reason.startswith(SLOW.partition("{")[0])


def named(ranks: Sequence[int | str]) -> str:
    """ "rank 3" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank) for rank in ranks)}"


def private_store(group: dist.ProcessGroup, name: str) -> tuple[str, dist.Store]:
    """(name, store) shared by the ranks of a group for one purpose. All ranks request them in the same order.

    A counter in the group's own store numbers them, so a group created again under its old name finds no old keys.
    """
    store = dist.distributed_c10d._get_process_group_store(group)
    name = f"interlace/{name}/{store.add(f'interlace/{name} of rank {group.rank()}', 1)}"
    return name, dist.PrefixStore(name, store)


class AbortReport(NamedTuple):
    """Abort report of a rank: the reason, and the ranks it waited for in vain (empty: a reason of its own)."""

    reason: str
    missing: tuple[int, ...] = ()


class AbortReports:
    """Failure reports of the ranks of a group. Created by all ranks in the same order.

    A rank that was waited for in vain may itself have waited for another. So each rank reports whom it waited for when
    it aborts. A search follows these reports from rank to rank, up to the one without a report.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, *, coordinated: bool = False) -> None:
        """coordinated: an external supervisor finds the lost ranks, so ranks need not wait for each other's reports."""
        self.rank, self.world, self._coordinated = group.rank(), group.size(), coordinated
        self._store = private_store(group, f"roll call of the {name}")[1]
        self._published: AbortReport | None = None
        self._silent = 0  # number of lost ranks without a report
        self.traced = False  # whether the lost ranks are known

    def leave(self, reason: str, timeout: float) -> None:
        """This rank aborts for a reason of its own, unless it has aborted already. timeout: of the other ranks' waits.

        Rank 0 may hold the store. If it has lost another rank, it stays until the rest have aborted too: they search
        the store for lost ranks, and would report rank 0 otherwise. It stays at most as long as they may wait, notice,
        and search.
        """
        if self._coordinated:
            return
        self._publish(AbortReport(reason))
        grace = 2 * min(timeout, _LONGEST) + _grace(timeout)
        # Only silent ranks: a collective waits for all ranks, and most of them are alive and will search.
        silent = self._silent
        if self.rank > 0 or _store_outlives_ranks():
            bounded(lambda: self._store.add(_DONE, 1), 1.0)
        elif self.traced:

            def stay() -> None:
                deadline, pause = time.monotonic() + grace, _POLL
                while self._store.add(_DONE, 0) < self.world - 1 - silent and time.monotonic() < deadline:
                    time.sleep(pause)
                    pause = min(2 * pause, 0.5)

            bounded(stay, grace + 1.0)

    def report_abort(self, reason: str, missing: Sequence[int]) -> None:
        """This rank stops waiting for the ranks `missing`. reason: as from `reason_of`."""
        self._publish(AbortReport(reason, tuple(rank for rank in missing if rank != self.rank)))

    def trace(self, reason: str, ranks: Sequence[int], timeout: float) -> tuple[str, list[int]]:
        """Reports that this rank stops waiting for `ranks`, and returns (description of the lost ranks, lost ranks).

        reason: as from `reason_of`. Takes seconds: live ranks have to notice the failure too, for which each has its
        `timeout`.
        """
        self.report_abort(reason, ranks)
        self.traced = True
        if self._coordinated:
            return f"lost {named(list(ranks))} ({reason})", list(ranks)
        own_report = AbortReport(reason, tuple(rank for rank in ranks if rank != self.rank))
        reports: dict[int, AbortReport] = {}
        grace, begin = _grace(timeout), time.monotonic()
        last_answer = [begin]  # last time the store answered

        def listen() -> bool:
            last_report, pause = begin, _POLL
            while True:
                silent, dead, all_slow = _follow_reports(own_report, reports, self.rank)
                for rank in silent:
                    if self._store.check([_key(rank)]):
                        reports[rank] = _read(self._store.get(_key(rank)))
                        last_report, pause = time.monotonic(), _POLL
                last_answer[0] = now = time.monotonic()
                if any(rank in reports for rank in silent):
                    if any(not report.missing for report in reports.values()):
                        return True
                    continue
                # A closed connection and a single silent rank: that rank is dead. With several silent ranks, wait until
                # the live ones have noticed, which may take each of them as long as this rank's own wait.
                certain = (dead or len(silent) == 1) and not all_slow and now - last_report > min(grace, _AT_ONCE)
                if not silent or certain or now - begin > grace + (0.0 if all_slow else min(timeout, _LONGEST)):
                    return True
                time.sleep(pause)
                pause = min(2 * pause, 0.5)

        answered = _while_progressing(listen, lambda: time.monotonic() - last_answer[0] < grace + 1.0)
        aborted = next((rank for rank, report in list(reports.items()) if not report.missing), None)
        if aborted is not None:
            return f"lost rank {aborted} (it aborted: {reports[aborted].reason})", [aborted]
        silent, dead, _ = _follow_reports(own_report, dict(reports), self.rank)
        culprits = sorted(dead or silent) or list(own_report.missing)
        if not answered and 0 not in reports and self.rank > 0 and not _store_outlives_ranks():
            culprits = [0]  # it holds the store, which no longer answers
        self._silent = sum(rank not in reports for rank in culprits)
        all_reports = [own_report, *reports.values()]
        causes = [report for report in all_reports if set(culprits) & set(report.missing)] or [own_report]
        # A connection may have been closed by a rank whose wait timed out.
        cause = next((report for report in causes if is_slow(report.reason)), causes[0])
        return f"lost {named(culprits)} ({cause.reason})", culprits

    def _publish(self, report: AbortReport) -> None:
        if self._published is None and not self._coordinated:
            self._published = report
            raw = encode(_WHAT, [report.reason[:500], " ".join(map(str, report.missing))])
            bounded(lambda: self._store.set(_key(self.rank), raw), 1.0)  # type: ignore[arg-type]


def _grace(timeout: float) -> float:
    """Seconds after a timeout in which a live rank reports."""
    return min(timeout / 2, 10.0)


def _follow_reports(
    own_report: AbortReport, reports: Mapping[int, AbortReport], own_rank: int
) -> tuple[list[int], dict[int, AbortReport], bool]:
    """Follows the reports: (silent ranks, ranks that died for certain, whether all waits for silent ranks timed out).

    A rank died for certain if a rank that waited for it alone saw its connection close.
    """
    silent: dict[int, None] = {}
    dead: dict[int, AbortReport] = {}
    all_slow, seen, pending = True, {own_rank}, [own_report]
    while pending:
        report = pending.pop()
        for rank in report.missing:
            if rank not in reports and rank != own_rank:
                silent[rank] = None
                all_slow &= is_slow(report.reason)
                if len(report.missing) == 1 and not is_slow(report.reason):
                    dead[rank] = report
            elif rank not in seen:
                seen.add(rank)
                pending.append(reports[rank])
    return list(silent), dead, all_slow


def _while_progressing(call: Callable[[], T], progresses: Callable[[], bool]) -> T | None:
    """The result of `call`; None if it fails or `progresses` turns False.

    Torch may block forever on a store whose host hangs.
    """
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            results.append(call())

    thread = threading.Thread(target=run, name="asking-the-store", daemon=True)
    thread.start()
    while thread.is_alive() and progresses():
        thread.join(0.1)
    return results[0] if results else None


def _store_outlives_ranks() -> bool:
    """True if the store outlives the ranks: torchrun's agent holds it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def bounded(call: Callable[[], T], seconds: float) -> T | None:
    """The result of `call`; None if it fails or takes longer."""
    deadline = time.monotonic() + seconds
    return _while_progressing(call, lambda: time.monotonic() < deadline)


def _key(rank: int) -> str:
    return f"rank {rank}"


def _read(raw: bytes) -> AbortReport:
    try:
        reason, missing = decode(raw, _WHAT, ["", ""])
        return AbortReport(reason, tuple(map(int, missing.split())))
    except ValueError as error:
        return AbortReport(str(error))
