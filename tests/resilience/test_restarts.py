"""Runs of dummy ranks with a coordinator that is killed and restarted: every step has one decision on all ranks."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from interlace.cli import main
from interlace.resilience.coordinator.process import Coordinator
from interlace.resilience.environment import AWAY
from interlace.resilience.errors import ResilienceError
from interlace.resilience.link import Link
from interlace.resilience.settings import Settings
from tests.resilience.cluster import PATIENCE, Mortal, Mourned, cluster, vote_on_steps
from tests.sockets import unread

SETTINGS = Settings(nodes=4, faults=1, min_nodes=1, heartbeat=20.0, gather=60.0, patience=PATIENCE)
FOR_THE_DEAD = replace(SETTINGS, patience=8.0)  # it expires for a node that does not come back


def in_the_end(run: Mortal, steps: int) -> None:
    assert run.end() == 0, run.journal()[-5:]
    run.check_votes(steps)
    assert all(len(processes) == 1 for processes in run.ranks().values())
    assert run.journal("end")[-1]["why"] == "trained to the end" and run.journal("false alarm") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_coordinator_that_is_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    """At random moments, between votes and during them, for short or longer outages: no node is lost, and processes
    stay.
    """
    draw = random.Random(seed)
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 0, 0.1), 0, Mortal) as run:
        run.go_on()
        run.start(4)
        run.until(lambda: len(run.ranks()) == 4, "four nodes that train")
        before = run.ranks()
        for _ in range(5):
            time.sleep(draw.random() * 0.3)  # it may be killed before it has done anything
            run.kill_coordinator()
            time.sleep(draw.random() * 0.3)
            run.start_coordinator()
        in_the_end(run, run.finish())
        assert run.ranks() == before and run.journal("lost") == []
        assert len(run.journal("taken up")) == 5


def said_by_supervisors(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("supervisor-*"))


@pytest.mark.parametrize("dies", [False, True], ids=["all live", "and a node with it"])
def test_a_vote_that_was_decided_and_heard_by_nobody(tmp_path: Path, dies: bool) -> None:
    """The decision was written, so it counts, even if a voter is gone by then."""
    with cluster(tmp_path, FOR_THE_DEAD if dies else SETTINGS, (vote_on_steps, 30, 0.03), 0, Mortal) as run:
        run.kill_coordinator()  # the first one has no scheduled death
        run.start_coordinator(last_vote=9)
        run.start(4)
        run.until_dead()
        if dies:
            run.supervisors[0].kill()
        run.start_coordinator()
        assert run.end() == 0, run.journal()[-5:]
        counted = run.check_votes(30)
        assert counted[9] == 1 and counted[10] == (2 if dies else 1)
        assert [each["event"] for each in run.journal("lost")] == ["death"] * dies
        assert all(len(processes) == 1 for processes in run.ranks().values())


@pytest.mark.slow
def test_node_death_join_and_preemption_without_a_coordinator(tmp_path: Path) -> None:
    with cluster(tmp_path, FOR_THE_DEAD, (vote_on_steps, 0, 0.04), 0, Mortal) as run:
        run.go_on()
        run.start(4)
        run.until(lambda: len(run.ranks()) == 4, "four nodes that train")
        run.kill_coordinator()
        dead, asked = run.supervisors[:2]
        dead.kill()
        asked.terminate()
        (joiner,) = run.start()
        run.until(lambda: "leaves after this step" in said_by_supervisors(tmp_path), "a node that wants to leave")
        run.start_coordinator()
        run.until(lambda: run.journal("lost"), "loss of the one that died")
        assert "did not reconnect within 8 s after" in run.journal("lost")[0]["detail"]
        asked.join(PATIENCE)
        assert asked.exitcode == 128 + signal.SIGTERM
        run.until(lambda: len(run.ranks()) == 5, "a joiner that trains")
        in_the_end(run, run.finish())
        assert joiner.exitcode == 0 and len(run.journal("lost")) == 1


def test_it_may_die_before_anything_and_when_nodes_end(tmp_path: Path) -> None:
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 12, 0.02), 2, Mortal) as run:
        run.until(lambda: run.journal("came"), "first node")
        run.kill_coordinator(signal.SIGTERM)  # like a planned move: nodes wait as usual
        run.start_coordinator(last_vote=11)
        run.start(2)
        run.until_dead()  # before any node has the end of the run
        run.start_coordinator()
        in_the_end(run, 12)
        assert {node.exitcode for node in run.supervisors} == {0}


def test_nodes_wait_for_it_no_longer_than_they_should(tmp_path: Path) -> None:
    settings = replace(SETTINGS, patience=1.0)
    with cluster(tmp_path, settings, (vote_on_steps, 10_000, 0.02), 4, Mortal) as run:
        run.until(lambda: len(run.ranks()) == 4, "four nodes that train")
        pids = [pid for processes in run.ranks().values() for pid in processes]
        run.kill_coordinator()
        for node in run.supervisors:
            node.join(PATIENCE)
        assert [node.exitcode for node in run.supervisors] == [1] * 4
        assert "not restarted within 1 s (resilience.coordinator_patience)" in said_by_supervisors(tmp_path)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_without_a_state_nodes_end_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 10_000, 0.02), 4, Mourned) as run:
        run.until(lambda: len(run.ranks()) == 4, "four nodes that train")
        run.kill_coordinator()
        for node in run.supervisors:
            node.join(PATIENCE)
        assert [node.exitcode for node in run.supervisors] == [1] * 4
        said = said_by_supervisors(tmp_path)
        assert "training cannot continue without it: resume from the last checkpoint" in said
        assert "restart" not in said


def test_one_that_does_not_know_the_run_refuses_its_nodes(tmp_path: Path) -> None:
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 10_000, 0.02), 4, Mortal) as run:
        run.until(lambda: len(run.ranks()) == 4, "four nodes that train")
        run.kill_coordinator()
        (tmp_path / "state").unlink()
        run.start_coordinator()
        for node in run.supervisors:
            node.join(PATIENCE)
        assert [node.exitcode for node in run.supervisors] == [1] * 4
        assert "which this coordinator does not have: start the coordinator with the --state" in said_by_supervisors(
            tmp_path
        )


def test_restarted_coordinator_refuses_nodes_of_another_config(tmp_path: Path) -> None:
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 0, 0.02), 0, Mortal) as run:
        run.go_on()
        run.start(4)
        run.until(lambda: run.generations(), "first generation")
        run.kill_coordinator()
        run.start_coordinator()
        run.settings = replace(SETTINGS, nodes=5)
        (other,) = run.start()
        other.join(PATIENCE)
        assert other.exitcode == 3 and "start all nodes with the same config" in said_by_supervisors(tmp_path)
        run.supervisors.remove(other)
        in_the_end(run, run.finish())


def test_a_run_that_is_over_is_not_taken_up(tmp_path: Path) -> None:
    with cluster(tmp_path, replace(SETTINGS, nodes=2), (vote_on_steps, 3, 0.01), 2, Mortal) as run:
        in_the_end(run, 3)
    with pytest.raises(ResilienceError, match=r"has ended .*training is complete.*remove the file"):
        Coordinator("127.0.0.1", 0, state=tmp_path / "state")
    assert (
        main(["coordinator", "--port", "0", "--state", str(tmp_path / "state")]) == 2
    )  # nodes would not find it again


def test_supervisor_wakes_a_rank_waiting_on_a_silent_store(tmp_path: Path) -> None:
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 1, 0.0), 0, Mortal) as run:
        port = json.loads((tmp_path / "state").read_text())["store_port"]
        word = tmp_path / f"page{AWAY}"
        os.mkfifo(word)  # opening it for writing waits for a reader
        link = Link(f"127.0.0.1:{port}", PATIENCE, PATIENCE, tmp_path / "page")
        before, said, failed = link.store, threading.Event(), list[bool]()

        def ask() -> None:
            with pytest.raises(dist.DistNetworkError):
                before.check(["anything"])
            failed.append(said.is_set())

        run.stop_coordinator()
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        run.until(lambda: unread(port), "a question that waits for its answer")
        said.set()
        word.write_text("1")  # the first start
        asking.join(PATIENCE)
        assert failed == [True]
        run.kill_coordinator()
        run.start_coordinator()
        link.renew(before, "it was silent")
        assert link.store is not before and not link.store.check(["anything"])
        word.write_text("1")  # an answer for the previous start does not cut this one off
        run.until(lambda: not is_read(word), "end of reading")
        word.write_text("")  # when it is read again, the previous answer has been handled
        assert not link.store.check(["anything"])


def is_read(pipe: Path) -> bool:
    """True if a process has opened a named pipe for reading."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True
