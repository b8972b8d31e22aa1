"""Random inputs of tensor-parallel products, their single-process results, and a run on virtual ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interlace.comm import all_gather_matmul, matmul_reduce_scatter, run_local


@dataclass
class Column:
    """Inputs of all_gather_matmul: x and the source of its gradient per rank, weights per rank."""

    x: list[Tensor]  # [..., m, K]
    weights: list[list[Tensor]]  # [N, K]
    d_gathered: list[Tensor]  # [..., W * m, K]
    d_products: list[list[Tensor]]  # [..., W * m, N]

    @property
    def world(self) -> int:
        return len(self.x)

    def oracle(
        self, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, list[list[Tensor]], list[Tensor], list[list[Tensor]]]:
        """gathered, products, gradients of x and of weights: by concatenation and torch's matmul in `dtype`."""
        x = [one.to(dtype).detach().requires_grad_() for one in self.x]
        weights = [[w.to(dtype).detach().requires_grad_() for w in mine] for mine in self.weights]
        gathered = torch.cat(x, dim=-2)
        products = [[gathered @ w.T for w in mine] for mine in weights]
        of = [gathered] * self.world + [product for mine in products for product in mine]
        sources = [*self.d_gathered, *(grad for grads in self.d_products for grad in grads)]
        flat = [*x, *(w for mine in weights for w in mine)]
        grads = [g.detach() for g in torch.autograd.grad(of, flat, [source.to(dtype) for source in sources])]
        count = len(self.weights[0])
        d_weights = [grads[self.world + r * count : self.world + (r + 1) * count] for r in range(self.world)]
        return gathered.detach(), [[p.detach() for p in mine] for mine in products], grads[: self.world], d_weights

    def run(self, *, before: Any = None, timeout: float = 20.0, **options: Any) -> list[tuple[Any, ...]]:
        """(gathered, products, gradient of x, gradients of weights) of every rank."""

        def rank(group: Any) -> tuple[Any, ...]:
            r = group.rank
            x = self.x[r].detach().requires_grad_()
            weights = [w.detach().requires_grad_() for w in self.weights[r]]
            gathered, products = all_gather_matmul(x, weights, **options)
            d_x, *d_weights = torch.autograd.grad(
                [gathered, *products], [x, *weights], [self.d_gathered[r], *self.d_products[r]]
            )
            return gathered.detach(), [p.detach() for p in products], d_x, d_weights

        return run_local(self.world, rank, before=before, timeout=timeout)


@dataclass
class Row:
    """Inputs of matmul_reduce_scatter."""

    x: list[Tensor]  # [..., W * m, K]
    weights: list[Tensor]  # [N, K]
    d_y: Tensor  # [..., W * m, N], all ranks' rows

    @property
    def world(self) -> int:
        return len(self.x)

    def rows(self, whole: Tensor, rank: int) -> Tensor:
        return whole.tensor_split(self.world, dim=-2)[rank]

    def oracle(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """All rows of the sum, gradients of x, gradients of weights, by torch's matmul in `dtype`."""
        x = [one.to(dtype).detach().requires_grad_() for one in self.x]
        weights = [w.to(dtype).detach().requires_grad_() for w in self.weights]
        y = sum((one @ w.T for one, w in zip(x, weights)), torch.zeros(self.d_y.shape, dtype=dtype))
        grads = [g.detach() for g in torch.autograd.grad(y, [*x, *weights], self.d_y.to(dtype))]
        return y.detach(), grads[: self.world], grads[self.world :]

    def run(self, *, before: Any = None, timeout: float = 20.0, **options: Any) -> list[tuple[Tensor, ...]]:
        """(this rank's rows, gradient of x, gradient of the weight) of every rank."""

        def rank(group: Any) -> tuple[Tensor, ...]:
            x = self.x[group.rank].detach().requires_grad_()
            weight = self.weights[group.rank].detach().requires_grad_()
            y = matmul_reduce_scatter(x, weight, **options)
            return y.detach(), *torch.autograd.grad(y, [x, weight], self.rows(self.d_y, group.rank))

        return run_local(self.world, rank, before=before, timeout=timeout)


def column(
    world: int, rows: int, width: int, outs: list[int], *, leading: tuple[int, ...] = (), dtype: torch.dtype,
    seed: int = 0, whole: bool = False, strided: bool = False,
) -> Column:  # fmt: skip
    make = _maker(dtype, seed, whole, strided)
    return Column(
        x=[make(*leading, rows, width) for _ in range(world)],
        weights=[[make(n, width) for n in outs] for _ in range(world)],
        d_gathered=[make(*leading, world * rows, width) for _ in range(world)],
        d_products=[[make(*leading, world * rows, n) for n in outs] for _ in range(world)],
    )


def row(
    world: int, rows: int, width: int, out: int, *, leading: tuple[int, ...] = (), dtype: torch.dtype, seed: int = 0,
    whole: bool = False, strided: bool = False,
) -> Row:  # fmt: skip
    make = _maker(dtype, seed, whole, strided)
    return Row(
        x=[make(*leading, world * rows, width) for _ in range(world)],
        weights=[make(out, width) for _ in range(world)],
        d_y=make(*leading, world * rows, out),
    )


def _maker(dtype: torch.dtype, seed: int, whole: bool, strided: bool) -> Any:
    """whole: small integers, so that every product and sum is exact in any dtype. strided: no dimension is dense."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        larger = [2 * size + 1 for size in shape] if strided else shape
        if whole:
            values = torch.randint(-1, 2, tuple(larger), generator=generator).to(dtype)
        else:
            values = torch.randn(*larger, generator=generator, dtype=torch.float64).to(dtype)
        return values[tuple(slice(0, 2 * size, 2) for size in shape)] if strided else values

    return make
