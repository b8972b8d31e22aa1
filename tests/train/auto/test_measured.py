"""Timing of candidates: rounds alternate, the fastest counts, and candidates that cannot win are skipped."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from interlace.costs.fitted import FREE
from interlace.costs.host_overhead import NO_HOST_OVERHEAD
from interlace.estimate.timed_layers import Company, Setting, measure, settings_of, unsure_of, worth_timing
from interlace.train.auto import machine, resolve
from interlace.train.config.load import ConfigError
from interlace.train.data import feed
from tests.train.auto import oracle

ONE, TWO, BOTH = Setting(1, 1), Setting(1, 2), Setting(2, 1)


class Rounds:
    """Replaces a `Profile`: its rounds take the times in `seconds`; records their order and threads."""

    def __init__(self, seconds: dict[Setting, float]) -> None:
        self.seconds, self.order, self.rounds = seconds, list[Setting](), dict[Setting, list[float]]()

    def round(self, setting: Setting, *, lanes: bool) -> float:
        assert torch.get_num_threads() == setting.threads and lanes == (setting.world > 1)
        self.order.append(setting)
        self.rounds.setdefault(setting, []).append(self.seconds[setting])
        return self.seconds[setting]

    def forget(self) -> None:
        self.order, self.rounds = [], {}

    def costs(self, setting: Setting, **_: Any) -> Any:
        return setting


def _measured(seconds: dict[Setting, float], said: list[str]) -> tuple[Rounds, Any]:
    rounds: Any = Rounds(seconds)
    result = measure(
        rounds, [ONE, TWO, BOTH], optimizer=lambda: FREE, worth=0.03, neighbours=lambda _: 0, say=said.append,
        clock=lambda: 100.0 * len(rounds.order),
    )  # fmt: skip
    return rounds, result


def test_rounds_of_all_settings_take_turns_at_least_three_times() -> None:
    lines: list[str] = []
    before = torch.get_num_threads()
    rounds, result = _measured({ONE: 1.0, TWO: 0.9, BOTH: 1.1}, lines)
    assert rounds.order == [ONE, TWO, BOTH] * 3 and set(result.costs) == {ONE, TWO, BOTH}
    assert lines == ["measuring (about 9 s): 1 rank with 1 thread, 1 rank with 2 threads, 2 ranks with 1 thread each"]
    assert torch.get_num_threads() == before


def test_what_cannot_win_is_not_timed() -> None:
    _, result = _measured({ONE: 1.0, TWO: 0.5, BOTH: 1.0}, [])  # two threads are no slower: two ranks cannot win
    assert set(result.costs) == {ONE, TWO} and "2 ranks with 1 thread each cannot be faster" in result.skipped[0]
    _, result = _measured({ONE: 1.0, TWO: 9.0, BOTH: 1.0}, [])
    assert set(result.costs) == {ONE, BOTH} and "1 rank with 2 threads took 9 times" in result.skipped[0]
    wide = Setting(1, 8)
    rounds: Any = Rounds({wide: 5.0, ONE: 40.0})
    result = measure(
        rounds,
        [wide, ONE],
        optimizer=lambda: FREE,
        worth=0.03,
        neighbours=lambda _: 0,
        say=[].append,
        clock=lambda: 0.0,
    )
    assert set(result.costs) == {wide} and "too long" in result.skipped[0] and ONE not in rounds.order
    assert worth_timing([BOTH], {}, 0.03) == ([BOTH], [])  # under torchrun there is no choice


def test_rounds_that_differ_say_so() -> None:
    assert unsure_of({ONE: [1.0, 1.2, 9.0], BOTH: [1.0, 1.05, 1.1]}) == pytest.approx(0.2)
    assert unsure_of({ONE: [1.0, 1.0, 1.0], TWO: [2.0, 9.0, 9.0]}) == 0.0  # two threads do not affect the decision


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads what a process computed from /proc")
def test_company_computes_while_it_is_told_to_and_ends() -> None:
    with Company(1) as company:
        [process] = company._started
        for _ in range(2):
            with company.busy(1):
                assert process.poll() is None
        ticks = _ticks(process.pid)
        with company.busy(1):
            while _ticks(process.pid) < ticks + 5:
                assert process.poll() is None
    assert process.returncode is not None


def _ticks(pid: int) -> int:
    """Compute so far, in hundredths of a second."""
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[11])


def test_thread_settings_count_only_ranks_of_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = oracle.config_of((2, 2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert settings_of([1, 2], lambda world: machine.threads(config, world)) == [Setting(1, 8), ONE, Setting(2, 4)]
    alone = machine.memory_of(config, "cpu", 1)
    assert machine.memory_of(config, "cpu", 4) == pytest.approx(alone / 4)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert machine.threads(config, 4) == (4,)
    assert machine.memory_of(config, "cpu", 4) == pytest.approx(alone / 2)
    assert machine.threads(oracle.config_of((2, 2), threads=3), 1) == (3,)
    with pytest.raises(ConfigError, match=r"does not measure the network between hosts.*parallel\.links"):
        resolve._links(config, "cpu", [4], "x.toml")


def test_links_that_the_config_states_are_taken() -> None:
    host = {"microseconds": 7.0, "gb_per_second": 3.0}
    config = oracle.config_of((2, 2), links={"host": host})
    links, how = resolve._links(config, "cpu", [2], "x.toml")
    assert how == "links from parallel.links" and links.host.message.latency == pytest.approx(7e-6)
    made = machine.counted(config, oracle.model_of(config), tflops=1.0, memory=1e9, how="as given")
    assert made.links(2) == links and how in made.origin


def test_a_model_that_cannot_be_timed_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("its layer wants\n  more than hidden states")

    monkeypatch.setattr(resolve, "here", breaks)
    monkeypatch.setattr(resolve, "_links", lambda *_: (None, ""))
    monkeypatch.setattr(resolve, "pool", lambda *_: [])
    monkeypatch.setattr(resolve, "measure_overhead", lambda *_: lambda *_: NO_HOST_OVERHEAD)
    monkeypatch.setattr(feed, "datasets", lambda *_, **__: (None, None))
    with pytest.raises(ConfigError, match=r"x.toml: \[parallel\] layout = 'auto'.*wants more.*--layout layout.toml"):
        resolve.choose(oracle.config_of((1, 1)), source="x.toml", say=print, ranks=1)
