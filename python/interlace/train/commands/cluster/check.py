"""``interlace doctor cluster``: compatibility check of the ranks of a job before a long run.

Under torchrun the process is one rank; else it starts all ranks on this machine. Order of the checks: presence of the
ranks; versions, config, files, space, devices (`facts`); clocks; process group; every pair of ranks, and all-reduces
(`links`).

Ranks communicate through the rendezvous store, in steps, with validated JSON. In each step a rank does its part and
publishes the result; rank 0 reads all results and decides whether to continue. Rank 0 names a rank that is silent for
the timeout. Rank 0 waits for the other ranks, and they wait for rank 0. A watchdog thread ends a process whose store
hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from interlace._text import first_line
from interlace.comm.process.rendezvous import Rounds
from interlace.train import device as devices
from interlace.train.commands.cluster import facts as cluster_facts
from interlace.train.commands.cluster import links as cluster_links
from interlace.train.commands.cluster import report as cluster_report
from interlace.train.commands.cluster.facts import Facts, Trouble, ranks_in_words
from interlace.train.commands.cluster.report import Report
from interlace.train.config.load import ConfigError, load, unsettled
from interlace.train.errors import TrainingError
from interlace.train.launch import launcher
from interlace.train.launch.startup import meeting_place

WRONG = 1  # exit code of every rank if a problem was found
PINGS = 5  # per clock
SLACK_SECONDS = 5.0
_VERDICT = "verdict"
_OTHERS = 3  # timeout factor for waits on rank 0, which may be late itself and then wait for the others


def cluster(options: argparse.Namespace) -> int:
    """Prints the report on rank 0; exit code 0 if no problem was found, else 1.

    config: of the planned run; its bytes are compared, and it sets the number of ranks and their device. timeout:
    seconds that a rank may be late in any step. seconds: time for measuring pairs. slow: fraction of the median below
    which a pair is called slow. json: a file for the report.

    Raises ConfigError if the number of ranks is unknown.
    """
    config, ranks, timeout = options.config, options.ranks, options.timeout
    if not 0 < timeout < float("inf") or options.seconds < 0 or not 0 <= options.slow <= 1:
        raise ConfigError("--timeout must be a positive number of seconds, --seconds at least 0, --slow 0 to 1")
    if launcher.under_launcher():
        return Examination(config, timeout, options.seconds, options.slow).run(options.json)
    if ranks is None and config is not None:
        loaded = load(config, [])
        unsettled(loaded, str(config), "doctor cluster", "--ranks N")
        ranks = loaded.world_size()
    if ranks is None or ranks < 1:
        raise ConfigError(
            "doctor cluster: start it with torchrun, or say how many ranks to start on this machine: --ranks N, or a "
            "config"
        )
    command = [sys.executable, *(word for word in sys.orig_argv[1:] if word)]
    with tempfile.TemporaryDirectory(prefix="interlace-doctor-") as folder:
        failure = launcher.RankProcesses(
            command, ranks, folder=Path(folder), timeout=2 * timeout + SLACK_SECONDS
        ).wait()
    if failure is None:
        return 0
    if failure.code != WRONG or failure.hung:  # otherwise rank 0 has reported it
        print(f"interlace: {failure}", file=sys.stderr)
    return launcher.USER_ERROR if failure.user_error else WRONG


class Stopped(Exception):
    """The examination cannot go on. troubles: reasons, complete only on rank 0."""

    def __init__(self, troubles: Sequence[Trouble]) -> None:
        super().__init__("; ".join(trouble.what for trouble in troubles))
        self.troubles = list(troubles)


class Late(Exception):
    """Ranks have not answered in time."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks


def _read(text: str, form: Any) -> Any:
    """Parses JSON from a peer. Raises ValueError if it is not of the type `form`."""
    try:
        value = TypeAdapter(form).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError("sent a message of another form: run the same version of the program on all ranks") from error
    return value.model_dump() if isinstance(value, BaseModel) else value


