"""The producer warp of the Gluon forward: it loads Q, K and V by TMA, and cleans V.

`bitfield_gluon_forward` has the barriers and who waits on what.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .gluon_compat import reinterpret, tma_load

BLOCK = gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of one consumer: one wgmma


@triton.constexpr_function
def products(columns):
    """Layout of a product of 64 rows, which one warpgroup computes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def stage_of(n, STAGES: gl.constexpr):
    return n % STAGES


@gluon.jit
def full_phase(n, STAGES: gl.constexpr):
    """The parity that a consumer of tile n waits for."""
    return (n // STAGES) & 1


@gluon.jit
def empty_phase(n, STAGES: gl.constexpr):
    """The parity that the producer of tile n waits for."""
    return ((n // STAGES) & 1) ^ 1


@gluon.jit
def _load(descriptor, rest, to, to_rest, barrier, at, batch, head, token, BLOCK_D: gl.constexpr, REST: gl.constexpr):
    """Both parts of a tile to place `at` of their buffers. `barrier` gets the bytes."""
    if REST:
        mbarrier.expect(barrier, descriptor.block_type.nbytes + rest.block_type.nbytes)
        tma_load(rest, [batch, head, token, BLOCK_D], barrier, to_rest.index(at))
    else:
        mbarrier.expect(barrier, descriptor.block_type.nbytes)
    tma_load(descriptor, [batch, head, token, 0], barrier, to.index(at))


@gluon.jit
def _fetch(
    descriptor, rest, buffers, rest_buffers, full, empty, n, batch, head, token,
    BLOCK_D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    stage = stage_of(n, STAGES)
    mbarrier.wait(empty.index(stage), empty_phase(n, STAGES))
    _load(descriptor, rest, buffers, rest_buffers, full.index(stage), stage, batch, head, token, BLOCK_D, REST)


@gluon.jit
def _clean(v_smem, stage, k_doc, keys, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Zeros in the rows of keys that take no part. Shared memory has the tile in atoms of 8 rows and 64 columns or,
    where it is narrower, all of them."""
    WIDTH: gl.constexpr = 64 if COLUMNS > 64 else COLUMNS
    PANELS: gl.constexpr = COLUMNS // WIDTH
    ATOMS: gl.constexpr = BLOCK // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    atoms = reinterpret(
        v_smem, v_smem.dtype, [STAGES * PANELS * ATOMS, 8, WIDTH],
        gl.NVMMASharedLayout(swizzle_byte_width=2 * WIDTH, element_bitwidth=16, rank=2),
    )  # fmt: skip
    for i in range(PANELS * ATOMS):
        rows = (i % ATOMS) * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
        part = gl.load(k_doc + rows, mask=rows < keys, other=-1) >= 0
        atom = atoms.index(stage * (PANELS * ATOMS) + i)
        atom.store(gl.where(part[:, None], atom.load(layout), 0.0))


@gluon.jit
def _fetch_clean(
    v_desc, rest, v_smem, rest_smem, v_full, v_empty, v_landed, n, cleaned, batch, head, token, k_doc, k_length,
    BLOCK_D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `_fetch`, of V with zeros where keys take no part; `cleaned` tiles before it were fetched so."""
    stage = stage_of(n, STAGES)
    mbarrier.wait(v_empty.index(stage), empty_phase(n, STAGES))
    _load(v_desc, rest, v_smem, rest_smem, v_landed, stage, batch, head, token, BLOCK_D, REST)
    mbarrier.wait(v_landed, cleaned & 1)
    _clean(v_smem, stage, k_doc + token, k_length - token, BLOCK_D, STAGES)
    if REST:
        _clean(rest_smem, stage, k_doc + token, k_length - token, REST, STAGES)
    fence_async_shared()
    mbarrier.arrive(v_full.index(stage), count=1)


@gluon.jit
def _token(full_list, full_count, part_list, n, tiles):
    """The first token of tile n, 0 beyond the last one."""
    if n < full_count:
        block = full_list + n
    else:
        block = part_list + (n - full_count)
    return gl.load(block, mask=n < tiles, other=0) * BLOCK


@gluon.jit
def _absent(k_doc, token, k_length, partial):
    """True if a key of a PARTIAL tile takes no part."""
    keys = token + gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [32], [1], [0]))
    return gl.min(gl.load(k_doc + keys, mask=(keys < k_length) & partial, other=0), 0) < 0


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_rest, k_rest, v_rest, q_smem, k_smem, v_smem, q_more, k_more, v_more,
    q_full, k_full, k_empty, v_full, v_empty, v_landed,
    full_list, full_count, part_list, part_count, batch, head, kv_head, first, k_doc, k_length,
    BLOCK_D: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for half in gl.static_range(2):
        _load(q_desc, q_rest, q_smem, q_more, q_full, half, batch, head, first + half * HALF, BLOCK_D, REST)
    cleaned = 0
    before = 0
    tiles = full_count + part_count
    token = _token(full_list, full_count, part_list, 0, tiles)
    for n in range(tiles + 1):
        after = _token(full_list, full_count, part_list, n + 1, tiles)
        absent = _absent(k_doc, before, k_length, n > full_count)
        if n < tiles:
            _fetch(
                k_desc, k_rest, k_smem, k_more, k_full, k_empty, n, batch, kv_head, token, BLOCK_D, REST, STAGES
            )  # fmt: skip
        if n > 0:
            if absent:
                _fetch_clean(
                    v_desc, v_rest, v_smem, v_more, v_full, v_empty, v_landed, n - 1, cleaned, batch, kv_head, before,
                    k_doc, k_length, BLOCK_D, REST, STAGES,
                )  # fmt: skip
                cleaned += 1
            else:
                _fetch(
                    v_desc, v_rest, v_smem, v_more, v_full, v_empty, n - 1, batch, kv_head, before,
                    BLOCK_D, REST, STAGES,
                )  # fmt: skip
        before = token
        token = after
