"""What happens where tensors change between whole and cut: forward, and its transpose in backward.

    forward                       backward                      where
    sum_over_ranks   sum          identity                      partial results leave whole rows
    split            own piece    gather                        a replicated tensor becomes pieces
    gather           gather       own piece                     pieces become a tensor that every rank uses alike

A loss of replicated tensors is one loss, computed by everybody: that is why sums have the identity as their backward,
unlike the collectives of `interlace.comm`, whose every rank has a loss of its own. `products` has what goes with matrix
products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interlace.comm import Transport, all_gather_into_tensor, all_reduce, resolve
from interlace.comm.group import Group, here, members
from interlace.comm.one_operation import as_one_operation
from interlace.comm.reverse_mode import check_reverse_mode
from interlace.comm.transports.base import Arguments, Copy, peers_of


class Ranks:
    """The ranks among which something is cut. A copy of a module keeps its ranks: deepcopy returns the same object.

    Args:
        group: a Transport, ProcessGroup, one-dimensional DeviceMesh or None (see `interlace.comm.group`). Nothing is
            connected before the first transfer.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = here() if group is None else group
        self.rank, self.world = members(self.group)
        self._to_compare: tuple[str, Arguments] | None = None

    @classmethod
    def at(cls, rank: int, world: int) -> Ranks:
        """Place `rank` of `world`, for a module that is cut before its ranks are connected: `connect` must follow."""
        made = cls.__new__(cls)
        made.group, made.rank, made.world, made._to_compare = None, rank, world, None
        return made

    def connect(self, transport: Transport) -> None:
        """From now on `transport` carries what these ranks tell each other. Raises ValueError if it is of others."""
        if (transport.rank, transport.world) != (self.rank, self.world):
            raise ValueError(
                f"the transport is of rank {transport.rank} of {transport.world}, but the module was cut for rank "
                f"{self.rank} of {self.world}"
            )
        self.group = transport

    def must_agree(self, what: str, **values: object) -> None:
        """Has `values` compared when something is first transferred: `what` was made on each rank by itself."""
        self._to_compare = what, Arguments(**values)

    @torch.compiler.disable
    def transport(self, tensor: Tensor) -> Transport:
        found = resolve(self.group, tensor.device)
        if self._to_compare is not None:
            (what, arguments), self._to_compare = self._to_compare, None
            found.copy_batch([], [], what, None, arguments).wait()
        return found

    def piece(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's of `world` pieces, a view; of unequal ones the first have one more (`counts`)."""
        return tensor.tensor_split(self.world, dim)[self.rank]

    def counts(self, total: int) -> list[int]:
        """The sizes of the pieces of `total`, rank by rank."""
        return [total // self.world + (rank < total % self.world) for rank in range(self.world)]

    def gather(self, piece: Tensor, dim: int, total: int | None = None) -> Tensor:
        """The pieces of all ranks, joined. No gradient. total: the size of `dim` then, where pieces may be unequal."""
        if self.world == 1:
            return piece.detach()
        if total is not None and total % self.world:
            return self.gather_rows(piece, self.counts(total), dim)
        pieces = piece.new_empty(self.world, *piece.shape)
        all_gather_into_tensor(pieces, piece.detach().contiguous(), group=self.transport(piece))
        return torch.cat(pieces.unbind(), dim) if dim else pieces.flatten(0, 1)

    def gather_rows(self, mine: Tensor, counts: Sequence[int], dim: int = -2) -> Tensor:
        """The rows of all ranks, joined along dimension `dim`, of which rank r has `counts[r]`. No gradient."""
        if self.world == 1:
            return mine
        rows = mine.detach().movedim(dim, 0).contiguous()
        whole = rows.new_empty(sum(counts), *rows.shape[1:])
        pieces = whole.split(list(counts))
        pieces[self.rank].copy_(rows)
        peers = peers_of(self.rank, self.world)
        self.transport(rows).copy_batch(
            [Copy(peer, rows) for peer in peers], [Copy(peer, pieces[peer]) for peer in peers], "gather_rows"
        ).wait()
        return whole.movedim(0, dim).contiguous()

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self


def whole_on_each(x: Tensor, ranks: Ranks) -> Tensor:
    """x, of which each rank computes the whole gradient, though the backward pass of x adds up those of all ranks."""
    return _mapped("whole_on_each", _WholeOnEach, x, ranks)


def sum_over_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of all ranks' x, the same bits everywhere."""
    return _mapped("sum_over_ranks", _Sum, x, ranks)


def split(x: Tensor, ranks: Ranks, dim: int, *, fill: bool = False) -> Tensor:
    """This rank's piece of a replicated x, cut along `dim`. Raises ValueError if it does not divide.

    fill: or fill the last pieces up with copies of the last row, whose gradients are dropped: nothing may come of them.
    """
    if x.shape[dim] % ranks.world and not fill:
        what = f"a sequence of {x.shape[dim]} tokens" if dim == -2 else f"a dimension of {x.shape[dim]}"
        raise ValueError(
            f"{what} does not divide among {ranks.world} ranks: pad it to a multiple, or pass sequence_parallel=False"
        )
    return _mapped("split", _Split, x, ranks, dim)


def gather(x: Tensor, ranks: Ranks, dim: int, total: int | None = None) -> Tensor:
    """The pieces of all ranks joined along `dim`, to be used by every rank alike. total: as for `Ranks.gather`."""
    return _mapped("gather", _Gather, x, ranks, dim, total)


def _mapped(name: str, function: type[torch.autograd.Function], x: Tensor, ranks: Ranks, *rest: Any) -> Tensor:
    if ranks.world == 1:
        return x
    check_reverse_mode(name, x)
    return function.apply(x, ranks, *rest)  # type: ignore[no-any-return]


class _WholeOnEach(torch.autograd.Function):
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
        return piece.contiguous()  # where none is missing and x is contiguous, no memory of its own

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


# ---------------------------------------------------------------------- parameters of which every rank sees a part


class SummedGradients:
    """A forward pre-hook: from then on, gradients of the module's own parameters are summed over ranks in backward.

    For parameters that every rank holds but uses on its own rows or heads only. Hooks of parameters are lost when these
    are copied or replaced, and cannot be set while they are frozen: so they are set by the forward that needs them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            sum_gradient(parameter, self.ranks)


def sum_gradient(parameter: nn.Parameter, ranks: Ranks) -> None:
    """Has the parameter's gradient summed over ranks in every backward, unless that is so or it needs none."""
    hooks = (parameter._backward_hooks or {}).values()
    if parameter.requires_grad and ranks.world > 1 and not any(isinstance(hook, _SumGradient) for hook in hooks):
        parameter.register_hook(_SumGradient(ranks))


class _SumGradient:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, grad: Tensor) -> Tensor:
        return _reduced(grad, self.ranks)
