"""Figures of a hot loop on Hopper: repeated products, shared memory traffic, waits, and clocks by resource.

A loop's machine code (`bench.machine_code.Loop`) and its tile give the cost of 128 x 128 pairs on one SM. The clocks
are a model, described in docs/roofline.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PAIRS = 128 * 128
GLUON = "gluon_"

# One SM of an H100 SXM, per clock.
MULTIPROCESSORS, CLOCK = 132, 1.83e9
TENSOR_FMA = 2048  # dense, 16 bits: 989 TFLOP/s; HMMA has half of it
SHARED_BYTES = 128
ISSUED = 4  # instructions of a warp
HALF_RATE = 2  # instructions of a warp that run on 64 lanes (`bench.machine_code.ALU`)
MUFU_WARPS = 0.5  # 16 lanes
ELEMENT = 2  # bytes

# Products of a pair: (those of the head dimension of q and k, those of v's).
PRODUCTS = {
    "forward": (1, 1), "query_gradient": (2, 1), "fused": (3, 2), "of keys": (2, 1), "of values": (1, 1),
    "key_gradient": (2, 2),
}  # fmt: skip


class HotLoop(NamedTuple):
    loop: str  # "FULL" or "PARTIAL"
    products: dict[str, int]  # per iteration and warp, by shape
    ratio: float  # multiply-adds issued, over those of the tile: above 1, warpgroups repeat each other's rows
    traffic: float  # shared memory operands of the worst HGMMA, bytes per clock
    mean_traffic: float  # of all
    wait: (
        int  # the fewest copy groups in flight after a wait; Gluon: the most HGMMA groups, 0 if exp2 is not beside them
    )
    instructions: int  # of a warp, per iteration
    per_pairs: float  # instructions of all warps, per 128 x 128 pairs
    spills: int
    clocks: dict[str, float]  # of one SM per 128 x 128 pairs, by resource
    loaded: float  # bytes from global memory per 128 x 128 pairs, at padded head dimensions
    shared: float  # bytes through shared memory per 128 x 128 pairs

    @property
    def overlapped(self) -> float:
        """Clocks if resources work side by side: those of the scarcest."""
        return max(self.clocks.values())

    @property
    def bound(self) -> str:
        return max(self.clocks, key=self.clocks.__getitem__)

    @property
    def in_turns(self) -> float:
        """Clocks if nothing runs beside the products."""
        return self.clocks["products"] + max(self.clocks[name] for name in ("issue", "half rate", "exp2"))


def multiply_adds(kernel: str, head_dim: int, value_dim: int) -> int:
    """Multiply-adds per pair."""
    of_qk, of_v = next(products for name, products in PRODUCTS.items() if name in kernel)
    return of_qk * head_dim + of_v * value_dim


def figures(kernel: str, used: dict[str, Any]) -> list[HotLoop]:
    """The FULL and the PARTIAL loop; empty if the loops of the kernel are not such a pair.

    If several partitions compute, the one that issues the most is used for each loop.
    """
    loops = used["loops"]
    if len(loops) % 2:
        return []
    return [
        _figures(kernel, name, used["tile"], max(loops[place::2], key=lambda loop: loop["instructions"]))
        for place, name in enumerate(("FULL", "PARTIAL")[: len(loops)])
    ]


def _figures(kernel: str, name: str, tile: dict[str, int], loop: dict[str, Any]) -> HotLoop:
    m, n, warps = tile["m"], tile["n"], tile["warps"]
    share = PAIRS / (m * n)
    issued = clocks = ideal = operands = worst = 0.0
    for shape, count in loop["products"].items():
        rows, columns, depth = (int(x) for x in shape.split()[0].split("x"))
        times = count * share * (warps / 4 if rows == 64 else warps)  # HGMMA of a warpgroup, HMMA of a warp
        alone = rows * columns * depth / (TENSOR_FMA if rows == 64 else TENSOR_FMA / 2)
        size = operand_bytes(shape)
        issued += times * rows * columns * depth
        ideal += times * alone
        clocks += times * max(alone, size / SHARED_BYTES)
        operands += times * size
        worst = max(worst, size / alone)
    gluon = kernel.startswith(GLUON)
    # If keys stay resident and queries stream, every n keys load all queries; else every m queries load all keys. Both
    # consumers of Gluon share what the producer loads.
    resident = 128 if gluon else (n if "key_gradient" in kernel else m)
    loaded = 128 / resident * 128 * (tile["head_dim"] + tile["value_dim"]) * ELEMENT
    copied = loaded if gluon else loop["copied"] * warps * share
    shared = operands + loop["shared"] * warps * share + copied
    return HotLoop(
        loop=name,
        products=loop["products"],
        ratio=issued / (PAIRS * multiply_adds(kernel, tile["head_dim"], tile["value_dim"])),
        traffic=worst,
        mean_traffic=operands / ideal,
        wait=_products_in_flight(loop) if gluon else min(loop["load_waits"], default=0),
        instructions=loop["instructions"],
        per_pairs=loop["instructions"] * warps * share,
        spills=loop["spills"],
        clocks={
            "products": clocks,
            "shared memory": shared / SHARED_BYTES,
            "issue": loop["instructions"] * warps * share / ISSUED,
            "half rate": loop["alu"] * warps * share / HALF_RATE,
            "exp2": loop["mufu"] * warps * share / MUFU_WARPS,
        },
        loaded=loaded,
        shared=shared,
    )


def _products_in_flight(loop: dict[str, Any]) -> int:
    """HGMMA groups in flight after the wait that leaves the most, if nine tenths of exp2 are issued beside products:
    ptxas may move a wait that leaves none to before them."""
    return max(loop["product_waits"], default=0) if loop["beside"] >= 0.9 * loop["mufu"] else 0


def operand_bytes(shape: str) -> int:
    """Bytes that one HGMMA reads from shared memory: B, and A unless it is in registers. 0 for HMMA."""
    size, *where = shape.split()
    rows, columns, depth = (int(x) for x in size.split("x"))
    if not where:
        return 0
    return ELEMENT * depth * (columns + (rows if where == ["shared"] else 0))


def problems(full: HotLoop, partial: HotLoop) -> dict[tuple[str, str], float]:
    """Problems of the two loops: {(loop, problem): figure}."""
    result: dict[tuple[str, str], float] = {}
    for loop in (full, partial):
        if loop.ratio > 1.05:
            result[loop.loop, "HGMMA ratio"] = round(loop.ratio, 2)
        if loop.traffic > SHARED_BYTES:
            result[loop.loop, "shared memory, B/clk"] = round(loop.traffic)
        if loop.wait == 0:
            result[loop.loop, "wait"] = 0
        if loop.spills:
            result[loop.loop, "spills in the loop"] = loop.spills
    if partial.per_pairs > 1.6 * full.per_pairs:
        result["PARTIAL", "instructions over FULL"] = round(partial.per_pairs / full.per_pairs, 2)
    return result
