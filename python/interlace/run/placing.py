"""`parallelize(mllm, layout)`: place a model on the ranks of a layout.

parallel = parallelize(mllm, layout)         # transport "local": one process runs all ranks
loss = parallel.step(samples)                # gradients are in .grad of parallel.named_parameters()
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.channels.process_group import GroupChannel
from interlace.layout import Layout
from interlace.model import MultimodalModel
from interlace.plan import analytic_costs
from interlace.run.errors import PipelineError
from interlace.run.execute.device import compute_device
from interlace.run.graph import stage_durations
from interlace.run.options import StepOptions
from interlace.run.parallel_model import ParallelModel


def parallelize(
    mllm: MultimodalModel,
    layout: Layout,
    *,
    transport: str | None = None,
    device: torch.device | str | None = None,
    coordinated: bool = False,
    options: StepOptions | None = None,
    **changes: Any,
) -> ParallelModel:
    """Place ``mllm`` on the ranks of ``layout``. Freeze parameters before: later changes are refused.

    Train the result's `named_parameters`. With transport "local" these are the parameters of ``mllm`` itself, as are
    all parameters that are neither cut nor sharded.

    transport: "local" runs all ranks in this process, a thread each, on ``mllm``'s own weights. "distributed" runs one
        rank of the default process group, on the weights of ``mllm`` that it holds; the default if such a group of more
        than one rank exists.
    device: where weights on the meta device get memory; default: the device of the other weights. Only weights that
        this process holds get memory, without values (NaN): fill `named_parameters` and the stages' buffers next.
    coordinated: a coordinator outside of the ranks detects lost ranks (elastic runs). A failed step then reports at
        once for which ranks it waited, without further queries.
    options: options of steps. changes: single options by name, such as ``schedule="gpipe"``; see `StepOptions`.

    Computes on the device of the weights of ``mllm``, one device per process. On GPUs, messages between ranks use NCCL;
    data that the host needs uses gloo.

    A module with tp > 1 is cut inside its blocks among the ranks of each lane, and so is a language model's vocabulary.
    With one rank per process, its parameters are then its pieces (see `named_parameters`), copied from the weights of
    ``mllm``; of a sharded weight, its rows. Weights that stages compute with are whole during a step; with shard =
    "full" for one layer at a time, if replicas run equally many chunks. Outside of steps they are out of date with
    "optimizer" and NaN with "full", also in ``mllm`` if they are its own. With cp > 1 each rank has some of the rows of
    a chunk inside the module's layers.

    Raises TypeError for an option that does not exist. Raises ValueError for an unknown value of an option, if the
    world size is not the layout's, for weights on several devices, for a module whose blocks cannot be cut among its tp
    ranks, with cp > 1 for a module whose layers mix rows other than by attention, and for dropout in training with tp
    or cp > 1.
    """
    options = replace(options or StepOptions(), **changes)
    if transport is None:
        grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        transport = "distributed" if grouped else "local"
    given = options.schedule_options or {}
    if options.schedule == "auto" and given.get("durations") is None:
        durations = stage_durations(mllm, layout, analytic_costs(mllm), recompute=options.recompute)
        options = replace(options, schedule_options={**given, "durations": durations})
    compute_on = compute_device(mllm, device)
    if transport == "local":
        ranks = list(range(layout.world))
        channel = None
    elif transport == "distributed":
        if not dist.is_initialized():
            raise PipelineError("torch.distributed is not initialised: call init_process_group before parallelize")
        if dist.get_world_size() != layout.world:
            raise ValueError(
                f"{dist.get_world_size()} ranks run, but the layout is for {layout.world}: start {layout.world} ranks, "
                "or change the specs"
            )
        ranks = [dist.get_rank()]
        channel = GroupChannel(mllm.modules_order(), options.timeout, compute_on, coordinated=coordinated)
    else:
        raise ValueError(f"unknown transport {transport!r}: use 'local' or 'distributed'")
    return ParallelModel(mllm, layout, options, ranks, channel, compute_on)
