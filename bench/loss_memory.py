"""Memory and time of the loss: the head's logits in chunks, all at once, and split over two ranks.

    python -m bench.loss_memory [--rows 2048 32768] [--words 128000] [--hidden 64] [--out FILE]

Forward and backward of the head and the cross entropy, in fp32, one thread per process. Each variant runs in its own
process; "lane" runs in two, over gloo, each with half of the words. Memory is the peak of a process (of two: the
larger) beyond the hidden states, its weight and their gradients, which exist before. Whole logits are only measured for
the smallest number of rows: they take --rows x --words x 4 bytes, several times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.measure import command, free_port, join_group, machine, peak_bytes, versions, write_json
from interlace.model import loss
from interlace.parallel import Ranks, VocabularyHead

ROOT = Path(__file__).parents[1]
WAYS = ("chunked", "lane", "whole")  # whole: only for the fewest rows
LANE = 2  # ranks


def run(way: str, rows: int, words: int, hidden: int) -> dict[str, float]:
    """Peak in MiB beyond the required memory, and seconds; of this process, which does nothing else."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head: loss.Head = nn.Linear(hidden, words, bias=False)
    if way == "lane":
        head = VocabularyHead.from_linear(head, Ranks())
    states = torch.randn(rows, hidden).requires_grad_()
    targets = torch.randint(words, (rows,))
    for tensor in (states, head.weight):
        tensor.grad = torch.zeros_like(tensor).fill_(0.0)
    warm = torch.randn(64, hidden).requires_grad_()
    loss.head_cross_entropy(warm, head, targets[:64]).backward()  # libraries allocate their one-time buffers
    if way == "whole":
        loss.LOGITS_BYTES = 1 << 62
    before = peak_bytes()
    began = time.perf_counter()
    value = loss.head_cross_entropy(states, head, targets)
    value.backward()
    seconds = time.perf_counter() - began
    peak = (peak_bytes() - before) / 2**20
    assert states.grad is not None
    return {"peak_mib": peak, "seconds": seconds, "loss": float(value.detach()), "gradient": float(states.grad.norm())}


def measure(rows: Sequence[int], words: int, hidden: int) -> list[dict[str, Any]]:
    """A row for each variant and number of rows."""
    result = []
    for count in sorted(rows):
        for way in WAYS if count == min(rows) else WAYS[:2]:
            port = free_port()
            children = [
                subprocess.Popen(
                    [sys.executable, "-m", "bench.loss_memory", "--child", way]
                    + [str(number) for number in (count, words, hidden, rank, port)],
                    cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
                for rank in range(LANE if way == "lane" else 1)
            ]  # fmt: skip
            output = [child.communicate() for child in children]
            for child, (_, errors) in zip(children, output, strict=True):
                if child.returncode:
                    raise RuntimeError(f"{way}, {count} rows ended with code {child.returncode}:\n{errors[-2000:]}")
            largest = max((json.loads(out) for out, _ in output), key=lambda each: each["peak_mib"])
            result.append({"way": way, "rows": count, "logits_mib": count * words * 4 / 2**20, **largest})
    return result


def main(argv: Sequence[str] | None = None) -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--words", type=int, default=128_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "loss_memory.json")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        way, *numbers = options.child
        rows, words, hidden, rank, port = map(int, numbers)
        if way == "lane":
            join_group(rank, LANE, port, timeout=300)
        print(json.dumps(run(way, rows, words, hidden)))
        return None
    report = {
        "benchmark": "loss_memory",
        "command": command("loss_memory", argv),
        "machine": machine(),
        "versions": versions(),
        "words": options.words,
        "hidden": options.hidden,
        "ranks": LANE,
        "rows": measure(options.rows, options.words, options.hidden),
    }
    write_json(options.out, report)
    for row in report["rows"]:
        what = f"{row['rows']:,} rows, {row['way']}"
        print(
            f"{what:24} logits {row['logits_mib']:8,.0f} MiB, peak {row['peak_mib']:8,.0f} MiB, {row['seconds']:.1f} s"
        )
    return report


if __name__ == "__main__":
    main()
