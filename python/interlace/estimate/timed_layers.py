"""Layers timed on this machine's CPUs, for each candidate number of ranks and threads.

Ranks share the cores, so costs depend on the number of ranks. Each setting is timed with the threads of one rank, while
other processes keep the other ranks' cores busy. Rounds of all settings alternate, at least three of each. The fastest
round counts, because other load of the machine only makes layers slower. The distance of the median round from the
fastest is the uncertainty.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from interlace.costs.step import FittedCosts
from interlace.estimate.profiling import ROUNDS, Profile
from interlace.plan import LinkModel

LEAST_ROUNDS = 3
BUDGET_SECONDS = 1.5  # of each setting
HOPELESS = 3.0
LONG = 20.0  # seconds: if one thread would take longer, a single thread cannot be the fastest


@dataclass(frozen=True)
class Setting:
    """Number of ranks on this machine, and number of threads of each."""

    world: int
    threads: int

    def __str__(self) -> str:
        several = self.world > 1
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.world} rank{'s' * several} with {threads}{' each' * several}"


@dataclass(frozen=True)
class Measured:
    """costs: of each setting that may be fastest. unsure: relative difference between rounds of one setting. skipped:
    reasons why the other settings were not timed, as sentences."""

    costs: dict[Setting, FittedCosts]
    unsure: float
    skipped: tuple[str, ...]


def measure(
    profile: Profile,
    settings: Sequence[Setting],
    *,
    optimizer: Callable[[], LinkModel],
    worth: float,
    neighbours: Callable[[Setting], int],
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Times the layers of `profile` in all settings that may be faster than one process.

    worth: relative gain that more ranks must reach. neighbours: number of other ranks on this machine. say: called with
    the expected duration before the rounds start.
    """
    threads = torch.get_num_threads()
    try:
        with Company(max(map(neighbours, settings))) as company:

            def once(setting: Setting) -> float:
                torch.set_num_threads(setting.threads)
                with company.busy(neighbours(setting)):
                    return profile.round(setting, lanes=setting.world > 1)

            widest = max(settings, key=lambda each: (each.world, each.threads))
            warm = once(widest)  # warm-up: allocators, caches and choices of libraries at their first call
            long = widest.threads > 1 and warm * widest.threads > LONG
            tried = [each for each in settings if each.threads > 1 or each.world > 1 or not long]
            first = {each: once(each) for each in tried if each.world == 1}
            chosen_settings, skipped = worth_timing(tried, first, worth)
            skipped += [f"{each}: a round would take too long, not timed" for each in settings if each not in tried]
            known = [first[each] for each in chosen_settings if each in first] or [warm]
            turn, budget = len(chosen_settings) * sum(known) / len(known), BUDGET_SECONDS * len(chosen_settings)
            about = max(LEAST_ROUNDS * turn, min(ROUNDS * turn, budget), 1.0)
            say(f"measuring (about {about:.0f} s): {', '.join(map(str, chosen_settings))}")
            profile.forget()
            begin, rounds = clock(), 0
            while rounds < LEAST_ROUNDS or (rounds < ROUNDS and clock() - begin + turn < budget):
                for each in chosen_settings:
                    once(each)
                rounds += 1
            costs: dict[Setting, FittedCosts] = {}
            for each in chosen_settings:
                torch.set_num_threads(each.threads)
                costs[each] = profile.costs(each, optimizer=optimizer(), of_rounds=np.min)
    finally:
        torch.set_num_threads(threads)
    return Measured(costs, unsure_of(profile.rounds), tuple(skipped))


def worth_timing(
    settings: Sequence[Setting], one_process: dict[Setting, float], worth: float
) -> tuple[list[Setting], list[str]]:
    """The settings that may be fastest, and the reasons to skip the others. Settings with more ranks are skipped if one
    process would be as fast even at perfect scaling of their threads. Settings with one process are skipped if they
    were `HOPELESS` times slower than with another number of threads.

    one_process: seconds of a round of settings of one rank.
    """
    alone = next((seconds for each, seconds in one_process.items() if each.threads == 1), None)
    best = min(one_process.values(), default=float("inf"))
    taken, skipped = [], []
    for each in settings:
        least = 0.0 if alone is None else alone / (each.world * each.threads)
        if each.world > 1 and least * (1 + worth) > best:
            skipped.append(f"{each} cannot be faster than one process: not timed")
        elif each.world == 1 and one_process[each] > HOPELESS * best:
            skipped.append(f"{each} took {one_process[each] / best:.0f} times as long as the faster: not timed again")
        else:
            taken.append(each)
    return taken, skipped


def unsure_of(rounds: Mapping[Setting, Sequence[float]]) -> float:
    """Relative distance of the median round from the fastest, as the maximum over settings. Of settings with one
    process only the fastest is included, because the others decide nothing."""
    best = min((each for each in rounds if each.world == 1), key=lambda each: min(rounds[each]), default=None)
    kept = [seconds for each, seconds in rounds.items() if each.world > 1 or each == best]
    return max(float(np.median(each)) / min(each) - 1 for each in kept)


_COMPANION = """
import os, select
import numpy as np
a = np.ones((256, 256), np.float32)
a @ a
os.write(1, b"r")
while os.read(0, 1):
    while not select.select([0], [], [], 0)[0]:
        a @ a
    os.read(0, 1)
"""


class Company:
    """Processes that multiply matrices on one core each, in place of the other ranks: a core whose neighbours are busy
    is slower. They end with this process in every case."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Company:
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command, pipe = [sys.executable, "-c", _COMPANION], subprocess.PIPE
        for _ in range(self.processes):
            self._started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, **single}))
        for each in self._started:
            assert each.stdout is not None
            if each.stdout.read(1) != b"r":
                self.__exit__()
                raise RuntimeError("a companion process that loads the other cores during timing did not start")
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._started:
            each.kill()
        for each in self._started:
            each.communicate()
        self._started = []

    @contextlib.contextmanager
    def busy(self, count: int) -> Iterator[None]:
        """Context in which `count` of them compute."""
        self._write_byte(count, b"g")
        try:
            yield
        finally:
            self._write_byte(count, b"s")

    def _write_byte(self, count: int, word: bytes) -> None:
        for each in self._started[:count]:
            assert each.stdin is not None
            each.stdin.write(word)
            each.stdin.flush()


def settings_of(worlds: Sequence[int], threads: Callable[[int], Any]) -> list[Setting]:
    """All combinations of a number of ranks and a number of threads allowed for it."""
    return [Setting(world, each) for world in worlds for each in threads(world)]
