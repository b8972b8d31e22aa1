"""GPUs: inputs are copied to the device, and times are measured on the GPU.

A GPU executes asynchronously. So inputs are copied from pinned memory without a synchronization. The time of an action
is a pair of events, which are read on request and not in the loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from interlace import _device
from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask
from interlace.model import Media
from interlace.parallel.sending import plan_to_device, to_device

NOTES = {"_narrowed", "_documents", "_has_rows", "_longest"}
"""Cached attributes of a plan."""

Mark = float | torch.Event
"""A point in time: seconds of `time.monotonic`, or an event on a GPU."""

ON_THE_HOST = {"lengths", "grid_thw", "merge_sizes"}
"""Keys of inputs that the host reads for shapes. On the GPU, reading them would cause a synchronization."""


def device_of(model: nn.Module) -> torch.device:
    """Device of the weights of `model` that are not on meta; the CPU if all are on meta.

    Raises ValueError if they are on several devices.
    """
    devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    if len(devices) > 1:
        raise ValueError(
            f"the model's weights are on {', '.join(sorted(map(str, devices)))}, but one process uses one device: move "
            "the model to one device with .to(device), and start one process per GPU"
        )
    return devices.pop() if devices else torch.device("cpu")


def compute_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Device on which a process computes with `model`: `device` if given, else the device of the weights.

    Raises ValueError if weights that are in memory are not on `device`.
    """
    here = device_of(model)
    place = here if device is None else torch.device(device)
    if place != here and not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"the model has weights on {here}, but device is {place}: move it with .to(device), or omit device"
        )
    return place


def moved(value: Any, device: torch.device) -> Any:
    """Collated inputs with all tensors on `device`: in mappings, lists, tuples, masks, plans and media.

    Not moved are meta tensors, which carry only shapes, and the inputs that the host reads (`ON_THE_HOST`).
    """
    if isinstance(value, Tensor):
        return to_device(value, device)
    if isinstance(value, AttentionPlan):
        plan = plan_to_device(value, device)
        # Results computed on the host: on a GPU they would need a synchronization.
        plan.__dict__.update({name: moved(each, device) for name, each in value.__dict__.items() if name in NOTES})
        return plan
    if isinstance(value, BitfieldMask):
        return value.mapped(lambda tensor: moved(tensor, device))
    if isinstance(value, Media):
        data = value.data
        return value if data is None else Media(value.shape, value.tokens, moved(data, device), about=value.about)
    if isinstance(value, Mapping):
        return {key: each if key in ON_THE_HOST else moved(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        each = [moved(item, device) for item in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    return value


def current(device: torch.device) -> AbstractContextManager[object]:
    """Context in which `device` is the current device; it holds per thread, so each thread must enter it."""
    return torch.accelerator.device_index(device.index) if _device.on_gpu(device) else nullcontext()


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Context for forwards under autocast to `dtype`; None: no autocast."""
    # No cache of casts: threads share the cache and empty it. So gradients of a weight that is used several times would
    # add up in `dtype` or not, depending on timing.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def mark(device: torch.device) -> Mark:
    """A time mark of the work on `device`; `seconds` reads marks."""
    if not _device.on_gpu(device):
        return time.monotonic()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds(times: Sequence[tuple[Any, Any]], device: torch.device) -> list[tuple[float, float]]:
    """Converts marks of a step to seconds of `time.monotonic`; synchronizes with the GPU."""
    if not _device.on_gpu(device) or not times:
        return list(times)
    with current(device):
        now = mark(device)
        assert not isinstance(now, float)
        now.synchronize()
    first = times[0][0]
    began = time.monotonic() - first.elapsed_time(now) / 1e3  # events give only differences [ms]
    return [tuple(began + first.elapsed_time(event) / 1e3 for event in pair) for pair in times]  # type: ignore[misc]


def generators(device: torch.device) -> list[Tensor]:
    """The states of the generators that a forward pass on `device` may draw from."""
    states = [torch.random.get_rng_state()]
    return [*states, torch.get_device_module(device).get_rng_state(device)] if _device.on_gpu(device) else states


def drawn_since(states: Sequence[Tensor], device: torch.device) -> bool:
    """True if random numbers were drawn since `generators` returned `states`."""
    return any(not torch.equal(a, b) for a, b in zip(states, generators(device), strict=True))
