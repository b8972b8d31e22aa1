"""Startup: synchronizes the ranks of a run before the first step, with a timeout on every wait.

Before training, ranks may do work of very different length: one downloads the data, others wait for it. One long
timeout does not fit, so ranks send heartbeats: every rank increments a counter in the store of the process group. A
rank whose counter is unchanged for ``parallel.timeout`` seconds is lost. Rank 0 watches all ranks and reports the
missing ones to the others, which watch rank 0.

Calls inside torch (rendezvous, creation of groups) cannot be watched in this way. A timer ends this rank there, with
its last words, if torch's own timeout fails (it does if the host of the store is gone without closing).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from interlace.comm.process.rendezvous import Rounds
from interlace.comm.process.store import is_loopback, tcp_store
from interlace.train.errors import TrainingError
from interlace.train.launch import launcher

LONGEST_SECONDS = 1800.0  # for one wait, even if the awaited rank sends heartbeats
SLACK_SECONDS = 5.0  # after its own timeout, for torch to report the error
_ANSWER = "all ranks"


class Startup(Rounds):
    """The ranks of a run before training. Construction joins the default process group; a single rank does nothing.

    `timeout` is the maximum time in seconds without a heartbeat; `backend` is the backend of the process group. Raises
    TrainingError if not all ranks join.
    """

    longest = 1 << 26

    def __init__(self, rank: int, world: int, timeout: float, backend: str = "gloo") -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.over = threading.Event()
        self.thread: threading.Thread | None = None
        if world == 1:
            return
        with self.bounded(f"meeting the other {world - 1} ranks"):
            wait = timedelta(seconds=timeout)
            store = meeting_place(rank, world, timeout)
            store.set_timeout(wait)
            dist.init_process_group(
                backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world, timeout=wait
            )
        super().__init__(dist.PrefixStore("startup", store), rank, world)
        self.thread = threading.Thread(target=self._beat, name="sign-of-life", daemon=True)
        self.thread.start()

    def gather(self, what: str, value: object) -> list[Any]:
        """Every rank's `value` (any JSON value), by rank. Collective; `what` names the work that a rank may still be
        doing.

        Raises TrainingError with the name of a rank that sends no heartbeat for `timeout` seconds.
        """
        if self.world == 1:
            return [value]
        mine = json.dumps(value)  # as text: values may differ in form between ranks
        self.begin(what, mine)
        others = range(1, self.world)
        if self.rank == 0:
            try:
                self._wait(others, others, what)
                texts = [mine, *(self._heard(rank, rank, what, "") for rank in others)]
            except TrainingError as error:
                self.put(_ANSWER, what, [str(error), [""] * self.world])
                self._linger()
                raise
            self.put(_ANSWER, what, ["", texts])
        else:
            self._wait([_ANSWER], [0], what)
            lost, texts = self._heard(_ANSWER, 0, what, ["", [""] * self.world])
            if lost:
                self.store.add("told", 1)
                raise TrainingError(f"{lost}; reported by rank 0 to rank {self.rank}")
        return [json.loads(text) for text in texts]

    def _heard(self, place: int | str, rank: int, what: str, like: object) -> Any:
        try:
            return self.get(place, what, like)
        except ValueError as error:
            raise TrainingError(f"rank {self.rank}, {what}: rank {rank} {error}") from error

    @contextlib.contextmanager
    def bounded(self, what: str, alone: str = "") -> Iterator[None]:
        """Bounds the time of torch calls inside the block; their errors become a TrainingError that names `what`.

        alone: further work inside the block on this rank only; it may also take long or fail.
        """
        if self.world == 1:
            yield
            return
        waited = f"rank {self.rank}, {what}: no answer within {self.timeout:g} s (parallel.timeout)"
        if alone:
            waited += f", or this rank took longer to {alone}"

        def end() -> None:
            launcher.report_error(TrainingError(waited), user_error=False, known=True)
            os._exit(1)

        timer = threading.Timer(self.timeout + SLACK_SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            own = f", or this rank could not {alone}" if alone else ""
            raise TrainingError(
                f"rank {self.rank}, {what}: not all ranks joined within {self.timeout:g} s{own} ({reason}); find the "
                "rank that failed, or raise parallel.timeout if ranks start slowly"
            ) from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """Stops the heartbeats: from here on the ranks communicate in every step. Safe to call twice.

        A process must not exit while one of its threads is inside the store: Python would end the thread there, and C++
        would call `terminate` (SIGABRT).
        """
        self.over.set()
        if self.thread is not None:
            self.thread.join(SLACK_SECONDS)

    def _wait(self, places: Sequence[int | str], ranks: Sequence[int], what: str) -> None:
        """Returns when all `places` have been filled, by `ranks` in this order; raises if one of these is lost."""
        of = dict(zip(places, ranks, strict=True))
        begin = looked = time.monotonic()
        signs = dict.fromkeys(ranks, (-1, begin))

        def watch(missing: Sequence[int | str]) -> None:
            nonlocal looked
            now = time.monotonic()
            if now - looked >= min(1.0, self.timeout / 4):
                looked = now
                with self._store_call(what):
                    for rank in (of[place] for place in missing):
                        beats = self.store.add(f"alive/{rank}", 0)
                        if beats != signs[rank][0]:
                            signs[rank] = (beats, now)
            for rank in (of[place] for place in missing):
                if now - signs[rank][1] > self.timeout:
                    raise TrainingError(
                        f"rank {self.rank}, {what}: lost rank {rank} (no sign of life for {self.timeout:g} s)"
                    )
                if now - begin > LONGEST_SECONDS:
                    raise TrainingError(f"rank {self.rank}, {what}: rank {rank} took over {LONGEST_SECONDS:g} s")

        self.wait_for(places, what, watch, slowest=0.2)

    def _store_call(self, what: str) -> AbstractContextManager[None]:
        return self.bounded(what)

    def _linger(self) -> None:
        """Gives ranks that are not lost time to read the reason for the end, because rank 0 may host the store."""
        deadline = time.monotonic() + SLACK_SECONDS
        while self.store.add("told", 0) < self.world - 2 and time.monotonic() < deadline:
            time.sleep(0.05)

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: ranks that wait for it report this
            while not self.over.wait(min(1.0, self.timeout / 4)):
                self.store.add(f"alive/{self.rank}", 1)


def meeting_place(rank: int, world: int, timeout: float, *, wait: bool = True) -> dist.Store:
    """The store at MASTER_ADDR: served by rank 0 on that address alone, or torchrun's, served by its agent.

    wait: True to wait for all ranks, False for rank 0 alone. Raises TrainingError.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if not wait:
            agent = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return dist.TCPStore(*agent, None, False, timedelta(seconds=timeout), wait_for_workers=False)
        store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout))))
        return store
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise TrainingError(
            f"rank {rank}: MASTER_ADDR is {host!r} and MASTER_PORT is {port!r}: set them to an address of rank 0's "
            "machine and a free port there, as `interlace train` and torchrun do"
        )
    elsewhere = world - int(os.environ.get("LOCAL_WORLD_SIZE", world))
    try:
        if elsewhere and is_loopback(host):
            raise TrainingError(
                f"rank {rank}: {elsewhere} ranks are on other machines, but MASTER_ADDR = {host} is a loopback "
                "address: set it to an address of rank 0's machine that the other machines can reach"
            )
        return tcp_store(host, int(port), rank, world, timeout, wait)
    except OSError as error:
        raise TrainingError(
            f"rank {rank}: {error}: MASTER_ADDR must be an address of the machine of rank 0, and MASTER_PORT free there"
        ) from error
