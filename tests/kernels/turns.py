"""Threads that take turns in random order: one runs at a time, and a seed repeats a run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any


class Broken(AssertionError):
    """What the model found."""


class Turns:
    """Actors that go on one at a time, in random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.actors: list[_Actor] = []
        self.current = threading.local()

    def run(self, functions: list[Callable[[], Any]]) -> None:
        self.actors = [_Actor(self, function) for function in functions]
        slow = self.random.choice([None, *self.actors])  # one that hardly gets a turn
        while self.actors:
            ready = [actor for actor in self.actors if actor.ready()]
            if not ready:
                self._abandon()
                raise Broken("nobody can go on")
            quick = [actor for actor in ready if actor is not slow or self.random.random() < 0.05]
            actor = self.random.choice(quick or ready)
            actor.turn()
            if actor.error is not None:
                self._abandon()
                raise actor.error
            if actor.finished:
                self.actors.remove(actor)

    def start(self, function: Callable[[], Any]) -> None:
        """Another actor, without a thread: it runs in one go."""
        self.actors.append(_Event(function))

    def until(self, condition: Callable[[], bool]) -> None:
        """Others' turn, until `condition` holds."""
        actor = getattr(self.current, "actor", None)
        if actor is not None:
            actor.pause(condition)

    def _abandon(self) -> None:
        for actor in self.actors:
            actor.abandon()


class _Event:
    finished, error = True, None

    def __init__(self, turn: Callable[[], Any]) -> None:
        self.turn = turn

    def ready(self) -> bool:
        return True

    def abandon(self) -> None:
        pass


class _Abandoned(BaseException):
    pass


class _Actor:
    def __init__(self, turns: Turns, function: Callable[[], Any]) -> None:
        self.ready: Callable[[], bool] = lambda: True
        self.error: BaseException | None = None
        self.finished = self.over = False
        self.mine, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(turns, function), daemon=True)
        self.thread.start()

    def _run(self, turns: Turns, function: Callable[[], Any]) -> None:
        turns.current.actor = self
        try:
            self._take()
            function()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.finished = True
        self.back.release()

    def turn(self) -> None:
        self.mine.release()
        self.back.acquire()

    def pause(self, condition: Callable[[], bool]) -> None:
        self.ready = condition
        self.back.release()
        self._take()

    def _take(self) -> None:
        self.mine.acquire()
        if self.over:
            raise _Abandoned

    def abandon(self) -> None:
        self.over = True
        self.mine.release()
        self.thread.join()
