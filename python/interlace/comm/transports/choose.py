"""Which transport the ranks of a process group use: decided once, by all together, and never changed afterwards.

Every rank says what it could run. The first transport of PREFERENCE that all of them can is taken, so that the decision
is the same everywhere and can be read off a log line: what was chosen, and why nothing better was.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from interlace import _device
from interlace.comm.lost import named
from interlace.comm.rendezvous import Rendezvous
from interlace.comm.transports.base import DEFAULT_TIMEOUT, Capabilities, CommError, Transport
from interlace.comm.transports.local import LocalHub, LocalTransport
from interlace.comm.transports.queued import forget_locals

_log = logging.getLogger(__name__)
_OTHER_DEVICE = "for"  # begins the reason not to take what moves tensors of another device

# (name, module, class), best first. A module that is not there is no candidate.
PREFERENCE = [
    ("cuda_ipc", "interlace.comm.transports.cuda_ipc", "CudaIpcTransport"),
    ("symm_mem", "interlace.comm.transports.symm_mem", "SymmMemTransport"),
    ("nccl", "interlace.comm.transports.process_group", "NcclTransport"),
    ("shm", "interlace.comm.transports.shm", "ShmTransport"),
    ("gloo", "interlace.comm.transports.process_group", "GlooTransport"),
]


def connect(
    process_group: Any = None,
    *,
    device: torch.device | str = "cpu",
    transport: str = "auto",
    timeout: float | None = None,
) -> Transport:
    """Connects the ranks of a process group; collective, with the same arguments on each.

    Args:
        process_group: a ProcessGroup, a one-dimensional DeviceMesh, or None: the default one, else this process alone.
        device: where the tensors lie. "cuda" means the current device.
        transport: a name of PREFERENCE, or "auto": what the environment's INTERLACE_TRANSPORT names, else the first
            that every rank can run. One rank alone gets a LocalTransport whatever is named.
        timeout: seconds that this and every later wait may last without anything moving; default: the process group's
            own, which init_process_group and new_group take.

    Raises:
        ValueError: the named transport cannot run (says on which rank, and why), the ranks ask for different ones, or
            none can run. CommError: a rank does not come, or none of what could run comes up.
    """
    from interlace.comm.group import process_group as resolved

    device = _device.indexed(torch.device(device))
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
    introduction = introduction_of(device, transport)
    wanted = introduction["wanted"]
    alone = process_group is None and not (dist.is_available() and dist.is_initialized())
    group = None if alone else resolved(process_group)
    if timeout is None:
        timeout = _timeout_of(group, device)
    if group is None or group.size() == 1:
        _known(wanted)
        return LocalTransport(0, LocalHub(1), device=device, timeout=timeout)

    rendezvous = Rendezvous(group, device, timeout)
    said = rendezvous.exchange(introduction, "choosing a transport")
    wanted = _agreed(said, rendezvous.called)
    reasons = _reasons(said, rendezvous.called)
    candidates = [name for name, why in reasons.items() if not why]
    if wanted != "auto":
        if reasons[wanted]:
            raise ValueError(f"transport {wanted!r} cannot run: {reasons[wanted]}")
        candidates = [wanted]
    for name in candidates:
        try:
            found = _class_of(name).connect(rendezvous)
        except CommError as error:
            forget_locals(error)  # memory that came up on this rank would live as long as the error
            if wanted != "auto" or rendezvous.over:  # who stayed away once will not come again
                raise
            reasons[name] = str(error)
            continue
        found.called = rendezvous.called
        if rendezvous.rank == 0:
            better = [(other, why) for other, why in reasons.items() if why and not why.startswith(_OTHER_DEVICE)]
            others = "; ".join(f"not {other}: {why}" for other, why in better) or "no other is better"
            _log.info("%d ranks on %s: transport %s (%s)", rendezvous.world, device.type, name, others)
        return found
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise (CommError if candidates else ValueError)(
        f"no transport for {rendezvous.world} ranks on {device.type}: {why}"
    )


def capabilities() -> dict[str, Capabilities]:
    """What each transport could do in this process, best first for each kind of device."""
    found = {"local": LocalTransport.capabilities()}
    for name, *_ in PREFERENCE:
        transport = _class_of(name)
        found[name] = (
            transport.capabilities() if transport else Capabilities(name, "cuda", missing="not in this version")
        )
    return found


def _class_of(name: str) -> Any:
    """The class of a transport, None if its module is not there."""
    module, attribute = next((module, attribute) for other, module, attribute in PREFERENCE if other == name)
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float:
    if group is not None:
        for each in (device, torch.device("cpu")):
            with contextlib.suppress(RuntimeError, AttributeError):  # no backend for it, or one without options
                options: Any = group._get_backend(each).options
                return float(options._timeout.total_seconds())
    return DEFAULT_TIMEOUT


def introduction_of(device: torch.device, transport: str = "auto") -> dict[str, Any]:
    """Introduction of a rank to the others, as JSON can hold it: the choice of a transport follows from all of them."""
    return {
        "wanted": os.environ.get("INTERLACE_TRANSPORT", "auto") if transport == "auto" else transport,
        "device": device.type,
        "host": _host(),
        "card": _card(device),
        "can": {
            name: [found.device, found.one_host, found.missing]
            for name, found in capabilities().items()
            if name != "local"
        },
    }


def edge_transports(said: Sequence[dict[str, Any]], edges: Sequence[tuple[int, int]], own: str) -> dict[Any, str]:
    """Edge -> the transport that `connect` is to make for it; "" where the group of torch.distributed carries it.

    That is where it can, unless another one is named, and between hosts if that one serves a single host. own: the name
    of such a group's backend. said: every rank's introduction. Raises ValueError, on all ranks alike, for an edge that
    the named transport, or none, can carry.
    """
    wanted, found = _agreed(said, range(len(said))), {}
    for edge in edges:
        reasons = _reasons([said[rank] for rank in edge], edge)
        shared = sharing(said, edge)
        source, to = (said[rank] for rank in edge)
        moves, one_host, _ = source["can"].get(wanted, ("", False, ""))
        afar = moves == source["device"] and one_host and source["host"] != to["host"]
        found[edge] = "" if (wanted in ("auto", own) and not shared) or afar else wanted
        what = f"the pipeline edge from rank {edge[0]} to rank {edge[1]}"
        if wanted != "auto" and found[edge] and reasons[wanted]:
            raise ValueError(f"transport {wanted!r} cannot carry {what}: {reasons[wanted]}")
        if found[edge] and all(reasons.values()):
            why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ValueError(f"no transport can carry {what}: {why}")
    return found


def sharing(said: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[int]:
    """Those of some ranks that are on one GPU, if there are any. said: every rank's introduction."""
    cards: dict[str, list[int]] = {}
    for rank in ranks:
        cards.setdefault(said[rank]["card"], []).append(rank)
    return next((found for card, found in cards.items() if card and len(found) > 1), [])


