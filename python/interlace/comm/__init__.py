"""Collectives that leave the multiprocessors to the matrix products, and what is overlapped with them.

`transports` move bytes, `group` finds the transport of a process group, `collectives` are torch's with sums in a fixed
order, `matmul` hides them under the matrix products of tensor parallelism (`pipeline`), `trace` records what overlapped
what.
"""

from interlace.comm.collectives import (
    Work,
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from interlace.comm.group import disconnect, resolve
from interlace.comm.matmul import all_gather_matmul, matmul_reduce_scatter
from interlace.comm.trace import Trace, traced
from interlace.comm.transports import CommError, Transport, run_local

__all__ = [
    "CommError",
    "Trace",
    "Transport",
    "Work",
    "all_gather_into_tensor",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all_single",
    "disconnect",
    "matmul_reduce_scatter",
    "reduce_scatter_tensor",
    "resolve",
    "run_local",
    "traced",
]