class Meeting(Rounds):
    """Store-based communication of the ranks in common steps. timeout: seconds that a rank may be behind the others."""

    longest = 1 << 24

    def __init__(self, rank: int, world: int, timeout: float) -> None:
        self.rank, self.timeout, self._what, self._until = rank, timeout, "", float("inf")
        threading.Thread(target=self._watch, name="doctor-watch", daemon=True).start()
        finding = f"finding the store of rank 0 ({_address()})"
        with self._limit(finding, 2 * timeout + SLACK_SECONDS):
            try:
                store = meeting_place(rank, world, timeout, wait=False)
                store.set_timeout(timedelta(seconds=timeout))
            except dist.DistError as error:
                text = f"rank {rank}, {finding}: no answer within {timeout:g} s; did rank 0 start, and has it ended?"
                raise TrainingError(text) from error
        super().__init__(dist.PrefixStore("doctor", store), rank, world)
        self.base = store

    def step(
        self,
        what: str,
        work: Callable[[], Any],
        judge: Callable[[list[Any]], Any] = lambda values: None,
        allowance: float = 0.0,
        *,
        form: Callable[[int], object] = lambda rank: None,
        verdict: object = None,
    ) -> Any:
        """Runs `work` on every rank (its result is JSON-serializable) and returns rank 0's verdict on all results.

        allowance: seconds for the work in addition to the timeout. form: rank -> type of its result. verdict: its
        type. Raises Stopped on all ranks if the work of a rank fails, a rank is silent, or a result has another
        type; on rank 0 with details.
        """
        patience = self.timeout + allowance
        with self._limit(what, _OTHERS * patience + SLACK_SECONDS):
            value, failure = None, ""
            try:
                value = work()
            except (RuntimeError, OSError, ValueError) as error:
                failure = first_line(error)
            self.begin(what, [json.dumps(value), failure])
            if self.rank > 0:
                self._await([_VERDICT], what, _OTHERS * patience)
                stop, answer = self.get(_VERDICT, what, ["", ""])
                if stop:
                    raise Stopped([Trouble(stop, "")])
                try:
                    return _read(answer, verdict)
                except ValueError as error:
                    self._end(f"rank 0, {what}: {error}")
            troubles, values = [], []
            silent = self._await(range(self.world), what, patience)
            if silent:
                text = f"no answer from {ranks_in_words(silent)} within {patience:g} s, {what}"
                troubles.append(Trouble(text, "look for these processes and their logs; slow ones need --timeout"))
            for rank in (rank for rank in range(self.world) if rank not in silent):
                try:
                    text, failure = self.get(rank, what, ["", ""])
                    values.append(None if failure else _read(text, form(rank)))
                except ValueError as error:
                    failure = str(error)
                if failure:
                    troubles.append(Trouble(f"rank {rank}, {what}: {failure}", "see the message of this rank"))
            try:
                if troubles:
                    raise Stopped(troubles)
                answer = judge(values)
            except Stopped as stop:
                self.put(_VERDICT, what, [str(stop), ""])
                raise
            self.put(_VERDICT, what, ["", json.dumps(answer)])
            return answer

    def leave(self) -> None:
        """Ends the meeting: rank 0, which may hold the store, waits until the others have read its last verdict."""
        with self._limit("leaving", _OTHERS * self.timeout + SLACK_SECONDS):
            self.begin("leaving", ["", ""])
            if self.rank == 0:
                self._await(range(self.world), "leaving", self.timeout)

    def _await(self, keys: Sequence[int | str], what: str, seconds: float) -> list[int]:
        """Ranks among `keys` that have no value within `seconds`. Ends this process if it waits for the verdict of rank
        0, which cannot follow then."""
        deadline = time.monotonic() + seconds

        def watch(missing: Sequence[int | str]) -> None:
            if time.monotonic() > deadline:
                raise Late([rank for rank in missing if isinstance(rank, int)])

        try:
            self.wait_for(keys, what, watch, slowest=0.2)
            return []
        except Late as late:
            if self.rank > 0:
                self._end(f"no answer from rank 0 within {seconds:g} s, {what}")
            return late.ranks

    @contextlib.contextmanager
    def _store_call(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._end(f"lost rank 0, which holds the store, {what} ({first_line(error)})")

    @contextlib.contextmanager
    def _limit(self, what: str, seconds: float) -> Iterator[None]:
        self._what, self._until = what, time.monotonic() + seconds
        yield
        self._until = float("inf")

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout / 4))
            if time.monotonic() > self._until:
                self._end(f"{self._what} took too long: a rank or the store of rank 0 hangs")

    def _end(self, text: str) -> NoReturn:
        print(f"interlace: rank {self.rank}: {text}", file=sys.stderr, flush=True)
        os._exit(WRONG)


