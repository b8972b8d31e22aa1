"""The CPU backend on every instruction set of this processor, and bf16, for which AMX has a separate code path.

Tests in this process run on the best set; if that is AMX, they test its tiles.
"""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import _core
from interlace.attention import AttentionPlan, bitfield_attention
from interlace.masks import BitfieldMask
from tests.attention import backends, cases
from tests.attention.backends import compare, finished, run
from tests.forkserver import start_script
from tests.mask_strategies import mask_pairs
from tests.sampling import given_by_tier

ISAS = ["amx", "avx512", "avx2", "baseline"]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---------------------------------------------------------------------- the choice


def forked(script, output, **environment):
    """Output of a script that must succeed, in a process with torch preloaded that selects its kernels anew."""
    process = start_script(script, output, environment)
    process.join(600)
    assert process.exitcode == 0, output.read_text()[-4000:]
    return output.read_text()


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(isa, tmp_path):
    """Selects a set that the processor has, never more than requested; all sets are correct."""
    script = """
import torch
from interlace import _core
from tests.attention import cases, backends
for name, dtype, dim in [("packed", torch.float32, 72), ("113 x 203", torch.bfloat16, 80), ("lambda", torch.float16, 9),
                         ("empty rows", torch.float64, 17), ("1 x 50", torch.float32, 64),
                         ("shuffled part", torch.bfloat16, 64), ("50 x 1", torch.bfloat16, 33)]:
    for softcap in (None, 3.0):
        backends.compare("cpu", *cases.masks()[name], dtype, dim=dim, softcap=softcap, block=128, scale=0.1)
print(_core.attention_isa())
"""
    result = forked(script, tmp_path / "said", INTERLACE_CPU_ISA=isa).strip()
    assert result in ISAS[ISAS.index(isa) :]
    if result != isa:
        pytest.skip(f"this processor, compiler or kernel has no {isa}: {result} was tested instead")


@pytest.mark.slow
def test_an_unknown_instruction_set_is_refused():
    script = """
import torch
from interlace import BitfieldMask, bitfield_attention
bitfield_attention(*(torch.ones(1, 1, 4, 4) for _ in range(3)), BitfieldMask.causal(1, 4), backend="cpu")
"""
    process = finished(script, INTERLACE_CPU_ISA="sse9")
    assert process.returncode != 0 and '"sse9"; it must be amx, avx512, avx2 or baseline' in process.stderr


@pytest.mark.skipif(_core.attention_isa() != "amx", reason="AMX is not to be had here anyway")
def test_a_kernel_that_refuses_tiles_means_avx512():
    """A seccomp filter answers arch_prctl(ARCH_REQ_XCOMP_PERM) with EPERM, as a kernel without AMX would."""
    assert platform.machine() == "x86_64"
    script = """
import ctypes, struct
def op(code, k, true=0, false=0):
    return struct.pack("HBBI", code, true, false, k)
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
program = b"".join([
    op(LOAD, 0), op(JUMP_EQUAL, 158, 0, 3),         # the call's number: arch_prctl
    op(LOAD, 16), op(JUMP_EQUAL, 0x1023, 0, 1),     # its first argument: ARCH_REQ_XCOMP_PERM
    op(RETURN, 0x00050001), op(RETURN, 0x7FFF0000), # EPERM; or let it pass
])
room = ctypes.create_string_buffer(program)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
filter = Filter(6, ctypes.addressof(room))
done = libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(filter)) == 0
if done:
    import torch
    from interlace import _core
    from tests.attention import cases, backends
    backends.compare("cpu", *cases.masks()["packed"], torch.bfloat16, dim=64, block=128, scale=0.1)
    print(_core.attention_isa())
else:
    print("no seccomp")
"""
    result = run(script).strip()
    if result == "no seccomp":
        pytest.skip("no seccomp filters here")
    assert result == "avx512"


# ---------------------------------------------------------------------- bf16


@pytest.mark.parametrize("name", cases.masks())
@pytest.mark.parametrize("dim", [9, 64])
def test_known_masks(name, dim):
    compare("cpu", *cases.masks()[name], torch.bfloat16, dim=dim, scale=dim**-0.5, block=128)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (40, 1)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_head_groups_and_softcap(heads, kv_heads, softcap):
    mask, keys = cases.masks()["shuffled part"]
    compare("cpu", mask, keys, torch.bfloat16, heads, kv_heads, dim=40, softcap=softcap, scale=0.15)


@pytest.mark.parametrize("block", [1, 7, 33, 48, 100, 128, 1 << 40])
def test_block_sizes(block):
    compare("cpu", *cases.masks()["multimodal"], torch.bfloat16, dim=32, scale=0.2, block=block)


