"""Communication: channels, collectives, communication overlap and process bookkeeping.

- `process`: rendezvous, groups, agreement between ranks, lost peers, the flight recorder, traces.
- `transports`: move bytes, one file per implementation; `transports/choose` selects the transport of a group.
- `collectives`: torch's collectives with sums in a fixed order; shards of context-parallel sequences.
- `overlap`: collectives overlapped with matrix products and attention; deferred weight gradients.
- `channels`: point-to-point messages of the pipeline executor, between threads or processes.
"""

from interlace.comm.collectives.rows import (
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from interlace.comm.collectives.shards import shard, shard_mask, unshard
from interlace.comm.overlap.context_parallel import ContextParallelPlan, context_parallel_attention
from interlace.comm.overlap.matmul import all_gather_matmul, matmul_reduce_scatter
from interlace.comm.process.errors import CommError
from interlace.comm.process.trace import traced
from interlace.comm.transports import EmulatedTransport, Transport, connect, run_local
from interlace.comm.transports.choose import disconnect, resolve

__all__ = [
    "CommError",
    "ContextParallelPlan",
    "EmulatedTransport",
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
    "traced",
    "unshard",
]
