"""Made-up resource use of kernels, in the format of `bench.compile_worker`."""

from __future__ import annotations

from typing import Any


def used(partial: dict[str, Any] | None = None, tile: dict[str, int] | None = None, **full: Any) -> dict[str, Any]:
    """A forward without problems except the given ones: of both loops, of PARTIAL alone, of the tile."""
    loop = dict(
        instructions=400, products={"64x64x16 shared": 8, "64x128x16 registers": 4}, load_waits=[2], product_waits=[0],
        spills=0, alu=100, mufu=32, beside=32, shared=0, copied=4096,
    )  # fmt: skip
    return {
        "tile": {**dict(m=128, n=64, warps=8, stages=3, head_dim=128, value_dim=128), **(tile or {})},
        "loops": [{**loop, **full}, {**loop, **full, **(partial or {})}],
    }
