"""States of the global random number generators, as stored in a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from interlace import _device


def rng_state() -> dict[str, Any]:
    """State of the global generators of python, numpy and torch, and of this rank's GPU if it has one, as JSON values.

    If the state has no GPU generator (written on a CPU), a GPU keeps its seeded one. A CPU ignores a GPU's state.
    """
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    module = torch.get_device_module(_device.KIND)
    gpu = {_device.KIND: module.get_rng_state().numpy().tobytes().hex()} if _device.in_use() else {}
    return gpu | {
        "python": random.getstate(),
        "numpy": [kind, numpy.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores the result of `rng_state` (also after a JSON round trip). Raises various errors for other values."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    if not 0 <= position <= len(keys):  # numpy does not check, and would read out of bounds
        raise ValueError(f"position {position} of {len(keys)}")
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if _device.KIND in state and _device.in_use():
        gpu = torch.frombuffer(bytearray.fromhex(state[_device.KIND]), dtype=torch.uint8)
        torch.get_device_module(_device.KIND).set_rng_state(gpu)
