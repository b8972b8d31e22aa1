"""``interlace doctor crash RUN``: analysis of a failed run from the flight recorders of its ranks.

Every rank that could still write left ``rank-N.json`` (`interlace.comm.process.recorder`). An event that was begun and
not ended shows the peers that a rank waited for. The chain of these waits ends at a rank that waited for no other, or
that left no file: the likely culprit. Files are untrusted: they are checked against a schema, never executed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from interlace.comm.process.abort_reports import named
from interlace.resilience.supervisor.faults import reached
from interlace.train.config.load import ConfigError

LARGEST = 16 << 20  # bytes of a file
MOST_RANKS = 1 << 20
LAST = 5  # events shown per rank
_NAME = re.compile(r"rank-(\d{1,7})\.json")
_BLOCKING = ("receive", "exchange", "wait", "finish", "compute")  # blocking: the rank does nothing else until they end
_UNDER_WAY = ("send", "all_reduce", "reduce_scatter", "gather", "all_gather")  # asynchronous: the rank goes on
_SHOWN = 20  # ranks shown in a list
_Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Event(_Table):
    id: int = Field(ge=0)
    kind: str = Field(max_length=100)
    what: str = Field(max_length=1000)
    ranks: list[_Rank] = Field(max_length=MOST_RANKS)
    begin: float = Field(ge=0, allow_inf_nan=False)
    end: float | None = Field(ge=0, allow_inf_nan=False)
    state: Literal["done", "waiting"]

    def __str__(self) -> str:
        return f"{self.kind} {self.what}".strip()


class Dump(_Table):
    version: Literal[1]
    rank: _Rank
    world: int = Field(ge=0, le=MOST_RANKS)
    host: str = Field(max_length=1000)
    pid: int
    time: float = Field(ge=0, allow_inf_nan=False)
    error: str = Field(max_length=10000)
    events: list[Event] = Field(max_length=1_000_000)


class Wait(NamedTuple):
    """`rank` waited for `peers`, in `event`."""

    rank: int
    peers: list[int]
    event: Event


class Crash(NamedTuple):
    """Analysis of a folder.

    world: ranks of the run, as far as the files show. damaged: file name -> reason why it cannot be used. missing:
    ranks without a usable file. waits: of each rank that waited. culprits: likely ones, most likely first. cycle: ranks
    that wait for each other in this order; then no rank but their action lists are to blame.
    """

    world: int
    dumps: dict[int, Dump]
    damaged: dict[str, str]
    missing: list[int]
    waits: list[Wait]
    culprits: list[int]
    cycle: list[int]


def read(folder: Path) -> Crash:
    """Reads and analyses the files in `folder`. Raises ConfigError if it has none."""
    try:
        paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror or error}") from None
    if not paths:
        raise ConfigError(f"{folder}: holds no rank-N.json, which the ranks of a run leave when it fails")
    dumps: dict[int, Dump] = {}
    damaged: dict[str, str] = {}
    for path in paths:
        try:
            dump = _read(path)
        except (OSError, ValueError, RecursionError) as error:
            damaged[path.name] = str(error)
            continue
        dumps[dump.rank] = dump
    mentioned = [rank for dump in dumps.values() for event in dump.events for rank in event.ranks]
    named_by_files = [int(path.stem.removeprefix("rank-")) for path in paths]
    known = [each for each in (*mentioned, *named_by_files) if 0 <= each < MOST_RANKS]
    world = max([dump.world for dump in dumps.values()] + [rank + 1 for rank in known])
    missing = [rank for rank in range(world) if rank not in dumps]
    waits = [wait for dump in dumps.values() if (wait := _wait_of(dump, dumps)) is not None]
    culprits, cycle = _blame(missing, waits, dumps)
    return Crash(world, dumps, damaged, missing, waits, culprits, cycle)


def _read(path: Path) -> Dump:
    if path.stat().st_size > LARGEST:
        raise ValueError(f"has more than {LARGEST >> 20} MiB")
    try:
        dump = Dump.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"is damaged: {f'{place}: ' if place else ''}{first['msg']}"[:300]) from None
    if path.name != f"rank-{dump.rank}.json":
        raise ValueError(f"says that it is of rank {dump.rank}")
    return dump


def _wait_of(dump: Dump, dumps: Mapping[int, Dump]) -> Wait | None:
    """Peers that a rank waited for at its end. None: it was busy, failed by itself, or all peers had joined."""
    event = next((each for each in reversed(dump.events) if each.state == "waiting" and each.kind in _BLOCKING), None)
    if event is None:
        return None
    absent = [rank for rank in event.ranks if rank != dump.rank and not _came(event, dumps.get(rank), dump.rank)]
    return Wait(dump.rank, absent, event) if absent else None


def _came(event: Event, other: Dump | None, rank: int) -> bool:
    """True if another rank has joined the collective that `rank` waits in."""
    if other is None or rank not in event.ranks:  # for a message, `ranks` contains only the peer
        return False
    same = [each for each in other.events if (each.what, each.ranks) == (event.what, event.ranks)]
    return any(each.state == "waiting" or (each.end is not None and each.end >= event.begin) for each in same)


def _blame(missing: Sequence[int], waits: Sequence[Wait], dumps: Mapping[int, Dump]) -> tuple[list[int], list[int]]:
    """(ranks where chains of waits end, most waited for first; else a cycle of ranks)."""
    after = {wait.rank: set(wait.peers) for wait in waits}
    # End of a chain -> number of ranks that wait for it, directly or not.
    waiting_for = Counter(end for rank in after for end in reached(rank, after) if end not in after)
    ends = sorted({*waiting_for, *missing}, key=lambda rank: (-waiting_for[rank], rank not in missing, rank))
    if not ends:
        ends = [rank for rank in dumps if rank not in after]
    if ends or not after:
        return ends, []
    path = [min(after)]
    while (following := min(after[path[-1]])) not in path:
        path.append(following)
    return [], path[path.index(following) :]


def report(crash: Crash) -> list[str]:
    """Lines of the report, the verdict first."""
    lines = [*_verdict(crash), ""]
    lines += [f"{name}: {why}" for name, why in crash.damaged.items()]
    if crash.missing:
        lines.append(f"no file from {_some(crash.missing)}: killed, hung, or on a machine that was lost")
    lines += ["", "who waited for whom:"]
    for wait in crash.waits:
        seconds = crash.dumps[wait.rank].time - wait.event.begin
        lines.append(
            f"  rank {wait.rank} waited for {_some(wait.peers)}, {wait.event}, since {_clock(wait.event.begin)} "
            f"({seconds:.1f} s)"
        )
    if not crash.waits:
        lines.append("  nobody for anybody")
    for rank, dump in sorted(crash.dumps.items()):
        lines += ["", f"rank {rank} on {dump.host}, process {dump.pid}, ended at {_clock(dump.time)}: {dump.error}"]
        for event in dump.events[-LAST:]:
            how = "not ended" if event.end is None else f"{1e3 * (event.end - event.begin):.1f} ms"
            others = [other for other in event.ranks if other != rank]
            whom = f" ({_some(others)})" if others else ""
            lines.append(f"  {_clock(event.begin)} {event}{whom}: {how}")
    return lines


def _verdict(crash: Crash) -> list[str]:
    if crash.cycle:
        ring = " -> ".join(f"rank {rank}" for rank in (*crash.cycle, crash.cycle[0]))
        return [f"likely cause: these ranks wait for each other: {ring}. Their lists of actions contradict each other."]
    lines = []
    for rank in crash.culprits[:3]:
        waiting = [wait.rank for wait in crash.waits if rank in wait.peers]
        waited = f"{_some(waiting)} waited for it" if waiting else "nobody waited for it"
        if rank in crash.missing:
            lines.append(f"likely cause: rank {rank}, which left no file ({waited}): look at its log and its machine")
        else:
            dump = crash.dumps[rank]
            busy = [event for event in dump.events if event.state == "waiting" and event.kind not in _UNDER_WAY]
            last = f", in {busy[-1]}" if busy else ""
            lines.append(f"likely cause: rank {rank}, which waited for nobody ({waited}){last}: {dump.error}")
    return lines


def _some(ranks: Sequence[int]) -> str:
    more = len(ranks) - _SHOWN
    return named(ranks[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}"
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"


def crash(options: argparse.Namespace) -> int:
    """Prints the report of a run folder or its crash/; exit code 0. Raises ConfigError if it has no files to read."""
    inside = options.folder / "crash"
    for line in report(read(inside if inside.is_dir() else options.folder)):
        print(line)
    return 0
