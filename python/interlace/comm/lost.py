"""Who is lost when a wait fails, and the words for it.

A wait of gloo that runs out closes all connections of its group, and a collective that fails does not say whose fault
it was. So the ranks that notice a failure say so in the store that the group met through: whoever says nothing within a
few seconds is lost, and whoever left on its own has said why.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from interlace.comm.transports.messages import decode, encode

T = TypeVar("T")

SLOW = "no answer within {:g} s: it hangs, or is slower than the timeout"
_POLL = 0.05  # seconds
_WHAT = "roll call"
_DONE = "done"
_LONGEST = 60.0  # seconds more for those who have not noticed yet
_AT_ONCE = 2.0  # seconds in which one that closed a connection says why, if it lives


def reason_of(error: BaseException, timeout: float) -> str:
    """Why a wait on a peer failed, from torch's words for it."""
    reason = first_line(error)
    if "imeout" in reason or "imed out" in reason:
        return SLOW.format(timeout)
    return f"it died or closed the connection: {reason}"


def is_slow(reason: str) -> bool:
    """Whether a reason, in the words of `reason_of`, is that a wait lasted for its timeout."""
    return reason.startswith(SLOW.partition("{")[0])


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def named(ranks: Sequence[int | str]) -> str:
    """ "rank 3" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(rank) for rank in ranks)}"


def private_store(group: dist.ProcessGroup, name: str) -> tuple[str, Any]:
    """(its name, a store) that the ranks of a group share for one purpose; they ask for them in the same order.

    Counted in the group's own store, so that a group that is made anew under its old name finds no old keys.
    """
    store = dist.distributed_c10d._get_process_group_store(group)
    name = f"interlace/{name}/{store.add(f'interlace/{name} of rank {group.rank()}', 1)}"
    return name, dist.PrefixStore(name, store)


class Word(NamedTuple):
    """What a rank says when it gives up: why, and for which ranks it waited in vain; none: a reason of its own."""

    reason: str
    waited: tuple[int, ...] = ()


class RollCall:
    """What the ranks of a group know of each other once something went wrong. Made by all ranks in the same order.

    Whom a rank waited for in vain may itself have waited for another. So each one says whom it waited for when it gives
    up, and who asks follows these words from rank to rank to the one that says nothing.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, *, coordinated: bool = False) -> None:
        """coordinated: who is lost finds somebody outside of the ranks, who need not wait for each other's words."""
        self.rank, self.world, self._coordinated = group.rank(), group.size(), coordinated
        self._store = private_store(group, f"roll call of the {name}")[1]
        self._said: Word | None = None
        self._silent = 0  # how many of the lost ranks said nothing
        self.traced = False  # whether it is known who is lost

    def leave(self, reason: str, timeout: float) -> None:
        """This rank gives up for a reason of its own, unless it has given up already. timeout: of the others' waits.

        Rank 0, which may hold the store, stays when it has lost another, until the rest have given up too: they ask
        there who is lost, and would take rank 0 for it. At most for as long as they may wait, notice, and ask.
        """
        if self._coordinated:
            return
        self._say(Word(reason))
        grace = 2 * min(timeout, _LONGEST) + _grace(timeout)
        # Not as many as it waited for: in a collective it waited for all, of which most live and will ask.
        away = self._silent
        if self.rank > 0 or _is_kept_elsewhere():
            bounded(lambda: self._store.add(_DONE, 1), 1.0)
        elif self.traced:

            def stay() -> bool:
                deadline, pause = time.monotonic() + grace, _POLL
                while self._store.add(_DONE, 0) < self.world - 1 - away and time.monotonic() < deadline:
                    time.sleep(pause)
                    pause = min(2 * pause, 0.5)
                return True

            bounded(stay, grace + 1.0)

    def gave_up(self, reason: str, waited: Sequence[int]) -> None:
        """This rank waits no longer for the ranks `waited`, for a `reason` in the words of `reason_of`."""
        self._say(Word(reason, tuple(rank for rank in waited if rank != self.rank)))

    def lost(self, ranks: Sequence[int], error: BaseException, timeout: float) -> tuple[str, list[int]]:
        """Says that this rank gives up waiting for `ranks`, and asks on: (who is lost and why, in words; who).

        Takes seconds: those who are not lost have to notice too, for which each has its `timeout`.
        """
        return self.trace(reason_of(error, timeout), ranks, timeout)

    def trace(self, reason: str, ranks: Sequence[int], timeout: float) -> tuple[str, list[int]]:
        """The same, for a `reason` that is known."""
        self.gave_up(reason, ranks)
        self.traced = True
        if self._coordinated:
            return f"lost {named(list(ranks))} ({reason})", list(ranks)
        mine = Word(reason, tuple(rank for rank in ranks if rank != self.rank))
        said: dict[int, Word] = {}
        grace, begin = _grace(timeout), time.monotonic()
        moved = [begin]  # when the store last answered

        def listen() -> bool:
            certain, pause = begin, _POLL
            while True:
                silent, surely, late = _trail(mine, said, self.rank)
                for rank in silent:
                    if self._store.check([_key(rank)]):
                        said[rank] = _read(self._store.get(_key(rank)))
                        certain, pause = time.monotonic(), _POLL
                moved[0] = now = time.monotonic()
                if any(rank in said for rank in silent):
                    if any(not word.waited for word in said.values()):
                        return True
                    continue
                # A connection was closed, and one rank alone says nothing: it is dead. Of several nothing is certain
                # before those that live have noticed, each of which may wait for as long as this one does.
                known = (surely or len(silent) == 1) and not late and now - certain > min(grace, _AT_ONCE)
                if not silent or known or now - begin > grace + (0.0 if late else min(timeout, _LONGEST)):
                    return True
                time.sleep(pause)
                pause = min(2 * pause, 0.5)

        answered = _while_it_moves(listen, lambda: time.monotonic() - moved[0] < grace + 1.0)
        left = next((rank for rank, word in list(said.items()) if not word.waited), None)
        if left is not None:
            return f"lost rank {left} (it gave up: {said[left].reason})", [left]
        silent, surely, _ = _trail(mine, dict(said), self.rank)
        culprits = sorted(surely or silent) or list(mine.waited)
        if not answered and 0 not in said and self.rank > 0 and not _is_kept_elsewhere():
            culprits = [0]  # it holds the store, which answers no more
        self._silent = sum(rank not in said for rank in culprits)
        words = [mine, *said.values()]
        of = next((word for word in words if set(culprits) & set(word.waited)), mine)
        if not is_slow(of.reason):  # then a connection was closed, perhaps by one whose wait ran out
            of = next((word for word in words if is_slow(word.reason) and set(culprits) & set(word.waited)), of)
        return f"lost {named(culprits)} ({of.reason})", culprits

    def _say(self, word: Word) -> None:
        if self._said is None and not self._coordinated:
            self._said = word
            raw = encode(_WHAT, [word.reason[:500], " ".join(map(str, word.waited))])
            bounded(lambda: self._store.set(_key(self.rank), raw), 1.0)


