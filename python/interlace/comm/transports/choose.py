"""Choice of the transport of a process group: made once, by all its ranks together, and cached.

Every rank lists the transports that it can run. The first transport of PREFERENCE that all ranks can run is taken, so
all ranks decide identically. The log line contains the choice, and the reasons why no better transport was taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace import _device
from interlace._hints import imported
from interlace.comm.process import groups
from interlace.comm.process.abort_reports import named
from interlace.comm.process.errors import CommError
from interlace.comm.process.groups import Device, Group
from interlace.comm.process.rendezvous import Rendezvous
from interlace.comm.transports.base import DEFAULT_TIMEOUT, Capabilities, Transport
from interlace.comm.transports.local import LocalHub, LocalTransport
from interlace.comm.transports.queued import forget_locals

_log = logging.getLogger(__name__)
_OTHER_DEVICE = "for"  # prefix of the reason to skip a transport for tensors of another device

# Name -> class, best first.
PREFERENCE = {
    "cuda_ipc": "interlace.comm.transports.cuda_ipc:CudaIpcTransport",
    "symm_mem": "interlace.comm.transports.symm_mem:SymmMemTransport",
    "nccl": "interlace.comm.transports.process_group:NcclTransport",
    "shm": "interlace.comm.transports.shm:ShmTransport",
    "gloo": "interlace.comm.transports.process_group:GlooTransport",
}


_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Transport]] = weakref.WeakKeyDictionary()
_single_rank: dict[torch.device, Transport] = {}
_connecting: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards these tables; never held while ranks wait for each other


def connect(
    process_group: Group = None, *, device: Device = "cpu", transport: str = "auto", timeout: float | None = None
) -> Transport:
    """Connects the ranks of a process group; collective, with the same arguments on each.

    Args:
        process_group: a ProcessGroup, a one-dimensional DeviceMesh, or None: the default one, else this process alone.
        device: of the tensors. "cuda" means the current device.
        transport: a name of PREFERENCE, a user's "package.module:Class", or "auto": the transport named by the
            environment variable INTERLACE_TRANSPORT, else the first that every rank can run. A single rank always gets
            a LocalTransport.
        timeout: seconds without progress after which this and every later wait fails; default: the process group's own
            timeout, from init_process_group or new_group.

    Raises:
        ValueError: the named transport cannot run (names the rank and the reason), the ranks request different ones, or
            none can run. CommError: a rank is missing, or no candidate connects.
    """
    device = _device.indexed(torch.device(device))
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
    introduction = introduction_of(device, transport)
    requested = introduction["wanted"]
    alone = process_group is None and not (dist.is_available() and dist.is_initialized())
    group = None if alone else groups.process_group(process_group)
    if timeout is None:
        timeout = _timeout_of(group, device)
    if group is None or group.size() == 1:
        _known(requested)
        return LocalTransport(0, LocalHub(1), device=device, timeout=timeout)

    rendezvous = Rendezvous(group, device, timeout)
    introductions = rendezvous.exchange(introduction, "choosing a transport")
    requested = _agreed(introductions, rendezvous.global_ranks)
    reasons = _reasons(introductions, rendezvous.global_ranks)
    candidates = [name for name, message in reasons.items() if not message]
    if requested != "auto":
        if reasons[requested]:
            raise ValueError(f"transport {requested!r} cannot run: {reasons[requested]}")
        candidates = [requested]
    for name in candidates:
        try:
            connected = _class_of(name).connect(rendezvous)
        except CommError as error:
            forget_locals(error)  # otherwise memory of this rank would live as long as the error
            if requested != "auto" or rendezvous.failed:  # a rank that was missing once will be missing again
                raise
            reasons[name] = str(error)
            continue
        connected.global_ranks = rendezvous.global_ranks
        if rendezvous.rank == 0:
            better = [f"not {x}: {why}" for x, why in reasons.items() if why and not why.startswith(_OTHER_DEVICE)]
            others = "; ".join(better) or "the first of the preferred"
            _log.info("%d ranks on %s: transport %s (%s)", rendezvous.world, device.type, name, others)
        return connected
    message = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise (CommError if candidates else ValueError)(
        f"no transport for {rendezvous.world} ranks on {device.type}: {message}"
    )


def capabilities(wanted: str = "auto", device: str = "cpu") -> dict[str, Capabilities]:
    """Capabilities of each transport in this process, best first for each kind of device.

    wanted: a further transport to list, if it is a user's class; one that cannot be imported is missing for `device`.
    """
    by_name = {"local": LocalTransport.capabilities()}
    for name in _names(wanted):
        try:
            by_name[name] = _class_of(name).capabilities()
        except ValueError as error:  # reported to the other ranks, which would otherwise wait for this one
            by_name[name] = Capabilities(name, device, missing=str(error))
    return by_name


def _names(wanted: str) -> list[str]:
    """Names of the transports to consider, best first."""
    return [*([wanted] if ":" in wanted else []), *PREFERENCE]


def _class_of(name: str) -> Any:
    """The class of a transport. Raises ValueError for a user's class that is none."""
    transport_class = imported(PREFERENCE.get(name, name), "transport")
    if not (isinstance(transport_class, type) and issubclass(transport_class, Transport)):
        raise ValueError(f"transport = {name!r} is not a subclass of interlace.comm.transports.Transport")
    if transport_class.capabilities.__func__ is Transport.capabilities.__func__:  # type: ignore[attr-defined]
        raise ValueError(f"transport = {name!r} does not define capabilities(), which says where it can run")
    return transport_class


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float:
    if group is not None:
        for candidate in (device, torch.device("cpu")):
            with contextlib.suppress(RuntimeError, AttributeError):  # no backend, or one without options
                options: Any = group._get_backend(candidate).options
                return float(options._timeout.total_seconds())
    return DEFAULT_TIMEOUT


