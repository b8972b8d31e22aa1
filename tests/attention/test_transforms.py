"""Derivatives by other ways than backward(): torch.func's transforms are correct.

Forward mode and second derivatives raise errors that say they are unsupported and name an alternative.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from interlace.attention import AttentionPlan, bitfield_attention
from interlace.attention.hf.limits import Limits
from interlace.attention.hf.plans import cut, narrowed, packed_plan
from interlace.masks import BitfieldMask, Segment

MASK = BitfieldMask.from_segments([[Segment("text", 2), Segment("image", 3), Segment("text", 1)]])
PLAN = AttentionPlan.build(MASK, block=4)
DENSE = MASK.to_dense()[:, None]
Q, K, V = (
    torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for seed, shape in enumerate([(1, 4, 6, 3), (1, 2, 6, 3), (1, 2, 6, 2)])
)
FORWARD_MODE = r"no forward-mode derivative.*reverse mode \(grad, vjp, jacrev\).*SDPBackend\.MATH"
SECOND = r"no second derivative.*SDPBackend\.MATH"


def ours(q, k=K, v=V):
    return bitfield_attention(q, k, v, PLAN)


def masked(q, k=K, v=V):
    """Takes a mask and makes its plan inside the transform."""
    return bitfield_attention(q, k, v, MASK)


def dense(q, k=K, v=V):
    k, v = (x.repeat_interleave(2, dim=-3) for x in (k, v))
    return (q @ k.mT * 3**-0.5).masked_fill(~DENSE, -torch.inf).softmax(-1) @ v


def square(f):
    return lambda *x: f(*x).square().sum()


def rows(x, count=3):
    return torch.stack([x * (1 + n / 2) for n in range(count)])


TRANSFORMS = {
    "grad": lambda f: grad(square(f))(Q),
    "grad of all": lambda f: grad(square(f), argnums=(0, 1, 2))(Q, K, V),
    "vjp": lambda f: vjp(f, Q, K, V)[1](torch.ones(1, 4, 6, 2, dtype=torch.float64)),
    "jacrev": lambda f: jacrev(f)(Q),
    "jacrev of v": lambda f: jacrev(f, argnums=2)(Q, K, V),
    "vmap": lambda f: vmap(f)(rows(Q)),
    "vmap of dimensions": lambda f: vmap(f, in_dims=(2, 0, None), out_dims=1)(rows(Q).movedim(0, 2), rows(K), V),
    "vmap(vmap)": lambda f: vmap(vmap(f))(rows(rows(Q), 2)),
    "vmap(grad)": lambda f: vmap(grad(square(f), argnums=(0, 1, 2)))(rows(Q), rows(K), rows(V)),
    "vmap(grad), shared keys": lambda f: vmap(grad(square(f), argnums=1), in_dims=(0, None, None))(rows(Q), K, V),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).square().sum())(rows(Q)),
    "vmap(jacrev)": lambda f: vmap(jacrev(f))(rows(Q, 2)),
    "functionalize": lambda f: functionalize(f)(Q),
    "vmap of no rows": lambda f: vmap(f)(rows(Q)[:0]),
    "vmap(grad) of no rows": lambda f: vmap(grad(square(f), argnums=(0, 1)))(rows(Q)[:0], rows(K)[:0]),
    "grad(vmap) of no rows": lambda f: grad(lambda x: vmap(f)(x).square().sum())(rows(Q)[:0]),
}


@pytest.mark.parametrize("form", [ours, masked])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_dense_attention(name, form):
    torch.testing.assert_close(TRANSFORMS[name](form), TRANSFORMS[name](dense), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("made_of", ["mask", "plan"])
def test_masks_that_differ_along_a_mapped_dimension(made_of):
    """A mask for each query tensor: packed documents with other boundaries, windows, spans."""
    cuts = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, -1]], dtype=torch.int32)
    windows = torch.tensor([[3] * 6, [1, 2, 3, 1, 2, 3], [6] * 6], dtype=torch.int32)
    bits = BitfieldMask.causal(1, 6).bits

    def mask(cut, window):
        return BitfieldMask(bits, doc=cut[None], window=window[None])

    def attend(q, cut, window):
        given = mask(cut, window)
        return bitfield_attention(q, K, V, given if made_of == "mask" else AttentionPlan.build(given, block=4))

    def wanted(q, cut, window):
        seen = mask(cut, window).to_dense()[:, None]
        k, v = (x.repeat_interleave(2, dim=1) for x in (K, V))
        scores = (q @ k.mT * 3**-0.5).masked_fill(~seen, -torch.inf)
        return torch.where(seen.any(-1, keepdim=True), scores.softmax(-1), 0.0).nan_to_num() @ v

    alone = [wanted(*one) for one in zip(rows(Q), cuts, windows)]
    torch.testing.assert_close(vmap(attend)(rows(Q), cuts, windows), torch.stack(alone), rtol=1e-11, atol=1e-11)
    result = vmap(grad(square(attend)), in_dims=(0, 0, 0))(rows(Q), cuts, windows)
    for got, one in zip(result, zip(rows(Q), cuts, windows)):
        x = one[0].clone().requires_grad_()
        out = wanted(x, *one[1:])
        torch.testing.assert_close(got, torch.autograd.grad(out.square().sum(), x)[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "functionalize"])
def test_what_a_transform_has_used_serves_outside(transform):
    """Cached tensors of masks and plans do not belong to the transform, whose tensors end with it."""
    mask = BitfieldMask.causal(1, 6)
    ends = torch.tensor([0, 2, 6])

    def attend(q):
        plan = cut(narrowed(AttentionPlan.build(mask, block=4), Limits(back=2)), ends, ends)
        return bitfield_attention(q, K, V, plan) + bitfield_attention(
            q, K, V, packed_plan(ends, ends, 6, 6, causal=True)
        )

    inside = TRANSFORMS[transform](lambda q, *_: attend(q))
    torch.testing.assert_close(TRANSFORMS[transform](lambda q, *_: attend(q)), inside)
    assert copy.deepcopy(mask).pos.numpy().tolist() == [[0, 1, 2, 3, 4, 5]]
    alone = attend(Q)
    torch.testing.assert_close(functionalize(attend)(Q), alone)
    for plan in (
        narrowed(AttentionPlan.build(mask, block=4), Limits(back=2)),
        packed_plan(ends, ends, 6, 6, causal=True),
    ):
        assert all(isinstance(tensor.numpy().tolist(), list) for tensor in plan.tensors())


def test_wrong_masks_are_told_under_transforms():
    def f(q, doc):
        return bitfield_attention(q, K, V, BitfieldMask(MASK.bits, doc=doc))

    wrong = torch.full((1, 6), -2, dtype=torch.int32)
    with pytest.raises(ValueError, match="doc holds -2"):
        grad(lambda q: f(q, wrong).sum())(Q)
    with pytest.raises(ValueError, match="doc holds -2"):
        vmap(f)(rows(Q), wrong.expand(3, 1, 6))


def test_no_rows_are_part_of_the_graph():
    none = rows(Q)[:0].requires_grad_()
    vmap(ours)(none).sum().backward()
    assert none.grad.shape == none.shape


def test_the_lse_has_its_gradient_under_transforms():
    def lse(f):
        return grad(lambda q: f(q).sum())(Q)

    wanted = lse(lambda q: (q @ K.repeat_interleave(2, 1).mT * 3**-0.5).masked_fill(~DENSE, -torch.inf).logsumexp(-1))
    got = lse(lambda q: bitfield_attention(q, K, V, PLAN, return_lse=True)[1])
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_autocast_under_a_transform():
    q, k, v = Q.float(), K.float(), V.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = grad(lambda q: bitfield_attention(q, k, v, PLAN).float().square().sum())(q)
        x = q.clone().requires_grad_()
        bitfield_attention(x, k, v, PLAN).float().square().sum().backward()
    assert got.dtype == torch.float32 and torch.equal(got, x.grad)


def dual_numbers(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(Q, Q))).tangent


FORWARD = {
    "jvp": lambda f: jvp(f, (Q,), (Q,))[1],
    "jvp in v": lambda f: jvp(lambda v: f(Q, K, v), (V,), (V,))[1],
    "jacfwd": lambda f: jacfwd(f)(Q),
    "linearize": lambda f: linearize(f, Q)[1](Q),
    "dual numbers": dual_numbers,
    "hessian": lambda f: hessian(square(f))(Q),
    "jvp of grad": lambda f: jvp(grad(square(f)), (Q,), (Q,))[1],
    "grad of jvp": lambda f: grad(lambda q: jvp(f, (q,), (Q,))[1].square().sum())(Q),
    "vmap(jvp)": lambda f: vmap(lambda q: jvp(f, (q,), (q,))[1])(rows(Q)),
}


@pytest.mark.parametrize("form", [ours, masked])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused(name, form):
    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        FORWARD[name](form)


@pytest.mark.parametrize("name", ["jvp", "hessian", "dual numbers"])
def test_the_way_out_of_forward_mode(name):
    """The alternative in the message gives dense attention's derivatives."""

    def instead(q):
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, K, V, attn_mask=DENSE, enable_gqa=True)

    torch.testing.assert_close(FORWARD[name](instead), FORWARD[name](dense))


