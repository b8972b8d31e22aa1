"""Collectives that leave the multiprocessors to the matrix products, and what is overlapped with them.

`transports` move bytes, `group` finds the transport of a process group, `collectives` are torch's with sums in a fixed
order, `context_parallel` is attention over tokens that several ranks hold, `shards` deals tokens to them, `trace`
records what overlapped what.
"""

from interlace.comm.collectives import (
    Work,
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from interlace.comm.context_parallel import ContextParallelPlan, context_parallel_attention
from interlace.comm.group import disconnect, resolve
from interlace.comm.shards import shard, shard_mask, unshard
from interlace.comm.torch_balancer import torch_load_balancer
from interlace.comm.trace import Trace, traced
from interlace.comm.transports import CommError, Transport, run_local

__all__ = [
    "CommError",
    "ContextParallelPlan",
    "Trace",
    "Transport",
    "Work",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "context_parallel_attention",
    "disconnect",
    "reduce_scatter_tensor",
    "resolve",
    "run_local",
    "shard",
    "shard_mask",
    "torch_load_balancer",
    "traced",
    "unshard",
]
