"""Use 2, measuring: the op beside SDPA with the same mask made dense, forward and backward, on this machine.

    python examples/benchmark.py [LENGTH ...]

Half a minute on two cores. `python -m bench.attention` does it with care (all masks, peers such as FlexAttention,
memory, a report as JSON); this is the shortest program that tells what to expect.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from interlace import AttentionPlan, BitfieldMask, Segment, bitfield_attention

HEADS, HEAD_DIM, ROUNDS = 8, 64, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(length: int) -> BitfieldMask:
    """Four documents in a row, each with a picture whose tokens see each other both ways."""
    part = length // 4
    document = [Segment("text", part // 4), Segment("image", part // 2), Segment("text", part - part // 4 - part // 2)]
    return BitfieldMask.pack([BitfieldMask.from_segments([document])] * 4)


def measure(call: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> tuple[Tensor, float]:
    """The output, and the seconds of a forward with its backward."""
    for tensor in tensors:
        tensor.grad = None
    _wait()
    start = time.perf_counter()
    out = call(*tensors)
    out.sum().backward()
    _wait()
    return out.detach(), time.perf_counter() - start


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def row(length: int) -> str:
    """A line of the table; the two alternate, so that a busy machine is busy for both."""
    mask = packed(length).to(DEVICE)
    plan, dense = AttentionPlan.build(mask), mask.to_dense()[:, None]
    tensors = [torch.randn(1, HEADS, length, HEAD_DIM, device=DEVICE, requires_grad=True) for _ in range(3)]
    calls = {
        "interlace": lambda q, k, v: bitfield_attention(q, k, v, plan),
        "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=dense),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    outputs = {}
    for _ in range(ROUNDS + 1):
        for name, call in calls.items():
            outputs[name], taken = measure(call, tensors)
            seconds[name].append(taken)
    torch.testing.assert_close(outputs["interlace"], outputs["sdpa"], atol=1e-4, rtol=1e-4)
    ours, theirs = (statistics.median(seconds[name][1:]) * 1e3 for name in ("interlace", "sdpa"))
    visible = dense.float().mean()
    return f"{length:>8,} {visible:>9.1%} {ours:>9.1f} ms {theirs:>9.1f} ms {theirs / ours:>6.1f} x"


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"{DEVICE}, {HEADS} heads of {HEAD_DIM}, fp32, forward and backward")
    print(f"{'tokens':>8} {'visible':>9} {'interlace':>12} {'SDPA':>12} {'faster':>8}")
    for size in map(int, sys.argv[1:] or ("512", "1024", "2048")):
        print(row(size), flush=True)
