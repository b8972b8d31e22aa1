"""`parallelize(mllm, layout)`: place a model on the ranks of a layout.

parallel = parallelize(mllm, layout)         # transport "local": one process plays every rank
loss = parallel.step(samples)                # gradients are in .grad of parallel.named_parameters()
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from interlace.comm.channel_group import GroupChannel
from interlace.layout import Layout
from interlace.model import Checkpointing, MultimodalModel
from interlace.parallel.context import ORDERS
from interlace.plan import analytic_costs
from interlace.run.assign import METHODS, Method
from interlace.run.device import place_of
from interlace.run.dispatch import BALANCES, Balance
from interlace.run.errors import PipelineError
from interlace.run.graph import stage_durations
from interlace.run.parallel_model import ParallelModel
from interlace.schedule import GENERATORS, Options


def parallelize(
    mllm: MultimodalModel,
    layout: Layout,
    *,
    schedule: str = "1f1b",
    schedule_options: Options | None = None,
    transport: str | None = None,
    device: torch.device | str | None = None,
    checkpointing: Checkpointing = "none",
    sequence_parallel: bool = True,
    context_order: str = "lpt",
    assign: Method = "tokens",
    balance: Balance = "llm",
    ranks_per_node: int | None = None,
    autocast: torch.dtype | None = None,
    timeout: float = 300.0,
    crash_folder: Path | str | None = None,
    coordinated: bool = False,
) -> ParallelModel:
    """Place ``mllm`` as ``layout`` says. What is frozen is fixed here: freeze before.

    What is trained are the result's `named_parameters`: with transport "local", and of what is neither cut nor sharded,
    the parameters of ``mllm`` itself.

    transport: "local" plays all ranks in this process, a thread each, on ``mllm``'s own weights. "distributed" is one
        rank of the default process group, on those weights of ``mllm`` that it holds; the default where such a group of
        more than one rank exists.
    schedule: "1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2", "zb_v" or "auto", see docs/schedules.md;
        schedule_options: its durations and limits, see `interlace.schedule.generate`, the same on every rank. "auto"
        goes by the counted costs of `plan.analytic_costs` where these give no durations.
    checkpointing: what layers keep for their backward: "none" (all of it is kept),
        "full" (their input) or "selective" (also what is costly to compute again), see `interlace.model.checkpointing`.
        autocast: run forwards under autocast to this dtype, e.g. torch.bfloat16. timeout: seconds that bound every wait
        for a peer.
    crash_folder: where a process whose step fails leaves what its rank did last, for `interlace doctor --crash`.
        coordinated: somebody outside of the ranks finds out who is lost (elastic runs), so a step that fails says at
        once for whom it waited, and does not ask further.

    device: where weights on the meta device get memory, by default where the others lie. Only what this process holds
        gets any, and no values yet (NaN): fill `named_parameters` and the stages' buffers next.

    It computes where the weights of ``mllm`` lie, one device per process; on GPUs the ranks' messages go over NCCL, and
    what must be known on the host over gloo.

    A module with tp > 1 is cut inside its blocks, and a language model's vocabulary too, among the ranks of each lane.
    Between processes a rank's parameters are then its pieces (see `named_parameters`), copied from the weights of
    ``mllm``, and of what is sharded its rows. Weights that stages compute with are whole in a step, with shard = "full"
    for a layer at a time where replicas run equally many chunks; outside of steps they are out of date with
    "optimizer" and NaN with "full", in ``mllm`` too where they are its own.
    sequence_parallel: cut the rows there too, between the products. By default so: norms and residuals then take 1 / tp
        of the memory and work, and the same bytes travel, under the products. Rows may be of any number; modules that
        mix tokens outside attention (``mllm.packing`` is not "packed") keep them whole.

    Of a module with cp > 1 each rank has some of the rows of a chunk inside its layers. context_order: which: "lpt"
    balances attention under the chunk's own mask, "zigzag" under a causal one, "ring" gives each rank neighbours.

    assign: how samples are spread over microbatches: "tokens" evens out the language model's tokens, the others what
        encoders and language model take ("stratified", "entrain", "as_printed"; see `interlace.run.assign`).
    balance: which replica takes which sample: "none" (by its place in the batch), "llm" (even for the language model,
        which encoders follow) or "per_module" (even for each); see `interlace.run.dispatch`. Lists of samples say that
        themselves for the language model. ranks_per_node: so many ranks that follow each other are a node, between
        which little is to travel; by default all are one.

    Raises ValueError when the world's size is not the layout's, for weights on several devices, for a module whose
    blocks cannot be cut among its tp ranks, for one whose layers do more between rows than attention, with cp > 1, and
    for dropout in training with either.
    """
    for what, given, known in (
        ("schedule", schedule, sorted(GENERATORS)),
        ("context_order", context_order, ORDERS),
        ("assign", assign, METHODS),
        ("balance", balance, BALANCES),
    ):
        if given not in known:
            raise ValueError(f"unknown {what} {given!r}: use one of {', '.join(map(repr, known))}")
    if transport is None:
        grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        transport = "distributed" if grouped else "local"
    options: Options = {**(schedule_options or {})}
    if callable(options.get("durations")):
        raise ValueError("schedule_options: give durations as a mapping, which ranks can compare, not as a function")
    if schedule == "auto" and options.get("durations") is None:
        options["durations"] = stage_durations(mllm, layout, analytic_costs(mllm), recompute=checkpointing == "full")
    place = place_of(mllm, device)
    if transport == "local":
        ranks = list(range(layout.world))
        channel = None
    elif transport == "distributed":
        if not dist.is_initialized():
            raise PipelineError("torch.distributed is not initialised: call init_process_group before parallelize")
        if dist.get_world_size() != layout.world:
            raise ValueError(
                f"{dist.get_world_size()} ranks run but the layout is for {layout.world}: start that many, or change "
                "the specs"
            )
        ranks = [dist.get_rank()]
        channel = GroupChannel(mllm.modules_order(), timeout, place, coordinated=coordinated)
    else:
        raise ValueError(f"unknown transport {transport!r}: use 'local' or 'distributed'")
    return ParallelModel(
        mllm,
        layout,
        schedule,
        options,
        ranks,
        channel,
        place,
        checkpointing,
        sequence_parallel,
        context_order,
        assign,
        balance,
        ranks_per_node,
        autocast,
        timeout,
        crash_folder,
    )