class Examination:
    """One rank's part of the examination."""

    def __init__(self, config: Path | None, timeout: float, seconds: float, slow: float) -> None:
        self.config, self.timeout, self.seconds, self.slow = config, timeout, seconds, slow
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.report = Report(self.world, timeout)
        self.device = torch.device("cpu")

    def run(self, out: Path | None) -> int:
        """Runs all steps; returns the exit code."""
        launcher.follow_launcher(self.timeout)
        meeting = Meeting(self.rank, self.world, self.timeout)
        good = False
        try:
            self._examine(meeting)
            good = meeting.step("ending", lambda: None, lambda _: not self.report.troubles, verdict=bool)
            meeting.leave()
        except Stopped as stop:
            self.report.troubles += stop.troubles
            if self.rank == 0:
                time.sleep(min(2.0, self.timeout))  # rank 0 may hold the store, from which the others read the reason
        if self.rank == 0:
            cluster_report.show(self.report)
            if out is not None:
                try:
                    cluster_report.write(self.report, out)
                except OSError as error:
                    print(f"interlace: --json {out}: cannot write there: {error.strerror or error}", file=sys.stderr)
                    good = False
        sys.stdout.flush()
        os._exit(0 if good else WRONG)  # destroying a group with lost ranks would wait for them

    def _examine(self, meeting: Meeting) -> None:
        meeting.step("coming", lambda: None)
        one_each = Annotated[list[str], Field(min_length=self.world, max_length=self.world)]
        hosts = meeting.step(
            "reading its facts", self._facts, self._judge_facts, form=lambda _: cluster_facts.Form, verdict=one_each
        )
        if self.world == 1:
            return
        meeting.step(
            "comparing clocks", lambda: self._clock(meeting), self._judge_clocks,
            form=lambda rank: tuple[float, float] if rank else None,
        )  # fmt: skip

        def join() -> None:
            store, wait = dist.PrefixStore("doctor group", meeting.base), timedelta(seconds=self.timeout)
            backend = devices.backend(self.device.type)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=wait)

        meeting.step("making the process group", join, allowance=self.timeout)
        self._links(meeting, hosts)
        self._sums(meeting, hosts)

    # -- facts -----------------------------------------------------------------------------------------------

    def _facts(self) -> Facts:
        folder, wanted = Path("runs"), "auto"
        if self.config is not None:
            config = load(self.config, [], open_replicas=True)
            folder, wanted = Path(config.run.folder), config.run.device
        kind = devices.choose(wanted, self.local_world, source=str(self.config or "doctor"))
        self.device = devices.take(kind, self.local_rank, deterministic=False)
        return cluster_facts.gather(self.config, folder, kind, self.local_rank)

    def _judge_facts(self, facts: list[Facts]) -> list[str]:
        """Host of each rank. Stops if ranks use different kinds of device, since they cannot form a process group."""
        troubles = cluster_facts.compare(facts)
        self.report.facts = facts
        if len({each["kind"] for each in facts}) > 1:
            raise Stopped(troubles)
        self.report.troubles += troubles
        self.report.notes += cluster_facts.settings_that_differ(facts)
        return [each["host"] for each in facts]

    # -- clocks ----------------------------------------------------------------------------------------------

    def _clock(self, meeting: Meeting) -> list[float] | None:
        """(seconds that this clock is ahead of rank 0's, bound of the error), from the ping with the shortest round
        trip.

        Rank 0 answers one rank after the other. The answer was given between question and receipt. The estimate assumes
        the midpoint, so its error is at most half of the round trip.
        """
        store = dist.PrefixStore("doctor clocks", meeting.base)
        if self.rank == 0:
            for rank in range(1, self.world):
                for number in range(PINGS):
                    key = f"{rank}/{number}"
                    try:
                        store.get(f"ask/{key}")
                    except RuntimeError as error:
                        for later in range(rank + 1, self.world):  # the later ranks need not wait for an answer
                            for each in range(PINGS):
                                store.set(f"answer/{later}/{each}", "nan")
                        raise RuntimeError(f"rank {rank} did not ask for the time ({first_line(error)})") from error
                    store.set(f"answer/{key}", repr(time.time()))
            return None
        best = (0.0, float("inf"))
        store.set_timeout(timedelta(seconds=2 * self.timeout))
        for number in range(PINGS):
            key = f"{self.rank}/{number}"
            asked = time.time()
            store.set(f"ask/{key}", "")
            theirs = float(store.get(f"answer/{key}"))
            heard = time.time()
            bound = max(heard - asked, 0.0) / 2
            if number and bound < best[1]:  # the first question includes waiting for earlier ranks
                best = ((asked + heard) / 2 - theirs, bound)
        return list(best)

    def _judge_clocks(self, clocks: list[Any]) -> None:
        self.report.clocks = [(0.0, 0.0), *((ahead, bound) for ahead, bound in clocks[1:])]
        for rank, (ahead, bound) in enumerate(self.report.clocks):
            if abs(ahead) - bound > cluster_facts.CLOCK_SECONDS:
                text = f"the clock of rank {rank} is {ahead:+.3f} s from rank 0's (to within {bound:.3f} s)"
                self.report.troubles.append(Trouble(text, "run a time service (chrony, ntpd) on every host"))

    # -- links -----------------------------------------------------------------------------------------------

    def _links(self, meeting: Meeting, hosts: list[str]) -> None:
        rounds, begin = cluster_links.rounds(self.world), time.monotonic()
        for number, pairs in enumerate(rounds, start=1):
            mine = next((pair for pair in pairs if self.rank in pair), None)

            def measure(mine: tuple[int, int] | None = mine) -> list[float] | None:
                if mine is None:
                    return None
                peer = sum(mine) - self.rank
                try:
                    return list(cluster_links.measure_pair(self.rank, peer, self.device, self.timeout))
                except RuntimeError as error:
                    raise RuntimeError(f"lost rank {peer} ({first_line(error)})") from error

            def judge(measured: list[Any], pairs: list[tuple[int, int]] = pairs) -> bool:
                self.report.links += [cluster_links.Link(*pair, *measured[pair[0]]) for pair in pairs]
                return time.monotonic() - begin < self.seconds

            what = f"measuring pairs of ranks, round {number} of {len(rounds)}"
            measured = {rank for pair in pairs for rank in pair}

            def form(rank: int, measured: set[int] = measured) -> object:
                return tuple[float, float] if rank in measured else None

            if not meeting.step(what, measure, judge, form=form, verdict=bool) and number < len(rounds):
                every = self.world * (self.world - 1) // 2
                self.report.notes.append(
                    f"{len(self.report.links)} of {every} pairs were measured in {self.seconds:g} s; --seconds for more"
                )
                break
        for link, median in cluster_links.slow(self.report.links, dict(enumerate(hosts)), self.slow):
            text = (
                f"ranks {link.first} ({hosts[link.first]}) and {link.second} ({hosts[link.second]}): "
                f"{link.bandwidth / 1e6:.0f} MB/s, where half of such pairs have {median / 1e6:.0f} MB/s or more"
            )
            do = "look at the card, cable and port of these hosts, and at NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
            self.report.troubles.append(Trouble(text, do))

    def _sums(self, meeting: Meeting, hosts: list[str]) -> None:
        groups: dict[str, dist.ProcessGroup] = {}
        members = cluster_facts.groups_of(hosts)

        def make() -> None:
            for host, ranks in members.items():  # every rank creates all groups, in the same order
                if len(ranks) > 1:
                    groups[host] = dist.new_group(ranks, timeout=timedelta(seconds=self.timeout))

        def measure(group: dist.ProcessGroup | None, size: int) -> float:
            return cluster_links.measure_sum(group, size, self.device, self.timeout)

        def within() -> float | None:
            mine = hosts[self.rank]
            return measure(groups[mine], len(members[mine])) if mine in groups else None

        def note(values: list[Any]) -> None:
            for host, ranks in members.items():
                if values[ranks[0]] is not None:
                    self.report.sums[host] = min(values[rank] for rank in ranks)

        if len(members) > 1:
            meeting.step("making the groups of hosts", make, allowance=self.timeout)
            alone = {rank for ranks in members.values() if len(ranks) == 1 for rank in ranks}
            meeting.step("summing within each host", within, note, form=lambda rank: None if rank in alone else float)
        of_all = partial(measure, None, self.world)
        self.report.sums[""] = meeting.step("summing over all ranks", of_all, min, form=lambda _: float, verdict=float)


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR is not set')}:{os.environ.get('MASTER_PORT', '')}"
