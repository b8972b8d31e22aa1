"""The `group` argument: a process group of torch.distributed, or the transport of a virtual rank.

`group` may be a Transport, a ProcessGroup or one-dimensional DeviceMesh of torch.distributed, or None. None means the
transport of the virtual rank inside `run_local`, else the default process group, else this process alone.
`interlace.comm.transports.choose.resolve` returns the transport of a group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from interlace.comm.transports.base import Transport

Group: TypeAlias = "Transport | dist.ProcessGroup | DeviceMesh | None"
Device = torch.device | str

_here = threading.local()


@contextmanager
def use(transport: Transport) -> Iterator[Transport]:
    """Inside the block `group=None` means `transport`, in this thread."""
    previous = current_transport()
    _here.transport = transport
    try:
        yield transport
    finally:
        _here.transport = previous


def current_transport() -> Transport | None:
    """The transport set by `use` for this thread; None if not set."""
    return getattr(_here, "transport", None)


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group of a ProcessGroup, a one-dimensional DeviceMesh, or None (the default one)."""
    result: Any = None
    if group is None:
        result = dist.group.WORLD
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        pass  # dist.new_group returns this to non-members
    elif isinstance(group, dist.ProcessGroup):
        result = group
    elif hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions: pass one of them, for example mesh['tp']"
            )
        result = group.get_group()
    else:
        raise TypeError(f"group must be a Transport, ProcessGroup, DeviceMesh or None, got {type(group).__name__}")
    if not isinstance(result, dist.ProcessGroup):
        raise ValueError("this rank is not a member of the process group: pass a group that contains it")
    return result
