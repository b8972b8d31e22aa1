"""Compile the attention kernels ahead of time, in a process of its own: one that must not interpret, and whose Triton
may be another version than its parent's (the folder that comes first on PYTHONPATH).

    echo '{"architecture": 90, "head_dim": 128}' | python -m bench.compile_worker

Reads configurations from standard input, one JSON object a line (fields of `Configuration`), and answers each with a
line of JSON: {kernel: what it uses (`interlace.kernels.ahead_of_time.Resources`)}. `bench.kernel_report` and the tests
start it.
"""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

import torch

from interlace.attention import AttentionPlan
from interlace.kernels.ahead_of_time import compile_call, resources
from interlace.kernels.bitfield_launch import Call, backward_calls, forward_calls
from interlace.masks import BitfieldMask

KEYS = 512
RAGGED_KEYS = 203  # ends inside a block of 128


class Configuration(NamedTuple):
    """What a kernel is specialised for. capped: with a softcap, and with keys that end inside a block."""

    architecture: int  # 10 * compute capability
    head_dim: int
    dtype: str = "bfloat16"
    capped: bool = False


def calls(configuration: Configuration) -> list[Call]:
    """All launches of one forward and of both backward passes with split rows, on meta tensors."""
    architecture, head_dim, dtype, capped = configuration
    mask, keys = BitfieldMask.causal(1, KEYS), BitfieldMask.causal(1, RAGGED_KEYS if capped else KEYS)
    plan = AttentionPlan.build(mask, keys, cap=1).to("meta")
    softcap = 5.0 if capped else None

    def tensor(heads: int, length: int) -> torch.Tensor:
        return torch.empty(1, heads, length, head_dim, dtype=getattr(torch, dtype), device="meta")

    q, k, v = tensor(8, KEYS), tensor(2, plan.k_len), tensor(2, plan.k_len)
    lse = torch.empty(1, 8, KEYS, device="meta")
    result = forward_calls(q, k, v, plan, q, lse, 0.1, softcap, architecture)
    for fused in (False, True):
        dq = q.float() if fused else q
        result += backward_calls(q, lse, q, k, v, q, lse, plan, dq, k, v, 0.1, softcap, architecture, fused=fused)
    return result


def answer(configuration: Configuration) -> dict[str, dict[str, int]]:
    """{kernel: resources}. Of a capped configuration only what the softcap and ragged keys change."""
    report = {}
    for call in calls(configuration):
        name = call.name
        if name not in report and (not configuration.capped or "SOFTCAP" in call.arguments):
            report[name] = resources(compile_call(call, configuration.architecture))._asdict()
    return report


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(Configuration(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
