"""A coordinator killed at any moment, and the state that its successor reads from its file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import strategies as st

from interlace.resilience.coordinator import state
from interlace.resilience.coordinator.authority import SEARCH, TOGETHER, Authority
from interlace.resilience.coordinator.hangs import Removal
from interlace.resilience.coordinator.state import StateFile
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Answer, Decision, Generation, Node
from interlace.resilience.member import (
    ABORTED,
    ENTERED,
    GENERATION,
    NEWEST,
    READY,
    WHY,
    cast,
    decided,
    prefix_of,
)
from interlace.resilience.settings import Settings
from tests.sampling import given_by_tier

STEPS = 6
PATIENCE = 1.0
FIRST = 3  # nodes


class Killed(Exception):
    """The coordinator is gone."""


class Fragile:
    """A store or a file whose user dies at one of its calls, before or after the call takes effect."""

    def __init__(self, real: Any, tick: Callable[[], None]) -> None:
        self._real, self._tick = real, tick

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self._tick()
            result = found(*arguments)
            self._tick()
            return result

        return call


@dataclass
class Rank:
    """The voting part of a rank: its pending wait, and the start of the coordinator that it has asked."""

    node: str
    step: int  # next step to train; -1: unknown
    generation: Generation | None = None
    mode: str = "waits"  # waits for a generation; then "meets", "trains", "votes", "done"
    asked: int = 0
    alive: bool = True
    after: int = 0


OPEN: list[StateFile] = []  # files of finished worlds; a process may have at most 1,024 open


def close_files() -> None:
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(autouse=True)
def _files() -> Iterator[None]:
    yield
    close_files()


@dataclass
class World:
    """A run in which the test triggers every event."""

    path: Path
    settings: Settings = field(
        default_factory=lambda: Settings(nodes=FIRST, faults=0, min_nodes=1, gather=2.0, patience=PATIENCE)
    )
    ranks: list[Rank] = field(default_factory=list)
    seen: dict[tuple[int, int], set[Answer]] = field(default_factory=dict)
    votes: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    now: float = 0.0
    fuse: int = -1
    starts: int = 0
    serving: bool = False  # whether the store answers; it does so until the end
    look: list[int] = field(default_factory=list)  # ranks that ask it between the coordinator's last call and its end
    authority: Authority | None = None

    def tick(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise Killed

    def start(self) -> None:
        self.store = dist.HashStore()
        self.fuse, self.starts, self.serving = -1, self.starts + 1, True
        self.file = StateFile(self.path)
        OPEN.append(self.file)
        store, kept = Fragile(self.store, self.tick), Fragile(self.file, self.tick)
        tell: Callable[..., None] = lambda what, **values: None  # noqa: E731
        if self.file.table is None:
            self.authority = Authority(self.settings, store, tell, self.now, kept)  # type: ignore[arg-type]
        else:
            self.authority = Authority.resumed(kept, store, tell, self.now)  # type: ignore[arg-type]

    def coordinate(self, work: Callable[[Authority], Any]) -> bool:
        """The coordinator acts, and may die of it; returns whether it has completed."""
        if self.authority is None:
            return False
        try:
            work(self.authority)
            return True
        except Killed:
            self.kill()
            return False

    def kill(self) -> None:
        self.authority = None
        for place in self.look:
            self.move(self.ranks[place % len(self.ranks)])
        self.serving = False
        close_files()

    def turn(self) -> None:
        self.now += 2 * TOGETHER
        self.coordinate(lambda authority: authority.decide({}, self.now, 0.0))

    def join(self) -> None:
        rank = Rank(f"n{len(self.ranks)}", -1)
        rank.alive = self.coordinate(lambda authority: authority.join(Node(rank.node, 1, "here")))
        self.ranks.append(rank)

    def lose(self, rank: Rank) -> None:
        rank.alive = False
        self.coordinate(lambda authority: authority.lose(Removal(rank.node, "death", "it is gone"), self.now))

    def come_back(self, rank: Rank) -> None:
        """A supervisor reconnects to the coordinator; it is rejected if it was already declared lost."""
        if rank.alive and self.authority is not None:
            if self.authority.is_away(rank.node):
                self.coordinate(lambda authority: authority.reconnected(rank.node))
                if rank.mode == "done":
                    self.coordinate(lambda authority: authority.finish(rank.node))
            elif rank.node not in self.authority.roster.nodes and rank.mode != "done":
                rank.alive = False

    def move(self, rank: Rank) -> None:
        """A rank does its next possible action."""
        if not rank.alive or not self.serving or rank.mode == "done":
            return
        anew, rank.asked = rank.asked != self.starts, self.starts
        generation = rank.generation
        if anew and rank.after >= 0:
            self.store.add(f"{READY}/{rank.node}", 1)
        if rank.mode == "waits":
            newest = self.store.add(NEWEST, 0)
            if newest > rank.after:
                result = Generation.from_json(self.store.get(f"{GENERATION}/{newest}"))
                if rank.node in result.nodes:
                    self.store.add(f"{prefix_of(result)}/{ENTERED}/{rank.node}", 1)
                    rank.generation, rank.after, rank.mode = result, newest, "meets"
                    self.store.set(f"{prefix_of(result)}/of ranks/{rank.node}", str(rank.step))
            return
        assert generation is not None
        if rank.mode == "meets":
            keys = [f"{prefix_of(generation)}/of ranks/{node}" for node in generation.order()]
            if self.store.check(keys):
                known = {int(self.store.get(key)) for key in keys}
                assert len(known - {-1}) <= 1, "two ranks have counted different steps"
                rank.mode = "trains"  # without a survivor that has the step, the record is the checkpoint
                rank.step = max(known) if max(known) >= 0 else len(self.check())
            elif self.store.check([f"{prefix_of(generation)}/over"]):
                rank.mode = "waits"
            return
        if rank.mode == "trains":
            rank.mode, anew = "votes", True
        if anew:
            cast(self.store, generation, rank.step)
            self.votes.setdefault((generation.number, rank.step), set()).add(rank.node)
        answer = decided(self.store, generation, rank.step)
        if answer is None:
            return
        self.seen.setdefault((generation.number, rank.step), set()).add(answer)
        if answer != "abort":
            assert self.votes[generation.number, rank.step] == set(generation.order()), "not all have voted"
            rank.step += 1
        rank.mode = "trains" if answer == "commit" else "waits"
        if rank.step == STEPS:
            rank.mode = "done"
            self.coordinate(lambda authority: authority.finish(rank.node))

    def check(self) -> dict[int, int]:
        assert all(len(answers) == 1 for answers in self.seen.values()), self.seen
        counted: dict[int, int] = {}
        for (generation, step), answers in sorted(self.seen.items()):
            if answers != {"abort"}:
                assert step not in counted, f"step {step} counts twice"
                counted[step] = generation
        assert sorted(counted) == list(range(len(counted)))
        return counted


@dataclass
class Episode:
    """The time between two starts of the coordinator."""

    back: list[int]  # order of reconnection
    rounds: int  # rounds in which all move
    join: bool
    moves: list[int]  # of single ranks
    fuse: int  # calls until the coordinator dies; 0: it dies between two turns
    look: list[int]
    lost: int  # rank that dies then; none if out of range


SOME = st.lists(st.integers(0, 4), max_size=4)
EPISODES = st.lists(
    st.builds(Episode, SOME, st.integers(0, 4), st.booleans(), SOME, st.integers(0, 25), SOME, st.integers(0, 9)),
    min_size=1,
    max_size=6,
)


@given_by_tier(100, 400, episodes=EPISODES)
def test_coordinator_killed_at_any_moment_keeps_its_decisions(episodes: list[Episode]) -> None:
    """Ranks that ask another start of it get the same decisions, and every step counts once."""
    with tempfile.TemporaryDirectory() as folder:
        close_files()  # of the previous example
        world = World(Path(folder) / "state")
        world.start()
        for _ in range(FIRST):
            world.join()
        for episode in episodes:
            for place in episode.back:
                world.come_back(world.ranks[place % len(world.ranks)])
            for _ in range(episode.rounds):
                all_move(world)
            if episode.join and len(world.ranks) < 5:
                world.join()
            for place in episode.moves:
                world.move(world.ranks[place % len(world.ranks)])
            world.look, world.fuse = episode.look, episode.fuse or -1
            if world.authority is not None and episode.fuse:
                all_move(world)
            if world.authority is not None:
                world.kill()
            if episode.lost < len(world.ranks) and sum(rank.alive for rank in world.ranks) > 1:
                world.lose(world.ranks[episode.lost])
            world.check()
            world.start()
        to_the_end(world)


def to_the_end(world: World) -> None:
    """Without further faults the run reaches its end, unless it had to stop."""
    for _ in range(200):
        for rank in world.ranks:
            world.come_back(rank)
        all_move(world)
    counted = world.check()
    assert world.authority is not None
    if not world.authority.ended:
        assert len(counted) == STEPS and world.authority.over
        for rank in world.ranks:  # one that joined after the last step is dismissed with the end of the run
            if rank.alive and rank.generation is not None:
                assert rank.mode == "done" or (rank.mode == "meets" and rank.step == -1)


def test_node_that_joins_at_the_last_step_ends_no_run_badly(tmp_path: Path) -> None:
    world = World(tmp_path / "state")
    world.start()
    for _ in range(FIRST):
        world.join()
    while any(rank.step < STEPS - 1 for rank in world.ranks):
        all_move(world)
    world.join()
    world.store.add(f"{READY}/{world.ranks[-1].node}", 1)
    world.turn()
    for rank in world.ranks[:FIRST]:
        world.move(rank)  # the last vote
    for _ in range(3):
        world.turn()  # the next generation is published before the ranks have read the decision
    assert world.authority is not None and world.authority.generation is not None
    assert world.authority.generation.number == 2
    to_the_end(world)
    assert world.authority.over and not world.authority.ended
    assert [rank.mode for rank in world.ranks[:FIRST]] == ["done"] * FIRST


@pytest.mark.parametrize("lost", [None, 1], ids=["all come back", "one is lost meanwhile"])
@pytest.mark.parametrize("scene", ["a vote", "a loss", "a rank that gave up", "a join"])
def test_every_call_may_be_a_coordinators_last(tmp_path: Path, scene: str, lost: int | None) -> None:
    """Some ranks see the store as it was left, and others do not."""
    fuse = 0
    while True:
        fuse += 1
        (tmp_path / str(fuse)).mkdir()
        close_files()
        world = World(tmp_path / str(fuse) / "state")
        world.start()
        for _ in range(FIRST):
            world.join()
        while len(world.check()) < 2:
            all_move(world)
        if scene == "a join":
            world.join()
            world.move(world.ranks[-1])
            world.turn()  # it is ready: the next vote ends the generation
        for rank in world.ranks:  # all vote, except in an abandoned generation
            if scene in ("a vote", "a join") or rank is not world.ranks[2]:
                world.move(rank)
                world.move(rank)
        generation = world.ranks[0].generation
        assert generation is not None
        if scene == "a rank that gave up":
            world.store.set(f"{prefix_of(generation)}/{WHY}", "it saw something")
            world.store.add(f"{prefix_of(generation)}/{ABORTED}", 1)
            world.turn()
            world.now += world.settings.heartbeat + SEARCH
        world.look, world.fuse = [0], fuse
        if scene == "a loss":
            world.lose(world.ranks[2])
        for _ in range(3):
            world.turn()
        survived = world.authority is not None
        if not survived:
            if lost is not None:
                world.lose(world.ranks[lost])
            world.start()
        world.fuse = -1
        to_the_end(world)
        if survived:
            break
    assert fuse > 10


def all_move(world: World) -> None:
    for rank in world.ranks:
        world.move(rank)
    world.turn()


# ---------------------------------------------------------------------- the file


def test_rank_that_missed_several_restarts_gets_an_abort(tmp_path: Path) -> None:
    """No step counts between the restarts, so each start makes a new generation with an empty store."""
    world = World(tmp_path / "state")
    world.start()
    for _ in range(FIRST):
        world.join()
    for rank in world.ranks:
        world.move(rank)
    world.turn()
    assert world.authority is not None and world.authority.generation is not None
    first = world.authority.generation
    for number in range(2, 6):
        world.kill()
        world.start()
        assert world.authority is not None
        for node in first.nodes:
            world.authority.reconnected(node)
        world.turn()
        world.turn()
        assert world.authority.generation is not None and world.authority.generation.number == number
        assert decided(world.store, first, 0) == "abort"


def written(path: Path, votes: int) -> None:
    """A file of a run in which this many votes were decided."""
    file = StateFile(path)
    file.store_port = 1234
    file.save({"roster": "as it was"})
    for step in range(votes):
        file.decide(Decision(3, step, "commit"))
    file.close()


def test_a_line_that_was_cut_short_anywhere_was_not_decided(tmp_path: Path) -> None:
    written(tmp_path / "state", 3)
    whole = (tmp_path / "state").read_bytes()
    run = json.loads(whole.splitlines()[0])["run"]
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(last, len(whole) + 1):
        (tmp_path / "state").write_bytes(whole[:end])
        file = StateFile(tmp_path / "state")
        file.close()
        assert file.decided == Decision(3, 1 if end < len(whole) else 2, "commit")
        assert (file.run, file.starts, file.store_port, file.table) == (run, 2, 1234, {"roster": "as it was"})


def test_it_does_not_grow_with_the_votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MOST_LINES", 10)
    written(tmp_path / "state", 1000)
    assert len((tmp_path / "state").read_bytes().splitlines()) <= 11
    file = StateFile(tmp_path / "state")
    file.close()
    assert file.decided == Decision(3, 999, "commit")


def test_what_cannot_be_taken_up_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "state"
    written(path, 1)
    first = json.loads(path.read_bytes().splitlines()[0])
    for raw, why in (
        (b"", "truncated"),
        (b"no json\n", "JSONDecodeError"),
        (json.dumps(first | {"interlace coordinator": 99}).encode() + b"\n", "format is 99"),
        (json.dumps(first).encode() + b'\n[3, 1, "perhaps"]\n', "perhaps"),
        (json.dumps(first).encode() + b"\nno json\n[3, 1]\n", "JSONDecodeError"),
    ):
        path.write_bytes(raw)
        with pytest.raises(ResilienceError, match=f"invalid coordinator state.*{why}"):
            StateFile(path)
    written(tmp_path / "another", 1)  # its state is not the state of an authority
    with pytest.raises(ResilienceError, match="invalid coordinator state"):
        Authority.resumed(StateFile(tmp_path / "another"), dist.HashStore(), lambda what, **values: None, 0.0)


def test_one_coordinator_at_a_time_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PASSING", 0.2)
    file = StateFile(tmp_path / "state")
    with pytest.raises(ResilienceError, match="is in use by a running coordinator"):
        StateFile(tmp_path / "state")
    file.close()
    StateFile(tmp_path / "state").close()
