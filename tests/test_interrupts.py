"""Ctrl-C ends every long call of the scheduler with KeyboardInterrupt; exceptions of other handlers do too."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from interlace import _core, balance
from tests.long_calls import CALLS

ROOT = Path(__file__).parent.parent
# Calls with the longest loops; `make test-all` has the others.
FAST = [
    "assign_exact",
    "assign_rows",
    "reorder_microbatches",
    "bottleneck_match",
    "pipeline_template",
    "instantiate",
    "orchestrate",
    "search_configuration",
]
# Functions without a long loop of their own.
SHORT = {"assign_zigzag", "assign_ring", "fingerprint", "Exchange"}


def interrupt(names):
    """Runs each call in one other process and sends it SIGINT meanwhile."""
    command = [sys.executable, "-m", "tests.long_calls", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["name"] for each in ended] == list(names)
    # CPU time: the machine may be busy with other work.
    late = [each for each in ended if each["how"] != "KeyboardInterrupt" or each["seconds"] > 1.0]
    assert not late


def test_long_calls_end_at_ctrl_c():
    interrupt(FAST)


@pytest.mark.slow
def test_every_long_call_ends_at_ctrl_c():
    interrupt([name for name in CALLS if name not in FAST])


def test_every_function_of_the_scheduler_has_a_long_call():
    functions = {name for name in vars(_core) if not name.startswith(("_", "attention_"))}
    assert functions - SHORT == {name.partition(",")[0] for name in CALLS}


class Alarm(Exception):
    pass


def test_exception_of_a_signal_handler_leaves_no_state():
    weights = np.random.default_rng(0).random(60)
    few = balance.assign_exact(weights, 7, nodes=1000)

    def handler(*_):
        again = balance.assign_exact(weights, 7, nodes=1000)  # a call within the interrupted one
        assert (again.bins == few.bins).all()
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Alarm):
            balance.assign_exact(weights, 7, nodes=2**62)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (balance.assign_exact(weights, 7, nodes=1000).bins == few.bins).all()


def test_a_handler_that_returns_does_not_end_the_call():
    weights = np.random.default_rng(0).random(60)
    calls = []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        result = balance.assign_exact(weights, 7, nodes=10**7)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(calls) == 1 and result.bound <= result.makespan


def test_calls_in_other_threads_continue_during_a_signal():
    weights = np.random.default_rng(0).random(60)
    result = []
    thread = threading.Thread(target=lambda: result.append(balance.assign_exact(weights, 7, nodes=10**7)))
    # A shell that starts the tests in the background makes them ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            signal.raise_signal(signal.SIGINT)
            while thread.is_alive():
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert (result[0].bins == balance.assign_exact(weights, 7, nodes=10**7).bins).all()
