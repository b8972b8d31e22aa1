"""Compiles the attention kernels ahead of time, in a separate process. The process must not interpret kernels, and its
Triton may be another version than its parent's (the folder that comes first on PYTHONPATH).

    echo '{"architecture": 90, "head_dim": 128, "dtype": "bfloat16"}' | python -m bench.compile_worker

Reads configurations from standard input, one JSON object a line (fields of `Configuration`). Answers each with a line
of JSON: {kernel: its resources (`interlace.kernels.ahead_of_time.Resources`)}. Attention kernels on Hopper in 16 bits
also have their "tile" (`tile_of`) and "loops" (`bench.machine_code.Loop`): FULL blocks, then PARTIAL ones, for each
computing partition of the program. `bench.kernel_report` and the tests start it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bench.machine_code import hot_loops
from interlace.attention import AttentionPlan
from interlace.attention._warm_up import plan_calls
from interlace.kernels.ahead_of_time import compile_call, machine_code, resources
from interlace.kernels.bitfield_gluon_backward_launch import gluon_backward_calls
from interlace.kernels.bitfield_gluon_launch import gluon_forward_calls
from interlace.kernels.bitfield_launch import Call, backward_calls, can_fuse, forward_calls
from interlace.kernels.ranks import copy_call, reduce_ranks_call
from interlace.masks import BitfieldMask

LENGTH = 512  # of queries and of keys, in blocks of 128


class Configuration(NamedTuple):
    """Specialisation of the kernels.

    part: "attention" (forward, both backwards, aggregation), "gluon" (those for Hopper), "plan" (block lists and
    bitmaps: no head dimension, no dtype), or "ranks" (collectives: no head dimension).
    variant: "plain", "capped" (with a softcap) or "computed" (of a plan without bitmaps). value_dim: head dimension
    of v if it differs from that of q and k.
    """

    architecture: int  # 10 * compute capability
    head_dim: int = 0
    dtype: str = ""
    variant: str = "plain"
    part: str = "attention"
    value_dim: int = 0


def calls(configuration: Configuration) -> list[Call]:
    """All launches of the part, with split rows, on meta tensors."""
    architecture, head_dim, dtype, variant, part, value_dim = configuration
    if part == "ranks":
        rows = torch.empty(4, 4096, dtype=getattr(torch, dtype), device="meta")
        words = torch.empty(4096, dtype=torch.int32, device="meta")
        return [reduce_ranks_call(list(rows), rows[0]), copy_call(words, words, 16)]
    plan = AttentionPlan.build(BitfieldMask.causal(1, LENGTH), cap=1).to("meta")
    if variant == "computed":
        plan = replace(plan, part_q_map=plan.part_q_map[:0], part_k_map=plan.part_k_map[:0])
    if part == "plan":
        return list(plan_calls(plan))
    softcap = 5.0 if variant == "capped" else None

    def tensor(heads: int, length: int, columns: int) -> torch.Tensor:
        return torch.empty(1, heads, length, columns, dtype=getattr(torch, dtype), device="meta")

    values = value_dim or head_dim
    q, k, v = tensor(8, LENGTH, head_dim), tensor(2, LENGTH, head_dim), tensor(2, LENGTH, values)
    out, lse = tensor(8, LENGTH, values), torch.empty(1, 8, LENGTH, device="meta")
    if part == "gluon":
        found = gluon_forward_calls(q, k, v, plan, out, lse, 0.1, softcap)
        if variant == "plain":
            found += gluon_backward_calls(out, lse, q, k, v, out, lse, plan, q, k, v, 0.1)
        return [call for call in found if call.kernel.is_gluon()]  # the others are part of "attention"
    result = forward_calls(q, k, v, plan, out, lse, 0.1, softcap, architecture)
    for fused in (False, True) if can_fuse(q, v, architecture) else (False,):
        dq = q.float() if fused else q
        result += backward_calls(out, lse, q, k, v, out, lse, plan, dq, k, v, 0.1, softcap, architecture, fused=fused)
    return result


def tile_of(call: Call) -> dict[str, int]:
    """Queries (m) and keys (n) that the warps of one hot loop process per iteration, and padded head dimensions.

    In Gluon a loop belongs to one consumer: the rows of its box of Q.
    """
    a = call.arguments
    if "q_desc" in a:
        queries, keys = a["q_desc"].block_shape[2], a["k_desc"].block_shape[2]
        if call.name == "gluon_query_gradient_kernel":  # an iteration processes both halves of a block of keys
            keys *= 2
        columns = a["BLOCK_D"] + a.get("REST", 0)
        return dict(m=queries, n=keys, warps=call.warps, stages=a["STAGES"], head_dim=columns, value_dim=columns)
    shape = dict(m=a["BLOCK_M"], n=a["BLOCK_N"], warps=call.warps, stages=call.stages)
    return dict(shape, head_dim=a["BLOCK_D"], value_dim=a["BLOCK_V"])


def answer(configuration: Configuration) -> dict[str, dict[str, Any]]:
    """{kernel: its resources}. For variants, only the kernels that the variant changes."""
    report: dict[str, dict[str, Any]] = {}
    for call in calls(configuration):
        name = call.name
        attends = "scale" in call.arguments
        if name == "list_kernel":
            name += " q-major" if call.arguments["step_stride"] == 1 else " k-major"
        if name in ("documents_kernel", "map_kernel"):
            name += " of queries" if call.arguments["OF_QUERIES"] else " of keys"
        if name not in report and (configuration.variant == "plain" or attends):
            compiled = compile_call(call, configuration.architecture)
            code = machine_code(compiled)
            report[name] = resources(compiled, code)._asdict()
            if attends and configuration.architecture == 90 and configuration.dtype != "float32":
                report[name]["tile"] = tile_of(call)
                report[name]["loops"] = [loop._asdict() for loop in hot_loops(code)]
    return report


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(Configuration(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