@pytest.mark.parametrize("dim", [1, 2, 31, 33, 64, 80, 96, 128, 256, 300])
def test_head_dimensions(dim):
    compare("cpu", *cases.masks()["multimodal"], torch.bfloat16, dim=dim, scale=dim**-0.5, block=128)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale, softcap):
    compare("cpu", *cases.masks()["packed"], torch.bfloat16, dim=16, scale=scale, softcap=softcap, block=128)


@given_by_tier(40, 150,
    mask_pairs(longest=150), st.sampled_from([16, 64, 100, 128]), st.sampled_from([1, 20, 64]),
    st.sampled_from([(1, 1), (4, 2)]), st.sampled_from([None, 3.0]),
)  # fmt: skip
def test_random_masks(pair, block, dim, heads, softcap):
    compare("cpu", *pair, torch.bfloat16, *heads, dim=dim, softcap=softcap, scale=dim**-0.5, block=block)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    mask_pairs(longest=400), st.sampled_from([7, 32, 64, 100, 128, 200]), st.integers(1, 140),
    st.sampled_from([(1, 1), (6, 2)]), st.sampled_from([None, 3.0]),
)  # fmt: skip
def test_many_random_masks(pair, block, dim, heads, softcap):
    compare("cpu", *pair, torch.bfloat16, *heads, dim=dim, softcap=softcap, scale=dim**-0.5, block=block)


@pytest.mark.slow
def test_more_rows_of_blocks_than_go_together():
    """Panels of 2,500 queries at head dimension 256 exceed the L2 cache: they are processed in several groups."""
    mask = BitfieldMask.causal(1, 2500, window=200, sinks=3)
    compare("cpu", mask, None, torch.bfloat16, 2, 1, dim=256, scale=1 / 16, block=128)


