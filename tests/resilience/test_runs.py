"""Whole elastic runs of dummy ranks: nodes die, hang, leave and join. Every step has one decision on all ranks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlace.resilience.environment import ERROR, PROGRESS
from interlace.resilience.errors import ResilienceError
from interlace.resilience.member import Member
from interlace.resilience.settings import Settings
from interlace.resilience.supervisor.process import Supervisor
from tests.resilience.cluster import cluster, vote_on_steps

SETTINGS = Settings(nodes=4, faults=1, min_nodes=1, heartbeat=20.0, gather=60.0)


def nodes_of(generation: dict[str, Any]) -> list[str]:
    return [node for pipeline in generation["pipelines"] for node in pipeline]


def kill(process: int, number: int = signal.SIGKILL) -> None:
    os.kill(process, number)


def test_a_death_a_join_and_a_preemption(tmp_path: Path) -> None:
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 0, 0.05), 0) as run:
        run.go_on()
        run.start(4)
        run.until(lambda: len(run.ranks()) == 4, "four nodes that train")
        first = run.generations()[0]["pipelines"]
        before = run.ranks()
        victim = first[0][0]
        kill(before[victim][0])
        second = run.until(lambda: run.generations()[1:], "generation without the victim")[0]
        assert sorted(nodes_of(second)) == sorted(node for node in before if node != victim)
        assert second["cause"] == [f"death {victim}"]
        (joiner,) = run.start()
        third = run.until(lambda: run.generations()[2:], "generation with the joiner")[0]
        assert len(nodes_of(third)) == 4 and len(third["cause"]) == 1
        run.until(lambda: len(run.ranks()) == 5, "a joiner that trains")
        run.until(lambda: not all(each.is_alive() for each in run.supervisors), "end of the victim's supervisor")
        leaver = next(each for each in run.supervisors if each.is_alive() and each is not joiner)
        leaver.terminate()
        fourth = run.until(lambda: run.generations()[3:], "generation without the leaver")[0]
        assert fourth["leaving"] == [fourth["cause"][0].removeprefix("leave ")]
        assert fourth["leaving"][0] not in nodes_of(fourth)
        run.until(lambda: leaver.exitcode is not None, "end of the leaver")
        steps = run.finish()
        assert run.end() == 0
        assert leaver.exitcode == 128 + signal.SIGTERM and joiner.exitcode == 0
        assert sorted(each.exitcode for each in run.supervisors) == [0, 0, 0, 1, 128 + signal.SIGTERM]
        counted = run.check_votes(steps)
        assert set(counted.values()) <= {1, 2, 3, 4} and counted[steps - 1] == 4
        after = run.ranks()
        assert all(len(processes) == 1 for processes in after.values()) and after.items() >= before.items()


def test_stopped_rank_is_removed_and_its_waiting_peers_stay(tmp_path: Path) -> None:
    settings = Settings(nodes=3, faults=1, min_nodes=1, heartbeat=2.0, gather=60.0)
    with cluster(tmp_path, settings, (vote_on_steps, 0, 0.02), 0) as run:
        run.go_on()
        run.start(3)
        run.until(lambda: len(run.ranks()) == 3, "three nodes that train")
        before = run.ranks()
        victim = sorted(before)[1]
        kill(before[victim][0], signal.SIGSTOP)
        second = run.until(lambda: run.generations()[1:], "generation without the stopped rank")[0]
        assert second["cause"] == [f"hang {victim}"]
        assert sorted(nodes_of(second)) == sorted(node for node in before if node != victim)
        steps = run.finish()
        assert run.end() == 0
        run.check_votes(steps)
        assert run.coordinator.false_alarms == 0 and run.ranks() == before
        assert "its process is stopped" in run.journal("lost")[0]["detail"]


def test_a_supervisors_death_is_its_nodes(tmp_path: Path) -> None:
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 0, 0.04), 0) as run:
        run.go_on()
        run.start(4)
        run.until(lambda: len(run.ranks()) == 4, "four nodes that train")
        before = run.ranks()
        run.supervisors[0].kill()
        second = run.until(lambda: run.generations()[1:], "generation without the node")[0]
        lost = second["cause"][0].removeprefix("death ")
        assert run.journal("lost")[0]["node"] == lost
        run.until(lambda: not Path(f"/proc/{before[lost][0]}").exists(), "end of the orphaned rank")
        steps = run.finish()
        assert run.end() == 0
        run.check_votes(steps)


def test_too_few_save_and_stop(tmp_path: Path) -> None:
    settings = Settings(nodes=2, faults=1, min_nodes=1, heartbeat=20.0, gather=60.0)
    with cluster(tmp_path, settings, (vote_on_steps, 10_000, 0.02), 2) as run:
        run.until(lambda: len(run.ranks()) == 2, "two nodes that train")
        victim, survivor = sorted(run.ranks())
        kill(run.ranks()[victim][0])
        last = run.until(lambda: run.generations()[1:], "last generation")[0]
        assert last["of"] == "save" and last["pipelines"] == [[survivor]]
        assert run.end() == 1
        assert "too few nodes" in run.journal("end")[0]["why"]


def test_preempting_all_nodes_saves_the_run_and_exits_by_signal(tmp_path: Path) -> None:
    settings = Settings(nodes=2, faults=1, min_nodes=1, heartbeat=20.0, gather=60.0)
    with cluster(tmp_path, settings, (vote_on_steps, 10_000, 0.02), 2) as run:
        run.until(lambda: len(run.ranks()) == 2, "two nodes that train")
        for node in run.supervisors:
            node.terminate()
        assert run.end() == 128 + signal.SIGTERM
        assert run.generations()[-1]["of"] == "save" and run.journal("lost") == []
        assert "nodes were asked to leave" in run.journal("end")[0]["why"]
        assert [node.exitcode for node in run.supervisors] == [128 + signal.SIGTERM] * 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_votes_are_unanimous_under_random_deaths(tmp_path: Path, seed: int) -> None:
    settings = Settings(nodes=4, faults=0, min_nodes=1, heartbeat=5.0, gather=60.0, ranks_per_node=2)
    with cluster(tmp_path, settings, (vote_on_steps, 10_000, 0.004, 0.02), 4) as run:

        def replace() -> None:
            """As many nodes as are lost come back, so that some are left at the end."""
            lost = len(run.journal("lost"))
            if lost > len(run.supervisors) - 4:
                run.start(lost - (len(run.supervisors) - 4))

        run.until(lambda: replace() or len(run.journal("lost")) >= 5 or run.code is not None, "five lost nodes")
        steps = run.finish()
        run.until(lambda: replace() or run.code is not None, "end of the run")
        assert run.end() == (0 if run.journal("end")[0]["why"] == "trained to the end" else 1)
        assert len(run.journal("lost")) >= 5 or run.code == 1  # 1: all nodes died at once
        run.check_votes(steps if run.code == 0 else None)


def test_an_unreachable_coordinator_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.resilience.supervisor.process.WELCOME", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    node = Supervisor(address, [], SETTINGS, host="host", logs=tmp_path)
    with pytest.raises(ResilienceError, match=f"no coordinator answers at {address}.*interlace coordinator"):
        node.run()
    with pytest.raises(ResilienceError, match="not host:port"):
        Supervisor("nonsense", [], SETTINGS, host="host", logs=tmp_path).run()


def test_what_is_no_coordinator_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.resilience.supervisor.process.WELCOME", 5.0)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ResilienceError, match="does not use this protocol"):
            Supervisor(address, [], SETTINGS, host="host", logs=tmp_path).run()
        thread.join()


def test_nodes_of_another_config_are_refused(tmp_path: Path) -> None:
    with cluster(tmp_path, SETTINGS, (vote_on_steps, 1, 0.05), 1) as run:
        run.until(lambda: run.journal("came"), "first node")
        run.settings = Settings(nodes=5, faults=1, min_nodes=1, heartbeat=20.0, gather=60.0)
        (other,) = run.start()
        other.join(60.0)
        assert other.exitcode == 3
        output = "".join(path.read_text() for path in tmp_path.glob("supervisor-*"))
        assert "start all nodes with the same config" in output and len(run.journal("came")) == 1


def give_up_once(folder: Path, steps: int) -> None:
    """A rank that votes; in generation 1 the first rank aborts without a visible reason."""
    member = Member.from_environment(60.0)
    generation = member.next_generation(0, 60.0)
    (folder / f"{member.node}-{os.getpid()}").write_text("")
    if generation.number == 1 and member.rank(generation) == 0:
        member.abort(generation, "a message was lost")
        generation = member.next_generation(1, 60.0)
    for step in range(steps):
        if member.vote(generation, step) == "abort":
            generation = member.next_generation(generation.number, 60.0)
            assert member.vote(generation, step) == "commit"


def test_when_a_rank_gives_up_and_none_is_lost_all_meet_again(tmp_path: Path) -> None:
    settings = Settings(nodes=2, faults=1, min_nodes=1, heartbeat=3.0, gather=60.0)
    with cluster(tmp_path, settings, (give_up_once, 3), 2) as run:
        assert run.end() == 0
        first, second = run.generations()
        assert second["pipelines"] == first["pipelines"] and second["cause"] == ["failure"]
        assert run.journal("lost") == [] and run.coordinator.false_alarms == 0


def give_up_always(folder: Path) -> None:
    member = Member.from_environment(60.0)
    generation = member.next_generation(0, 60.0)
    while True:
        member.abort(generation, "a message was lost")
        generation = member.next_generation(generation.number, 60.0)


@pytest.mark.slow
def test_repeated_give_ups_end_the_run_with_their_reason(tmp_path: Path) -> None:
    settings = Settings(nodes=2, faults=1, min_nodes=1, heartbeat=2.0, gather=60.0)
    with cluster(tmp_path, settings, (give_up_always,), 2) as run:
        assert run.end() == 1
        assert "4 times in a row" in run.journal("end")[0]["why"]
        assert "a message was lost" in run.journal("end")[0]["why"]


def fail_at_step(folder: Path, step: int) -> None:
    """A rank that votes, and fails on the data of a step."""
    member = Member.from_environment(60.0)
    generation = member.next_generation(0, 60.0)
    (folder / f"{member.node}-{os.getpid()}").write_text("")
    for before in range(step):
        assert member.vote(generation, before) == "commit"
    while True:
        if generation.ranks_of(member.node)[0] == 0:  # one rank reads the record, then the next one
            Path(os.environ[PROGRESS] + ERROR).write_text("DecodeError: record 17 of chats.jsonl is broken")
            raise ValueError("what else a process says when it ends")
        generation = member.next_generation(generation.number, 60.0)


def test_an_error_that_the_next_node_has_too_ends_the_run(tmp_path: Path) -> None:
    """For any number of remaining nodes and any number of restarts."""
    with cluster(tmp_path, SETTINGS, (fail_at_step, 3), 4) as run:
        assert run.end() == 1
        assert len(run.generations()) == 2 and len(run.journal("lost")) == 2
        why = run.journal("end")[0]["why"]
        assert why.count("record 17 of chats.jsonl is broken") == 1 and "continue with --resume" in why
        assert "what else" not in why


def fail_at_once(folder: Path) -> None:
    """A rank that fails before any generation, if its node's kind gets that far."""
    (folder / f"x-{os.getpid()}").touch()
    while len(list(folder.glob("x-*"))) < 3:
        time.sleep(0.01)
    if sorted(folder.glob("x-*"))[0].name != f"x-{os.getpid()}":
        Path(os.environ[PROGRESS] + ERROR).write_text("DecodeError: chats.jsonl is broken")
        raise ValueError("what else a process says when it ends")
    Member.from_environment(60.0).next_generation(0, 60.0)