def test_forward_mode_of_other_things_goes_on():
    """Attention outside of the differentiated part, and an unused level of forward mode."""
    x = torch.tensor(2.0, dtype=torch.float64)
    _, tangent = jvp(lambda x: x**3 * ours(Q).sum(), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, 12 * ours(Q).sum())
    with forward_ad.dual_level():
        q = Q.clone().requires_grad_()
        (got,) = torch.autograd.grad(square(ours)(q), q)
    torch.testing.assert_close(got, grad(square(dense))(Q))


def test_a_backward_in_forward_mode_is_refused():
    """Forward over reverse by hand: the graph is made outside, and the incoming gradient is a dual number."""
    q = Q.clone().requires_grad_()
    out = ours(q)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=FORWARD_MODE):
        torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_an_exported_program_is_refused_too():
    """Its graph calls the op directly."""

    class Model(torch.nn.Module):
        def forward(self, q, k, v, plan):
            return bitfield_attention(q, k, v, plan)

    program = torch.export.export(Model(), (Q, K, V, PLAN)).module()
    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        jvp(lambda q: program(q, K, V, PLAN), (Q,), (Q,))


SECOND_DERIVATIVES = {
    "grad(grad)": lambda f: grad(lambda q: grad(square(f))(q).sum())(Q),
    "jacrev(jacrev)": lambda f: jacrev(jacrev(square(f)))(Q),
    "functional.hessian": lambda f: torch.autograd.functional.hessian(square(f), Q),
    "functional.jvp": lambda f: torch.autograd.functional.jvp(f, Q, Q)[1],  # by a double backward
}