def introduction_of(device: torch.device, transport: str = "auto") -> dict[str, Any]:
    """Introduction of a rank, JSON-serializable. The choice of a transport follows from all introductions."""
    wanted = os.environ.get("INTERLACE_TRANSPORT", "auto") if transport == "auto" else transport
    return {
        "wanted": wanted,
        "device": device.type,
        "host": _host(),
        "card": _card(device),
        "can": {
            name: [able.device, able.one_host, able.missing]
            for name, able in capabilities(wanted, device.type).items()
            if name != "local"
        },
    }


def edge_transports(
    introductions: Sequence[dict[str, Any]], edges: Sequence[tuple[int, int]], group_backend: str
) -> dict[tuple[int, int], str]:
    """Edge -> the transport that `connect` must create for it; "" if the group of torch.distributed carries it.

    torch.distributed is used where it can carry the edge, unless another transport is named. A named transport for a
    single host is not used between hosts.

    group_backend: the name of such a group's backend.
    introductions: every rank's introduction.

    Raises ValueError, identically on all ranks, for an edge that the named transport, or no transport, can carry.
    """
    requested = _agreed(introductions, range(len(introductions)))
    chosen: dict[tuple[int, int], str] = {}
    for edge in edges:
        reasons = _reasons([introductions[rank] for rank in edge], edge)
        shared = sharing(introductions, edge)
        source, target = (introductions[rank] for rank in edge)
        moves, one_host, _ = source["can"].get(requested, ("", False, ""))
        between_hosts = moves == source["device"] and one_host and source["host"] != target["host"]
        chosen[edge] = "" if (requested in ("auto", group_backend) and not shared) or between_hosts else requested
        edge_name = f"the pipeline edge from rank {edge[0]} to rank {edge[1]}"
        if requested != "auto" and chosen[edge] and reasons[requested]:
            raise ValueError(f"transport {requested!r} cannot carry {edge_name}: {reasons[requested]}")
        if chosen[edge] and all(reasons.values()):
            listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ValueError(f"no transport can carry {edge_name}: {listed}")
    return chosen


