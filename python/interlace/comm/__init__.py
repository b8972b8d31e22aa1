"""Collectives that leave the multiprocessors to the matrix products, and what is overlapped with them.

`transports` move bytes, `group` finds the transport of a process group, `collectives` are torch's with sums in a fixed
order, `matmul` hides them under the matrix products of tensor parallelism (`overlap`), `deferred` puts off gradients
of weights, `context_parallel` is attention over tokens that several ranks hold, `shards` deals tokens to them, `trace`
records what overlapped what.

`channel` is what the pipeline's executor speaks to, between threads (`channel_local`) or processes (`channel_group`),
with `star` for small values of all ranks, `reductions` to compare what was summed, `lost` to find out who is gone and
`recorder` to say afterwards what everyone did. `rendezvous` is where ranks meet before there is any of this.
"""

from interlace.comm.channel import Channel, Pending, Tag
from interlace.comm.channel_group import GroupChannel
from interlace.comm.channel_local import LocalChannel, LocalNetwork
from interlace.comm.collectives import (
    Handle,
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from interlace.comm.context_parallel import ContextParallelPlan, context_parallel_attention
from interlace.comm.group import disconnect, resolve
from interlace.comm.matmul import all_gather_matmul, matmul_reduce_scatter
from interlace.comm.recorder import FlightRecorder
from interlace.comm.shards import shard, shard_mask, unshard
from interlace.comm.torch_balancer import torch_load_balancer
from interlace.comm.trace import Trace, traced
from interlace.comm.transports import CommError, EmulatedTransport, Transport, connect, run_local

__all__ = [
    "Channel",
    "CommError",
    "ContextParallelPlan",
    "EmulatedTransport",
    "FlightRecorder",
    "GroupChannel",
    "Handle",
    "LocalChannel",
    "LocalNetwork",
    "Pending",
    "Tag",
    "Trace",
    "Transport",
    "all_gather_into_tensor",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all_single",
    "connect",
    "context_parallel_attention",
    "disconnect",
    "matmul_reduce_scatter",
    "reduce_scatter_tensor",
    "resolve",
    "run_local",
    "shard",
    "shard_mask",
    "torch_load_balancer",
    "traced",
    "unshard",
]
