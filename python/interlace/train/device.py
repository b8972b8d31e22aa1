"""Device of a rank: a GPU of its own, or the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from interlace import _device
from interlace._text import one_line
from interlace.train.config.load import ConfigError
from interlace.train.errors import TrainingError
from interlace.train.launch.startup import Startup

if TYPE_CHECKING:
    from interlace.run.parallel_model import ParallelModel

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""``train.precision`` -> autocast dtype of matrix products in a forward; None: the dtype of the weights."""


def choose(wanted: str, ranks: int, *, source: str = "config") -> str:
    """Device type for ``run.device`` and a number of ranks on this machine: "cpu" or the type of GPUs.

    "auto" uses GPUs if there is one for each rank. Raises ConfigError for "cuda" if there are too few.
    """
    gpus = _device.count()
    if wanted == "auto":
        return _device.KIND if gpus >= ranks else "cpu"
    if wanted == "cuda" and gpus < ranks:
        raise ConfigError(
            f"{source}: run.device is 'cuda', which needs a GPU for each of the {ranks} rank{'s' * (ranks > 1)} on "
            f"this machine, but {_gpus_available(gpus)}; set run.device = 'cpu', lower the degrees in [parallel], or "
            "use more machines"
        )
    return _device.KIND if wanted == "cuda" else wanted


def backend(kind: str) -> str:
    """Backend of the ranks' process group: gloo, for control messages between the programs."""
    return "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"


def take(kind: str, local_rank: int, *, deterministic: bool = True) -> torch.device:
    """This rank's device. Also makes it the current device."""
    # Operations without a deterministic kernel are errors on the CPU. On a GPU that would include the usual
    # interpolation of position embeddings, so there they are warnings that name the operation.
    torch.use_deterministic_algorithms(deterministic, warn_only=kind != "cpu")
    # Deterministic mode also makes torch fill every new tensor, which costs a pass over memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if kind == "cpu":
        return torch.device("cpu")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product; torch requires it
    device = torch.device(kind, local_rank)
    torch.accelerator.set_device_index(device)
    return device


def finish() -> None:
    """Waits until this rank's GPU, if any, has finished all queued work."""
    if _device.in_use():
        torch.accelerator.synchronize()


def compile_layers(parallel: ParallelModel, device: torch.device, *, source: str = "config") -> None:
    """Compiles the repeated layers of the stages of `parallel`, each on its first run (``train.compile``).

    Raises ConfigError if torch.compile does not work here, which is tested with one small function.
    """
    try:
        torch.compile(lambda x: torch.sin(x) + 1)(torch.zeros(2, device=device))
    except Exception as error:  # from any of the compiler's backends: no compiler, no Triton, no headers of Python
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"{source}: train.compile = true, but torch.compile does not work here: {why}. A CPU needs a C++ compiler "
            "(g++) and Python's headers, a GPU needs Triton; install them, or omit the key"
        ) from None
    for stages in parallel.stages.values():
        for stage in stages.values():
            for layer in cast(nn.ModuleList, stage.layers):
                layer.compile()


def warm_up_attention(
    parallel: ParallelModel, device: torch.device, precision: str, say: Callable[[str], object]
) -> None:
    """Compiles the attention kernels of the modules of `parallel` ahead of time, if `device` is a GPU.

    say: receives progress messages.

    Only an optimization: kernels that fail to compile here are compiled when they are first launched.
    """
    if device.type != "cuda":
        return
    from interlace.attention import warm_up
    from interlace.estimate.sample_sizes import configs_of, heads_of
    from interlace.model.naming import LANGUAGE_MODEL
    from interlace.model.stages.attention_switch import NAMES

    model = parallel.mllm
    heads, configs = heads_of(model), configs_of(model)
    for name in dict.fromkeys(module for stages in parallel.stages.values() for module, _ in stages):
        shape, tp = heads[name], parallel.layout.spec(name).tp
        if getattr(configs[name], "_attn_implementation", None) not in NAMES:
            continue
        trained = name == LANGUAGE_MODEL or any(p.requires_grad for p in model.encoders[name].module.parameters())
        try:
            warm_up(
                q_heads=max(1, shape.queries // tp),
                kv_heads=max(1, shape.keys // tp),
                head_dim=shape.dim,
                value_dim=shape.value_dim,
                dtype=AUTOCAST[precision] or torch.float32,
                softcap=getattr(configs[name], "attn_logit_softcapping", None),
                device=device,
                backward=trained,
                threads=torch.get_num_threads(),
                progress=partial(_log_for, name, say),
            )
        except Exception as error:  # a compiler may raise anything
            say(f"{name}: attention kernels were not precompiled: {one_line(error)}")


def _log_for(name: str, say: Callable[[str], object], line: str) -> None:
    say(f"{name}: {line}")


def agree(kind: str, startup: Startup, *, source: str = "config") -> None:
    """Raises ConfigError, on all ranks, if machines resolved ``run.device = "auto"`` differently."""
    kinds = startup.gather("choosing the device", kind)
    other = [rank for rank, theirs in enumerate(kinds) if theirs != kinds[0]]
    if other:
        with contextlib.suppress(TrainingError):  # rank 0 may host the store and close it once all have read
            startup.gather("ending for want of one kind of device", "")
        raise ConfigError(
            f"{source}: rank 0 computes on {_names(kinds[0])}, ranks {other} on {_names(kinds[other[0]])}: some "
            "machines lack a GPU for each rank; set run.device = 'cpu', or start ranks only on "
            "machines with enough GPUs"
        )


def _gpus_available(gpus: int) -> str:
    if gpus:
        return f"this machine has {gpus}"
    return "this torch is built without CUDA" if torch.version.cuda is None else "no GPU is usable here"


def _names(kind: str) -> str:
    return "the CPU" if kind == "cpu" else "a GPU"
