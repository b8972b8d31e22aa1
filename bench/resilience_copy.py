"""Recovery copies: the rate at which layers, moments and averages reach another node, beside the link's.

Two processes stand for two hosts. One holds `--gib` of layers of a transformer (matrices of 4096 x 4096 and small
norms, each with two moments). The other has none of them and takes them over (`interlace.resilience.takeover.copy`).
The link's rate is measured with the same number of bytes sent in one piece, between the same processes over the same
process group, in turns with the takeover.

With `--mbit` each process is in its own network namespace (as root), joined by a veth pair of that rate (`tc qdisc ...
tbf`). Otherwise the loopback measures the speed of one machine's memory.

    python -m bench.resilience_copy --out bench/results/resilience_copy.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.measure import command, machine, versions, write_json
from interlace.resilience.takeover import Takeover, Tensors, Transfer, copy

WIDTH = 4096
NAMES = ("interlace0", "interlace1")
ADDRESS = "10.213.7."


def layers(gib: float, *, value: float) -> Tensors:
    """Layers of `gib` in total: name -> its tensors, filled with a value."""
    result: dict[str, dict[str, torch.Tensor]] = {}
    left = gib * 2**30
    while left > 0:
        shape = (WIDTH, min(WIDTH, max(1, round(left / (12 * WIDTH)))))
        for name, size in ((f"{len(result)}.weight", shape), (f"{len(result)}.norm", (WIDTH,))):
            result[name] = {key: torch.full(size, value) for key in ("weight", "exp_avg", "exp_avg_sq")}
            result[name]["step"] = torch.tensor(value)
            left -= sum(tensor.nbytes for tensor in result[name].values())
    return result


def rank(number: int, address: str, port: int, gib: float, rounds: int) -> list[dict[str, float]]:
    """One of the two processes; seconds of each round, measured by the receiver."""
    store = dist.TCPStore(address, port, 2, number == 0, timedelta(seconds=120), wait_for_workers=False)
    group = dist.ProcessGroupGloo(dist.PrefixStore("copying", store), number, 2, timedelta(seconds=600))
    held = layers(gib, value=float(number == 0))
    total = sum(tensor.nbytes for each in held.values() for tensor in each.values())
    flat = torch.ones(total // 4)
    takeover = Takeover((Transfer(0, 1, tuple(held)),), ())
    result = []
    for _ in range(rounds + 1):  # the first one touches the memory
        group.barrier().wait()
        begin = time.perf_counter()
        (group.send([flat], 1, 0) if number == 0 else group.recv([flat], 0, 0)).wait()
        link = time.perf_counter() - begin
        group.barrier().wait()
        begin = time.perf_counter()
        received = copy(takeover, number, group, held, held)
        result.append({"link": link, "copy": time.perf_counter() - begin, "bytes": float(total)})
        if number == 1 and received != total:
            raise ValueError(f"{received} bytes came of {total}")
    if any(not bool((tensor == 1.0).all()) for each in held.values() for tensor in each.values()):
        raise ValueError("other values came than were sent")
    group.barrier().wait()
    return result[1:]


@contextlib.contextmanager
def hosts(mbit: int | None) -> Iterator[tuple[list[list[str]], str]]:
    """(command prefix for a process on each host, address of the first host)."""
    if mbit is None:
        yield [[], []], "127.0.0.1"
        return
    first, second = NAMES
    try:
        for line in (
            f"ip netns add {first}",
            f"ip netns add {second}",
            f"ip link add veth netns {first} type veth peer name veth netns {second}",
        ):
            subprocess.run(line.split(), check=True)
        for place, name in enumerate(NAMES, 1):
            for line in (
                f"ip -n {name} addr add {ADDRESS}{place}/24 dev veth",
                f"ip -n {name} link set veth up",
                f"ip -n {name} link set lo up",
                f"tc -n {name} qdisc add dev veth root tbf rate {mbit}mbit burst 256kb latency 50ms",
            ):
                subprocess.run(line.split(), check=True)
        yield [["ip", "netns", "exec", name] for name in NAMES], f"{ADDRESS}1"
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def measure(gib: float, rounds: int, mbit: int | None) -> dict[str, Any]:
    """The rates of the link and of the takeover, in GB/s, the best of `rounds` each, and their ratio."""
    port = 20000 + os.getpid() % 20000
    with hosts(mbit) as (prefixes, address), tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / str(number) for number in range(2)]
        processes = []
        for number, prefix in enumerate(prefixes):
            arguments = ["--rank", str(number), address, str(port), "--gib", str(gib), "--rounds", str(rounds)]
            own = {"GLOO_SOCKET_IFNAME": "veth" if prefix else "lo"}
            run = [*prefix, sys.executable, "-m", "bench.resilience_copy", *arguments, "--out", str(outs[number])]
            processes.append(subprocess.Popen(run, env={**os.environ, **own}))
        if any([process.wait() for process in processes]):
            raise RuntimeError("a process has failed")
        result = json.loads(outs[1].read_text())
    total = result[0]["bytes"]
    link, copied = (total / min(each[what] for each in result) / 1e9 for what in ("link", "copy"))
    return {
        "mbit": mbit, "gib": total / 2**30, "link_gb_per_second": link, "copy_gb_per_second": copied,
        "share_of_link": copied / link, "rounds": result,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, nargs="*", help="links of these rates, beside the loopback")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=3, metavar=("NUMBER", "ADDRESS", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        number, address, port = int(options.rank[0]), options.rank[1], int(options.rank[2])
        options.out.write_text(json.dumps(rank(number, address, port, options.gib, options.rounds)))
        return
    cases = [measure(options.gib, options.rounds, mbit) for mbit in (None, *(options.mbit or ()))]
    report = {
        "command": command("resilience_copy"),
        "machine": machine(),
        "versions": versions("torch"),
        "cases": cases,
    }
    for case in cases:
        print(
            f"{'loopback' if case['mbit'] is None else str(case['mbit']) + ' Mbit/s'}: link "
            f"{case['link_gb_per_second']:.3f} GB/s, takeover {case['copy_gb_per_second']:.3f} GB/s "
            f"({100 * case['share_of_link']:.0f} %)"
        )
    if options.out:
        write_json(options.out, report)


if __name__ == "__main__":
    main()
