"""bitfield_attention as a torch op: opcheck, compile, export, autocast, checkpointing, and refused inputs."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from interlace.attention import AttentionPlan, bitfield_attention, op
from interlace.masks import BitfieldMask, Segment

MASK = BitfieldMask.from_segments([[Segment("text", 10), Segment("image", 20)], [Segment("text", 25)]])
PLAN = AttentionPlan.build(MASK, block=16)


def inputs(dtype=torch.float32, length=30, value_dim=8, **kwargs):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, length, 8), (2, 2, length, 8), (2, 2, length, value_dim)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(**kwargs) for s in shapes]


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda f, **options: torch.compile(f, backend="aot_eager", **options)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(backend, dtype):
    arguments = (*inputs(dtype), PLAN.tensors(), PLAN.block, PLAN.sinks, 0.3, None, True, backend)
    torch.library.opcheck(op._forward, arguments)


def test_opcheck_with_values_of_another_head_dimension():
    arguments = (*inputs(value_dim=5), PLAN.tensors(), PLAN.block, PLAN.sinks, 0.3, None, True, "")
    torch.library.opcheck(op._forward, arguments)


@pytest.mark.parametrize(("deterministic", "value_dim"), [(True, 8), (False, 5)])
def test_opcheck_of_the_backward(deterministic, value_dim):
    q, k, v = (x.detach() for x in inputs(value_dim=value_dim))
    out, lse = bitfield_attention(q, k, v, PLAN, return_lse=True)
    rest = (PLAN.tensors(), PLAN.block, PLAN.sinks, 0.3, 2.0, deterministic, "")
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(op._backward, (torch.randn_like(out), dlse, q, k, v, out, lse, *rest))


def test_a_mask_and_its_plan_are_the_same():
    q, k, v = inputs()
    torch.testing.assert_close(bitfield_attention(q, k, v, MASK), bitfield_attention(q, k, v, PLAN))
    part = MASK.select(slice(20, 30))
    tail = bitfield_attention(q[:, :, 20:], k, v, part, kv_mask=MASK)
    torch.testing.assert_close(tail, bitfield_attention(q, k, v, MASK)[:, :, 20:])


def test_default_scale_is_that_of_sdpa():
    q, k, v = inputs()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(bitfield_attention(q, k, v, BitfieldMask.causal(2, 30)), wanted)


@pytest.mark.parametrize("value_dim", [8, 5])
def test_compile_fullgraph(compiled, value_dim):
    def model(q, k, v, plan):
        out, lse = bitfield_attention(q * 2, k, v, plan, softcap=5.0, return_lse=True)
        return out.sum() + lse.exp().sum()

    q, k, v = inputs(value_dim=value_dim)
    wanted = model(q, k, v, PLAN)
    wanted_grads = torch.autograd.grad(wanted, (q, k, v))
    got = compiled(model, fullgraph=True)(q, k, v, PLAN)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got, (q, k, v)), wanted_grads)


def test_new_masks_do_not_compile_again(compiled):
    compilations = []

    def counting(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    f = torch.compile(lambda q, k, v, plan: bitfield_attention(q, k, v, plan), fullgraph=True, backend=counting)
    q, k, v = inputs()
    for window in (None, 25, 17, 9, 3, 1):
        mask = BitfieldMask.causal(2, 30, window=window)
        plan = AttentionPlan.build(mask, block=5, cap=2)
        torch.testing.assert_close(f(q, k, v, plan), bitfield_attention(q, k, v, mask))
    assert len(compilations) <= 3  # once, and again when some lengths, then the others, turn out to vary


@pytest.mark.slow  # torch.compile traces all of AttentionPlan.build, with graph breaks where values are read
def test_compile_with_a_mask_builds_the_plan_outside_the_graph(compiled):
    q, k, v = inputs()
    got = compiled(lambda q, k, v: bitfield_attention(q * 1, k, v, MASK))(q, k, v)
    torch.testing.assert_close(got, bitfield_attention(q, k, v, MASK))


@pytest.mark.parametrize("value_dim", [8, 5])
def test_export(value_dim):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, plan):
            return bitfield_attention(q * 2, k, v, plan)

    q, k, v = (x.detach() for x in inputs(value_dim=value_dim))
    program = torch.export.export(Model(), (q, k, v, PLAN))
    torch.testing.assert_close(program.module()(q, k, v, PLAN), Model()(q, k, v, PLAN))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_to_its_dtype(dtype, compiled):
    q, k, v = inputs(value_dim=5)

    def model(q, k, v):
        with torch.autocast("cpu", dtype=dtype):
            return bitfield_attention(q, k.to(dtype), v, PLAN)  # mixed inputs, as after a linear layer

    out = model(q, k, v)
    assert out.dtype == dtype
    wanted = bitfield_attention(*(x.to(dtype) for x in (q, k, v)), PLAN)
    assert torch.equal(out, wanted)
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32
    assert compiled(model, fullgraph=True)(q, k, v).dtype == dtype
    with torch.autocast("cpu", dtype=dtype):
        assert bitfield_attention(*inputs(torch.float64), PLAN).dtype == torch.float64


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    q, k, v = inputs(value_dim=5)

    def model(q, k, v):
        return bitfield_attention(torch.tanh(q), k, v, PLAN)

    wanted = torch.autograd.grad(model(q, k, v).square().sum(), (q, k, v))
    checkpoint(model, q, k, v, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close((q.grad, k.grad, v.grad), wanted)


def test_no_gradient_is_asked_for():
    q, k, v = (x.detach() for x in inputs())
    assert not bitfield_attention(q, k, v, PLAN).requires_grad
    only_v = v.clone().requires_grad_()
    out = bitfield_attention(q, k, only_v, PLAN)
    assert torch.autograd.grad(out.sum(), only_v)[0].shape == v.shape


def test_a_second_derivative_raises():
    q, k, v = inputs()
    grad = torch.autograd.grad(bitfield_attention(q, k, v, PLAN).square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="bitfield_attention has no second derivative"):
        torch.autograd.grad(grad.sum(), q)


def test_dispatch_modes_see_the_op_and_bits_match_eager():
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def run(q, k, v):
        out, lse = bitfield_attention(q, k, v, PLAN, return_lse=True)
        return (out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v)))

    eager = run(*inputs())
    with Mode():
        watched = run(*inputs())
    assert {"interlace.bitfield_attention.default", "interlace.bitfield_attention_backward.default"} <= set(seen)
    assert all(torch.equal(one, other) for one, other in zip(eager, watched))


def test_vmap_goes_row_by_row():
    q, k, v = (torch.stack([x.detach(), 2 * x.detach()]) for x in inputs(value_dim=5))
    mapped = torch.vmap(lambda q, k, v: bitfield_attention(q, k, v, PLAN))(q, k, v)
    for row in range(2):
        assert torch.equal(mapped[row], bitfield_attention(q[row], k[row], v[row], PLAN))


def test_backward_under_a_transform_of_what_ran_in_eager_mode():
    q, k, v = inputs()
    out = bitfield_attention(q, k, v, PLAN)
    douts = torch.randn(3, *out.shape)
    one_by_one = [torch.autograd.grad(out, q, dout, retain_graph=True)[0] for dout in douts]
    mapped = torch.func.vmap(lambda dout: torch.autograd.grad(out, q, dout, retain_graph=True)[0])(douts)
    for i, wanted in enumerate(one_by_one):
        assert torch.equal(mapped[i], wanted)


def test_default_devices_and_meta_tensors():
    q, k, v = inputs()
    with torch.device("meta"):
        out = bitfield_attention(q, k, v, PLAN)
        grad = torch.autograd.grad(out.square().sum(), q)[0]
    assert out.device.type == grad.device.type == "cpu"
    shapes = bitfield_attention(*(x.to("meta") for x in inputs(value_dim=5)), PLAN.to("meta"), return_lse=True)
    assert [(x.device.type, tuple(x.shape)) for x in shapes] == [("meta", (2, 4, 30, 5)), ("meta", (2, 4, 30))]


def test_results_are_contiguous_as_the_fake_kernel_says():
    q, k, v = (torch.randn(2, 30, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    for backend in ("cpu", "reference"):
        out, lse = bitfield_attention(q, k, v, PLAN, return_lse=True, backend=backend)
        assert out.is_contiguous() and lse.is_contiguous()


# ---------------------------------------------------------------------- refusals


def refused(error, message, mask=PLAN, change=None, **options):
    q, k, v = inputs()
    tensors = {"q": q, "k": k, "v": v}
    for name, f in (change or {}).items():
        tensors[name] = f(tensors[name])
    with pytest.raises(error, match=message):
        bitfield_attention(**tensors, mask=mask, **options)


def test_bad_tensors():
    refused(ValueError, r"q must be a tensor \[batch, heads, tokens, head_dim\]", change={"q": lambda x: x[0]})
    refused(ValueError, "k must be a tensor", change={"k": lambda x: x.tolist()})
    refused(ValueError, "k is on meta but q is on cpu", change={"k": lambda x: x.to("meta")})
    refused(ValueError, r"k has shape .* and v .* \(head dimensions may differ", change={"v": lambda x: x[:, :1]})
    refused(ValueError, r"k has shape .* and v .* tokens must be equal", change={"v": lambda x: x[:, :, :29]})
    refused(ValueError, "batch and head_dim must be equal", change={"q": lambda x: x[..., :4]})
    refused(ValueError, "batch and head_dim must be equal", change={"q": lambda x: x[:1]})
    refused(ValueError, "3 query heads are not a multiple of 2", change={"q": lambda x: x[:, :3]})
    for wrong in ({"q": lambda x: x[:, :0]}, {name: lambda x: x[:, :0] for name in "qkv"}):
        refused(ValueError, "q has 0 heads.*at least 1", change=wrong)
    refused(ValueError, "k has 0 and head_dim", change={name: lambda x: x[:, :0] for name in "kv"})
    refused(ValueError, "head_dim is 0, that of v 8; each must", change={name: lambda x: x[..., :0] for name in "qk"})
    refused(ValueError, "head_dim is 8, that of v 0; each must", change={"v": lambda x: x[..., :0]})
    refused(TypeError, "q, k and v must have one dtype", change={"v": lambda x: x.double()})
    integers = {name: lambda x: x.detach().int() for name in "qkv"}
    refused(TypeError, "floating dtype", change=integers)


def test_masks_of_other_sizes():
    refused(ValueError, "2, 30 queries and 31 keys, but", mask=MASK, kv_mask=BitfieldMask.causal(2, 31))
    refused(ValueError, "30 queries and 30 keys, but q and k hold batch 2, 29", change={"q": lambda x: x[:, :, :29]})
    refused(ValueError, "batch 1, 30 queries", mask=BitfieldMask.causal(1, 30))
    refused(ValueError, "plan is on meta but q is on cpu", mask=PLAN.to("meta"))
    refused(ValueError, "already contains one: pass kv_mask to", kv_mask=MASK)
    refused(TypeError, "BitfieldMask or an AttentionPlan, got Tensor", mask=MASK.to_dense())


def test_bad_options():
    refused(ValueError, "scale is nan", scale=float("nan"))
    refused(ValueError, "softcap is 0", softcap=0.0)
    refused(TypeError, "deterministic", deterministic=1)
    refused(ValueError, "must be one of reference, cpu, triton, gluon", backend="flash")


def test_gluon_says_what_it_needs():
    refused(ValueError, 'backend "gluon" cannot run this: the Gluon kernel takes fp16 and bf16', backend="gluon")

    def unsupported(**options):
        return op.unsupported(
            "gluon", torch.empty(1, 1, 16, options.pop("dim", 64), **{"dtype": torch.bfloat16, **options})
        )

    assert "runs on Hopper GPUs, not on cpu" in unsupported()
    assert "multiples of 8 up to 128, not 60" in unsupported(dim=60)
    assert "multiples of 8 up to 128, not 256" in unsupported(dim=256)
    q, v = (torch.empty(1, 1, 16, dim, dtype=torch.bfloat16) for dim in (96, 64))
    assert 'needs equal head dimensions, but q has 96 and v 64: use "triton"' in op.unsupported("gluon", q, v)


def test_a_named_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "interlace.attention.triton", None)  # as on a machine without triton
    op._module.cache_clear()
    try:
        refused(ValueError, 'backend "triton" cannot run this: it cannot be imported', backend="triton")
    finally:
        op._module.cache_clear()


def test_head_dims_too_large_for_triton_use_another_backend():
    """Each backend's error message, and the automatic choice respects the limits."""
    pytest.importorskip("triton")
    q, v = torch.empty(1, 1, 16, 64), torch.empty(1, 1, 16, 512)
    assert "head dimensions up to 256, not 512" in op.unsupported("triton", q, v)
    assert "head dimensions up to 256, not 512" in op.unsupported("triton", v, q)
    for device, wanted in (("cpu", "cpu"), ("meta", "reference")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert op.choose_backend(q.to(device), v.to(device)) == wanted


def test_hopper_takes_gluon_by_direction(monkeypatch):
    for backend in ("triton", "gluon"):
        monkeypatch.setattr(f"interlace.attention.{backend}.unsupported", lambda q, v: None)
    q = torch.empty(1, 1, 16, 64, device="meta")
    assert [op.choose_backend(q, forward=forward) for forward in (True, False)] == ["gluon", "triton"]
    monkeypatch.setattr("interlace.attention.gluon.BACKWARD_IS_CHOSEN", True)
    assert op.choose_backend(q, forward=False) == "gluon"


def test_the_cpu_backend_says_that_it_is_for_cpu_tensors():
    assert op.unsupported("cpu", torch.empty(1, device="meta")) == "it runs on CPU tensors and q is on meta"
    assert op.unsupported("reference", torch.empty(1, device="meta")) is None
