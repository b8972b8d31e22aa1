"""The launcher: names the rank that died first, stops the others in time, forwards signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from interlace.comm.transports.shm import start_time_of
from interlace.train import runfolder
from interlace.train.config.load import ConfigError, from_table
from interlace.train.launch import launcher
from tests.digits import DATA


def _run(body: str, tmp_path: Path, count: int = 2, timeout: float = 60.0, **more: object) -> tuple[int, str, float]:
    """Runs `count` ranks of a small script (no torch: they start in 50 ms); returns code, output, seconds.

    Limits on the seconds only detect hangs: they are far more than a busy machine takes.
    """
    lines: list[str] = []
    command = [sys.executable, "-c", "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + body]
    start = time.monotonic()
    resume = more.pop("resume", lambda: "")
    ranks = launcher.RankProcesses(command, count, folder=tmp_path, timeout=timeout, **more)  # type: ignore[arg-type]
    code = ranks.run(resume, lines.append)  # type: ignore[arg-type]
    return code, "\n".join(lines), time.monotonic() - start


def test_ranks_get_torchruns_variables(tmp_path: Path) -> None:
    body = "open(f'{sys.argv[0]}', 'a') if False else None\nprint(*[os.environ[k] for k in "
    body += "('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS')], file=sys.stderr)"
    assert _run(body, tmp_path, threads=3)[0] == 0
    assert (tmp_path / "logs" / "rank-0.log").read_text().split() == ["0", "0", "2", "127.0.0.1", "3"]
    assert (tmp_path / "logs" / "rank-1.log").read_text().split() == ["1", "1", "2", "127.0.0.1", "3"]


def test_killed_rank_is_named_with_the_way_to_go_on(tmp_path: Path) -> None:
    body = """
    if rank == 1:
        print("about to do step 7", file=sys.stderr, flush=True)
        open("draft", "w").write(str(os.getpid()))
        os.rename("draft", "victim")
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists("victim"):
        time.sleep(0.01)
    try:
        while True:  # the launcher has seen it end when there is no such process any more
            os.kill(int(open("victim").read()), 0)
            time.sleep(0.01)
    except ProcessLookupError:
        sys.exit("peer lost")  # what a rank does whose partner is gone
    """
    body = f"os.chdir({str(tmp_path)!r})\n" + textwrap.dedent(body)
    code, said, seconds = _run(body, tmp_path, resume=lambda: "interlace train --resume x")
    assert code == 1 and seconds < 60
    assert "rank 1 was killed by SIGKILL (signal 9); its last output: about to do step 7" in said
    assert "stopped the other ranks (0)" in said
    assert "interlace train --resume x" in said


def test_hung_ranks_are_killed_within_the_timeout(tmp_path: Path) -> None:
    body = "sys.exit(3) if rank == 0 else time.sleep(600)"
    code, said, seconds = _run(body, tmp_path, count=3, timeout=0.5)
    assert code == 1 and seconds < 60
    assert "rank 0 exited with code 3" in said and "(1, 2)" in said and "no checkpoint was saved yet" in said


def test_first_exception_is_reported_as_the_cause(tmp_path: Path) -> None:
    body = f"""
    os.environ[{launcher.RUN_FOLDER!r}] = {str(tmp_path)!r}
    from interlace.train.launch import launcher
    os.chdir({str(tmp_path)!r})

    def wait_for(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    if rank == 0:
        wait_for("reported-1")
    try:
        raise RuntimeError("division of labour" if rank == 1 else "connection closed by peer")
    except RuntimeError as error:
        launcher.report_error(error, user_error=False)
        open(f"reported-{{rank}}", "w").close()
        wait_for("reported-0")
        sys.exit(1)
    """
    code, said, _ = _run(textwrap.dedent(body), tmp_path)
    assert code == 1
    assert "rank 1 exited with code 1; its last output: RuntimeError: division of labour" in said


def test_user_errors_stay_one_line(tmp_path: Path) -> None:
    body = f"""
    os.environ[{launcher.RUN_FOLDER!r}] = {str(tmp_path)!r}
    from interlace.train.launch import launcher
    launcher.report_error(ValueError("[train] has no key 'stesp'"), user_error=True)
    sys.exit(2)
    """
    assert _run(textwrap.dedent(body), tmp_path)[:2] == (2, "interlace: [train] has no key 'stesp'")


def _wait_until_ready(tmp_path: Path) -> None:
    """Waits for both ranks, and for the launcher: a signal before it handles them would end this process."""
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler or not all(
        (tmp_path / f"ready-{rank}").exists() for rank in range(2)
    ):
        time.sleep(0.02)


def test_signals_are_forwarded_once_and_then_kill(tmp_path: Path) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: open(f"saved-{rank}", "w").close() or sys.exit(0))
    open(f"ready-{rank}", "w").close()
    time.sleep(600)
    """

    def terminate() -> None:
        _wait_until_ready(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)

    body = f"os.chdir({str(tmp_path)!r})\n" + textwrap.dedent(body)
    threading.Thread(target=terminate, daemon=True).start()
    code, said, seconds = _run(body, tmp_path)
    assert (code, said) == (0, "") and seconds < 60
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


SAVING = """
def save(*_):
    open(f"asked-{rank}", "a").write(".")
    while not os.path.exists("may-finish"):
        time.sleep(0.02)
    open(f"saved-{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(f"ready-{rank}", "w").close()
time.sleep(600)
"""


def _signalled(tmp_path: Path, *numbers: int, stuck: bool = False) -> tuple[int, str, list[bool]]:
    """A run of two ranks whose launcher gets these signals one after another. Returns the ranks that finished their
    save.

    stuck: the saves never finish; otherwise they finish after all signals have been sent.
    """

    def send() -> None:
        _wait_until_ready(tmp_path)
        for number in numbers:
            os.kill(os.getpid(), number)
            while not all((tmp_path / f"asked-{rank}").exists() for rank in range(2)):
                time.sleep(0.02)
            time.sleep(0.1)
        if not stuck:
            (tmp_path / "may-finish").touch()

    threading.Thread(target=send, daemon=True).start()
    code, said, _ = _run(f"os.chdir({str(tmp_path)!r})\n" + SAVING, tmp_path)
    return code, said, [(tmp_path / f"saved-{rank}").exists() for rank in range(2)]


def test_repeated_sigterms_do_not_cut_the_last_save_short(tmp_path: Path) -> None:
    numbers = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert _signalled(tmp_path, *numbers) == (0, "", [True, True])
    assert all((tmp_path / f"asked-{rank}").read_text() == "." for rank in range(2))  # each was asked once


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    code, said, saved = _signalled(tmp_path, signal.SIGINT, signal.SIGINT, stuck=True)
    assert code == 1 and "stopped on request before it could save everything" in said and saved == [False, False]


def test_patience_with_a_stuck_save_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PATIENCE_SECONDS", 0.05)
    code, said, saved = _signalled(tmp_path, signal.SIGTERM, signal.SIGTERM, stuck=True)
    assert code == 1 and "stopped on request" in said and saved == [False, False]


def test_ranks_stop_when_the_launcher_is_killed(tmp_path: Path) -> None:
    rank = f"""
    import os, sys, time
    sys.path.insert(0, {str(Path(launcher.__file__).parents[3])!r})
    from interlace.train.launch import launcher
    launcher.follow_launcher(5.0)
    print(os.getpid(), flush=True)
    time.sleep(600)
    """
    script = f"""
    import sys
    sys.path.insert(0, {str(Path(launcher.__file__).parents[3])!r})
    from pathlib import Path
    from interlace.train.launch import launcher
    command = [sys.executable, "-c", {textwrap.dedent(rank)!r}]
    launcher.RankProcesses(command, 1, folder=Path({str(tmp_path)!r}), timeout=5).run()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while start_time_of(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_log_of_rank_0_is_whole_when_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(pipe, log) -> None:
        time.sleep(0.5)  # a busy machine
        copy(pipe, log)

    copy = launcher._tee
    monkeypatch.setattr(launcher, "_tee", late)
    assert _run("print('done', file=sys.stderr)", tmp_path)[0] == 0
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "done\n"
    code, said, _ = _run("sys.exit('why it ends')", tmp_path, count=1)
    assert code == 1 and "why it ends" in said


def test_run_folders_and_what_resume_means(tmp_path: Path) -> None:
    config = from_table(
        {
            "run": {"name": "tiny", "folder": str(tmp_path)},
            "model": {"language_model": {"architecture": "LlamaForCausalLM"}},
            "data": dict(DATA),
            "train": {"steps": 20, "batch_size": 1},
        }
    )
    with pytest.raises(ConfigError, match="no run with a checkpoint under"):
        runfolder.resolve(config, "")
    first, second, third = (runfolder.create(config) for _ in range(3))
    assert len({first, second, third}) == 3 and not (tmp_path / "tiny" / "latest").exists()
    for folder in (first, third):
        runfolder.point_latest(folder)
    assert (tmp_path / "tiny" / "latest").resolve() == third.resolve()
    for folder in (first, second):
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert runfolder.resolve(config, "") == (second, None)
    assert runfolder.resolve(config, str(first)) == (first, None)
    assert runfolder.resolve(config, str(first / "checkpoints")) == (first, None)
    step = first / "checkpoints" / "step-00000004"
    assert runfolder.resolve(config, str(step)) == (first, step)
    with pytest.raises(ConfigError, match="no checkpoint under"):
        runfolder.resolve(config, str(third))
    with pytest.raises(ConfigError, match="there is no such folder"):
        runfolder.resolve(config, str(tmp_path / "nothing"))


def test_newest_run_is_the_last_started_despite_clock_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour back in autumn, in local time; a clock that is set back, in any; and names of the previous version."""
    config = from_table(
        {
            "run": {"name": "tiny", "folder": str(tmp_path)},
            "model": {"language_model": {"architecture": "LlamaForCausalLM"}},
            "data": dict(DATA),
            "train": {"steps": 20, "batch_size": 1},
        }
    )

    def begin(seconds: float) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(runfolder.time, "gmtime", lambda: real(seconds))
            patch.setattr(runfolder.time, "strftime", lambda text, when=None: write(text, when or real(seconds)))
            folder = runfolder.create(config)
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
        return folder

    real, write = time.gmtime, time.strftime
    old = tmp_path / "tiny" / "2030-01-01T00-00-00"
    (old / "checkpoints" / "step-00000001").mkdir(parents=True)
    for seconds in (1e9, 1e9 - 3600, 1e9 - 3600, 5e8):
        folder = begin(seconds)
        assert runfolder.resolve(config, "")[0] == folder
    assert folder.name == "1985-11-05T00-53-20Z"
    (folder / "run.json").write_text("{")  # damaged: without a number, so it comes before numbered ones
    assert runfolder.resolve(config, "")[0].name == "2001-09-09T00-46-40Z.1"


def test_ranks_that_saved_on_signal_return_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "may-finish").touch()
    body = f"os.chdir({str(tmp_path)!r})\n" + SAVING.replace("sys.exit(0)", "sys.exit(128 + _[0])")
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):

        def send(number: int = number) -> None:
            while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
                time.sleep(0.02)
            os.kill(os.getpid(), number)

        threading.Thread(target=send, daemon=True).start()
        assert _run(body, tmp_path)[:2] == (code, "")  # ranks get SIGTERM in either case
        for path in tmp_path.glob("ready-*"):
            path.unlink()
    # A signal may also reach one rank alone; the other ranks agree with it, save and end like it.
    assert _run("sys.exit(143)", tmp_path)[:2] == (143, "")
    assert _run("sys.exit(143 if rank else 0)", tmp_path)[:2] == (143, "")
    code, said, _ = _run("os.kill(os.getpid(), signal.SIGTERM) if rank else sys.exit(143)", tmp_path)
    assert code == 1 and "rank 1 was killed by SIGTERM" in said
