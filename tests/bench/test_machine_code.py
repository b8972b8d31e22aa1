"""Detection of hot loops in short handwritten machine code, and their figures."""

from __future__ import annotations

import itertools

import pytest

from bench import hot_loops
from bench.machine_code import hot_loops as read
from tests.bench.loops import used

PRODUCT = "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR20], R88"


def sass(text: str) -> str:
    """Lines in the format of nvdisasm: labels at the margin, instructions with their address."""
    address = itertools.count(0, 16)
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(x if x.endswith(":") else f"        /*{next(address):04x}*/      {x} ;" for x in lines)


def test_loops_come_in_order_of_appearance():
    full, partial = read(
        sass(f"""
        kernel:
        LDC R1, c[0x0][0x28]
        @!P0 EXIT
        .L_x_1:
        DEPBAR.LE SB0, 0x2
        {PRODUCT}
        @P0 BRA `(.L_x_1)
        @P1 BRA `(.L_x_3)
        .L_x_2:
        DEPBAR.LE SB0, 0x1
        ISETP.GE.AND P0, PT, R1, R2, PT
        {PRODUCT}
        {PRODUCT}
        @P0 BRA `(.L_x_2)
        .L_x_3:
        EXIT
        .L_x_4:
        BRA `(.L_x_4)
        """)
    )
    assert (full.instructions, full.products, full.load_waits) == (3, {"64x64x16 shared": 1}, [2])
    assert (partial.instructions, partial.alu, partial.load_waits) == (5, 1, [1])


def test_only_the_innermost_loop_is_hot():
    (loop,) = read(
        sass(f"""
        .L_x_1:
        {PRODUCT}
        .L_x_2:
        {PRODUCT}
        @P0 BRA `(.L_x_2)
        @P1 BRA `(.L_x_1)
        EXIT
        """)
    )
    assert loop.instructions == 2


def test_waits_that_spin_out_of_line_are_not_counted():
    """The jump back from a wait ends behind the loop's head, and holds no loop of its own."""
    (loop,) = read(
        sass(f"""
        .L_x_1:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R16
        @!P0 BRA `(.L_x_3)
        .L_x_2:
        {PRODUCT}
        @P1 BRA `(.L_x_1)
        EXIT
        .L_x_3:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR6], R16
        @!P0 BRA `(.L_x_3)
        BRA `(.L_x_2)
        """)
    )
    assert loop.instructions == 4


def test_partitions_behind_an_indirect_branch_are_reached():
    loop = f".L_x_NUMBER:\n{PRODUCT}\n@P0 BRA `(.L_x_NUMBER)\nEXIT\n"
    result = read(
        sass(
            "S2R R2, SR_TID.X\n"
            'BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_5,.L_x_6"*)\n'
            + loop.replace("NUMBER", "5")
            + loop.replace("NUMBER", "6")
            + loop.replace("NUMBER", "7")  # no jump leads to it
        )
    )
    assert len(result) == 2


@pytest.mark.parametrize("jump", ["BRA P0, `(.L_x_1)", "BRA.DIV UR4, `(.L_x_1)", "@!UP0 BRA `(.L_x_1)"])
def test_conditional_jumps_fall_through(jump):
    (loop,) = read(sass(f".L_x_1:\n{PRODUCT}\n{jump}\nEXIT"))
    assert loop.instructions == 2


def test_instructions_of_a_loop_are_told_apart():
    (loop,) = read(
        sass("""
        .L_x_1:
        HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR16].tnspB, R24
        HGMMA.64x32x16.F32 R24, gdesc[UR16], RZ, !UPT
        WARPGROUP.DEPBAR.LE gsb0, 0x1
        WARPGROUP.DEPBAR.LE gsb0, 0x0
        LDL.64 R16, [R1+0x10]
        STL [R1], R184
        MUFU.EX2 R3, R3
        @P0 FSEL R1, R2, R3, P1
        LDSM.16.M88.4 R8, [R2]
        STS.64 [R2], R4
        LDS R2, [R3]
        LDGSTS.E.BYPASS.128 [R2], desc[UR4][R6.64]
        @P0 BRA `(.L_x_1)
        EXIT
        """)
    )
    assert loop.products == {"64x128x16 registers": 1, "64x32x16 shared": 1}
    assert (loop.product_waits, loop.load_waits) == ([1, 0], [])
    assert (loop.spills, loop.mufu, loop.beside, loop.alu) == (2, 1, 0, 1)
    assert (loop.shared, loop.copied) == (32 * (16 + 8 + 4), 32 * 16)


