"""The pipeline of the Gluon forward on a model of its barriers, with the stages and phases that the kernel computes.

Producer, consumers and the copies under way take steps in random order. The model fails if a buffer is overwritten
while a consumer may still read it, if a consumer reads anything but its tile, or if nobody can go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

pytest.importorskip("triton.experimental.gluon")

from interlace.kernels import bitfield_gluon_forward as kernel
from interlace.kernels.bitfield_gluon_launch import STAGES

stage_of, full_phase, empty_phase = kernel.stage_of.fn, kernel.full_phase.fn, kernel.empty_phase.fn
CONSUMERS = 2


class Broken(AssertionError):
    """What the model found."""


@dataclass
class Barrier:
    """An mbarrier: a phase is complete when `count` arrivals and all expected copies have come."""

    count: int
    phase: int = 0
    arrived: int = 0
    copies: int = 0

    def passes(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def arrive(self, copies: int = 0) -> None:
        self.copies += copies
        self.arrived += 1
        if self.arrived > self.count:
            raise Broken("more arrivals than the phase takes")
        self._advance()

    def copied(self) -> None:
        self.copies -= 1
        self._advance()

    def _advance(self) -> None:
        if self.arrived == self.count and self.copies == 0:
            self.phase, self.arrived = self.phase + 1, 0


Step = Callable[[], bool]  # whether the actor can go on


@dataclass
class Pipeline:
    tiles: int
    stages: int
    empty_count: int = CONSUMERS
    empty_phase: Callable[[int, int], int] = empty_phase
    early: bool = False  # consumers hand a buffer back before they have read it
    barriers: dict[str, list[Barrier]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barriers = {
            **{f"{x}_full": [Barrier(1) for _ in range(self.stages)] for x in "kv"},
            **{f"{x}_empty": [Barrier(self.empty_count) for _ in range(self.stages)] for x in "kv"},
        }
        self.q_full = Barrier(1)
        self.buffers: dict[str, list[object]] = {x: [None] * self.stages for x in "kv"}
        self.reading: dict[str, list[int]] = {x: [0] * self.stages for x in "kv"}
        self.done = 0

    def copy(self, x: str, n: int) -> Iterator[Step]:
        """The bytes of a tile on their way; they may arrive at any time."""
        yield lambda: True
        stage = stage_of(n, self.stages)
        if self.reading[x][stage]:
            raise Broken(f"{x} tile {n} overwrites a buffer that is being read")
        self.buffers[x][stage] = n
        self.barriers[f"{x}_full"][stage].copied()

    def produce(self, start: Callable[[Iterator[Step]], None]) -> Iterator[Step]:
        """`_produce` and `_fetch`."""
        self.q_full.arrive(copies=2)
        for _ in range(2):
            start(self.copy_q())
        for n in range(self.tiles):
            for x in "kv":
                stage, phase = stage_of(n, self.stages), self.empty_phase(n, self.stages)
                yield lambda x=x, stage=stage, phase=phase: self.barriers[f"{x}_empty"][stage].passes(phase)
                self.barriers[f"{x}_full"][stage].arrive(copies=1)
                start(self.copy(x, n))

    def copy_q(self) -> Iterator[Step]:
        yield lambda: True
        self.q_full.copied()

    def consume(self) -> Iterator[Step]:
        """`_consume` and `_attend`."""
        yield lambda: self.q_full.passes(0)
        for n in range(self.tiles):
            stage, phase = stage_of(n, self.stages), full_phase(n, self.stages)
            for x in "kv":
                yield lambda x=x, stage=stage, phase=phase: self.barriers[f"{x}_full"][stage].passes(phase)
                if self.early:
                    self.barriers[f"{x}_empty"][stage].arrive()
                    yield lambda: True
                self.reading[x][stage] += 1
                for _ in range(random.randrange(3)):
                    yield lambda: True  # the product is under way
                self.reading[x][stage] -= 1
                if self.buffers[x][stage] != n:
                    raise Broken(f"{x} tile {n} was {self.buffers[x][stage]}")
                if not self.early:
                    self.barriers[f"{x}_empty"][stage].arrive()
        self.done += 1

    def run(self) -> None:
        waiting: list[tuple[Iterator[Step], Step]] = []

        def start(actor: Iterator[Step]) -> None:
            if (step := next(actor, None)) is not None:
                waiting.append((actor, step))

        actors = [self.produce(start), *(self.consume() for _ in range(CONSUMERS))]
        random.shuffle(actors)
        for actor in actors:
            start(actor)
        slow = random.choice([None, *actors])  # one that hardly gets a turn
        while waiting:
            ready = [entry for entry in waiting if entry[1]()]
            if not ready:
                raise Broken("nobody can go on")
            chosen = random.choice([e for e in ready if e[0] is not slow or random.random() < 0.02] or ready)
            waiting.remove(chosen)
            start(chosen[0])
        if self.done != CONSUMERS:
            raise Broken("a consumer did not finish")


@pytest.mark.parametrize("stages", sorted({1, *STAGES.values()}))
@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 4, 5, 9, 20])
def test_no_tile_is_lost_and_nobody_waits_for_ever(tiles, stages):
    for seed in range(100):
        random.seed(seed)
        Pipeline(tiles, stages).run()


@pytest.mark.parametrize(
    "mistake",
    [
        dict(empty_count=1),
        dict(empty_count=3),
        dict(empty_phase=full_phase),
        dict(empty_phase=lambda n, stages: 1),
        dict(early=True),
    ],
)
def test_the_model_finds_mistakes(mistake):
    def fails(seed: int) -> bool:
        random.seed(seed)
        try:
            Pipeline(20, 2, **mistake).run()
        except Broken:
            return True
        return False

    assert any(fails(seed) for seed in range(100))