def _grace(timeout: float) -> float:
    """Seconds beyond a wait in which a rank that lives says so."""
    return min(timeout / 2, 10.0)


def _trail(mine: Word, said: Mapping[int, Word], me: int) -> tuple[list[int], dict[int, Word], bool]:
    """Where the words lead: the ranks that are silent; those of them that died for sure, as somebody who waited for one
    alone saw its connection close; and whether all waits that lead there lasted until the timeout."""
    silent: dict[int, None] = {}
    surely: dict[int, Word] = {}
    late, seen, words = True, {me}, [mine]
    while words:
        word = words.pop()
        for rank in word.waited:
            if rank not in said and rank != me:
                silent[rank] = None
                late &= is_slow(word.reason)
                if len(word.waited) == 1 and not is_slow(word.reason):
                    surely[rank] = word
            elif rank not in seen:
                seen.add(rank)
                words.append(said[rank])
    return list(silent), surely, late


def _while_it_moves(call: Callable[[], bool], moves: Callable[[], bool]) -> bool:
    """What `call` returns; False when it fails, or no longer `moves`: torch may wait for ever on a store whose host
    hangs."""
    ended, found = threading.Event(), [False]

    def run() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            found[0] = call()
        ended.set()

    threading.Thread(target=run, name="asking-the-store", daemon=True).start()
    while not ended.wait(0.1) and moves():
        pass
    return found[0]


def _is_kept_elsewhere() -> bool:
    """Whether the store outlives the ranks: torchrun's agent holds it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def bounded(call: Callable[[], T], seconds: float) -> T | None:
    """What `call` returns; None if it fails or takes longer (torch may wait for ever on a store whose host hangs)."""
    found: list[T] = []

    def run() -> None:
        try:
            found.append(call())
        except (RuntimeError, OSError):
            return

    thread = threading.Thread(target=run, name="asking-the-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _key(rank: int) -> str:
    return f"rank {rank}"


def _read(raw: bytes) -> Word:
    try:
        reason, waited = decode(raw, _WHAT, ["", ""])
        return Word(reason, tuple(map(int, waited.split())))
    except ValueError as error:
        return Word(str(error))
