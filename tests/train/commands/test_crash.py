"""`interlace doctor crash`: the faulty ranks, from hand-written files and from real channels; damaged files."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import cli
from interlace.comm.channels.base import Tag
from interlace.comm.channels.local import LocalChannel, LocalNetwork
from interlace.comm.process.errors import CommError
from interlace.train.commands.crash import read, report
from interlace.train.config.load import ConfigError

NOW = 1.7e9


def event(number: int, kind: str, what: str, ranks: list[int], end: float | None = None) -> dict[str, Any]:
    state = "waiting" if end is None else "done"
    return {
        "id": number, "kind": kind, "what": what, "ranks": ranks, "begin": NOW + number, "end": end, "state": state,
    }  # fmt: skip


def write(folder: Path, rank: int, *events: dict[str, Any], error: str = "lost", world: int = 4) -> None:
    table = {
        "version": 1, "rank": rank, "world": world, "host": "node-3", "pid": 77, "time": NOW + 60, "error": error,
        "events": list(events),
    }  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(table))


def test_a_dead_rank_at_the_end_of_a_chain(tmp_path: Path) -> None:
    """0 waits for 1, 1 for 2, 2 and 3 are in a sum with 1; rank 3 died. Rank 2 was in the sum, so it is not blamed."""
    write(tmp_path, 0, event(1, "receive", "a[0] chunk 1", [1]))
    write(tmp_path, 1, event(1, "all_reduce", "a", [1, 2, 3]), event(2, "wait", "a", [1, 2, 3]))
    done = event(0, "all_reduce", "a", [1, 2, 3], NOW + 0.5)  # of the previous step: not the one that rank 1 waits in
    write(tmp_path, 2, done, event(1, "all_reduce", "a", [1, 2, 3]), event(3, "compute", "B:a/0@3", []))
    crash = read(tmp_path)
    assert (crash.world, crash.missing, crash.cycle) == (4, [3], [])
    assert [(wait.rank, wait.peers) for wait in crash.waits] == [(0, [1]), (1, [3])]
    assert crash.culprits == [3]
    text = "\n".join(report(crash))
    assert text.startswith("likely cause: rank 3, which left no file (rank 1 waited for it): look at its log")
    assert "rank 0 waited for rank 1, receive a[0] chunk 1, since " in text and "(59.0 s)" in text
    assert "no file from rank 3: killed, hung" in text
    assert "compute B:a/0@3: not ended" in text and "rank 2 on node-3, process 77" in text
    assert "all_reduce a (ranks 1, 3): 500.0 ms" in text


def test_ranks_of_a_lane_wait_for_each_other_where_they_compute(tmp_path: Path) -> None:
    """Rank 2 computes with 1, which has not reached that operation; 0 with 3, which has: both are busy."""
    write(tmp_path, 0, event(1, "compute", "F:a/0@3", [0, 3]))
    write(tmp_path, 1, event(1, "compute", "F:b/0@1", []))
    write(tmp_path, 2, event(1, "compute", "F:b/0@2", [1, 2]))
    write(tmp_path, 3, event(1, "compute", "F:a/0@3", [0, 3]))
    crash = read(tmp_path)
    assert [(wait.rank, wait.peers) for wait in crash.waits] == [(2, [1])]
    assert crash.culprits[0] == 1


def test_a_rank_that_failed_by_itself(tmp_path: Path) -> None:
    """Its messages in flight were not received, but they did not block it."""
    write(tmp_path, 0, event(1, "exchange", "the loss", [0, 1]), world=2)
    busy = event(2, "compute", "F:a/0@3", [])
    write(tmp_path, 1, event(1, "send", "a[0] chunk 1", [0]), busy, error="out of memory", world=2)
    crash = read(tmp_path)
    assert crash.culprits == [1] and not crash.missing and not crash.cycle
    assert report(crash)[0] == (
        "likely cause: rank 1, which waited for nobody (rank 0 waited for it), in compute F:a/0@3: out of memory"
    )


def test_a_cycle_is_the_schedules_fault(tmp_path: Path) -> None:
    write(tmp_path, 0, event(1, "receive", "a[0] chunk 1", [1]))
    write(tmp_path, 1, event(1, "receive", "b[0] chunk 1", [2]))
    write(tmp_path, 2, event(1, "finish", "", [0]))
    write(tmp_path, 3, event(1, "receive", "a[0] chunk 1", [0]))
    crash = read(tmp_path)
    assert crash.cycle == [0, 1, 2] and not crash.culprits
    assert "wait for each other: rank 0 -> rank 1 -> rank 2 -> rank 0. Their lists" in report(crash)[0]


def test_damaged_files_are_told_and_not_executed(tmp_path: Path) -> None:
    class Executed:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    write(tmp_path, 0, event(1, "receive", "a[0] chunk 1", [1]), world=8)
    (tmp_path / "rank-1.json").write_bytes(pickle.dumps(Executed()))
    write(tmp_path, 2, event(1, "receive", "a", [2**40]))
    write(tmp_path, 3)
    (tmp_path / "rank-3.json").rename(tmp_path / "rank-4.json")
    (tmp_path / "rank-5.json").write_text("[" * 100000)
    with (tmp_path / "rank-6.json").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "rank-x.json").write_text("of something else")
    crash = read(tmp_path)
    assert not (tmp_path / "executed").exists()
    assert list(crash.dumps) == [0] and crash.missing == [1, 2, 3, 4, 5, 6, 7] and crash.culprits[0] == 1
    assert {name: why[:30] for name, why in crash.damaged.items()} == {
        "rank-1.json": "is damaged: Invalid JSON: expe",
        "rank-2.json": "is damaged: events.0.ranks.0: ",
        "rank-4.json": "says that it is of rank 3",
        "rank-5.json": "is damaged: Invalid JSON: recu",
        "rank-6.json": "has more than 16 MiB",
    }  # fmt: skip
    assert "rank-4.json: says that it is of rank 3" in report(crash)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["receive", "wait", "finish", "exchange", "compute", "send"]), st.sampled_from("ab"),
              st.lists(st.integers(0, 3), max_size=3), st.booleans()),
    max_size=4,
)  # fmt: skip


@settings(max_examples=60)
@given(st.dictionaries(st.integers(0, 3), EVENTS, min_size=1))
def test_any_files_give_a_verdict(tmp_path_factory: pytest.TempPathFactory, ranks: dict[int, Any]) -> None:
    folder = tmp_path_factory.mktemp("crash")
    for rank, events in ranks.items():
        rows = [event(i, *each[:3], NOW + i if each[3] else None) for i, each in enumerate(events)]
        write(folder, rank, *rows)
    crash = read(folder)
    after = {wait.rank: set(wait.peers) for wait in crash.waits}
    assert bool(crash.culprits) != bool(crash.cycle)
    assert not after.keys() & set(crash.culprits)
    for rank, following in zip(crash.cycle, [*crash.cycle[1:], *crash.cycle[:1]], strict=True):
        assert following in after[rank]
    assert report(crash)[0].startswith("likely cause: ")


def test_what_real_channels_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 2 fails by itself; 1 waits for it in a receive, 0 waits for 1 in a sum that began long before."""
    network = LocalNetwork(3, 0.5)

    def main(rank: int) -> None:
        here = LocalChannel(rank, network)
        try:
            if rank == 0:
                here.start_all_reduce(torch.ones(1), [0, 1], "gradients").wait()
            if rank == 1:
                here.receive(2, Tag("a", 0, 3, 3, False))
            if rank == 2:
                here.send(torch.ones(1), 0, Tag("a", 0, 1, 1, False))
                raise ValueError("a damaged image")
        except (CommError, ValueError) as error:
            here.recorder.dump(tmp_path, str(error))

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cli.main(["doctor", "crash", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    run = tmp_path / "run"
    shutil.copytree(tmp_path, run / "crash", ignore=shutil.ignore_patterns("run"))
    assert cli.main(["doctor", "crash", str(run)]) == 0 and capsys.readouterr().out == text
    assert text.startswith("likely cause: rank 2, which waited for nobody (rank 1 waited for it): a damaged image")
    assert "rank 0 waited for rank 1, wait REDUCE gradients, since" in text
    assert "rank 1 waited for rank 2, receive a[0] chunk 3, since" in text


def test_a_folder_without_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, says in ((tmp_path, "holds no rank-N.json"), (tmp_path / "none", "cannot be read: No such file")):
        with pytest.raises(ConfigError, match=says):
            read(folder)
        assert cli.main(["doctor", "crash", str(folder)]) == 2 and says in capsys.readouterr().err
