"""Type of the GPU device in torch, defined only here.

Streams, events and memory statistics use torch.accelerator. Code that exists for CUDA only (Triton, NCCL, CUDA IPC,
CuPy) names CUDA explicitly.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

KIND = "cuda"
"""Type of the device. tests/rehearsal, which has no GPU, sets the name of a stand-in."""


def on_gpu(device: torch.device) -> bool:
    """True if work on `device` is queued on streams while the program continues."""
    return device.type == KIND


def count() -> int:
    """Number of usable GPUs."""
    module = torch.get_device_module(KIND)
    return int(module.device_count()) if module.is_available() else 0


def in_use() -> bool:
    """True if this process has begun to use a GPU."""
    return bool(torch.get_device_module(KIND).is_initialized())


def indexed(device: torch.device) -> torch.device:
    """`device` with an index: a GPU without an index is the current one."""
    if on_gpu(device) and device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def memory(device: torch.device) -> int:
    """Total memory of a device, in bytes."""
    if on_gpu(device):
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def done(device: torch.device) -> Callable[[], bool]:
    """Returns a poll function: True once the current stream of a device has finished all work queued until now."""
    if device.type == "cpu":
        return lambda: True
    event = torch.Event(device.type)
    event.record(torch.accelerator.current_stream(device))
    return event.query  # type: ignore[no-any-return]
