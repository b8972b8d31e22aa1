"""``interlace doctor --distributed``: whether the ranks of a job fit together, before a long run is begun on them.

Started by torchrun it is one rank; else it starts so many on this machine. In order: who came; versions, config, files,
space, devices (`cluster_facts`); clocks; the process group; every pair of ranks and sums over them (`cluster_links`).

The ranks talk through the store they meet in, as JSON that is checked, in steps: each rank does its part and says what
came of it, rank 0 hears all and says whether to go on. A rank that says nothing for the timeout is named; rank 0 waits
for the others, they for rank 0, and a thread ends a process whose store hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from interlace.comm.lost import first_line
from interlace.comm.rendezvous import Rounds
from interlace.train import device as devices
from interlace.train.commands import cluster_facts, cluster_links, cluster_report
from interlace.train.commands.cluster_facts import Facts, Trouble, ranks_in_words
from interlace.train.commands.cluster_report import Report
from interlace.train.config import ConfigError, load, unsettled
from interlace.train.errors import TrainingError
from interlace.train.launch import launcher
from interlace.train.launch.startup import meeting_place

WRONG = 1  # exit code of every rank when something is wrong
PINGS = 5  # of a clock
SLACK_SECONDS = 5.0
_VERDICT = "verdict"
_OTHERS = (
    3  # so many times longer the others wait for rank 0, which itself may have to wait in its part and then for them
)


def doctor_distributed(
    config: Path | None, ranks: int | None, timeout: float, seconds: float, slow: float, out: Path | None
) -> int:
    """Prints the report on rank 0; the exit code is 0 when nothing is wrong, else 1.

    config: of the run that is to be begun; its bytes are compared, and it says how many ranks to start and on what they
    compute. timeout: seconds that a rank may be late in any step. seconds: how long pairs are measured. slow: the part
    of the median below which a pair is called slow. out: a JSON file for the report.

    Raises ConfigError where the number of ranks is not known.
    """
    if not 0 < timeout < float("inf") or seconds < 0 or not 0 <= slow <= 1:
        raise ConfigError("--timeout must be a positive number of seconds, --seconds at least 0, --slow 0 to 1")
    if launcher.under_launcher():
        return Examination(config, timeout, seconds, slow).run(out)
    if ranks is None and config is not None:
        loaded = load(config, [])
        unsettled(loaded, str(config), "doctor --distributed (or --ranks N)")
        ranks = loaded.world_size()
    if ranks is None or ranks < 1:
        raise ConfigError(
            "doctor --distributed: start it with torchrun, or say how many ranks to start on this machine: --ranks N, "
            "or --config FILE"
        )
    command = [sys.executable, *(word for word in sys.orig_argv[1:] if word)]
    with tempfile.TemporaryDirectory(prefix="interlace-doctor-") as folder:
        failure = launcher.RankProcesses(
            command, ranks, folder=Path(folder), timeout=2 * timeout + SLACK_SECONDS
        ).wait()
    if failure is None:
        return 0
    if failure.code != WRONG or failure.hung:  # else rank 0 has said it
        print(f"interlace: {failure}", file=sys.stderr)
    return launcher.USER_ERROR if failure.user_error else WRONG


class Stopped(Exception):
    """The examination cannot go on. `troubles`: why, known on rank 0 alone."""

    def __init__(self, troubles: Sequence[Trouble]) -> None:
        super().__init__("; ".join(trouble.what for trouble in troubles))
        self.troubles = list(troubles)


def _read(text: str, form: Any) -> Any:
    """What a peer said as JSON. Raises ValueError where it is not of the type `form`."""
    try:
        value = TypeAdapter(form).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError("says something of another form: do the ranks run one version of the program?") from error
    return value.model_dump() if isinstance(value, BaseModel) else value


class Meeting(Rounds):
    """The ranks, in steps that all of them take. `timeout`: seconds that one may be behind the others."""

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
        form: Callable[[int], Any] = lambda rank: None,
        told: Any = None,
    ) -> Any:
        """Every rank does its `work` (what it returns JSON can hold), and is told what rank 0 makes of all results.

        allowance: seconds that the work may take beside the timeout. form: rank -> type of what its work returns; told:
        of what rank 0 makes of it. Raises Stopped on all ranks when the work of one fails, or a rank says nothing, or
        what is of another form; on rank 0 it says which.
        """
        patience = self.timeout + allowance
        with self._limit(what, _OTHERS * patience + SLACK_SECONDS):
            value, failure = None, ""
            try:
                value = work()
            except (RuntimeError, OSError, ValueError) as error:
                failure = first_line(error) or type(error).__name__
            self.begin(what, [json.dumps(value), failure])
            if self.rank > 0:
                self._await([_VERDICT], [0], what, _OTHERS * patience)
                stop, answer = self.hear(_VERDICT, what, ["", ""])
                if stop:
                    raise Stopped([Trouble(stop, "")])
                try:
                    return _read(answer, told)
                except ValueError as error:
                    self._end(f"rank 0, {what}: {error}")
            troubles, values = [], [value]
            if failure:
                troubles.append(Trouble(f"rank 0, {what}: {failure}", "see the message of this rank"))
            silent = self._await(range(1, self.world), range(1, self.world), what, patience)
            if silent:
                text = f"no answer from {ranks_in_words(silent)} within {patience:g} s, {what}"
                troubles.append(Trouble(text, "look for these processes and their logs; slow ones need --timeout"))
            for rank in (rank for rank in range(1, self.world) if rank not in silent):
                try:
                    text, failure = self.hear(rank, what, ["", ""])
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
                self.say(_VERDICT, what, [str(stop), ""])
                raise
            self.say(_VERDICT, what, ["", json.dumps(answer)])
            return answer

    def _await(self, places: Iterable[int | str], ranks: Iterable[int], what: str, seconds: float) -> list[int]:
        """The ranks whose places are not filled within so many seconds. Ends this process when rank 0 is one of them:
        nobody is left to say more."""
        of, deadline, late = dict(zip(places, ranks, strict=True)), time.monotonic() + seconds, [0]

        class Late(Exception):
            pass

        def watch(missing: Sequence[int | str]) -> None:
            if time.monotonic() > deadline:
                late[:] = [of[place] for place in missing]
                raise Late

        try:
            self.wait_for(of, what, watch, slowest=0.2)
            return []
        except Late:
            if self.rank > 0:
                self._end(f"no answer from rank 0 within {seconds:g} s, {what}")
            return late

    def _asking(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._the_store_answers(what)

    @contextlib.contextmanager
    def _the_store_answers(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._end(f"lost rank 0, which holds the store, {what} ({first_line(error)})")

    @contextlib.contextmanager
    def _limit(self, what: str, seconds: float) -> Iterator[None]:
        before = self._what, self._until
        self._what, self._until = what, time.monotonic() + seconds
        yield
        self._what, self._until = before

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout / 4))
            if time.monotonic() > self._until:
                self._end(f"{self._what} took too long: a rank or the store of rank 0 hangs")

    def _end(self, text: str) -> NoReturn:
        print(f"interlace: rank {self.rank}: {text}", file=sys.stderr, flush=True)
        os._exit(WRONG)


class Examination:
    """One rank's part in it."""

    def __init__(self, config: Path | None, timeout: float, seconds: float, slow: float) -> None:
        self.config, self.timeout, self.seconds, self.slow = config, timeout, seconds, slow
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.report = Report(self.world, timeout)
        self.device = torch.device("cpu")

    def run(self, out: Path | None) -> int:
        """All steps; returns the exit code."""
        launcher.follow_launcher(self.timeout)
        meeting = Meeting(self.rank, self.world, self.timeout)
        good = False
        try:
            self._examine(meeting)
            good = meeting.step("ending", lambda: None, lambda _: not self.report.troubles, told=bool)
        except Stopped as stop:
            self.report.troubles += stop.troubles
            if self.rank == 0:
                time.sleep(min(2.0, self.timeout))  # it may hold the store, in which the others read why this ends
        if self.rank == 0:
            cluster_report.show(self.report)
            if out is not None:
                try:
                    cluster_report.write(self.report, out)
                except OSError as error:
                    print(f"interlace: --json {out}: cannot write there: {error.strerror or error}", file=sys.stderr)
                    good = False
        sys.stdout.flush()
        os._exit(0 if good else WRONG)  # a group whose ranks are lost would wait for them

    def _examine(self, meeting: Meeting) -> None:
        meeting.step("coming", lambda: None)
        one_each = Annotated[list[str], Field(min_length=self.world, max_length=self.world)]
        hosts = meeting.step(
            "reading its facts", self._facts, self._judge_facts, form=lambda _: cluster_facts.Form, told=one_each
        )
        if self.world == 1:
            return
        meeting.step(
            "comparing clocks", lambda: self._clock(meeting), self._judge_clocks,
            form=lambda rank: tuple[float, float] if rank else None,
        )  # fmt: skip
        backend = devices.backend(self.device.type)
        wait = timedelta(seconds=self.timeout)

        def join() -> None:
            store = dist.PrefixStore("doctor group", meeting.base)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=wait)

        meeting.step("making the process group", join, allowance=self.timeout)
        self._links(meeting, hosts)
        self._sums(meeting, hosts)

    # -- facts -----------------------------------------------------------------------------------------------

    def _facts(self) -> Facts:
        folder, wanted = Path("runs"), "auto"
        if self.config is not None:
            try:
                config = load(self.config, [], open_replicas=True)
            except ConfigError as error:
                raise ValueError(str(error)) from error
            folder, wanted = Path(config.run.folder), config.run.device
        try:
            kind = devices.choose(wanted, self.local_world, source=str(self.config or "doctor"))
        except ConfigError as error:
            raise ValueError(str(error)) from error
        self.device = devices.take(kind, self.local_rank, deterministic=False)
        return cluster_facts.gather(self.config, folder, kind, self.local_rank)

    def _judge_facts(self, facts: list[Facts]) -> list[str]:
        """The host of each rank. Ranks on different kinds of device have no process group, so that ends it."""
        troubles = cluster_facts.compare(facts)
        self.report.facts = facts
        if len({each["kind"] for each in facts}) > 1:
            raise Stopped(troubles)
        self.report.troubles += troubles
        self.report.notes += cluster_facts.settings_that_differ(facts)
        return [each["host"] for each in facts]

    # -- clocks ----------------------------------------------------------------------------------------------

    def _clock(self, meeting: Meeting) -> list[float] | None:
        """(how far this clock is ahead of rank 0's, the bound of that) in seconds, from the shortest of some questions.

        Rank 0 answers one rank after the other. The answer was given between question and receipt, in the middle of
        which it is taken to have been: so it is off by half of the time in between at most.
        """
        store = dist.PrefixStore("doctor clocks", meeting.base)
        if self.rank == 0:
            for rank in range(1, self.world):
                for number in range(PINGS):
                    key = f"{rank}/{number}"
                    try:
                        store.get(f"ask/{key}")
                    except RuntimeError as error:
                        for later in range(rank + 1, self.world):  # they need not wait for an answer
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
            if number and bound < best[1]:  # the first question waits for the ranks before
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

            def judge(found: list[Any], pairs: list[tuple[int, int]] = pairs) -> bool:
                self.report.links += [cluster_links.Link(*pair, *found[pair[0]]) for pair in pairs]
                return time.monotonic() - begin < self.seconds

            what = f"measuring pairs of ranks, round {number} of {len(rounds)}"
            measured = {rank for pair in pairs for rank in pair}

            def form(rank: int, measured: set[int] = measured) -> Any:
                return tuple[float, float] if rank in measured else None

            if not meeting.step(what, measure, judge, form=form, told=bool) and number < len(rounds):
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
        groups: dict[str, Any] = {}
        members = {host: [rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)}
        several = len(members) > 1
        wait = timedelta(seconds=self.timeout)

        def make() -> None:
            for host, ranks in members.items():  # every rank makes all groups, in one order
                if several and len(ranks) > 1:
                    groups[host] = dist.new_group(ranks, timeout=wait)

        def within() -> float | None:
            mine = hosts[self.rank]
            if mine not in groups:
                return None
            return cluster_links.measure_sum(groups[mine], len(members[mine]), self.device, self.timeout)

        def over_all() -> float:
            return cluster_links.measure_sum(None, self.world, self.device, self.timeout)

        def note(values: list[Any]) -> None:
            for host, ranks in members.items():
                if values[ranks[0]] is not None:
                    self.report.sums[host] = min(values[rank] for rank in ranks)

        if several:
            meeting.step("making the groups of hosts", make, allowance=self.timeout)
            alone = {rank for ranks in members.values() if len(ranks) == 1 for rank in ranks}
            meeting.step("summing within each host", within, note, form=lambda rank: None if rank in alone else float)
        meeting.step(
            "summing over all ranks", over_all, lambda found: self.report.sums.update({"": min(found)}),
            form=lambda _: float,
        )  # fmt: skip


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR is not set')}:{os.environ.get('MASTER_PORT', '')}"
