"""A TokenShards as load balancer for torch's own context parallelism, which splits by position alone.

    balancer = torch_load_balancer(shards, device)
    q, k, v, block_mask = _context_parallel_shard(mesh, [q, k, v, block_mask], [2, 2, 2, 2], load_balancer=balancer)
    (out,) = context_parallel_unshard(mesh, [out], [2], load_balancer=balancer)

`_create_cp_block_mask` and `context_parallel_unshard` use torch's head-tail order without a balancer: pass it
everywhere. The hook is a private class of torch and moves between versions: present in 2.13. Torch adds no padding, so
its tensors need `shards.padded_length` tokens; FlexAttention requires a multiple of 128 per rank.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from interlace.balance import TokenShards

_HOMES = (
    "torch.distributed.tensor.experimental._context_parallel._load_balancer",
    "torch.distributed.tensor.experimental._load_balancer",
)


def torch_load_balancer(shards: TokenShards, device: torch.device | str = "cpu") -> Any:
    """A `_LoadBalancer` of torch that assigns tokens as `shards` does.

    Args:
        shards: of the microbatch, for as many ranks as the device mesh has.
        device: of the tensors to be sharded.

    Raises:
        RuntimeError: this torch has no such hook, or one without an order per sequence.
    """
    return _balancer_class()(shards, torch.device(device))


@cache
def _balancer_class() -> type:
    base = _hook()

    class ShardsBalancer(base):  # type: ignore[misc,valid-type]
        """Assigns tokens by a TokenShards."""

        def __init__(self, shards: TokenShards, device: torch.device) -> None:
            self.shards, self.device = shards, device

        def _generate_indices(self, restore: bool = False) -> Tensor:
            """[1, tokens] if all sequences have the same order (valid for any batch), else [B, tokens]."""
            index = self.shards.inverse if restore else self.shards.order
            if (index == index[:1]).all():
                index = index[:1]
            return torch.from_numpy(index).to(self.device)

    return ShardsBalancer


def _hook() -> Any:
    for name in _HOMES:
        try:
            module = import_module(name)
            base, known = module._LoadBalancer, module._HeadTailLoadBalancer(2, 1, "cpu")
            rows = known._generate_indices(restore=False)
        except (ImportError, AttributeError, TypeError):
            continue
        if rows.dim() == 2:  # older versions have a one-dimensional order for the whole batch
            return base
    raise RuntimeError(
        f"torch {torch.__version__} has no _LoadBalancer for context parallelism with an order per sequence: use "
        "torch 2.13 or later, or interlace.comm.context_parallel_attention"
    )
