"""Deferred gradients of weights: bitwise equal to autograd's, nothing lost and nothing kept too long."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from interlace.comm import all_gather_matmul, matmul_reduce_scatter, run_local
from interlace.comm.overlap.deferred import Deferral, DeferredForward, deferred_linear
from interlace.parallel import Ranks
from interlace.parallel.products import copied_products, sum_of_products

SHAPES = [(5, 6), (1, 6), (2, 3, 6), (1, 7, 6), (2, 2, 2, 6), (0, 6), (4, 1)]
LAYOUTS = ["contiguous", "transposed", "sliced"]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in a different memory layout."""
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x


def halves(y: Tensor, dy: Tensor, deferral: Deferral, parameters: list[nn.Parameter]) -> None:
    """Backward in two halves. Checks that the first half leaves the weights unchanged."""
    with deferral.begin() as gradients:
        y.backward(dy)
    weights = [p for p in parameters if p.dim() == 2]
    assert all(weight.grad is None for weight in weights) and len(gradients) == len(weights)
    gradients.compute()
    assert len(gradients) == 0


@given(
    shape=st.sampled_from(SHAPES), layout=st.sampled_from(LAYOUTS), outs=st.sampled_from([1, 3, 8]),
    bias=st.booleans(), by=st.sampled_from(["out", "in"]), trains_x=st.booleans(), trains_bias=st.booleans(),
    autocast=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_both_halves_have_the_bits_of_a_whole_backward(
    shape: tuple[int, ...], layout: str, outs: int, bias: bool, by: str, trains_x: bool, trains_bias: bool,
    autocast: bool, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    layer: Any = nn.Linear(shape[-1], outs, bias, dtype=dtype) if by == "out" else Conv1D(outs, shape[-1]).to(dtype)
    if layer.bias is not None:
        layer.bias.data.normal_()
        layer.bias.requires_grad_(trains_bias)
    given_x = laid_out(torch.randn(shape, dtype=dtype), layout)
    result = []
    for split in (False, True):
        layer.zero_grad()
        deferral = Deferral()
        forward = DeferredForward(layer, deferral, by) if split else layer
        x = given_x.detach().requires_grad_(trains_x)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if autocast else nullcontext():
            y = forward(x) if by == "out" or x.is_contiguous() else forward(x.reshape(shape).contiguous())
        torch.manual_seed(seed)
        dy = torch.randn_like(y)
        if split:
            halves(y, dy, deferral, [p for p in layer.parameters() if p.requires_grad])
        else:
            y.backward(dy)
        result.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for whole, half in zip(*result, strict=True):
        assert (whole is None) == (half is None)
        if whole is not None:
            assert whole.dtype is half.dtype and whole.stride() == half.stride() and torch.equal(whole, half)


def test_weight_used_three_times_is_summed_as_in_autograd() -> None:
    """Added to the gradients of earlier chunks in autograd's order: (a + b + c) first, or the bits would differ."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 6))
    chunks = [torch.randn(5, 6) for _ in range(4)]
    result: list[Tensor] = []
    for split in (False, True):
        weight.grad = None
        deferral, later = Deferral(), []
        for x in chunks:
            y = x
            for _ in range(3):
                y = torch.tanh(deferred_linear(y, weight, None, deferral) if split else nn.functional.linear(y, weight))
            with deferral.begin() as gradients:
                y.sum().backward()
            later.append(gradients)
        for gradients in later:
            gradients.compute()
        assert weight.grad is not None
        result.append(weight.grad)
    assert torch.equal(*result)


def test_hooks_of_a_weight_run_once_with_its_whole_gradient() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    seen: list[tuple[str, Tensor]] = []

    def double(grad: Tensor) -> Tensor:
        seen.append(("gradient", grad.clone()))
        return grad * 2

    weight.register_hook(double)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("sum", p.grad.clone())))
    deferral = Deferral()
    x = torch.ones(4, 3, requires_grad=True)
    y = deferred_linear(deferred_linear(x, weight, None, deferral) @ torch.ones(2, 3), weight, None, deferral)
    with deferral.begin() as gradients:
        y.sum().backward()
    assert not seen and weight.grad is None
    gradients.compute()
    due = torch.full((2, 3), 4 * 6.0 + 4 * 6.0)  # 4 rows of each use, each of 6
    assert [kind for kind, _ in seen] == ["gradient", "sum"]
    assert torch.equal(seen[0][1], due) and torch.equal(seen[1][1], 2 * due)
    assert weight.grad is not None and torch.equal(weight.grad, 2 * due)


def test_what_needs_no_gradient_is_not_put_off() -> None:
    deferral, x = Deferral(), torch.ones(2, 3, requires_grad=True)
    frozen, leaf = nn.Parameter(torch.ones(4, 3), requires_grad=False), nn.Parameter(torch.ones(4, 3))
    bias = nn.Parameter(torch.zeros(4))
    y = deferred_linear(x, frozen, bias, deferral) + deferred_linear(x, leaf * 2, None, deferral)
    with torch.no_grad():
        assert not deferred_linear(x, leaf, None, deferral).requires_grad
    with deferral.begin() as gradients:
        y.sum().backward()
    assert not len(gradients) and leaf.grad is not None and bias.grad is not None and x.grad is not None


def test_without_deferral_a_product_is_plain() -> None:
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(4)
    assert torch.equal(deferred_linear(x, weight, bias, None), nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(deferred_linear(x, weight, bias, None, by="in"), x @ weight + bias)


def test_backward_outside_of_deferral_begin_is_an_error() -> None:
    y = deferred_linear(torch.ones(2, 3), nn.Parameter(torch.ones(4, 3)), None, Deferral())
    with pytest.raises(RuntimeError, match=r"run its backward inside Deferral\.begin"):
        y.sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_first_half_frees_the_graph_and_second_the_operands(recompute: bool) -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    deferral = Deferral()
    kept: dict[str, list[weakref.ref[Tensor]]] = {"operand": [], "other": []}
    runs = 0

    def block(layer: nn.Module, x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        kept["operand"].append(weakref.ref(x))
        square = deferred_linear(x, layer.weight, layer.bias, deferral) ** 2  # type: ignore[arg-type]
        kept["other"].append(weakref.ref(square))
        return torch.tanh(square)

    x = torch.randn(4, 8)
    for layer in layers:
        x = checkpoint(block, layer, x, use_reentrant=False) if recompute else block(layer, x)
    with deferral.begin() as gradients:
        x.sum().backward()
    del x
    gc.collect()
    assert runs == len(layers) * (1 + recompute)
    assert not any(ref() is not None for ref in kept["other"])
    assert len(gradients) == len(layers)
    waiting: list[Any] = [product for _, products in gradients._of.values() for product in products]
    held = [each for product in waiting for each in product.args[:2]]
    assert sum(each.untyped_storage().nbytes() for each in held) == len(layers) * 2 * 4 * 8 * 4
    gone = [weakref.ref(each) for each in held]
    del held, waiting
    gradients.compute()
    assert not any(ref() is not None for ref in gone)
    assert runs == len(layers) * (1 + recompute)


@pytest.mark.parametrize("trains_x", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["gather", "gather again", "scatter", "copied", "summed"])
def test_products_of_a_lane_put_off_what_they_otherwise_make(kind: str, autocast: bool, trains_x: bool) -> None:
    """Two backwards before either second half: data gathered for one is not overwritten by the other."""
    world, rows = 2, 4
    torch.manual_seed(0)
    inputs = [[torch.randn(2, rows, 6) for _ in range(2)] for _ in range(world)]
    made = [[torch.randn(n, 6) for n in (3, 5)] for _ in range(world)]

    def product(x: Tensor, weights: list[nn.Parameter], ranks: Ranks, deferral: Deferral | None) -> list[Tensor]:
        group = ranks.transport(x)
        if kind.startswith("gather"):
            regather = kind == "gather again"
            return all_gather_matmul(x, weights, group=group, num_chunks=2, regather=regather, deferral=deferral)[1]
        if kind == "scatter":
            return [matmul_reduce_scatter(x, weights[0], group=group, num_chunks=2, deferral=deferral)]
        if kind == "copied":
            return copied_products(x, weights, ranks, 2, deferral)[1]
        return [sum_of_products(x, weights[0], ranks, 2, deferral)]

    def rank(group: Any) -> list[list[Tensor | None]]:
        result: list[list[Tensor | None]] = []
        for split in (False, True):
            weights = [nn.Parameter(w.clone()) for w in made[group.rank]]
            deferral, later, here = Deferral(), [], []
            for given_x in inputs[0 if kind == "copied" else group.rank]:
                x = given_x.clone().requires_grad_(trains_x)
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if autocast else nullcontext():
                    products = product(x, weights, Ranks(group), deferral if split else None)
                with deferral.begin() as gradients:
                    torch.autograd.backward([(y.float() ** 2).sum() for y in products])
                later.append(gradients)
                here += [*products, x.grad]
            if split:
                used = weights[: len(products)]
                assert all(weight.grad is None for weight in weights) and len(later[0]) == len(used)
                for gradients in later:
                    gradients.compute()
            result.append([*here, *(weight.grad for weight in weights)])
        return result

    for whole, half in run_local(world, rank, timeout=20):
        for a, b in zip(whole, half, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or (a.dtype is b.dtype and torch.equal(a, b))