def _card(device: torch.device) -> str:
    """Of a GPU: equal for ranks that share it."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" and _device.count() else ""


def _host() -> str:
    """Equal for processes that see each other: of one host, and of one container on it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _agreed(said: Sequence[dict[str, Any]], called: Sequence[int]) -> str:
    """The name that all ranks want. Raises ValueError that says who wants what. called: their numbers in the job."""
    for key, what in (("wanted", "transports"), ("device", "devices")):
        values: dict[str, list[int]] = {}
        for rank, introduction in zip(called, said, strict=True):
            values.setdefault(introduction[key], []).append(rank)
        if len(values) > 1:
            each = ", ".join(f"{value} on {named(ranks)}" for value, ranks in values.items())
            raise ValueError(f"the ranks ask for different {what}: {each}")
    return _known(said[0]["wanted"])


def _known(name: str) -> str:
    names = ["auto", *(name for name, *_ in PREFERENCE)]
    if name not in names:
        raise ValueError(f"transport {name!r} (argument or INTERLACE_TRANSPORT) is none of {', '.join(names)}")
    return name


def _reasons(said: Sequence[dict[str, Any]], called: Sequence[int]) -> dict[str, str]:
    """Name -> why the ranks cannot use it together ("" if they can), best first. called: their numbers in the job."""
    device, hosts = said[0]["device"], {introduction["host"] for introduction in said}
    reasons = {}
    for name, *_ in PREFERENCE:
        moves, one_host, _ = said[0]["can"][name]
        missing = {rank: introduction["can"][name][2] for rank, introduction in zip(called, said, strict=True)}
        missing = {rank: why for rank, why in missing.items() if why}
        reason = "; ".join(f"{why} on {named([r for r in missing if missing[r] == why])}" for why in _unique(missing))
        if moves != device:
            reason = f"{_OTHER_DEVICE} {moves} tensors"
        elif not reason and one_host and len(hosts) > 1:
            reason = f"the ranks are on {len(hosts)} hosts or in as many containers"
        elif not reason and name == "nccl" and (shared := sharing(said, range(len(said)))):
            reason = f"{named([called[rank] for rank in shared])} share a GPU, which NCCL refuses"
        reasons[name] = reason
    return reasons


def _unique(missing: dict[int, str]) -> list[str]:
    return list(dict.fromkeys(missing.values()))
