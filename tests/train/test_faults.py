"""Storage failures: each stage of a checkpoint on each rank, by errors, by hangs, by folders that are not shared.

After each fault every rank has ended with an error that names the cause. No checkpoint is mixed or incomplete, and the
run resumes from the newest complete one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from interlace.train import runfolder
from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint import folder as checkpointfolder
from interlace.train.checkpoint import storage
from interlace.train.checkpoint.identity import identity_of
from interlace.train.config.load import ConfigError
from interlace.train.errors import TrainingError
from interlace.train.launch import launcher
from interlace.train.launch.peers import Peers
from tests.distributed.workers import run_ranks

RANKS = 1
SHARED = "shared"  # the parameter held by every rank, as by data-parallel replicas


def use_ranks(world: int) -> None:
    """In its own process: sets the number of ranks of the model."""
    global RANKS
    RANKS = world


@pytest.fixture(autouse=True)
def nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 0.0)


def patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (ck, checkpointfolder):
        monkeypatch.setattr(module, "LATE_SECONDS", seconds)


class Unplugged(BaseException):
    """A library error that is not an Exception."""


def full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def unplugged(*_: Any, **__: Any) -> Any:
    raise Unplugged("the disk is gone")


def checkpoint_exception(*_: Any, **__: Any) -> Any:
    raise CheckpointException("write", {0: (OSError(5, "Input/output error"), None)})  # type: ignore[dict-item]


def half_written(path: Path, tensors: Any) -> Any:
    path.write_bytes(b"\x10")
    raise OSError(5, "Input/output error")


CAUSES = {
    full: "No space left on device",
    unplugged: "Unplugged: the disk is gone",
    checkpoint_exception: "CheckpointException",
    half_written: "Input/output error",
}
STAGES: list[tuple[str, Any, str, list[int], list[Callable[..., Any]]]] = [
    ("prepare", ck.Checkpoints, "_begin", [0], [full, unplugged]),
    ("share out", ck, "parts_of", [0, 2], [full, unplugged, checkpoint_exception]),
    ("write", ck, "write_tensors", [0, 1, 2], [full, unplugged, checkpoint_exception, half_written]),
    ("read back", ck, "digest", [0], [full, unplugged]),
    ("finish", ck, "write_synced", [0], [full, checkpoint_exception]),
    ("sync", ck, "sync_folder", [0], [full]),
    ("make visible", ck, "replace", [0], [full, unplugged]),
]


def whole_model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.ParameterDict({SHARED: torch.randn(5, 4)})
    model.update({f"of{rank}": nn.Parameter(torch.randn(3, 2 + rank)) for rank in range(RANKS)})
    return model


def checkpoints(folder: Path, peers: Peers | None = None) -> ck.Checkpoints:
    return ck.Checkpoints(folder, keep=5, identity=identity_of(whole_model(), {}), peers=peers)


def save(store: ck.Checkpoints, step: int) -> Path:
    """Saves weights that encode their step."""
    model = whole_model()
    mine = {name: p.detach() + step for name, p in model.named_parameters() if name in (SHARED, f"of{store.rank}")}
    return store.save(step, mine, {f"exp_avg.{name}": 2 * tensor for name, tensor in mine.items()}, {"place": step})


def check_newest(folder: Path, step: int) -> None:
    """In one process, as in `generate`: the newest checkpoint is that of `step`, and it is complete."""
    path = checkpointfolder.newest(folder)
    assert path is not None and path.name == checkpointfolder.name_of(step), path
    model = whole_model()
    assert ck.load_parameters(path, model, identity_of(model, {})) == step
    for name, parameter in whole_model().named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter + step), name


def every_stage_fails_once(rank: int, folder: str, world: int) -> list[tuple[str, str, str]]:
    """(stage, failing rank and cause, error on this rank) of each fault."""
    use_ranks(world)
    store = checkpoints(Path(folder), Peers(30.0))
    save(store, 1)
    lines, step = [], 1
    for stage, owner, name, ranks, faults in STAGES:
        for victim in (each for each in ranks if each < world):
            for fault in faults:
                with pytest.MonkeyPatch.context() as patch:
                    if rank == victim:
                        patch.setattr(owner, name, fault)
                    words = "nothing"
                    try:
                        save(store, step + 1)
                    except TrainingError as error:
                        words = str(error)
                    lines.append((stage, f"{victim} {CAUSES[fault]}", words))
                if rank == 0:
                    check_newest(store.folder, step)
        # The next attempt ignores leftovers, and the run resumes from there.
        step += 1
        path = save(store, step)
        mine = {name: torch.zeros_like(p) for name, p in whole_model().named_parameters() if name != SHARED}
        assert store.newest() == path and store.load(path, mine, {})["place"] == step
        if rank == 0:
            check_newest(store.folder, step)
            assert not list(store.folder.glob(".*"))
    return lines


def check_told(told: list[tuple[str, str, str]], world: int) -> None:
    assert len(told) == sum(len(faults) * sum(rank < world for rank in ranks) for *_, ranks, faults in STAGES)
    for stage, cause, words in told:
        victim, what = cause.split(" ", 1)
        assert f"rank {victim}: " in words and what in words, (stage, cause, words)


def test_a_fault_in_any_stage_ends_the_save_with_its_cause(tmp_path: Path) -> None:
    check_told(every_stage_fails_once(0, str(tmp_path), 1), 1)


@pytest.mark.slow
def test_fault_in_any_stage_ends_all_ranks_with_its_cause(tmp_path: Path) -> None:
    for kind, told in run_ranks(3, every_stage_fails_once, str(tmp_path), 3, timeout=240):
        assert kind == "returned", told
        check_told(told, 3)


def hangs_once(rank: int, folder: str, private: bool) -> str:
    """Rank 1 is away for longer than the others wait; with `private`, each rank sees only its own folder."""
    use_ranks(2)
    ck.LATE_SECONDS = checkpointfolder.LATE_SECONDS = 0.5
    place = Path(folder) / (f"node{rank}" if private else "shared")
    dist.barrier()
    store = checkpoints(place, Peers(60.0))
    write = ck.write_tensors

    def late(path: Path, tensors: Any) -> Any:
        time.sleep(8.0)
        return write(path, tensors)

    if not private:
        save(store, 1)
        store = checkpoints(place, Peers(2.0, allowance=1.0))
        dist.barrier()
        if rank == 1:
            ck.write_tensors = late
    try:
        save(store, 2)
    except TrainingError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_rank_with_hanging_storage_is_named_by_the_others(tmp_path: Path) -> None:
    results = run_ranks(2, hangs_once, str(tmp_path), False, timeout=120)
    assert results[0][0] == results[1][0] == "returned", results
    assert "rank 0, writing checkpoint step-00000002: lost rank 1 (no answer within 3 s" in results[0][1]
    assert "lost rank 0" in results[1][1]  # it had aborted by then
    path = checkpointfolder.newest(tmp_path / "shared")
    assert path is not None and path.name == "step-00000001" and checkpointfolder.complete(path.parent) == [path]


@pytest.mark.slow
def test_folders_of_their_own_leave_no_checkpoint(tmp_path: Path) -> None:
    """Simulated: each rank has another folder. (With real file systems: below.)"""
    results = run_ranks(2, hangs_once, str(tmp_path), True, timeout=120)
    for kind, words in results:
        assert kind == "returned" and "rank 1 on " in words, (kind, words)
        assert "put run.folder on a file system that all nodes share" in words, words
    assert not [path for path in tmp_path.rglob("step-*") if path.name[0] != "."]


# --- ranks on different file systems --------------------------------------------------------------------------

ON_ITS_OWN = """
import os, sys
from pathlib import Path
from interlace.train import runfolder
from interlace.train.checkpoint import checkpoints as ck, folder as checkpointfolder
from interlace.train.config.load import ConfigError
from interlace.train.errors import TrainingError
from interlace.train.launch.startup import Startup
from interlace.train.launch.peers import Peers
from tests.train import test_faults as faults
faults.use_ranks(2)
ck.LATE_SECONDS = checkpointfolder.LATE_SECONDS = 0.5
runfolder.PROBE_SECONDS = 0.5
folder = Path(sys.argv[1])
startup = Startup(int(os.environ["RANK"]), 2, 30.0)
try:
    runfolder.check_shared(folder, startup)
    print("SHARED", flush=True)
