"""The names that Gluon changed between Triton 3.6 and 3.9, under one name each.

TMA copies are `async_copy_global_to_shared` up to 3.7 and `async_load` from 3.8 on; the first argument after the
barrier of `mbarrier.expect` changed its name, so it is passed by position.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

TMA_HAS_ASYNC_LOAD = gl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8))
tma_load = tma.async_load if TMA_HAS_ASYNC_LOAD.value else tma.async_copy_global_to_shared
"""tma_load(descriptor, coordinates, barrier, destination)"""

HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The bytes of shared memory as another type, shape and layout."""
    if HAS_REINTERPRET:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)
