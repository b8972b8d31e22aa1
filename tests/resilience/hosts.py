"""Emulated hosts of a cluster: network namespaces, each with its own virtual cable and disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

NEW_NETWORK, NEW_MOUNTS = 0x40000000, 0x00020000  # CLONE_NEWNET, CLONE_NEWNS
BIND, PRIVATE = 1 << 12, 1 << 18 | 1 << 14  # MS_BIND; MS_PRIVATE, of all mounts below
CARD = "eth0"  # network interface at the host's end of its cable


@dataclass(frozen=True)
class Hosts:
    """names: of their namespaces. addresses: of each. cables: this machine's ends of their cables, all connected to a
    switch with the address `switch`.
    """

    names: list[str]
    addresses: list[str]
    cables: list[str]
    switch: str

    def cut(self, host: int) -> None:
        """Cuts a cable: packets in flight are lost, and no connection is closed."""
        ip("link", "set", self.cables[host], "down")

    def mend(self, host: int) -> None:
        ip("link", "set", self.cables[host], "up")


@contextlib.contextmanager
def hosts_of_namespaces(count: int) -> Iterator[Hosts]:
    """Makes this many hosts; skips the test if namespaces are not available."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need `ip` and root")
    tag = uuid4().hex[:6]
    subnet = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    names, cables, bridge = [f"h{tag}{n}" for n in range(count)], [f"v{tag}{n}" for n in range(count)], f"b{tag}"
    addresses = [f"{subnet}.{number + 2}" for number in range(count)]
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for name, cable, address in zip(names, cables, addresses, strict=True):
                ip("netns", "add", name)
                ip("link", "add", cable, "type", "veth", "peer", "name", CARD, "netns", name)
                ip("link", "set", cable, "master", bridge, "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", CARD)
                ip("-n", name, "link", "set", CARD, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield Hosts(names, addresses, cables, f"{subnet}.1")
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)  # also removes its end of the cable, and so the cable
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", bridge)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def enter(name: str, own: Path | None = None, seen_as: Path | None = None) -> None:
    """Moves this process and its later children to a host. own: a folder private to this host, mounted at `seen_as`."""
    system = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as file:
        _done(system.setns(file.fileno(), NEW_NETWORK), "entering a network namespace")
    os.environ["GLOO_SOCKET_IFNAME"] = CARD  # the host name resolves to another address here
    if own is not None:
        _done(system.unshare(NEW_MOUNTS), "making mounts of its own")
        _done(system.mount(b"none", b"/", None, PRIVATE, None), "keeping its mounts to itself")
        _done(system.mount(os.fsencode(own), os.fsencode(str(seen_as)), None, BIND, None), f"mounting {own}")


def _done(code: int, what: str) -> None:
    if code:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
