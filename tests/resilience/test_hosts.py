"""Nodes on hosts of their own, made of network namespaces; the coordinator and its store are on another one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from interlace.resilience.settings import Settings
from tests.resilience.cluster import cluster, vote_on_steps

pytestmark = pytest.mark.slow


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, list[str], list[str]]]:
    """(an address of this host, namespaces of three others, the cables to them on this one)."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need `ip` and root")
    tag = uuid4().hex[:6]
    subnet = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
    names, cables, bridge = [f"h{tag}{n}" for n in range(3)], [f"v{tag}{n}" for n in range(3)], f"b{tag}"
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for number, (name, cable) in enumerate(zip(names, cables)):
                ip("netns", "add", name)
                ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", cable, "master", bridge, "up")
                ip("-n", name, "addr", "add", f"{subnet}.{number + 2}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield f"{subnet}.1", names, cables
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)  # with its end of the cable, and so the cable
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", bridge)


def test_a_cut_cable_is_found_by_heartbeat(tmp_path: Path, hosts: tuple[str, list[str], list[str]]) -> None:
    address, names, cables = hosts
    settings = Settings(nodes=3, faults=1, min_nodes=1, heartbeat=1.0, gather=60.0)
    steps = 120
    with cluster(tmp_path, settings, (vote_on_steps, steps, 0.05), 0, host=address) as run:
        nodes = run.start(3, networks=names)
        run.until(lambda: len(run.ranks()) == 3, "three nodes that train, over the network")
        before = run.ranks()
        ip("link", "set", cables[1], "down")  # nobody says goodbye, no connection is closed
        second = run.until(lambda: run.generations()[1:], "generation without the node")[0]
        lost = second["cause"][0].removeprefix("death ")
        assert "no sign of life from its supervisor for 1 s" in run.journal("lost")[0]["detail"]
        nodes[1].join(60.0)
        assert nodes[1].exitcode == 1  # it has lost the coordinator, and ends its ranks
        said = "".join(path.read_text() for path in tmp_path.glob("supervisor-*"))
        assert f"it has lost the coordinator at {address}" in said
        assert not Path(f"/proc/{before[lost][0]}").exists()
        assert run.end() == 0
        run.check_votes(steps)
        assert {node: processes for node, processes in run.ranks().items() if node != lost} == {
            node: processes for node, processes in before.items() if node != lost
        }
        assert [nodes[0].exitcode, nodes[2].exitcode] == [0, 0]
