"""GPU: the one place that says which type of torch's devices that is.

Streams, events and memory statistics are those of torch.accelerator. What exists for CUDA alone (Triton, NCCL, CUDA
IPC, CuPy) names CUDA where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

KIND = "cuda"
"""Type of the device. tests/rehearsal, which has no GPU, sets the name of a stand-in."""


def on_gpu(device: torch.device) -> bool:
    """Whether work on `device` is queued on streams while the program goes on."""
    return device.type == KIND


def count() -> int:
    """Number of GPUs that are usable here."""
    module = torch.get_device_module(KIND)
    return int(module.device_count()) if module.is_available() else 0


def in_use() -> bool:
    """Whether this process has a GPU that it has begun to use."""
    return bool(torch.get_device_module(KIND).is_initialized())


def indexed(device: torch.device) -> torch.device:
    """`device` with a number: a GPU without one is the current one."""
    if on_gpu(device) and device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def memory(device: torch.device) -> int:
    """Bytes that a device has."""
    if on_gpu(device):
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def done(device: torch.device) -> Callable[[], bool]:
    """A test: has the current stream of a device done what it was asked until now?"""
    if device.type == "cpu":
        return lambda: True
    event = torch.Event(device.type)
    event.record(torch.accelerator.current_stream(device))
    return event.query  # type: ignore[no-any-return]
