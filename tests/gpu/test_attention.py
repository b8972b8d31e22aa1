"""The attention op on a GPU against dense fp64, and GPU-only behaviour: graphs, devices, atomics, wide offsets.

Every kernel configuration compiles for seconds. So dtypes times head dimensions are swept on one mask. All other tests
use head dimension DIM, where shapes share a compilation, mostly in bf16 at lengths that are no multiple of a block.
"""

from __future__ import annotations

import pytest
import torch

from bench.attention_masks import MASKS
from bench.attention_peers import Problem
from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention.op import unsupported
from interlace.masks import BitfieldMask, Segment, word
from tests.attention import cases
from tests.gpu import dense
from tests.gpu.dense import DEVICE, DIM, LENGTH, ON_GPU, check
from tests.judge import judge
from tests.memory_load import memory_load

pytestmark = pytest.mark.skipif(DEVICE is None, reason=dense.WHY_SKIPPED)
needs_cuda = pytest.mark.skipif(not ON_GPU, reason="needs CUDA")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BACKENDS = ("triton", "gluon") if ON_GPU else ("cpu",)


def uneven_documents() -> BitfieldMask:
    """Documents of 1, 130, 57, 300 and 3 tokens, images in three of them."""
    rows = [
        [Segment("text", 1)],
        [Segment("text", 20), Segment("image", 90), Segment("text", 20)],
        [Segment("image", 50), Segment("audio", 7)],
        [Segment("text", 100), Segment("image", 64), Segment("image", 70), Segment("text", 66)],
        [Segment("text", 3)],
    ]
    return BitfieldMask.pack([BitfieldMask.from_segments([row]) for row in rows])


def empty_rows(length: int = 300) -> BitfieldMask:
    """Two rows: among causal queries, some that attend a stream without tokens; and padding for the last third."""
    bits = torch.full((2, length), word(0, [0], causal=True))
    bits[0, length // 4 : length // 2] = word(3, [5])
    doc = torch.zeros(2, length, dtype=torch.int32)
    doc[1, length // 3 :] = -1
    return BitfieldMask(bits, doc=doc)


def odd_shapes() -> dict[str, tuple[BitfieldMask, BitfieldMask | None]]:
    long, packed = BitfieldMask.causal(1, 203), uneven_documents()
    shuffled = torch.randperm(packed.length, generator=torch.Generator().manual_seed(0))
    return {
        "113 x 203": (long.select(slice(90, 203)), long),
        "1 x 5000": (BitfieldMask.causal(1, 5000).select([4999]), BitfieldMask.causal(1, 5000)),
        "300 x 1": (BitfieldMask.causal(1, 300), BitfieldMask.causal(1, 1)),
        "1 x 1": (BitfieldMask.causal(3, 1), None),
        "uneven documents": (packed, None),
        "shuffled part": (packed.select(shuffled[:301]), packed),
        "empty rows": (empty_rows(), None),
        "nothing at all": (BitfieldMask(torch.full((1, 200), word(0, [1]))), None),
        "window and sinks": (BitfieldMask.causal(2, 555, window=77, sinks=5), None),
        "cross": (BitfieldMask.full(2, 40), BitfieldMask.full(2, 777)),
    }


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check(MASKS[name](LENGTH))


def check_backend(backend: str, mask: BitfieldMask, **options) -> None:
    """check() in bf16 with a named backend, in both directions: the op itself chooses one per card."""
    skip_without(backend, options.get("dim", DIM))
    check(mask, backend=backend, **options)


def skip_without(backend: str, dim: int = DIM) -> None:
    if (why := unsupported(backend, torch.empty(1, 1, 1, dim, dtype=torch.bfloat16, device=DEVICE))) is not None:
        pytest.skip(why)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_masks_by_backend(name, backend):
    for length in (LENGTH, 1024 if ON_GPU else 128):
        for cap in (None, 2):
            check_backend(backend, MASKS[name](length), cap=cap)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_head_dimensions_by_backend(dim, backend):
    check_backend(backend, uneven_documents(), dim=dim)
    check_backend(backend, empty_rows(), dim=dim, cap=1, softcap=5.0, with_lse=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 72, 80, 128, 256])
def test_dtypes_and_head_dimensions(dtype, dim):
    check(uneven_documents(), dtype=dtype, dim=dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (96, 64), (64, 256), (72, 9)])
