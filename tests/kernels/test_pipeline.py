"""The pipeline of the Gluon forward on a model of its barriers, with the stages and phases that the kernel computes.

Producer, consumers, and the copies and products in flight take steps in random order. The model fails if a buffer is
overwritten while a product may still read it, if a product reads anything but its tile, or on a deadlock. The kernel
itself runs in test_gluon_forward.py, in fewer orders.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

pytest.importorskip("triton.experimental.gluon")

from interlace.kernels import bitfield_gluon_producer as producer
from interlace.kernels.bitfield_gluon_forward import turn_phase as turn_phase_
from interlace.kernels.bitfield_gluon_launch import STAGES

stage_of, full_phase, empty_phase = producer.stage_of.fn, producer.full_phase.fn, producer.empty_phase.fn
turn_phase = turn_phase_.fn
CONSUMERS = 2


class Broken(AssertionError):
    """Error found by the model."""


@dataclass
class Barrier:
    """An mbarrier: a phase is complete after `count` arrivals and all expected copies."""

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


Step = Callable[[], bool]  # True if the actor can continue


@dataclass
class Pipeline:
    tiles: int
    stages: int
    empty_count: int = CONSUMERS
    empty_phase: Callable[[int, int], int] = empty_phase
    turn_phase: Callable[[int, int], int] = turn_phase
    early: str = ""  # "k" or "v": consumers release it before their product is complete
    dirty: bool = False  # V is released before it is clean
    barriers: dict[str, list[Barrier]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barriers = {
            **{f"{x}_full": [Barrier(1) for _ in range(self.stages)] for x in "kv"},
            **{f"{x}_empty": [Barrier(self.empty_count) for _ in range(self.stages)] for x in "kv"},
        }
        self.q_full = Barrier(2)
        self.v_landed = Barrier(1)
        self.turn = [Barrier(1) for _ in range(CONSUMERS)]
        self.buffers: dict[str, list[object]] = {x: [None] * self.stages for x in "kv"}
        self.reading: dict[str, list[int]] = {x: [0] * self.stages for x in "kv"}
        self.absent = [random.random() < 0.3 for _ in range(self.tiles)]  # tiles with unused keys
        self.done = 0

    def copy(self, x: str, n: int, to: Barrier) -> Iterator[Step]:
        """Copy of a tile in flight; its bytes may arrive at any time."""
        yield lambda: True
        self.write(x, n, clean=x == "k" or not self.absent[n])
        to.copied()

    def write(self, x: str, n: int, clean: bool) -> None:
        stage = stage_of(n, self.stages)
        if self.reading[x][stage]:
            raise Broken(f"{x} tile {n} overwrites a buffer that is being read")
        self.buffers[x][stage] = (n, clean)

    def produce(self, start: Callable[[Iterator[Step]], None]) -> Iterator[Step]:
        """`produce`, `_fetch` and `_fetch_clean`; a copy stands for both parts of a tile."""
        for _ in range(2):
            self.q_full.arrive(copies=1)
            start(self.copy_q())
        cleaned = 0
        for n in range(self.tiles + 1):
            for x, tile in (("k", n), ("v", n - 1)):
                if not 0 <= tile < self.tiles:
                    continue
                stage, phase = stage_of(tile, self.stages), self.empty_phase(tile, self.stages)
                full = self.barriers[f"{x}_full"][stage]
                yield lambda x=x, stage=stage, phase=phase: self.barriers[f"{x}_empty"][stage].passes(phase)
                lands = self.v_landed if x == "v" and self.absent[tile] else full
                lands.arrive(copies=1)
                start(self.copy(x, tile, lands))
                if lands is self.v_landed:
                    if self.dirty:
                        full.arrive()
                    yield lambda phase=cleaned & 1: self.v_landed.passes(phase)
                    self.write(x, tile, clean=True)
                    cleaned += 1
                    if not self.dirty:
                        full.arrive()

    def copy_q(self) -> Iterator[Step]:
        yield lambda: True
        self.q_full.copied()

    def product(self, x: str, n: int, done: dict[str, list[int]], k: int, v: int) -> Iterator[Step]:
        """Begins when k products with K and v with V of the same consumer are complete: they run in order."""
        stage = stage_of(n, self.stages)
        yield lambda: (len(done["k"]), len(done["v"])) == (k, v)
        self.reading[x][stage] += 1
        for _ in range(random.randrange(3)):
            yield lambda: True
        self.reading[x][stage] -= 1
        if self.buffers[x][stage] != (n, True):
            raise Broken(f"{x} tile {n} was {self.buffers[x][stage]}")
        done[x].append(n)

    def consume(self, me: int, start: Callable[[Iterator[Step]], None]) -> Iterator[Step]:
        """`_consume` and `_step`."""
        done: dict[str, list[int]] = {"k": [], "v": []}
        yield lambda: self.q_full.passes(0)
        for n in range(self.tiles):
            stage, phase, turn = stage_of(n, self.stages), full_phase(n, self.stages), self.turn_phase(n, me)
            yield lambda turn=turn: self.turn[me].passes(turn)
            yield lambda stage=stage, phase=phase: self.barriers["k_full"][stage].passes(phase)
            start(self.product("k", n, done, n, max(n - 1, 0)))
            if n:
                start(self.product("v", n - 1, done, n + 1, n - 1))
            yield lambda n=n: self.early == "k" or len(done["k"]) > n
            self.turn[1 - me].arrive()
            self.barriers["k_empty"][stage].arrive()
            yield lambda stage=stage, phase=phase: self.barriers["v_full"][stage].passes(phase)
            if n:
                yield lambda n=n: self.early == "v" or len(done["v"]) >= n
                self.barriers["v_empty"][stage_of(n - 1, self.stages)].arrive()
        if self.tiles:
            start(self.product("v", self.tiles - 1, done, self.tiles, self.tiles - 1))
        yield lambda: len(done["v"]) == self.tiles
        self.done += 1

    def run(self) -> None:
        waiting: list[tuple[Iterator[Step], Step]] = []

        def start(actor: Iterator[Step]) -> None:
            if (step := next(actor, None)) is not None:
                waiting.append((actor, step))

        actors = [self.produce(start), *(self.consume(me, start) for me in range(CONSUMERS))]
        random.shuffle(actors)
        for actor in actors:
            start(actor)
        slow = random.choice([None, *actors])  # this actor rarely gets a turn
        while waiting:
            ready = [entry for entry in waiting if entry[1]()]
            if not ready:
                raise Broken("nobody can go on")
            chosen = random.choice([e for e in ready if e[0] is not slow or random.random() < 0.02] or ready)
            waiting.remove(chosen)
            start(chosen[0])
        if self.done != CONSUMERS:
            raise Broken("a consumer did not finish")


@pytest.mark.parametrize("stages", sorted({*STAGES.values()}))
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
        dict(turn_phase=lambda n, consumer: n & 1),
        dict(early="k"),
        dict(early="v"),
        dict(dirty=True),
        dict(stages=1),
    ],
)
def test_the_model_finds_mistakes(mistake):
    def fails(seed: int) -> bool:
        random.seed(seed)
        try:
            Pipeline(20, **{"stages": 2, **mistake}).run()
        except Broken:
            return True
        return False

    assert any(fails(seed) for seed in range(100))
