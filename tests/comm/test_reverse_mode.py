"""Collectives refuse forward mode, which would drop tangents, and torch.func's transforms."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Lock

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from interlace.attention import AttentionPlan
from interlace.balance import distribute_tokens
from interlace.comm import (
    all_gather_into_tensor,
    all_gather_matmul,
    all_reduce,
    all_to_all_single,
    context_parallel_attention,
    matmul_reduce_scatter,
    reduce_scatter_tensor,
    run_local,
    unshard,
)
from interlace.masks import BitfieldMask
from interlace.parallel import mappings, products

MASK = BitfieldMask.causal(1, 32)
SHARDS = distribute_tokens(AttentionPlan.build(MASK, block=16).row_blocks(), 2, block=16, lengths=32)
WEIGHT = torch.ones(4, 4)


def into(function, shape):
    """The collective as a function of its input."""

    def operation(x, group):
        output = x.new_empty(shape)
        function(output, x, group=group)
        return output

    return operation


def in_place(x, group):
    y = x.clone()
    all_reduce(y, group=group)
    return y


def attention(x, group):
    x = x[None, None]
    return context_parallel_attention(x, x, x, MASK, SHARDS, group=group)


OPERATIONS = {
    "all_gather_into_tensor": into(all_gather_into_tensor, (2, 16, 4)),
    "reduce_scatter_tensor": into(reduce_scatter_tensor, (8, 4)),
    "all_reduce": in_place,
    "all_to_all_single": into(all_to_all_single, (16, 4)),
    "all_gather_matmul": lambda x, group: all_gather_matmul(x, [WEIGHT], group=group)[1][0],
    "matmul_reduce_scatter": lambda x, group: matmul_reduce_scatter(x, WEIGHT, group=group),
    "context_parallel_attention": attention,
    "unshard": lambda x, group: unshard(x[None], SHARDS, group),
    "copied_products": lambda x, group: products.copied_products(x, [WEIGHT], mappings.Ranks(group))[1][0],
    "sum_over_ranks": lambda x, group: mappings.sum_over_ranks(x, mappings.Ranks(group)),
    "sum_of_products": lambda x, group: products.sum_of_products(x, WEIGHT, mappings.Ranks(group)),
    "split": lambda x, group: mappings.split(x, mappings.Ranks(group), 0),
    "gather": lambda x, group: mappings.gather(x, mappings.Ranks(group), 0),
}
WAYS = {
    "dual numbers": lambda f, x: f(forward_ad.make_dual(x, x)),
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "grad": lambda f, x: grad(lambda y: f(y).sum())(x),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, x])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_other_derivatives_than_those_of_backward_are_refused(name, way):
    one_at_a_time = Lock()  # torch counts the levels of forward derivatives for the whole process, not per thread

    def rank(group):
        with one_at_a_time, pytest.raises(RuntimeError, match=r"torch\.autograd\.grad or backward\(\)"):
            WAYS[way](lambda x: OPERATIONS[name](x, group), torch.ones(16, 4))

    with forward_ad.dual_level() if way == "dual numbers" else nullcontext():
        run_local(2, rank, timeout=20)
