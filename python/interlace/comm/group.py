"""From the `group` that a user passes to a transport.

`group` may be a Transport, a ProcessGroup or one-dimensional DeviceMesh of torch.distributed, or None: the transport of
the virtual rank inside `run_local`, else the default process group, else this process alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.transports.base import Transport
from interlace.comm.transports.local import LocalHub, LocalTransport

Group = Any  # Transport | ProcessGroup | DeviceMesh | None

_here = threading.local()
_connected: weakref.WeakKeyDictionary[Any, dict[str, Transport]] = weakref.WeakKeyDictionary()
_alone: dict[torch.device, Transport] = {}
_connecting: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_finding = threading.Lock()  # of what is in these tables; never held while ranks wait for each other


@contextmanager
def use(transport: Transport) -> Iterator[Transport]:
    """Inside the block `group=None` means `transport`, in this thread."""
    before = here()
    _here.transport = transport
    try:
        yield transport
    finally:
        _here.transport = before


def here() -> Transport | None:
    """What `group=None` means in this thread because of `use`, if anything."""
    return getattr(_here, "transport", None)


def members(group: Group) -> tuple[int, int]:
    """(rank of this process, number of ranks) of `group`, without connecting anything. Errors as for `resolve`."""
    group = here() if group is None else group
    if isinstance(group, Transport):
        return group.rank, group.world
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    found = process_group(group)
    return dist.get_rank(found), dist.get_world_size(found)


def resolve(group: Group, device: torch.device | str = "cpu") -> Transport:
    """The transport of `group` for tensors of `device`.

    The first use of a process group connects its ranks (`connect`, collective) and keeps the transport until the
    process group is destroyed or `disconnect` is called. Its waits last as long as those of the process group may.

    Raises:
        TypeError: not a group. ValueError: a mesh of several dimensions, or a process group this rank is not in.
    """
    group = here() if group is None else group
    if isinstance(group, Transport):
        return group
    device = torch.device(device)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        if device not in _alone:
            _alone[device] = LocalTransport(0, LocalHub(1), device=device)
        return _alone[device]
    found = process_group(group)
    with _finding:
        transports = _connected.setdefault(found, {})
        connecting = _connecting.setdefault(found, threading.Lock())
    if device.type not in transports:
        from interlace.comm.transports.choose import connect

        with connecting:  # once, though several threads may come first
            if device.type not in transports:
                transports[device.type] = connect(found, device=device)
    return transports[device.type]


def disconnect(group: Group = None) -> None:
    """Closes the transports that `resolve` made for `group`; the next use connects anew, on every rank.

    A transport that failed stays as it is until then.
    """
    if isinstance(group, Transport):
        group.close()
        return
    if group is None and not (dist.is_available() and dist.is_initialized()):
        while _alone:
            _alone.popitem()[1].close()
        return
    for transport in _connected.pop(process_group(group), {}).values():
        transport.close()


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group of a ProcessGroup, a one-dimensional DeviceMesh, or None (the default one)."""
    found: Any = None
    if group is None:
        found = dist.group.WORLD
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        pass  # what dist.new_group gives those whom it leaves out
    elif isinstance(group, dist.ProcessGroup):
        found = group
    elif hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions: pass one of them, as mesh['tp']")
        found = group.get_group()
    else:
        raise TypeError(f"group must be a Transport, ProcessGroup, DeviceMesh or None, got {type(group).__name__}")
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError("this rank is not a member of the process group")
    return found
