"""Tile sizes of the bitfield attention kernels: one table, by architecture and head dimension.

Tiles of 90 have at least 16 rows per warp, so that no warp repeats another's product, and three stages, so that loads
are in flight while a tile is computed. Those of head dimension 64 and 128, and the forward of 256, were within 3 % of
the fastest of `bench.kernel_times` on an H200 (whole blocks, no softcap); dK/dV of 64 had two stages then. The others
have not been timed: they were chosen from machine code (docs/kernel-report.md), which the gate in tests/kernels checks.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """m: queries and n: keys per tile; warps per program; stages of the software pipeline."""

    m: int
    n: int
    warps: int
    stages: int


FORWARD, QUERY_GRADIENT, KEY_GRADIENT = "forward", "query_gradient", "key_gradient"
FUSED_GRADIENT = "fused_gradient"

# 16-bit inputs. architecture -> kernel -> {`width` of the head dimensions: tile}.
TILES: dict[int, dict[str, dict[int, Tile]]] = {
    80: {
        FORWARD: {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2), 192: Tile(64, 32, 8, 2), 256: Tile(64, 32, 8, 2)},
        QUERY_GRADIENT: {
            64: Tile(64, 32, 4, 2),
            128: Tile(32, 64, 8, 2),
            192: Tile(32, 32, 8, 2),
            256: Tile(64, 32, 8, 1),
        },
        KEY_GRADIENT: {
            64: Tile(32, 128, 8, 2),
            128: Tile(64, 32, 8, 2),
            192: Tile(32, 32, 8, 2),
            256: Tile(32, 32, 8, 1),
        },
    },
    90: {
        FORWARD: {
            64: Tile(128, 64, 8, 3),
            128: Tile(128, 64, 8, 3),
            192: Tile(128, 64, 8, 3),
            256: Tile(128, 32, 8, 3),
        },
        QUERY_GRADIENT: {
            64: Tile(64, 64, 4, 3),
            128: Tile(128, 64, 8, 3),
            192: Tile(128, 32, 8, 3),
            256: Tile(128, 32, 8, 3),
        },
        # With 64 keys 8 warps would repeat each other's products. From 192 on dK and dV are apart (`keys_apart`).
        KEY_GRADIENT: {
            64: Tile(64, 64, 4, 3),
            128: Tile(32, 64, 4, 3),
            192: Tile(32, 128, 8, 3),
            256: Tile(32, 128, 8, 3),
        },
    },
    100: {
        FORWARD: {64: Tile(128, 32, 8, 3), 128: Tile(64, 64, 8, 3), 192: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
        QUERY_GRADIENT: {
            64: Tile(64, 64, 8, 3),
            128: Tile(64, 32, 8, 2),
            192: Tile(128, 32, 8, 2),
            256: Tile(128, 32, 8, 2),
        },
        KEY_GRADIENT: {
            64: Tile(64, 128, 8, 3),
            128: Tile(32, 128, 8, 2),
            192: Tile(64, 64, 8, 1),
            256: Tile(32, 64, 8, 1),
        },
        FUSED_GRADIENT: {64: Tile(32, 128, 8, 2), 128: Tile(32, 128, 8, 1)},
    },
}
# Another tile where there is no softcap and no padding of head dimensions, and v is as wide as q and k: a larger one is
# clean there, or (80) that of TILES spills under Triton 3.6.
PLAIN = {
    (80, FORWARD, 256): Tile(64, 16, 8, 2),
    (100, QUERY_GRADIENT, 128): Tile(64, 64, 8, 2),
}
# Where the tile of TILES spills once there is a softcap.
CAPPED = {
    (80, KEY_GRADIENT, 64): Tile(16, 128, 8, 2),
    (90, KEY_GRADIENT, 64): Tile(32, 128, 8, 3),
    (100, QUERY_GRADIENT, 64): Tile(64, 64, 8, 2),
    (100, KEY_GRADIENT, 64): Tile(32, 128, 8, 2),
}
# Exact fp32 products run on the plain cores, which hold their operands in registers: larger tiles spill, but for these.
FLOAT32 = Tile(16, 16, 8, 1)
FLOAT32_LARGER = {
    (QUERY_GRADIENT, 64): Tile(16, 32, 8, 1),
    (QUERY_GRADIENT, 192): Tile(16, 32, 8, 1),
    (KEY_GRADIENT, 128): Tile(16, 32, 8, 1),
}
INTERPRETED = Tile(32, 32, 1, 1)


def width(block_d: int, block_v: int) -> int:
    """What tiles go by: 64, 128 or 256, the wider of the padded head dimensions of q and k and of v; or 192 for q and k
    padded to 256 beside v padded to 128 or less, as for DeepSeek's 192 and 128."""
    return 192 if block_d > 128 >= block_v else max(block_d, block_v, 64)


def has_fused(architecture: int, block_d: int, block_v: int, *, float32: bool) -> bool:
    """Whether FUSED_GRADIENT has a tile.

    On Hopper none was as fast as the two kernels that it would replace: 65 ms at best against 54 for 32,768 tokens of
    head dimension 128 on an H200. Its atomics write 4 bytes per 10 * n products, n keys per tile: the small tiles of
    fp32 and of head dimension 256 would drown in them. Under sm_80, where operands of products live in registers,
    every tile spills.
    """
    if architecture == 0:
        return True
    return not float32 and width(block_d, block_v) in TILES[_known(architecture)].get(FUSED_GRADIENT, {})


def keys_apart(architecture: int, block_d: int, block_v: int, *, float32: bool) -> bool:
    """True if dK and dV take separate launches.

    On Hopper from head dimension 192 on: the accumulators of both leave registers for 64 keys only, which two
    warpgroups then compute twice. One of them alone has room for 128.
    """
    return architecture in (0, 90) and not float32 and width(block_d, block_v) > 128


def choose(
    kernel: str,
    architecture: int,
    block_d: int,
    block_v: int,
    block: int,
    *,
    float32: bool,
    capped: bool = False,
    bounded: bool = True,
) -> Tile:
    """The tile of `kernel` for `architecture` (10 * major; 0 = the interpreter), cut to the plan's block.

    block_d, block_v: padded head dimensions of q and k, and of v.
    capped: with a softcap. bounded: head dimensions are padded, so loads have masks.
    """
    if architecture == 0:
        tile = INTERPRETED
    else:
        known, wide = _known(architecture), width(block_d, block_v)
        if float32:
            tile = FLOAT32_LARGER.get((kernel, wide), FLOAT32)
        else:
            key = (known, kernel, wide)
            tile = TILES[known][kernel][wide]
            if capped:
                tile = CAPPED.get(key, tile)
            elif not bounded and block_v == block_d:
                tile = PLAIN.get(key, tile)
    return tile._replace(m=min(tile.m, block), n=min(tile.n, block))


def _known(architecture: int) -> int:
    # Consumer Blackwell (120) has Ampere's instructions and 99 KiB of shared memory, in which the tiles of 80 fit.
    return 80 if architecture >= 120 else max((a for a in TILES if a <= architecture), default=80)