@pytest.mark.parametrize(("wait", "beside"), [(0, 2), (1, 3)])
def test_exp2_beside_products(wait, beside):
    """Two groups; the first exp2 overlaps with products left in flight at the end of the loop."""
    (loop,) = read(
        sass(f"""
        .L_x_1:
        MUFU.EX2 R1, R1
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0
        HGMMA.64x128x16.F32.BF16 R88, R120, gdesc[UR16], R88, gsb0
        WARPGROUP.DEPBAR.LE gsb0, 0x1
        MUFU.EX2 R2, R2
        MUFU.EX2 R3, R3
        WARPGROUP.DEPBAR.LE gsb0, {wait:#x}
        @P0 BRA `(.L_x_1)
        EXIT
        """)
    )
    assert (loop.mufu, loop.beside) == (3, beside)


def test_mma_sync_is_read_where_there_is_no_wgmma():
    (loop,) = read(sass(".L_x_1:\nHMMA.16816.F32.BF16 R4, R8, R12, R4\n@P0 BRA `(.L_x_1)\nEXIT"))
    assert loop.products == {"16x8x16": 1}
    assert read(sass(f".L_x_1:\nHMMA.1688.F32 R4, R8, R12, R4\n@P0 BRA `(.L_x_1)\n{PRODUCT}\nEXIT")) == []


# ---------------------------------------------------------------------- figures


def test_a_forward_of_two_warpgroups():
    full, partial = hot_loops.figures("forward_kernel", used())
    assert full == partial._replace(loop="FULL")
    assert full.ratio == 1
    assert (full.traffic, full.mean_traffic, full.wait) == (128, 96, 2)
    assert full.per_pairs == 400 * 8 * 2
    assert full.clocks["products"] == 2 * 2 * 128**3 / 4096 == 2048
    assert full.clocks["issue"] == 6400 / 4 and full.clocks["half rate"] == 1600 / 2
    assert full.clocks["exp2"] == 128 * 128 / 16
    assert full.shared == 2048 * 96 + 2 * 8 * 4096 and full.loaded == 2 * 8 * 4096
    assert (full.bound, full.overlapped, full.in_turns) == ("products", 2048, 2048 + 1600)
    assert not hot_loops.problems(full, partial)


def test_rows_that_two_warpgroups_repeat():
    (loop, _) = hot_loops.figures("forward_kernel", used(tile={"m": 64}))
    assert (loop.ratio, loop.clocks["products"]) == (2, 4096)


def test_narrow_products_exceed_shared_memory():
    products = {"64x32x16 shared": 16, "64x128x16 registers": 4}
    full, partial = hot_loops.figures("key_gradient_kernel", used(products=products, tile=dict(m=32, warps=4)))
    assert (full.ratio, full.traffic, full.mean_traffic) == (1, 192, 128)
    assert full.clocks["products"] == 4096 / 2 * 1.5 + 4096 / 2
    assert set(hot_loops.problems(full, partial)) == {
        ("FULL", "shared memory, B/clk"), ("PARTIAL", "shared memory, B/clk")
    }  # fmt: skip


def test_a_consumer_of_gluon():
    """Half of the queries of a block, waits of HGMMA, and copies by TMA, for which the loop has no instructions."""
    products = {"64x128x16 shared": 8, "64x128x16 registers": 8}
    tile = dict(m=64, n=128, warps=4)
    kernel = used(products=products, load_waits=[], product_waits=[0, 1], copied=0, tile=tile)
    kernel["loops"] += [{**kernel["loops"][0], "instructions": 410}, kernel["loops"][1]]
    full, partial = hot_loops.figures("gluon_forward_kernel", kernel)
    assert (full.ratio, full.wait, full.instructions, partial.instructions) == (1, 1, 410, 400)
    assert full.per_pairs == 410 * 4 * 2
    assert full.loaded == 128 * 256 * 2 and full.shared == 2048 * 80 + full.loaded
    kernel["loops"][1]["beside"] = 28  # of 32
    assert [loop.wait for loop in hot_loops.figures("gluon_forward_kernel", kernel)] == [1, 0]


def test_problems_of_loops():
    for change, problem, figure in (
        ({"load_waits": [2, 0]}, "wait", 0),
        ({"load_waits": []}, "wait", 0),  # nothing is prefetched
        ({"spills": 3}, "spills in the loop", 3),
        ({"products": {"64x64x16 shared": 16, "64x128x16 registers": 4}}, "HGMMA ratio", 1.5),
        ({"instructions": 641}, "instructions over FULL", 1.6),
    ):
        result = hot_loops.problems(*hot_loops.figures("forward_kernel", used(change)))
        assert result == {("PARTIAL", problem): figure}


def test_loops_that_are_no_pairs_have_no_figures():
    kernel = used()
    for loops in ([], kernel["loops"][:1]):
        assert hot_loops.figures("forward_kernel", {**kernel, "loops": loops}) == []