except ConfigError as error:
    print("PROBE", error, flush=True)
startup.close()
try:
    faults.save(faults.checkpoints(folder / "checkpoints", Peers(20.0)), 1)
except TrainingError as error:
    print("SAVE", error, flush=True)
print("LEFT", [path.name for path in folder.rglob("step-*") if path.name[0] != "."], flush=True)
os._exit(0)
"""


def _can_mount(folder: Path) -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(folder)]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


@pytest.mark.slow
def test_ranks_on_different_file_systems_are_refused(tmp_path: Path) -> None:
    """A mount namespace with a tmpfs for each rank: one path, two file systems, as on two hosts."""
    if not _can_mount(tmp_path):
        pytest.skip("this process may not make mount namespaces (unshare -m needs root)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **launcher.rendezvous(2)}
    environment.pop(launcher.LAUNCHER, None)
    script = 'mount -t tmpfs none "$1" && exec "$2" -c "$3" "$1"'
    processes = [
        subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, ON_ITS_OWN],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output = process.communicate(timeout=600)[0]
            assert f"PROBE the ranks do not share the run folder {tmp_path}: rank 1 on " in output, output
            assert "does not see what rank 0 wrote" in output and "SAVE rank 1 on " in output, output
            assert "put run.folder on a file system" in output and "LEFT []" in output, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()


class Together:
    """`Startup` for ranks that are threads."""

    def __init__(self, world: int) -> None:
        self.world, self.values = world, [None] * world
        self.barrier = threading.Barrier(world)

    def of(self, rank: int) -> Any:
        class Rank:
            world = self.world

            def gather(_, what: str, value: Any) -> list[Any]:
                self.values[rank] = value
                self.barrier.wait(30)
                values = list(self.values)
                self.barrier.wait(30)
                return values

        Rank.rank = rank  # type: ignore[attr-defined]
        return Rank()


def _probe(folders: list[Path]) -> list[str]:
    """Error of each rank if these are its run folders."""
    together, heard = Together(len(folders)), [""] * len(folders)

    def one(rank: int) -> None:
        try:
            runfolder.check_shared(folders[rank], together.of(rank))
        except ConfigError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_the_run_folder_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfolder, "PROBE_SECONDS", 0.2)
    shared, other, third = (tmp_path / name for name in ("shared", "other", "third"))
    for folder in (shared, other):
        folder.mkdir()
    assert _probe([shared] * 4) == [""] * 4
    for folders, words in (
        ([shared, shared, other], "rank 2 on "),
        ([other, shared, shared], "rank 1 on "),
        ([shared, third], "does not see what rank 0 wrote"),
        ([third / "deeper", shared], "rank 0 on "),
    ):
        heard = _probe(folders)
        assert len(set(heard)) <= len(set(folders)) and all(words in line for line in heard), heard
        assert all("Put run.folder on a file system that all nodes see" in line for line in heard)
    assert not list(shared.iterdir()) and not list(other.iterdir())


# --- files that come late -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _late(path: Path) -> Iterator[None]:
    """Hides a file, like the cache of an NFS client, until it has been waited for twice."""
    hidden, waits = path.with_name("hidden"), itertools.count(1)
    path.rename(hidden)

    def sleep(seconds: float) -> None:
        if next(waits) == 2:
            hidden.rename(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointfolder, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        yield
    assert next(waits) == 3


@pytest.mark.parametrize("name", ["rank-00000.safetensors", storage.MANIFEST])
def test_late_checkpoint_file_is_awaited_before_marking_torn(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    patience(monkeypatch, 20.0)
    store = checkpoints(tmp_path)
    save(store, 1)
    path = save(store, 2)
    with _late(path / name):
        assert store.newest() == path
    assert "which the file system may show late" in capfd.readouterr().err
    patience(monkeypatch, 0.2)
    (path / name).unlink()
    assert store.newest() == tmp_path / "step-00000001" and (tmp_path / "step-00000002.torn").is_dir()


def test_rank_0_waits_for_the_file_of_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 20.0)
    real = storage.write_tensors

    def hidden(path: Path, tensors: Any) -> Any:
        written = real(path, tensors)
        path.rename(path.with_name("hidden"))
        threading.Timer(0.5, path.with_name("hidden").rename, [path]).start()
        return written

    monkeypatch.setattr(ck, "write_tensors", hidden)
    save(checkpoints(tmp_path), 1)
    check_newest(tmp_path, 1)


def test_a_run_folder_that_is_lost_gets_no_checkpoint(tmp_path: Path) -> None:
    """Another job holds it by now: at any moment of detection, nothing visible to others changes."""
    store = checkpoints(tmp_path)
    save(store, 1)

    def lost_after(count: int) -> Callable[[], None]:
        left = [count]

        def check() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise TrainingError("the run folder was taken over")

        return check

    for count in (0, 1):
        store.check = lost_after(count)
        with pytest.raises(TrainingError, match="the run folder was taken over"):
            save(store, 2)
        assert [path.name for path in checkpointfolder.complete(tmp_path)] == ["step-00000001"]
    store.check = lost_after(0)
    for change in (store.newest, lambda: store.set_aside_after(0)):
        with pytest.raises((TrainingError, ck.CheckpointError), match="the run folder was taken over"):
            change()
    check_newest(tmp_path, 1)


def test_two_jobs_never_share_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job's files are never in another's checkpoint, even if both save the same step at the same time."""
    first, second = checkpoints(tmp_path), checkpoints(tmp_path)
    real = storage.write_tensors

    def interrupted(path: Path, tensors: Any) -> Any:
        monkeypatch.setattr(ck, "write_tensors", real)
        written = real(path, tensors)
        save(second, 2)  # cleans up, writes, and makes its own visible
        return written

    monkeypatch.setattr(ck, "write_tensors", interrupted)
    with pytest.raises(TrainingError, match="rank 0"):
        save(first, 2)
    check_newest(tmp_path, 2)
