"""Peak memory of one forward and backward beyond its inputs and outputs, in a separate process (CPU).

    python -m bench.attention_memory CONTENDER MASK LENGTH HEADS HEAD_DIM DTYPE THREADS      prints one JSON line

The high-water mark of resident memory belongs to a process, so each figure is measured in a fresh process. The process
imports everything, warms up on a small problem (thread pools, code pages), and creates its inputs, outputs and mask.
Measurement starts after that.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench.attention_peers import INTERLACE, PEERS, Contender, Problem
from bench.measure import parse_heads, peak_bytes

PAGE = resource.getpagesize()


def measure(contender: Contender, problem: Problem) -> dict[str, Any]:
    """Bytes beyond q, k, v, dout, out and the three gradients, split into those of the mask and those of a step.

    All allocations of a step count (scores, workspaces, saved tensors such as the LSE). The dense mask or the plan is
    built before the step and counted as `mask_bytes`.
    """
    _give_back()
    before = _resident()
    state = contender.build(problem)
    _give_back()
    mask_bytes = max(0, _resident() - before)
    results = problem.q.nbytes * 2 + problem.k.nbytes + problem.v.nbytes  # out, dq, dk, dv
    _reset_peak()
    start = _resident()
    out = contender.forward(problem, state)
    grads = torch.autograd.grad(out, (problem.q, problem.k, problem.v), problem.dout)
    assert out.nbytes + sum(grad.nbytes for grad in grads) == results
    return {
        "bytes": max(0, _peak() - start - results),
        "mask_bytes": mask_bytes,
        "inputs_and_outputs_bytes": results + problem.q.nbytes * 2 + problem.k.nbytes + problem.v.nbytes,
        "peak_was_reset": _CAN_RESET,
    }


def in_a_fresh_process(
    contender: str, mask: str, length: int, heads: str, head_dim: int, dtype: str, threads: int
) -> dict[str, Any]:
    """`measure` in a fresh process. A failure is returned as {"failed": its last line}."""
    arguments = [contender, mask, str(length), heads, str(head_dim), dtype, str(threads)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.attention_memory", *arguments], capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit code {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _give_back() -> None:
    """Return freed memory to the system; otherwise a step would reuse memory that is not counted (glibc only)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _peak() -> int:
    """The high-water mark since the last reset, in bytes."""
    if _CAN_RESET:
        return peak_bytes()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset_peak() -> bool:
    """Restart the high-water mark. If the kernel refuses, the mark of the whole process is an upper bound."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


_CAN_RESET = os.path.exists("/proc/self/clear_refs") and _reset_peak()


def main(argv: list[str]) -> None:
    name, mask, length, heads, head_dim, dtype, threads = argv
    torch.set_num_threads(int(threads))
    contender = INTERLACE if name == INTERLACE.name else PEERS[name]
    q_heads, kv_heads = parse_heads(heads)
    options: dict[str, Any] = dict(
        heads=q_heads,
        kv_heads=kv_heads,
        head_dim=int(head_dim),
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
    )
    measure(contender, Problem.make(mask, 300, **options))
    print(json.dumps(measure(contender, Problem.make(mask, int(length), **options))))


if __name__ == "__main__":
    main(sys.argv[1:])
