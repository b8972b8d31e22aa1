"""Compile the attention kernels ahead of time in a process of its own (one that must not interpret).

python -m tests.kernels.compile_worker ARCHITECTURE HEAD_DIM DTYPE  prints JSON: {kernel (with softcap or without): what
it uses}.
"""

from __future__ import annotations

import json
import sys

import torch

from interlace.attention import AttentionPlan
from interlace.kernels.ahead_of_time import compile_call, resources
from interlace.kernels.bitfield_launch import Call, backward_calls, forward_calls
from interlace.masks import BitfieldMask


def calls(architecture: int, head_dim: int, dtype: torch.dtype, softcap: float | None) -> list[Call]:
    """All launches of one forward and backward with split rows, on meta tensors; 203 keys end inside a block."""
    mask = BitfieldMask.causal(1, 512)
    plan = AttentionPlan.build(mask, BitfieldMask.causal(1, 203 if softcap else 512), cap=1).to("meta")

    def tensor(heads: int, length: int) -> torch.Tensor:
        return torch.empty(1, heads, length, head_dim, dtype=dtype, device="meta")

    q, k, v = tensor(8, 512), tensor(2, plan.k_len), tensor(2, plan.k_len)
    lse = torch.empty(1, 8, 512, device="meta")
    forward = forward_calls(q, k, v, plan, q, lse, 0.1, softcap, architecture)
    return forward + backward_calls(q, lse, q, k, v, q, lse, plan, q, k, v, 0.1, softcap, architecture)


def main() -> None:
    architecture, head_dim, dtype = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
    report = {}
    for softcap in (None, 5.0):
        for call in calls(architecture, head_dim, dtype, softcap):
            name = call.kernel.__name__ + (" with softcap" if softcap and "SOFTCAP" in call.arguments else "")
            if name not in report:
                report[name] = resources(compile_call(call, architecture))._asdict()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