def test_values_of_another_head_dimension(dim, value_dim, dtype):
    """DeepSeek's, MiniCPM3's, values wider than keys, and odd ones; also split, capped and with atomics."""
    shapes = dict(dtype=dtype, dim=dim, value_dim=value_dim)
    check(uneven_documents(), **shapes)
    check(empty_rows(), cap=1, softcap=5.0, with_lse=True, **shapes)
    check(uneven_documents(), deterministic=False, **shapes)


def test_values_too_wide_for_triton_run_on_another_backend():
    if not ON_GPU:
        check(uneven_documents(), dim=DIM, value_dim=300)
        return
    q, v = (torch.randn(1, 1, 64, columns, device=DEVICE, dtype=torch.bfloat16) for columns in (128, 300))
    mask = BitfieldMask.causal(1, 64).to(DEVICE)
    with pytest.raises(ValueError, match="head dimensions up to 256, not 300"):
        bitfield_attention(q, q, v, mask, backend="triton")
    with pytest.raises(ValueError, match='needs equal head dimensions, but q has 128 and v 300: use "triton"'):
        bitfield_attention(q, q, v, mask, backend="gluon")
    assert bitfield_attention(q, q, v, mask).shape == v.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_in_every_dtype(name, dtype):
    check(MASKS[name](203), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", odd_shapes())
def test_odd_shapes(name, dtype):
    check(*odd_shapes()[name], dtype=dtype)


@pytest.mark.parametrize("name", ["causal", "gemma3_images", "cornstarch_mp"])
def test_lengths_that_are_whole_blocks(name):
    check(MASKS[name](1024 if ON_GPU else 256))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 8), (8, 1), (6, 2)])
