"""Mappings between whole and sharded tensors. The backward pass is the transpose of the forward pass.

    forward                       backward                      used for
    sum_over_ranks   sum          identity                      partial results become whole rows
    split            own piece    gather                        a replicated tensor becomes pieces
    gather           gather       own piece                     pieces become a tensor that all ranks use identically

The loss of replicated tensors is one loss, computed by every rank. So the backward of a sum is the identity. In the
collectives of `interlace.comm` each rank has a loss of its own. `products` combines these mappings with matrix
products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interlace.comm import Transport, all_gather_into_tensor, all_reduce, resolve
from interlace.comm.collectives.one_operation import as_one_operation
from interlace.comm.collectives.reverse_mode import check_reverse_mode
from interlace.comm.process.agreement import Arguments
from interlace.comm.process.groups import Group, current_transport
from interlace.comm.transports.base import swap
from interlace.comm.transports.choose import members


class Ranks:
    """The ranks among which a module is sharded. A copy of a module keeps its ranks: deepcopy returns the same object.

    Args:
        group: a Transport, ProcessGroup, one-dimensional DeviceMesh or None (see `interlace.comm.process.groups`).
            Nothing is connected before the first transfer.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = current_transport() if group is None else group
        self.rank, self.world = members(self.group)
        self._to_compare: tuple[str, Arguments] | None = None

    @classmethod
    def at(cls, rank: int, world: int) -> Ranks:
        """Rank `rank` of `world`, for a module that is sharded before its ranks are connected. Call `connect` later."""
        ranks = cls.__new__(cls)
        ranks.group, ranks.rank, ranks.world, ranks._to_compare = None, rank, world, None
        return ranks

    def connect(self, transport: Transport) -> None:
        """Uses `transport` for all transfers from now on. Raises ValueError if its rank or world size differs."""
        if (transport.rank, transport.world) != (self.rank, self.world):
            raise ValueError(
                f"the transport has rank {transport.rank} of {transport.world}, but the module was sharded for rank "
                f"{self.rank} of {self.world}: pass a transport of the same rank and world size"
            )
        self.group = transport

    def must_agree(self, label: str, **values: object) -> None:
        """Compares `values` of all ranks before the first transfer. label: the object that each rank created."""
        self._to_compare = label, Arguments(**values)

    @torch.compiler.disable
    def transport(self, tensor: Tensor) -> Transport:
        transport = resolve(self.group, tensor.device)
        if self._to_compare is not None:
            (label, arguments), self._to_compare = self._to_compare, None
            transport.copy_batch([], [], label, None, arguments).wait()
        return transport

    def piece(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's piece of `tensor`, a view. The first pieces have one more if the size is not divisible
        (`counts`).
        """
        return tensor.tensor_split(self.world, dim)[self.rank]

    def counts(self, total: int) -> list[int]:
        """The sizes of the pieces of `total`, in rank order."""
        return [total // self.world + (rank < total % self.world) for rank in range(self.world)]

    def gather(self, piece: Tensor, dim: int, total: int | None = None) -> Tensor:
        """The pieces of all ranks, concatenated. No gradient. total: resulting size of `dim`, if pieces may be
        unequal.
        """
        if self.world == 1:
            return piece.detach()
        if total is not None and total % self.world:
            return self.gather_rows(piece, self.counts(total), dim)
        pieces = piece.new_empty(self.world, *piece.shape)
        all_gather_into_tensor(pieces, piece.detach().contiguous(), group=self.transport(piece))
        return torch.cat(pieces.unbind(), dim) if dim else pieces.flatten(0, 1)

    def gather_rows(self, piece: Tensor, counts: Sequence[int], dim: int = -2) -> Tensor:
        """The rows of all ranks, concatenated along `dim`. Rank r contributes `counts[r]` rows. No gradient."""
        if self.world == 1:
            return piece
        rows = piece.detach().movedim(dim, 0).contiguous()
        gathered = rows.new_empty(sum(counts), *rows.shape[1:])
        pieces = gathered.split(list(counts))
        pieces[self.rank].copy_(rows)
        swap(self.transport(rows), lambda _: [rows], lambda peer: [pieces[peer]], "gather_rows").wait()
        return gathered.movedim(0, dim).contiguous()

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self


def average_gradient(x: Tensor, ranks: Ranks) -> Tensor:
    """x, for a gradient that is whole on each rank although the backward pass of x sums over ranks.

    Divides the gradient by the number of ranks.
    """
    return _mapped("average_gradient", _AverageGradient, x, ranks)


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of all ranks' x, bitwise identical on every rank."""
    return _mapped("sum_over_ranks", _Sum, x, ranks)


def split(x: Tensor, ranks: Ranks, dim: int, *, fill: bool = False) -> Tensor:
    """This rank's piece of a replicated x, cut along `dim`. Raises ValueError if `dim` is not divisible by the ranks.

    fill: pad the last pieces with copies of the last row instead. Gradients of the copies are dropped, so the result
        must not depend on them.
    """
    if x.shape[dim] % ranks.world and not fill:
        size = f"a sequence of {x.shape[dim]} tokens" if dim == -2 else f"a dimension of {x.shape[dim]}"
        raise ValueError(
            f"{size} is not divisible by {ranks.world} ranks: pad it to a multiple, or pass sequence_parallel=False"
        )
    return _mapped("split", _Split, x, ranks, dim)


def gather(x: Tensor, ranks: Ranks, dim: int, total: int | None = None) -> Tensor:
    """The pieces of all ranks, concatenated along `dim`. All ranks must use the result identically.

    total: as for `Ranks.gather`.
    """
    return _mapped("gather", _Gather, x, ranks, dim, total)


def _mapped(name: str, function: type[torch.autograd.Function], x: Tensor, ranks: Ranks, *rest: Any) -> Tensor:
    if ranks.world == 1:
        return x
    check_reverse_mode(name, x)
    return function.apply(x, ranks, *rest)  # type: ignore[no-any-return]


class _AverageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.world = ranks.world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] / ctx.world, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return _as_one(lambda: _reduced(x, ranks), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim, ctx.total = ranks, dim, x.shape[dim]
        size = -(-ctx.total // ranks.world)
        start = min(ranks.rank * size, ctx.total)
        piece = x.narrow(dim, start, min(size, ctx.total - start))
        if missing := size - piece.shape[dim]:
            last = x.narrow(dim, ctx.total - 1, 1)
            piece = torch.cat([piece, *[last] * missing], dim)
        return piece.contiguous()  # a view if no row is missing and x is contiguous

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.gather(grads[0], ctx.dim).narrow(ctx.dim, 0, ctx.total), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int, total: int | None) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return _as_one(lambda: ranks.gather(x, dim, total), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.piece(grads[0], ctx.dim).contiguous(), None, None, None


def _as_one(transfer: Callable[[], Tensor], x: Tensor) -> Tensor:
    return as_one_operation(lambda: [transfer()], x)[0]


def _reduced(x: Tensor, ranks: Ranks) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=ranks.transport(x))
    return total


# ---------------------------------------------------------------------- parameters used on a part of the rows


class SummedGradients:
    """Forward pre-hook that sums gradients of the module's own parameters over ranks in backward.

    For parameters that are replicated but applied to this rank's own rows or heads. Hooks of parameters are lost when a
    parameter is copied or replaced, and cannot be set on a frozen one. So each forward sets them if they are missing.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            sum_gradient(parameter, self.ranks)


def sum_gradient(parameter: nn.Parameter, ranks: Ranks) -> None:
    """Sums the parameter's gradient over ranks in every backward. No-op if already set or if it needs no gradient."""
    hooks = (parameter._backward_hooks or {}).values()
    if parameter.requires_grad and ranks.world > 1 and not any(isinstance(hook, _SumGradient) for hook in hooks):
        parameter.register_hook(_SumGradient(ranks))


class _SumGradient:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, grad: Tensor) -> Tensor:
        return _reduced(grad, self.ranks)
