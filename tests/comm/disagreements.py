"""Calls of every operation in which one rank passes a different argument. Ranks are threads or processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from interlace import balance
from interlace.attention import AttentionPlan
from interlace.comm import (
    CommError,
    ContextParallelPlan,
    EmulatedTransport,
    Transport,
    all_gather_into_tensor,
    all_gather_matmul,
    all_reduce,
    all_to_all_single,
    connect,
    context_parallel_attention,
    matmul_reduce_scatter,
    reduce_scatter_tensor,
    unshard,
)
from interlace.masks import BitfieldMask
from interlace.parallel import ColumnParallelLinear, tensor_parallel

OP = dist.ReduceOp
TOKENS = 32


def gather(group: Transport, shape: tuple[int, ...] = (4, 6), dtype: Any = torch.float32, grad: bool = False) -> None:
    x = torch.ones(shape, dtype=dtype).requires_grad_(grad)
    all_gather_into_tensor(torch.empty(group.world, *shape, dtype=dtype), x, group)


def scatter(group: Transport, op: Any = OP.SUM, rows: int = 2) -> None:
    whole = torch.ones(group.world * rows, 6 // rows)
    reduce_scatter_tensor(torch.empty(rows, 6 // rows), whole, op, group)


def reduce(group: Transport, op: Any = OP.SUM, size: int = 12, dtype: Any = torch.float32) -> None:
    all_reduce(torch.ones(size, dtype=dtype), op, group)


def reduce_in_two_rounds(group: Transport, op: Any = OP.SUM) -> None:
    all_reduce(torch.ones(40_000), op, group)


def exchange(group: Transport, row: tuple[int, ...] = (6,), own: int = 1) -> None:
    """own: rows that this rank gives to each rank, and takes from it."""
    x = torch.ones(own * group.world, *row)
    all_to_all_single(torch.empty_like(x), x, group=group)


def backward(group: Transport, op: Any = OP.SUM) -> None:
    """The same forward pass; the reductions of the backward pass differ."""
    x = torch.ones(5, requires_grad=True)
    y = x.clone()
    all_reduce(y, OP.SUM, group)
    grad = torch.ones(5)
    y.backward(grad)
    all_reduce(x.grad, op, group)


def gathered_product(
    group: Transport, shape: tuple[int, ...] = (4, 6), chunks: int = 2, layout: Any = "direct", regather: bool = False,
    grad: bool = False, weight_grad: bool = False, weights: int = 1,
) -> None:  # fmt: skip
    x, weight = torch.ones(shape).requires_grad_(grad), torch.ones(3, shape[-1]).requires_grad_(weight_grad)
    options: dict[str, Any] = {"group": group, "num_chunks": chunks, "layout": layout, "regather": regather}
    all_gather_matmul(x, [weight] * weights, **options)


def scattered_product(group: Transport, rows: int = 4, columns: int = 3, inner: int = 6, grad: bool = False) -> None:
    x = torch.ones(rows * group.world, inner).requires_grad_(grad)
    matmul_reduce_scatter(x, torch.ones(columns, inner), group=group, num_chunks=1)


def sequence(method: str = "lpt", mask: BitfieldMask | None = None) -> tuple[BitfieldMask, Any]:
    mask = BitfieldMask.causal(1, TOKENS) if mask is None else mask
    blocks = AttentionPlan.build(BitfieldMask.causal(1, TOKENS), block=4).row_blocks()
    return mask, lambda world: balance.distribute_tokens(blocks, world, block=4, lengths=TOKENS, method=method)


def masks() -> dict[str, BitfieldMask]:
    causal = BitfieldMask.causal(1, TOKENS)
    doc = torch.zeros(1, TOKENS, dtype=torch.int32)
    doc[0, -1] = 1
    return {
        "causal": causal,
        "full": BitfieldMask.full(1, TOKENS),
        "window": BitfieldMask.causal(1, TOKENS, window=30),
        "sinks": BitfieldMask.causal(1, TOKENS, window=30, sinks=1),
        "one token in another document": BitfieldMask(causal.bits, doc=doc, pos=causal.pos),
        "one position": BitfieldMask(causal.bits, pos=causal.pos + (causal.pos == 7)),
        "written otherwise": BitfieldMask(
            causal.bits, doc=doc * 0, span=doc * 0 - 1, pos=causal.pos, window=torch.full_like(doc, 1 << 30)
        ),
    }


def attention(
    group: Transport, mask: str = "causal", method: str = "lpt", heads: int = 4, kv_heads: int = 2, chunk: int = 1,
    grad: bool = False, prepared: bool = False, width: int = 8, **options: Any,
) -> None:  # fmt: skip
    given, shards_for = sequence(method, masks()[mask])
    shards = shards_for(group.world)
    each = shards.tokens_per_rank
    q, k, v = (torch.ones(1, n, each, width).requires_grad_(grad) for n in (heads, kv_heads, kv_heads))
    plan = ContextParallelPlan.build(given, shards, group.rank) if prepared else given
    context_parallel_attention(q, k, v, plan, shards, group=group, heads_per_chunk=chunk, **options)


def together(group: Transport, method: str = "lpt") -> None:
    shards = sequence(method)[1](group.world)
    unshard(torch.ones(1, shards.tokens_per_rank, 3), shards, group)


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, hidden), nn.Linear(hidden, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).relu()))


def module(group: Transport, norm: str = "sequence", hidden: int = 12, **options: Any) -> None:
    plan = {"up": "column", "down": "row", "norm": norm}
    tensor_parallel(Mlp(hidden), plan, group, **options)(torch.ones(2 * group.world, 6))


def layer(group: Transport, features: int = 12) -> None:
    ColumnParallelLinear(6, features, group=group)(torch.ones(2, 6))


# operation, argument of the differing rank, text of the error
DIFFERENT: list[tuple[Callable[..., None], dict[str, Any], str]] = [
    (gather, {"shape": (6, 4)}, r"input is \[[46], [46]\] here but \[[46], [46]\] on rank"),
    (gather, {"dtype": torch.int32}, "dtype is (float32|int32) here but (float32|int32)"),
    (gather, {"grad": True}, "backward is (True|False) here but"),
    (scatter, {"op": OP.AVG}, "op is (sum|mean) here but (sum|mean) on rank"),
    (scatter, {"rows": 3}, r"input is \[\d+, \d\] here but"),
    (reduce, {"op": OP.MAX}, "op is (sum|max) here but (sum|max) on rank"),
    (reduce, {"op": OP.MIN}, "op is (sum|min) here but"),
    (reduce, {"size": 13}, r"tensor is \[1[23]\] here but \[1[23]\] on rank"),
    (reduce, {"dtype": torch.int32}, "dtype is (float32|int32) here but"),
    (reduce_in_two_rounds, {"op": OP.AVG}, "op is (sum|mean) here but"),
    (backward, {"op": OP.MAX}, "op is (sum|max) here but"),
    (exchange, {"row": (2, 3)}, r"row is \[.*\] here but \[.*\] on rank"),
    (exchange, {"own": 2}, "sends (6|12) float32, (6|12) float32 expected"),
    (gathered_product, {"shape": (2, 2, 6)}, r"x is \[.*\] here but"),
    (gathered_product, {"chunks": 1}, r"chunk 0 of [12] .*chunk 0 of [12]|chunks is"),
    (gathered_product, {"layout": "remap"}, "layout is (direct|remap) here but"),
    (gathered_product, {"regather": True}, "regather is (alone|False) here but"),
    (gathered_product, {"grad": True}, "backward is (True|False) here but"),
    (scattered_product, {"columns": 4}, r"result is \[4, [34]\] here but"),
    (scattered_product, {"rows": 2}, r"result is \[[24], 3\] here but"),
    (scattered_product, {"grad": True}, "backward is (True|False) here but"),
    (attention, {"mask": "full"}, "mask is fingerprint [0-9a-f]{16} here but fingerprint [0-9a-f]{16} on rank"),
    (attention, {"mask": "window"}, "mask is fingerprint"),
    (attention, {"mask": "sinks"}, "mask is fingerprint"),
    (attention, {"mask": "one token in another document"}, "mask is fingerprint"),
    (attention, {"mask": "one position", "prepared": True}, "mask is fingerprint"),
    (attention, {"method": "zigzag"}, "shards is fingerprint [0-9a-f]{16} here but fingerprint [0-9a-f]{16} on rank"),
    (attention, {"scale": 0.5}, "scale is 0.[35]\\d* here but"),
    (attention, {"softcap": 3.0}, "softcap is (3.0|None) here but"),
    (attention, {"deterministic": False}, "deterministic is (True|False) here but"),
    (attention, {"heads": 8}, r"q is \[1, [48], \d+, 8\] here but"),
    (attention, {"heads": 8, "kv_heads": 4}, r"k is \[1, [24], \d+, 8\] here but"),
    (attention, {"width": 16}, r"q is \[1, 4, \d+, (8|16)\] here but"),
    (attention, {"chunk": 2}, "chunks is [12] here but|key heads 0:1.*key heads 0:2|key heads 0:2.*key heads 0:1"),
    (attention, {"grad": True}, "backward is (True|False) here but"),
    (together, {"method": "zigzag"}, "shards is fingerprint"),
    (module, {"norm": "replicate"}, "tensor_parallel: plan is fingerprint"),
    (module, {"hidden": 24}, "tensor_parallel: parameters is fingerprint"),
    (module, {"sequence_parallel": False}, "tensor_parallel: sequence_parallel is (True|False) here but"),
    (module, {"sum_gradients": False}, "tensor_parallel: sum_gradients is (True|False) here but"),
    (module, {"length": lambda: 4}, "tensor_parallel: any_length is (True|False) here but"),
    (module, {"num_chunks": 2}, "tensor_parallel: num_chunks is (auto|2) here but"),
    (layer, {"features": 24}, "ColumnParallelLinear: out_features is (12|24) here but"),
]

# Arguments that may differ between ranks: no error, and the operation works.
OWN: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (gathered_product, {"weights": 2}),
    (gathered_product, {"weight_grad": True}),
    (scattered_product, {"inner": 8}),
    (attention, {"prepared": True}),
    (attention, {"mask": "written otherwise"}),
    (attention, {"return_lse": True}),
    (attention, {"backend": "reference"}),
]


def connected(kind: str, group: Transport | None, timeout: float) -> Transport:
    """A transport of this kind, over `group` if ranks are threads."""
    result = group if group is not None else connect(transport=kind.removeprefix("emulated "), timeout=timeout)
    return EmulatedTransport(result, bandwidth=1e9) if kind.startswith("emulated") else result


def told(group: Transport, number: int) -> str:
    """Error on this rank when the last rank differs as in DIFFERENT[number]; "" without an error."""
    operation, instead, _ = DIFFERENT[number]
    try:
        operation(group, **(instead if group.rank == group.world - 1 else {}))
        group.barrier()
    except CommError as error:
        return str(error)
    return ""


def all_told(rank: int, kind: str, numbers: Sequence[int], timeout: float) -> list[str]:
    """For a process: its error in each case, each on a transport of its own."""
    lines = []
    for number in numbers:
        with connected(kind, None, timeout) as group:
            lines.append(told(group, number))
    return lines


def works(group: Transport) -> int:
    """Operations in which the last rank passes permitted differences, on one transport; then with equal arguments."""
    for operation, instead in OWN:
        operation(group, **(instead if group.rank == group.world - 1 else {}))
    for operation, _, _ in DIFFERENT:
        operation(group)
    group.barrier()
    return len(OWN) + len(DIFFERENT)


def all_work(rank: int, kind: str, timeout: float) -> int:
    with connected(kind, None, timeout) as group:
        return works(group)