@pytest.mark.parametrize("name", SECOND_DERIVATIVES)
def test_second_derivatives_are_refused(name):
    with pytest.raises(RuntimeError, match=SECOND):
        SECOND_DERIVATIVES[name](ours)


def test_is_grads_batched_is_refused_and_vmap_works():
    q = Q.clone().requires_grad_()
    out = ours(q)
    douts = rows(torch.ones_like(out))
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True.*torch\.func\.vmap"):
        torch.autograd.grad(out, q, douts, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"torch\.func\.jacrev, or vectorize=False"):
        torch.autograd.functional.jacobian(ours, Q, vectorize=True)
    (got,) = vmap(lambda dout: torch.autograd.grad(out, q, dout, retain_graph=True))(douts)
    wanted = [torch.autograd.grad(dense(x := Q.clone().requires_grad_()), x, dout)[0] for dout in douts]
    torch.testing.assert_close(got, torch.stack(wanted))


@pytest.mark.parametrize("name", ["grad", "vmap(grad)", "jvp"])
def test_transforms_in_compiled_functions_run_in_eager_mode(name):
    """With fullgraph=True the error gives the reason."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(lambda f: {**TRANSFORMS, **FORWARD}[name](f), backend="aot_eager")
        if name in FORWARD:
            with pytest.raises(RuntimeError, match=FORWARD_MODE):
                compiled(ours)
        else:
            torch.testing.assert_close(compiled(ours), TRANSFORMS[name](dense))
        whole = torch.compile(lambda f: {**TRANSFORMS, **FORWARD}[name](f), backend="aot_eager", fullgraph=True)
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"cannot be compiled inside a transform of torch\.func"
        ):
            whole(ours)
    torch._dynamo.reset()
