"""Host time of attention: Python's time to launch a forward, and a forward and backward.

    python -m bench.host_time [--repeats 300] [--out bench/results/host_time.json]

The driver is a stub (`bench.warm_cache.Driver`): kernels are compiled for sm_90, launches do nothing. Tensors are on
the CPU. Figures are medians of the calling thread's processor time, for calls of `bitfield_attention` with a plan and,
for the backward, torch.autograd.grad. "first kind" makes and binds all arguments in every call. "empty" is the floor:
an autograd function that allocates the same results and does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton

from bench.measure import command, write_json
from bench.triton_versions import ROOT
from bench.warm_cache import Driver
from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention import triton as triton_backend
from interlace.kernels import bitfield_launch, prepared
from interlace.masks import BitfieldMask


def median(run: Callable[[], None], repeats: int) -> float:
    """Median microseconds of this thread."""
    for _ in range(20):
        run()
    times = []
    for _ in range(repeats):
        began = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - began)
    return round(statistics.median(times) / 1e3, 1)


class Empty(torch.autograd.Function):
    """Autograd function with as many tensors and numbers in and out as the op."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale, softcap, deterministic, backend):  # type: ignore[no-untyped-def]
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        return (*(torch.empty_like(x) for x in ctx.saved_tensors[:3]), *(None,) * 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "host_time.json")
    options = parser.parse_args()
    triton.runtime.driver.set_active(Driver())
    triton_backend.unsupported = lambda q, v: None  # type: ignore[assignment]
    bitfield_launch.architecture_of = lambda device: 90
    plan = AttentionPlan.build(BitfieldMask.causal(1, 1024))
    maps = {f"part_{side}_map": torch.zeros(getattr(plan, f"part_{side}_idx").numel(), 129, 4).int() for side in "qk"}
    plan = replace(plan, **maps)
    q = torch.zeros(1, 16, 1024, 128, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.zeros(1, 4, 1024, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    dout = torch.zeros_like(q)

    def forward() -> None:
        bitfield_attention(q, k, v, plan, backend="triton")

    def both() -> None:
        torch.autograd.grad(bitfield_attention(q, k, v, plan, backend="triton"), (q, k, v), dout)

    def empty() -> None:
        Empty.apply(q, k, v, plan, 1.0, None, True, "triton")

    def empty_both() -> None:
        torch.autograd.grad(Empty.apply(q, k, v, plan, 1.0, None, True, "triton")[0], (q, k, v), dout)

    def anew(run: Callable[[], None]) -> None:
        prepared._plans.clear()
        run()

    result = {
        "forward": median(forward, options.repeats),
        "forward and backward": median(both, options.repeats),
        "empty forward": median(empty, options.repeats),
        "empty forward and backward": median(empty_both, options.repeats),
        "forward, first kind": median(lambda: anew(forward), options.repeats),
        "forward and backward, first kind": median(lambda: anew(both), options.repeats),
    }
    print(*(f"{name}: {value} us" for name, value in result.items()), sep="\n")
    write_json(options.out, {"command": command("host_time"), "unit": "us of the calling thread", **result})


if __name__ == "__main__":
    main()
