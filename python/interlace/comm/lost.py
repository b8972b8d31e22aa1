"""Who is lost when a wait fails, and the words for it.

A wait of gloo that runs out closes all connections of its group, and a collective that fails does not say whose fault
it was. So the ranks that notice a failure say so in the store that the group met through: whoever says nothing within a
few seconds is lost, and whoever left on its own has said why.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from interlace.comm.transports.messages import decode, encode

T = TypeVar("T")

SLOW = "no answer within {:g} s: it hangs, or is slower than the timeout"
_POLL = 0.05  # seconds
_WHAT = "roll call"
_WAITS, _LEFT = "waits", "left"


def reason_of(error: BaseException, timeout: float) -> str:
    """Why a wait on a peer failed, from torch's words for it."""
    reason = first_line(error)
    if "imeout" in reason or "imed out" in reason:
        return SLOW.format(timeout)
    return f"it died or closed the connection: {reason}"


def _is_slow(reason: str) -> bool:
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


class RollCall:
    """What the ranks of a group know of each other once something went wrong. Made by all ranks in the same order."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.rank = group.rank()
        self._store = private_store(group, f"roll call of the {name}")[1]
        self._said = False

    def leave(self, reason: str) -> None:
        """This rank gives up for a reason of its own, unless it has given up already."""
        self._say(_LEFT, reason)

    def gave_up(self, reason: str) -> None:
        """This rank waits no longer, for a `reason` in the words of `reason_of`: so it is not one that is lost."""
        self._say(_WAITS, reason)

    def lost(self, ranks: Sequence[int], error: BaseException, timeout: float) -> str:
        """Says that this rank gives up; returns whom of `ranks` it lost and why, in words. Takes seconds."""
        others = [rank for rank in ranks if rank != self.rank]
        grace = min(timeout / 2, 10.0)
        reason = reason_of(error, timeout)
        self.gave_up(reason)
        said: dict[int, list[str]] = {}

        def listen() -> bool:
            deadline = time.monotonic() + grace
            while len(said) < len(others):
                for rank in others:
                    if rank not in said and self._store.check([_key(rank)]):
                        said[rank] = _read(self._store.get(_key(rank)))
                if time.monotonic() > deadline or any(kind == _LEFT for kind, _ in said.values()):
                    break
                time.sleep(_POLL)
            return True

        if bounded(listen, grace + 1.0) is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # The store is gone, which rank 0 holds: it is lost, or has gone after it had named the one that is.
            silent = [0] if 0 in others and 0 not in said else [rank for rank in others if rank not in said]
        else:
            silent = [rank for rank in others if rank not in said]
        left = {rank: text for rank, (kind, text) in list(said.items()) if kind == _LEFT}
        if left:
            rank, text = next(iter(left.items()))
            return f"lost rank {rank} (it gave up: {text})"
        if not _is_slow(reason):  # then a connection was closed, perhaps by one whose wait ran out
            reason = next((text for _, text in list(said.values()) if _is_slow(text)), reason)
        return f"lost {named(silent or others)} ({reason})"

    def _say(self, kind: str, text: str) -> None:
        if not self._said:
            self._said = True
            raw = encode(_WHAT, [kind, text[:500]])
            bounded(lambda: self._store.set(_key(self.rank), raw), 1.0)


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


def _read(raw: bytes) -> list[str]:
    try:
        kind, text = decode(raw, _WHAT, ["", ""])
    except ValueError as error:
        return [_WAITS, str(error)]
    return [kind, text]
