"""The lock of a run folder: one job at a time, named. Dead jobs are replaced: on this host at once, on others after a
timeout.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from interlace.train.config.load import ConfigError
from interlace.train.errors import TrainingError
from interlace.train.launch import lock as locks

HOLD = """
import sys, time
from pathlib import Path
from interlace.train.launch import lock
held = lock.take(Path(sys.argv[1]))
print(held.nonce, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.6)


def _from_another_machine(folder: Path) -> locks.RunLock:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "_machine", lambda: "another boot")
        patch.setattr(locks.platform, "node", lambda: "far")
        return locks.take(folder)


def _dies(held: locks.RunLock) -> None:
    """A job that ends without releasing its lock."""
    held.over.set()
    held.thread.join()
    os.close(held.handle)


def test_one_job_holds_a_folder_and_is_named(tmp_path: Path) -> None:
    with locks.take(tmp_path) as held:
        held.check()
        with pytest.raises(ConfigError) as refused:
            locks.take(tmp_path)
        for part in (str(tmp_path), f"process {os.getpid()} on ", " UTC", "--take-over"):
            assert part in str(refused.value)
    assert not list(tmp_path.iterdir())
    locks.take(tmp_path).release()


def test_a_job_that_died_here_is_replaced_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {holder.pid} on"):
            locks.take(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    lines: list[str] = []
    with locks.take(tmp_path, say=lines.append) as held:
        held.check()
    assert lines == [] and not list(tmp_path.iterdir())


def test_a_reused_process_id_is_another_process(tmp_path: Path) -> None:
    held = locks.take(tmp_path)
    _dies(held)
    (tmp_path / locks.NAME).write_text(json.dumps({**held.record, "started": held.record["started"] - 1}) + "\n")
    locks.take(tmp_path).release()


def test_remote_run_lock_is_refused_if_live_and_taken_if_stale(tmp_path: Path) -> None:
    far = _from_another_machine(tmp_path)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "STALE_SECONDS", 60.0)  # its next heartbeat ends the wait, however late
        with pytest.raises(ConfigError, match=r"in use by process \d+ on far"):
            locks.take(tmp_path, say=lines.append)
    assert len(lines) == 1 and "held by process" in lines[0]
    far.over.set()  # it hangs, or its machine is gone
    far.thread.join()
    began = time.monotonic()
    with locks.take(tmp_path, say=lines.append) as held:
        assert time.monotonic() - began >= locks.STALE_SECONDS
        held.check()
        with pytest.raises(TrainingError, match=f"taken over by process {os.getpid()} on"):
            far.check()  # back again: it must not write any more
    os.close(far.handle)


def test_take_over_replaces_a_live_lock_and_informs_its_holder(tmp_path: Path) -> None:
    first = locks.take(tmp_path)
    second = locks.take(tmp_path, take_over=True)
    deadline = time.monotonic() + 60
    while not first.trouble and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "was taken over by" in first.trouble
    first.release()
    second.check()  # the end of the first job has not removed the lock of the second
    second.release()
    third = locks.take(tmp_path)
    (tmp_path / locks.NAME).unlink()
    with pytest.raises(TrainingError, match="was removed, so another job may use"):
        third.check()
    third.release()


def test_the_lock_lasts_as_long_as_any_process_of_the_job(tmp_path: Path) -> None:
    """A killed launcher leaves its ranks, which save and end: until then they hold the folder."""
    held = locks.take(tmp_path)
    rank = locks.join(tmp_path, held.nonce)
    held.release()
    rank.check()
    with pytest.raises(ConfigError, match="in use by"):
        locks.take(tmp_path)
    _dies(rank)
    (tmp_path / locks.NAME).unlink()
    with pytest.raises(TrainingError, match="cannot open"):
        locks.join(tmp_path, held.nonce)
    with locks.take(tmp_path), pytest.raises(TrainingError, match="was taken over by"):
        locks.join(tmp_path, held.nonce)


@pytest.mark.parametrize("contents", [b"", b"{", b"[1]\n", b"\0" * 4096, b'{"nonce": 3}\n', b"[" * 5000])
def test_a_damaged_lock_is_replaced_when_it_stands_still(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / locks.NAME).write_bytes(contents)
    lines: list[str] = []
    locks.take(tmp_path, say=lines.append).release()
    assert "a job that left a damaged run.lock" in lines[0]


def test_a_claim_that_nobody_gives_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "CLAIM_SECONDS", 0.5)
    (tmp_path / locks.NAME).write_bytes(b"damaged")
    claim = tmp_path / f"{locks.NAME}.damaged.claim"
    claim.touch()
    with pytest.raises(ConfigError, match=f"if no such job exists, remove {claim}"):
        locks.take(tmp_path)
    assert (tmp_path / locks.NAME).read_bytes() == b"damaged" and claim.exists()


@pytest.mark.parametrize("failure", [errno.EPERM, errno.EOPNOTSUPP])
def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int) -> None:
    def no_links(*_: object) -> None:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(os, "link", no_links)
    with locks.take(tmp_path), pytest.raises(ConfigError, match="in use by"):
        locks.take(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_link_that_nfs_reports_as_failed_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def made_twice(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", made_twice)
    with locks.take(tmp_path) as held:
        held.check()


def test_of_many_who_take_a_dead_lock_over_one_gets_it(tmp_path: Path) -> None:
    _dies(_from_another_machine(tmp_path))
    taken: list[locks.RunLock] = []
    refused: list[str] = []
    start = threading.Barrier(8)

    def job() -> None:
        start.wait()
        try:
            taken.append(locks.take(tmp_path))
        except ConfigError as error:
            refused.append(str(error))

    for _ in range(5):
        threads = [threading.Thread(target=job) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1 and len(refused) == 7 and all("is in use by process" in line for line in refused)
        held = taken.pop()
        held.check()
        _dies(held)
        (tmp_path / locks.NAME).write_text(json.dumps({**held.record, "machine": "another boot"}) + "\n")
        refused.clear()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write in the run folder"):
        locks.take(tmp_path / "missing")


def test_release_keeps_a_lock_that_is_being_taken_over(tmp_path: Path) -> None:
    held = locks.take(tmp_path)
    (tmp_path / f"{locks.NAME}.{held.nonce}.claim").touch()
    held.release()
    assert (tmp_path / locks.NAME).exists()


def test_a_lock_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        with pytest.raises(ConfigError, match=r"cannot lock the run folder .*: Permission denied"):
            locks.take(tmp_path)
    (tmp_path / locks.NAME).symlink_to(tmp_path / "nothing")
    monkeypatch.setattr(locks, "STALE_SECONDS", 0.1)
    monkeypatch.setattr(locks, "CLAIM_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="cannot be read"):
        locks.take(tmp_path)