@pytest.mark.parametrize("amplitude", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("causal", [True, False])
def test_errors_are_those_of_sdpa(amplitude, causal):
    """Errors against exact attention, of outputs and gradients, are at most slightly above those of torch's bf16."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(1, 4, 512, 64, generator=generator) for _ in range(4))
    q, k, v, dout = (x.bfloat16() for x in (q * amplitude, k * amplitude, v, dout))
    mask = BitfieldMask.causal(1, 512) if causal else BitfieldMask.full(1, 512)

    def results(op, *inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = op(*inputs)
        return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]

    exact = results(lambda q, k, v: cases.oracle(q, k, v, mask.to_dense(), 1 / 8)[0], *(x.double() for x in (q, k, v)))
    ours = results(lambda q, k, v: bitfield_attention(q, k, v, mask, backend="cpu"), q, k, v)
    sdpa = results(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, v)
    for name, one, other, wanted in zip(["out", "dq", "dk", "dv"], ours, sdpa, exact):
        mine, theirs = ((x.double() - wanted).norm() for x in (one, other))
        assert mine <= 1.15 * theirs, (name, mine, theirs)
        mine, theirs = ((x.double() - wanted).abs().max() for x in (one, other))
        assert mine <= 2.0 * theirs, (name, mine, theirs)


def test_a_weight_of_nearly_one_adds_no_error():
    """Rows in which one late key has 30 to 250 times the weight of the first: errors are those of rounding the result.

    The late key does not move the shift of the exponentials, so its weight is no power of two, and is rounded.
    """
    generator = torch.Generator().manual_seed(4)
    mask = BitfieldMask.causal(1, 400, window=1, sinks=1)  # each query sees itself and key 0
    q, v = torch.ones(1, 8, 400, 1), torch.randn(1, 8, 400, 1, generator=generator)
    k = 3.4 + 2.1 * torch.rand(1, 8, 400, 1, generator=generator)
    k[:, :, 0] = 0
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact, _ = cases.oracle(q, k, v, mask.to_dense(), 1.0)
    out = bitfield_attention(q, k, v, mask, scale=1.0, backend="cpu")
    assert (out.double() - exact).norm() <= 1.1 * (exact.bfloat16().double() - exact).norm()


def test_masked_keys_get_zero_gradient_even_if_nan():
    doc = torch.zeros(1, 40, dtype=torch.int32)
    doc[:, 37:] = -1
    mask = BitfieldMask(BitfieldMask.causal(1, 40).bits, doc=doc)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = cases.tensors(mask, None, 2, 1, 16, dtype)
        with torch.no_grad():
            k[:, :, 37:] = torch.nan
        out = bitfield_attention(q, k, v, mask, backend="cpu")
        _, dk, dv = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        assert out.isfinite().all() and dk.isfinite().all() and dv.isfinite().all()
        assert dv[:, :, :37].any() and not dk[:, :, 37:].any() and not dv[:, :, 37:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_of_minus_infinity_is_a_weight_of_zero(dtype):
    """Also beside the zeros that pad a panel of 40 queries: 0 * inf must not enter the sums."""
    mask, keys = BitfieldMask.full(1, 40), BitfieldMask.full(1, 64)
    q, k, v = cases.tensors(mask, keys, 2, 1, 16, dtype)
    with torch.no_grad():
        q.abs_()
        k[:, :, 5] = -torch.inf
    out = bitfield_attention(q, k, v, mask, kv_mask=keys, backend="cpu")
    rest = [x[:, :, [t for t in range(64) if t != 5]] for x in (k, v)]
    wanted = bitfield_attention(q, *rest, mask, kv_mask=BitfieldMask.full(1, 63), backend="cpu")
    torch.testing.assert_close(out, wanted)
    _, dk, dv = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert dk.isfinite().all() and dv.isfinite().all() and not dk[:, :, 5].any() and not dv[:, :, 5].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_change_nothing(dtype):
    mask, _ = cases.masks()["packed"]
    shape = (1, mask.length, 4, 40)
    q, k, v, dout = (torch.randn(shape).to(dtype).transpose(1, 2) for _ in range(4))

    def results(q, k, v, dout):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = bitfield_attention(q, k, v, mask, backend="cpu")
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    apart = results(*(x.contiguous() for x in (q, k, v, dout)))
    assert all(torch.equal(one, other) for one, other in zip(results(q, k, v, dout), apart))
    padded = torch.randn(1, 4, mask.length, 47).to(dtype)[..., 3:43]  # rows that start and end anywhere
    padded.copy_(q)
    assert torch.equal(results(padded, k, v, dout)[0], apart[0])


@pytest.mark.parametrize("heads", [1, 3])
def test_results_repeat_and_forward_is_independent_of_threads(heads, threads):
    mask, keys = cases.masks()["packed"]
    plan = AttentionPlan.build(mask, keys, block=64)
    result = {}
    for count in (1, 1, 2, 2, 3):
        threads(count)
        q, k, v = cases.tensors(mask, keys, 2 * heads, heads, 64, torch.bfloat16)
        out, lse = bitfield_attention(q, k, v, plan, return_lse=True, backend="cpu")
        grads = torch.autograd.grad((out.float().square().sum() + lse.sum()), (q, k, v))
        for one, other in zip(result.setdefault(count, (out, lse, *grads)), (out, lse, *grads)):
            assert torch.equal(one, other)
    for count in (2, 3):
        assert all(torch.equal(one, other) for one, other in zip(result[1][:3], result[count][:3]))  # out, lse, dq
        for one, other in zip(result[1][3:], result[count][3:]):  # sums of other pieces
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_key_gradients_of_several_pieces(dtype, threads):
    """One key head for three threads: the sum of the pieces is returned unchanged, or rounded once."""
    threads(3)
    backends.wide_key_gradients("cpu", dtype, 20, 1)


def test_threads_of_python_at_once(threads):
    """Each has its own tiles and its own sums, while torch uses the tiles of another."""
    threads(2)
    mask, keys = cases.masks()["packed"]
    plan = AttentionPlan.build(mask, keys, block=64)
    inputs = cases.tensors(mask, keys, 4, 2, 64, torch.bfloat16)
    a = torch.randn(200, 200, generator=torch.Generator().manual_seed(6)).bfloat16()

    def turn():
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        out = bitfield_attention(q, k, v, plan, backend="cpu")
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v)), a @ a]

    wanted = turn()
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: turn(), range(40)):
            assert all(torch.equal(one, other) for one, other in zip(result, wanted))


def test_torch_finds_the_tiles_as_it_needs_them(threads):
    """Matrix products of torch, which configures the same tiles, before, between and after ours."""
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(200, 200, generator=generator).bfloat16() for _ in range(2))
    mask, keys = cases.masks()["causal"]
    q, k, v = cases.tensors(mask, keys, 4, 4, 48, torch.bfloat16)

    def turn():
        out = bitfield_attention(q, k, v, mask, backend="cpu")
        return out, a @ b, *torch.autograd.grad(out.float().sum(), (q, k, v)), b @ a

    for count in (1, 2):
        threads(count)
        product = a @ b
        first, *others = (turn() for _ in range(3))
        assert torch.equal(product, first[1])
        assert all(torch.equal(one, other) for results in others for one, other in zip(first, results))


def test_denormals_are_left_as_they_were_outside():
    """Tiles and the code between them treat denormals as 0; code outside does not."""
    mask, keys = cases.masks()["causal"]
    tiny = torch.full((8,), 1e-40)
    q, k, v = cases.tensors(mask, keys, 1, 1, 16, torch.bfloat16)
    bitfield_attention(q, k, v, mask, backend="cpu").float().sum().backward()
    assert (tiny * 0.5 > 0).all() and (tiny + tiny > tiny).all()