def sharing(introductions: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[int]:
    """Those of some ranks that share one GPU; empty if none do. introductions: every rank's introduction."""
    cards = _ranks_by((introductions[rank]["card"], rank) for rank in ranks)
    return next((on_card for card, on_card in cards.items() if card and len(on_card) > 1), [])


def _card(device: torch.device) -> str:
    """Identity of a GPU: equal for ranks that share it."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" and _device.count() else ""


def _host() -> str:
    """Identity of the host and the container on it: equal for processes that see each other."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _agreed(introductions: Sequence[dict[str, Any]], global_ranks: Sequence[int]) -> str:
    """The transport name that all ranks request. Raises ValueError with the requests if they differ.

    global_ranks: global numbers of the ranks.
    """
    for key, subject in (("wanted", "transports"), ("device", "devices")):
        values = _ranks_by((each[key], rank) for rank, each in zip(global_ranks, introductions, strict=True))
        if len(values) > 1:
            requests = ", ".join(f"{value} on {named(ranks)}" for value, ranks in values.items())
            raise ValueError(f"the ranks request different {subject}: {requests}: use the same on all")
    return _known(introductions[0]["wanted"])


def _known(name: str) -> str:
    names = ["auto", *_names(name)]
    if name not in names:
        listed = ", ".join(names)
        raise ValueError(
            f"unknown transport {name!r} (argument or INTERLACE_TRANSPORT): use one of {listed}, or a "
            "'package.module:Class'"
        )
    return name


def _reasons(introductions: Sequence[dict[str, Any]], global_ranks: Sequence[int]) -> dict[str, str]:
    """Transport -> why the ranks cannot use it together ("" if they can), best first.

    global_ranks: global numbers of the ranks.
    """
    device, hosts = introductions[0]["device"], {introduction["host"] for introduction in introductions}
    reasons = {}
    for name in _names(introductions[0]["wanted"]):
        moves, one_host, _ = introductions[0]["can"][name]
        missing = _ranks_by((each["can"][name][2], r) for r, each in zip(global_ranks, introductions, strict=True))
        reason = "; ".join(f"{why} on {named(ranks)}" for why, ranks in missing.items() if why)
        if moves != device:
            reason = f"{_OTHER_DEVICE} {moves} tensors"
        elif not reason and one_host and len(hosts) > 1:
            reason = f"the ranks are on {len(hosts)} hosts or in several containers"
        elif not reason and name == "nccl" and (shared := sharing(introductions, range(len(introductions)))):
            reason = f"{named([global_ranks[rank] for rank in shared])} share a GPU, which NCCL does not support"
        reasons[name] = reason
    return reasons


def _ranks_by(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Value -> the ranks that have it, from (value, rank) pairs."""
    ranks: dict[str, list[int]] = {}
    for value, rank in pairs:
        ranks.setdefault(value, []).append(rank)
    return ranks


def members(group: Group) -> tuple[int, int]:
    """(rank of this process, number of ranks) of `group`, without connecting anything. Errors as for `resolve`."""
    group = groups.current_transport() if group is None else group
    if isinstance(group, Transport):
        return group.rank, group.world
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    process_group = groups.process_group(group)
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def resolve(group: Group, device: torch.device | str = "cpu") -> Transport:
    """The transport of `group` for tensors of `device`.

    The first use of a process group connects its ranks (`connect`, collective). The transport is kept until the process
    group is destroyed or `disconnect` is called. Its waits use the timeout of the process group.

    Raises:
        TypeError: not a group. ValueError: a mesh of several dimensions, or a process group without this rank.
    """
    group = groups.current_transport() if group is None else group
    if isinstance(group, Transport):
        return group
    device = torch.device(device)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        if device not in _single_rank:
            _single_rank[device] = LocalTransport(0, LocalHub(1), device=device)
        return _single_rank[device]
    process_group = groups.process_group(group)
    with _lock:
        transports = _connected.setdefault(process_group, {})
        connecting = _connecting.setdefault(process_group, threading.Lock())
    if device.type not in transports:
        with connecting:  # once, even if several threads arrive together
            if device.type not in transports:
                transports[device.type] = connect(process_group, device=device)
    return transports[device.type]


def disconnect(group: Group = None) -> None:
    """Closes the transports that `resolve` created for `group`; the next use connects again, on every rank.

    Until then, a failed transport stays failed.
    """
    if isinstance(group, Transport):
        group.close()
        return
    if group is None and not (dist.is_available() and dist.is_initialized()):
        while _single_rank:
            _single_rank.popitem()[1].close()
        return
    for transport in _connected.pop(groups.process_group(group), {}).values():
        transport.close()