def test_head_groups(heads, kv_heads):
    check(uneven_documents(), heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("cap", [1, 2, 5])
@pytest.mark.parametrize("name", ["causal", "prefix_lm", "cornstarch_ee"])
def test_split_rows(name, cap):
    """Several pieces per row, in both directions; `cap=1` merges as many partial results as there are blocks."""
    mask = MASKS[name](LENGTH)
    if ON_GPU:
        assert AttentionPlan.build(mask.to(DEVICE), cap=cap).stats().split_rows > 0
    check(mask, cap=cap, with_lse=True)


@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_softcap(softcap):
    check(uneven_documents(), softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_the_lse(dtype):
    check(uneven_documents(), dtype=dtype, with_lse=True)
    check(empty_rows(), dtype=dtype, with_lse=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cap", [None, 2])
def test_repeats_by_backend(cap, backend):
    skip_without(backend)
    check_repeats(cap, (DIM, DIM), backend)


@pytest.mark.parametrize("cap", [None, 2])
def test_repeats_are_bitwise_equal(cap):
    check_repeats(cap, (192, 128))


def check_repeats(cap, dims, backend=None):
    """200 repetitions, beside copies that keep the device's memory busy."""
    mask = MASKS["cornstarch_ee"](LENGTH).to(DEVICE)
    x = dense.inputs(mask, None, torch.bfloat16, dims[0], heads=8, kv_heads=2, value_dim=dims[1])
    plan = AttentionPlan.build(mask, cap=cap)
    first = dense.ours(x, plan, with_lse=True, backend=backend)
    with memory_load(DEVICE):
        for turn in range(200 if ON_GPU else 20):
            for name, one, other in zip(first._fields, first, dense.ours(x, plan, with_lse=True, backend=backend)):
                assert torch.equal(one, other), (name, turn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_what_nobody_looks_at_may_be_nan(deterministic, dtype):
    check_no_part(deterministic, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_nobody_looks_at_may_be_nan_by_backend(backend):
    skip_without(backend)
    check_no_part(True, torch.bfloat16, backend)


def check_no_part(deterministic, dtype, backend=None):
    """Padding, queries without keys and keys without queries: results are bitwise equal to those with zeros there."""
    mask = empty_rows().to(DEVICE)
    pairs = mask.to_dense()
    blind, unseen = ~pairs.any(2)[:, None, :, None], ~pairs.any(1)[:, None, :, None]
    assert blind.any() and unseen.any()
    results = []
    for value in (0.0, torch.nan, torch.inf):
        for cap in (None, 1):
            plan = AttentionPlan.build(mask, cap=cap)
            x = dense.inputs(mask, None, dtype, DIM)
            with torch.no_grad():
                for tensor, rows in ((x.q, blind), (x.dout, blind), (x.k, unseen), (x.v, unseen)):
                    tensor.masked_fill_(rows, value)
                x.dlse.masked_fill_(blind[..., 0], value)
            results.append(dense.ours(x, plan, with_lse=True, deterministic=deterministic, backend=backend))
    for turn, result in enumerate(results[2:]):
        for name, one, other in zip(result._fields, result, results[turn % 2]):
            if name == "dq" and not deterministic:  # a sum of atomics
                assert one.isfinite().all()
            else:
                assert torch.equal(one, other), (name, turn)


def test_strided_inputs_and_an_expanded_gradient():
    """Heads as a transposed view, as in models; `out.sum()` returns a gradient without storage."""
    mask = BitfieldMask.causal(2, 300).to(DEVICE)
    made = [torch.randn(2, 300, 4, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    views = [x.transpose(1, 2).requires_grad_() for x in made]
    packed = [x.transpose(1, 2).contiguous().requires_grad_() for x in made]
    results = []
    for q, k, v in (views, packed):
        out = bitfield_attention(q, k, v, mask)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for one, other in zip(*results):
        assert torch.equal(one, other)


def test_large_scores_do_not_overflow():
    mask = MASKS["lambda"](LENGTH).to(DEVICE)
    x = dense.inputs(mask, None, torch.bfloat16, DIM)
    got = dense.ours(x, AttentionPlan.build(mask), scale=100.0)
    assert all(tensor.isfinite().all() for tensor in got)


def test_plans_made_on_the_device_equal_those_made_on_the_cpu():
    for name in MASKS:
        mask = MASKS[name](1500)
        here, there = AttentionPlan.build(mask, cap=3), AttentionPlan.build(mask.to(DEVICE), cap=3)
        for field, one, other in zip(range(99), here.tensors(), there.tensors()):
            assert torch.equal(one, other.cpu()), (name, field)


def test_long_sequences():
    """Exact at sampled rows, with the default splits."""
    length = 16384 if ON_GPU else 700
    for name in ("cornstarch_ee", "gemma3_images"):
        problem = Problem.make(
            name, length, heads=8, kv_heads=1, head_dim=DIM, dtype=torch.bfloat16, device=torch.device(DEVICE)
        )
        q, k, v = (x.detach() for x in (problem.q, problem.k, problem.v))
        out = bitfield_attention(q, k, v, AttentionPlan.build(problem.mask))
        rows = torch.linspace(0, length - 1, 100, device=DEVICE).long().unique()
        q, seen = q[:, :, rows], problem.mask.select(rows).to_dense(problem.mask)
        wanted, _ = cases.oracle(q, k, v, seen, DIM**-0.5)
        nothing = torch.zeros_like(q), torch.zeros(q.shape[:3], device=DEVICE)
        judge("out", out[:, :, rows], cases.in_its_dtype(q, k, v, seen, DIM**-0.5, None, *nothing)[0], wanted)


def test_autocast():
    mask = BitfieldMask.causal(1, 300).to(DEVICE)
    q = torch.randn(1, 4, 300, DIM, device=DEVICE, requires_grad=True)
    with torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16):
        out = bitfield_attention(q, q, q, mask)
    assert out.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert grad.dtype == torch.float32 and grad.isfinite().all()


def test_torch_compile_in_one_graph():
    mask = uneven_documents().to(DEVICE)
    plan = AttentionPlan.build(mask)
    x = dense.inputs(mask, None, torch.bfloat16, DIM)

    def layer(q, k, v, plan):
        return bitfield_attention(q * 1.0, k, v, plan, return_lse=True)

    wanted = layer(x.q, x.k, x.v, plan)
    got = torch.compile(layer, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")(x.q, x.k, x.v, plan)
    for one, other in zip(got, wanted):
        assert torch.equal(one, other)
    grads = [torch.autograd.grad(result, (x.q, x.k, x.v), (x.dout, x.dlse)) for result in (got, wanted)]
    for one, other in zip(*grads):
        assert torch.equal(one, other)


def test_a_plan_on_another_device_is_refused():
    plan = AttentionPlan.build(BitfieldMask.causal(1, 64))
    elsewhere = torch.device("meta") if not ON_GPU else DEVICE
    q = torch.zeros(1, 2, 64, 64, device=elsewhere, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"is on cpu but q is on {elsewhere.type}"):
        bitfield_attention(q, q, q, plan)
    with pytest.raises(ValueError, match="v is on cpu but q is on"):
        bitfield_attention(q, q, torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16), plan)


@needs_cuda
def test_fp64_uses_the_reference_and_triton_refuses_it():
    q = torch.randn(1, 1, 64, 64, device=DEVICE, dtype=torch.float64)
    mask = BitfieldMask.causal(1, 64).to(DEVICE)
    with pytest.raises(ValueError, match="float64"):
        bitfield_attention(q, q, q, mask, backend="triton")
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert dense.error(bitfield_attention(q, q, q, mask), wanted) < 1e-12


@needs_cuda
@pytest.mark.parametrize("cap", [None, 2])
def test_a_cuda_graph_replays_forward_and_backward(cap):
    """Captured once with a plan, then replayed on other values: bitwise equal to the eager op."""
    mask = uneven_documents().to(DEVICE)
    plan = AttentionPlan.build(mask, cap=cap)
    x = dense.inputs(mask, None, torch.bfloat16, DIM)

    def step():
        out, lse = bitfield_attention(x.q, x.k, x.v, plan, return_lse=True)
        return (out, lse, *torch.autograd.grad((out, lse), (x.q, x.k, x.v), (x.dout, x.dlse)))

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        with torch.no_grad():
            for tensor in (x.q, x.k, x.v, x.dout, x.dlse):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, device=DEVICE))
        graph.replay()
        for one, other in zip([tensor.clone() for tensor in captured], step()):
            assert torch.equal(one, other)


@needs_cuda
def test_offsets_beyond_31_bits():
    """q of more than 2^31 elements: the last head equals the same head computed alone."""
    heads, length, dim = 136, 131072, 128
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")
    mask = BitfieldMask.causal(1, length, window=130).to(DEVICE)
    plan = AttentionPlan.build(mask)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, dout = (
        torch.randn(1, heads, length, dim, device=DEVICE, dtype=torch.bfloat16, generator=generator) for _ in range(2)
    )
    k, v = (torch.randn(1, 1, length, dim, device=DEVICE, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    q.requires_grad_()
    out = bitfield_attention(q, k, v, plan)
    (dq,) = torch.autograd.grad(out, q, dout)
    last = q.detach()[:, -1:].clone().requires_grad_()
    alone = bitfield_attention(last, k, v, plan)
    (wanted,) = torch.autograd.grad(alone, last, dout[:, -1:])
    assert dense.error(out[:, -1:], alone) < 1e-2 and dense.error(dq[:, -1:], wanted) < 1e-2