def test_error_before_the_first_generation_ends_the_run(tmp_path: Path) -> None:
    """The run ends without waiting for further nodes."""
    settings = Settings(nodes=3, faults=0, min_nodes=1, heartbeat=5.0, gather=60.0)
    with cluster(tmp_path, settings, (fail_at_once,), 3) as run:
        assert run.end() == 1
        assert "chats.jsonl is broken" in run.journal("end")[0]["why"] and run.generations() == []
        assert [each.exitcode for each in run.supervisors] == [1, 1, 1]


def end_the_run(folder: Path) -> None:
    member = Member.from_environment(60.0)
    generation = member.next_generation(0, 60.0)
    if member.rank(generation) == 1:
        member.end("no rank has layer 3")
        raise ResilienceError("no rank has layer 3")
    member.next_generation(generation.number, 60.0)


def test_a_rank_that_ends_the_run_is_heard_by_all(tmp_path: Path) -> None:
    """No rank trains on without it, and the coordinator reports its message, not a lost node."""
    settings = Settings(nodes=3, faults=0, min_nodes=1, heartbeat=5.0, gather=60.0)
    with cluster(tmp_path, settings, (end_the_run,), 3) as run:
        assert run.end() == 1
        assert run.journal("end")[0]["why"] == "no rank has layer 3" and len(run.generations()) == 1
        assert [each.exitcode for each in run.supervisors] == [1, 1, 1]


@pytest.mark.slow
def test_a_node_that_cannot_leave_in_time_is_lost(tmp_path: Path) -> None:
    with cluster(tmp_path, replace(SETTINGS, nodes=3), (vote_on_steps, 0, 0.05), 0) as run:
        run.go_on()
        nodes = [*run.start(1, notice=0.2), *run.start(2)]
        run.until(lambda: len(run.ranks()) == 3, "three nodes that train")
        with run.held(3):
            nodes[0].terminate()  # the step lasts longer than the notice period
            run.until(lambda: nodes[0].exitcode is not None, "end of the node")
        second = run.until(lambda: run.generations()[1:], "generation without the node")[0]
        assert [cause.split()[0] for cause in second["cause"]] == ["death"] and second["leaving"] == []
        steps = run.finish()
        assert run.end() == 0
        assert sorted(each.exitcode for each in nodes) == [0, 0, 1]
        run.check_votes(steps)
