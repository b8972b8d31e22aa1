"""Column- and row-parallel nn.Linear: cut among ranks by outputs (column) or by inputs (row).

    up = ColumnParallelLinear.from_linear(mlp.up, group)      # [..., m, in]         -> [..., world * m, out / world]
    down = RowParallelLinear.from_linear(mlp.down, group)     # [..., world * m, in / world]  -> [..., m, out]

With sequence parallelism (the default) a rank holds m rows of the sequence before and after such a pair. The first
layer gathers rows, the second reduce-scatters sums. Both transfers overlap with the products
(`interlace.comm.overlap.matmul`). Without it every rank holds all rows, and the sums are all-reduced, also overlapped
with the products (`interlace.parallel.products`).

Parameters keep the names of nn.Linear. `load_state_dict` accepts an ordinary checkpoint of the whole layer, and each
rank takes its shard. `full_state_dict` of `interlace.parallel` returns the whole layer again.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from interlace.comm import all_gather_matmul, matmul_reduce_scatter
from interlace.comm.overlap.deferred import Deferral
from interlace.comm.process.groups import Group
from interlace.parallel.layer import ParallelLayer
from interlace.parallel.mappings import Ranks, gather, sum_gradient
from interlace.parallel.products import copied_products, sum_of_products

P = TypeVar("P", bound="ParallelLinear")


class ParallelLinear(ParallelLayer):
    """Base class: a shard of the parameters of an nn.Linear. in_features and out_features: of the whole layer."""

    equal = True  # all shards must have equal size
    weight: nn.Parameter
    bias: nn.Parameter | None
    deferral: Deferral | None = None  # set if weight gradients are deferred (`interlace.run.execute.deferred`)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group | Ranks = None,
        sequence_parallel: bool = True,
        num_chunks: int | Literal["auto"] = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initializes parameters as shards of nn.Linear's initial values, if all ranks have the same random state.

        Args:
            in_features, out_features: of the whole layer.
            group: a Transport, ProcessGroup, one-dimensional DeviceMesh, None (see `interlace.comm.process.groups`) or
                a Ranks.
            sequence_parallel: shard the side that is not cut by features by rows of the sequence.
            num_chunks: number of row chunks for communication overlap, see `all_gather_matmul`.
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sizes = out_features, in_features
        self.ranks = group if isinstance(group, Ranks) else Ranks(group)
        self.sequence_parallel, self.num_chunks = sequence_parallel, num_chunks
        if self.ranks is not group:
            self.ranks.must_agree(
                type(self).__name__, in_features=in_features, out_features=out_features, bias=bias,
                sequence_parallel=sequence_parallel, num_chunks=num_chunks,
            )  # fmt: skip
        cut, name = (out_features, "out") if self.cut["weight"] == 0 else (in_features, "in")
        if cut < self.ranks.world or (self.equal and cut % self.ranks.world):
            raise ValueError(
                f"{type(self).__name__}: {name}_features = {cut} is not divisible by {self.ranks.world} ranks"
            )
        for key, present in (("weight", True), ("bias", bias)):
            if not present:
                self.register_parameter(key, None)
            else:
                local = torch.empty(self.region(key).sizes, device=device, dtype=dtype)
                self.register_parameter(key, nn.Parameter(local))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            initial = nn.Linear(
                self.in_features, self.out_features, self.bias is not None,
                device=self.weight.device, dtype=self.weight.dtype,
            )  # fmt: skip
            with torch.no_grad():
                for key, parameter in self.named_parameters():
                    parameter.copy_(self.piece(key, getattr(initial, key)))

    @classmethod
    def from_linear(cls: type[P], linear: nn.Linear, group: Group | Ranks = None, **options: Any) -> P:
        """A copy of this rank's shard of `linear`. Frozen parameters stay frozen. Ranks must pass the same layer."""
        local = cls(
            linear.in_features, linear.out_features, linear.bias is not None, group=group, device="meta", **options
        )
        local.take(linear)
        return local

    def _check(self, x: Tensor, width: int) -> None:
        if x.shape[-1] != width:
            raise ValueError(f"{type(self).__name__} takes [..., {width}] here, got {list(x.shape)}")

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank={self.ranks.rank}/{self.ranks.world}, sequence_parallel={self.sequence_parallel}"
        )


class ColumnParallelLinear(ParallelLinear):
    """Column-parallel linear layer: this rank's outputs for all rows.

    x [..., m, in] with sequence parallelism, m rows of each rank; else [..., rows, in], equal on all ranks.
    Returns [..., rows, out / world], or [..., rows, out] on every rank with `gather_output`.

    Args:
        gather_output: join the outputs of all ranks. All ranks must use them identically.
        regather: see `all_gather_matmul`.
        parts: number of equally large parts of the outputs, each cut separately (2: gate and up in one layer).
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self, *args: Any, gather_output: bool = False, regather: bool = False, parts: int = 1, **options: Any
    ) -> None:
        self.parts = parts
        super().__init__(*args, **options)
        self.gather_output, self.regather = gather_output, regather
        self.precomputed: tuple[Tensor, Tensor] | None = None  # (an input, its product), from `SharedInput`

    def forward(self, x: Tensor) -> Tensor:
        if self.precomputed is not None and x is self.precomputed[0]:
            y = self.precomputed[1]
        else:
            self._check(x, self.in_features)
            if self.sequence_parallel:
                _, (y,) = all_gather_matmul(
                    x, [self.weight], group=self.ranks.transport(x), num_chunks=self.num_chunks,
                    regather=self.regather, deferral=self.deferral,
                )  # fmt: skip
            else:
                _, (y,) = copied_products(x, [self.weight], self.ranks, self.num_chunks, self.deferral)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return gather(y, self.ranks, -1, self.out_features) if self.gather_output else y


class RowParallelLinear(ParallelLinear):
    """Row-parallel linear layer: the sum over ranks of products of their inputs, plus the bias once.

    x [..., rows, in / world]. Returns [..., rows / world, out] with sequence parallelism, else [..., rows, out].

    Args:
        fill: with sequence parallelism, accept any number of rows. Zero rows pad them to a multiple of the ranks, so
            the last rows of the result are products of zeros.
        sum_gradients: sum the bias's gradient over ranks in every backward (each rank has the gradient of its own
            rows). False leaves that to the caller.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(self, *args: Any, fill: bool = False, sum_gradients: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fill, self.sum_gradients = fill, sum_gradients

    def forward(self, x: Tensor) -> Tensor:
        self._check(x, self.in_features // self.ranks.world)
        if self.sequence_parallel:
            if self.fill and (padding := -x.shape[-2] % self.ranks.world):
                x = pad(x, (0, 0, 0, padding))
            y = matmul_reduce_scatter(
                x, self.weight, group=self.ranks.transport(x), num_chunks=self.num_chunks, deferral=self.deferral
            )
            if self.bias is not None and self.sum_gradients:
                sum_gradient(self.bias, self.ranks)
        else:
            y = sum_of_products(x, self.weight, self.ranks, self.num_chunks, self.deferral)
        return y if self.bias is None else y + self.bias.to(y.dtype)
