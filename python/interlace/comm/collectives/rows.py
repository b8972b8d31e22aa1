"""all_gather_into_tensor, reduce_scatter_tensor, all_reduce, all_to_all_single: names and shapes of torch.distributed.

Differences from torch.distributed:

- Any transport moves the bytes, copy engines if the GPU has them. Copy engines cannot add, so reductions move the data
  first and the receiver adds it.
- Sums are made in float32 (float64 for float64, integers unchanged) in rank order. So bits are reproducible and
  identical on every rank.
- Operations are differentiable: if `input` requires a gradient, `output` becomes part of the graph, in place. The
  backward pass of a collective is a collective too and needs every rank: all inputs require gradients or none, and
  every rank's loss depends on its output.

Other arguments that all ranks must agree on are listed in `agreement`, and compared in every call. Under torch.compile
the graph breaks here, as at all functions of this package that move bytes.

With `async_op` the call returns a `Handle`. Do not touch input and output until its `wait`. They must not share memory,
with one exception as in torch: without gradients, the input of a gather and the output of a reduce-scatter may be this
rank's piece of the other tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.comm.collectives.reverse_mode import check_reverse_mode
from interlace.comm.process.agreement import Arguments, arguments_of
from interlace.comm.process.groups import Group
from interlace.comm.transports.base import Ticket, Transport, swap
from interlace.comm.transports.choose import resolve

if TYPE_CHECKING:
    Reduction = dist.ReduceOp.RedOpType

SUM = dist.ReduceOp.SUM
Body = Callable[..., list[Ticket]]  # of a collective on contiguous tensors
_NAMES = {
    dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min",
}  # fmt: skip
_SUMMED_BY_KERNEL = (torch.float32, torch.bfloat16, torch.float16)
_REDUCED = {
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip
ONE_ROUND = 64 << 10  # bytes up to which all_reduce sends everything to all ranks: one latency instead of two


class Handle:
    """An operation in flight. `wait` may be called more than once."""

    def __init__(self, tickets: Sequence[Ticket], deliver: tuple[Tensor, Tensor] | None = None) -> None:
        self._tickets = tickets
        self._deliver = deliver  # (to, from): final copy into a non-contiguous output

    def is_completed(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        """Returns when the output may be used (on CUDA: in the current stream). Raises CommError."""
        for ticket in self._tickets:
            ticket.wait()
        self._tickets = ()
        if self._deliver is not None:
            to, source = self._deliver
            self._deliver = None
            with torch.no_grad():
                to.copy_(source)


@torch.compiler.disable
def all_gather_into_tensor(output: Tensor, input: Tensor, group: Group = None, async_op: bool = False) -> Handle | None:
    """output = the inputs of all ranks, in rank order.

    Args:
        output: as many elements as `world` inputs: [world * n, ...] or [world, n, ...] for an input [n, ...].
        input: the same shape and dtype on every rank. Its gradient is the sum of all ranks' gradients of their slice.
        group: a Transport, ProcessGroup, DeviceMesh or None (see `interlace.comm.process.groups`).
        async_op: return a Handle instead of waiting.

    Raises:
        ValueError: sizes, dtypes or devices do not fit, or memory is shared. CommError: a peer is lost, late, or passes
            other arguments; another thread uses the transport.
    """
    transport = resolve(group, input.device)
    _check("all_gather_into_tensor", output, input, transport.world * input.numel(), transport.world)
    return _run(_gather, "all_gather_into_tensor", transport, output, input, async_op, None)


@torch.compiler.disable
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Reduction = SUM, group: Group = None, async_op: bool = False
) -> Handle | None:
    """output = this rank's piece of the sum (or AVG, MAX, MIN) of all ranks' inputs.

    Args:
        output: this rank's piece: [n, ...].
        input: the pieces for all ranks, in rank order: [world * n, ...] or [world, n, ...].
        op: differentiable for SUM and AVG; AVG is for floating-point dtypes.

    Other arguments and errors as for `all_gather_into_tensor`.
    """
    transport, name = resolve(group, input.device), "reduce_scatter_tensor"
    _check(name, input, output, transport.world * output.numel(), transport.world)
    return _run(_scatter, name, transport, output, input, async_op, _reduction(name, op, input.dtype))


@torch.compiler.disable
def all_reduce(tensor: Tensor, op: Reduction = SUM, group: Group = None, async_op: bool = False) -> Handle | None:
    """tensor = the sum (or AVG, MAX, MIN) of all ranks' tensors, in place, bitwise identical on every rank.

    Arguments and errors as for `reduce_scatter_tensor`.
    """
    transport, name = resolve(group, tensor.device), "all_reduce"
    return _run(_reduce, name, transport, tensor, tensor, async_op, _reduction(name, op, tensor.dtype))


@torch.compiler.disable
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Handle | None:
    """Sends the r-th piece of input's first dimension to rank r; output = received pieces in rank order.

    Args:
        output: [sum(output_split_sizes), ...], input: [sum(input_split_sizes), ...].
        output_split_sizes, input_split_sizes: rows from and to each rank, 0 allowed; None: equal pieces.

    Other arguments and errors as for `all_gather_into_tensor`.
    """
    transport = resolve(group, input.device)
    name = "all_to_all_single"
    for argument, tensor in (("output", output), ("input", input)):
        if tensor.dim() == 0:
            raise ValueError(f"{name}: {argument} has no dimension to split")
    if output.shape[1:] != input.shape[1:]:
        raise ValueError(
            f"{name}: output {list(output.shape)} and input {list(input.shape)} need rows of the same shape"
        )
    _check_pair(name, output, input)
    receive_counts = _splits(name, "output", output, output_split_sizes, transport.world)
    send_counts = _splits(name, "input", input, input_split_sizes, transport.world)
    if receive_counts[transport.rank] != send_counts[transport.rank]:
        raise ValueError(
            f"{name}: rank {transport.rank} sends itself {send_counts[transport.rank]} rows, but receives "
            f"{receive_counts[transport.rank]}"
        )
    return _run(_exchange, name, transport, output, input, async_op, (receive_counts, send_counts))


# ---------------------------------------------------------------------- collectives on contiguous tensors


def _gather(call: _Call, output: Tensor, input: Tensor, _: None) -> list[Ticket]:
    transport, size, flat, source = call.transport, input.numel(), _flat(output), _flat(input)

    def piece(rank: int) -> Tensor:
        return flat[rank * size : (rank + 1) * size]  # cheaper than narrow

    if output.data_ptr() + transport.rank * input.nbytes != input.data_ptr():
        piece(transport.rank).copy_(source)
    return [swap(transport, lambda _: [source], lambda peer: [piece(peer)], call.name, call.arguments)]


def _scatter(call: _Call, output: Tensor, input: Tensor, op: str) -> list[Ticket]:
    pieces = list(input.view(call.transport.world, -1).unbind(0))
    return [reduce_pieces(call.transport, pieces, _flat(output), call.name, call.arguments, op)]


def _reduce(call: _Call, tensor: Tensor, _: Tensor, op: str) -> list[Ticket]:
    return reduce_whole(call.transport, _flat(tensor), call.name, call.arguments, op)


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _exchange(call: _Call, output: Tensor, input: Tensor, splits: tuple[list[int], list[int]]) -> list[Ticket]:
    transport, (takes, gives) = call.transport, splits
    to, source = output.split(takes), input.split(gives)
    to[transport.rank].copy_(source[transport.rank])
    return [swap(transport, lambda peer: [source[peer]], lambda peer: [to[peer]], call.name, call.arguments)]


def reduce_pieces(
    transport: Transport, pieces: Sequence[Tensor], output: Tensor, label: str, arguments: Arguments, op: str = "sum"
) -> Ticket:
    """Starts output = the reduction over ranks of their pieces for this rank; contiguous.

    `output` may be one of the pieces: it is written after all have been sent.
    """
    arrived = [pieces[r] if r == transport.rank else torch.empty_like(output) for r in range(transport.world)]
    add_up = partial(reduce_in_order, arrived, output, op)
    return swap(transport, lambda peer: [pieces[peer]], lambda peer: [arrived[peer]], label, arguments, add_up)


def reduce_whole(transport: Transport, flat: Tensor, label: str, arguments: Arguments, op: str = "sum") -> list[Ticket]:
    """Starts flat [n] = its reduction over ranks, in place; contiguous."""
    if flat.numel() * flat.element_size() <= ONE_ROUND:
        return [reduce_pieces(transport, [flat] * transport.world, flat, label, arguments, op)]
    pieces = list(flat.tensor_split(transport.world))
    mine = pieces[transport.rank]
    first = reduce_pieces(transport, pieces, mine, f"{label}, reduce", arguments, op)
    return [first, swap(transport, lambda _: [mine], lambda peer: [pieces[peer]], f"{label}, gather", arguments)]


def reduce_in_order(parts: Sequence[Tensor], output: Tensor, op: str = "sum") -> None:
    """output = parts[0] op parts[1] op ..., in that order, in float32 (float64 and integers unchanged).

    All of one shape, the parts of one dtype. On CUDA one kernel if there are few enough parts.
    """
    if output.is_cuda and op in ("sum", "mean") and output.dtype in _SUMMED_BY_KERNEL:
        from interlace.kernels.bitfield_launch import on_device
        from interlace.kernels.ranks import MAX_PARTS, reduce_ranks_call

        if len(parts) <= MAX_PARTS:
            to = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
            with on_device(output.device):
                reduce_ranks_call([part.contiguous() for part in parts], to, mean=op == "mean").run()
            if to is not output:
                output.copy_(to)
            return
    wide = torch.promote_types(output.dtype, torch.float32) if output.is_floating_point() else output.dtype
    if wide == output.dtype and op == "sum" and len(parts) > 1:  # writes the last sum directly to the output
        first, *others, last = parts
        total = sum(others, first)
        torch.add(total, last, out=output)
        return
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        if op in ("sum", "mean"):
            total += part
        else:
            (torch.maximum if op == "max" else torch.minimum)(total, part.to(wide), out=total)
    if op == "mean":
        total = total / len(parts)
    output.copy_(total)


def gather_rows(name: str, transport: Transport, output: Tensor, input: Tensor, **agreed: object) -> None:
    """As `all_gather_into_tensor`, under the name of another operation. Ranks must also agree on `agreed`."""
    _run(_gather, name, transport, output, input, False, None, **agreed)


# ---------------------------------------------------------------------- checks, strides, gradients


class _Call(NamedTuple):
    """Shared data of the copies of one call."""

    transport: Transport
    name: str
    arguments: Arguments
    recorded: bool  # for a backward pass: saved memory must not be overwritten


def _run(
    body: Body, name: str, transport: Transport, output: Tensor, input: Tensor, async_op: bool, options: object,
    **agreed: object,
) -> Handle | None:  # fmt: skip
    """agreed: further arguments that must be equal on all ranks, besides those derived from the tensors."""
    check_reverse_mode(name, input, output)
    recorded = torch.is_grad_enabled() and (input.requires_grad or output.requires_grad)
    backward = recorded and input.requires_grad
    if body is _exchange:
        agreed["row"] = input.shape[1:]
    else:
        agreed["tensor" if body is _reduce else "input"] = input.shape
    if body in (_scatter, _reduce):
        agreed["op"] = options
    call = _Call(transport, name, arguments_of(input.dtype, backward, **agreed), recorded)
    with transport.used_for(name, at_once=not async_op):
        if recorded:
            if options in ("max", "min") and input.requires_grad:
                raise ValueError(f"{name}: {options} has no gradient: detach the tensor, or use SUM or AVG")
            works: list[Handle] = []
            _Differentiable.apply(output, input, body, call, options, works)
            work = works[0]
        else:
            work = _start(body, call, output, input, options)
        if async_op:
            return work
        work.wait()
        return None


def _start(body: Body, call: _Call, output: Tensor, input: Tensor, options: object) -> Handle:
    """Runs inside an autograd function if gradients are recorded; that function records nothing else."""
    source = input.contiguous()
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    if input is output and body is _reduce:
        to = source
    elif output.is_contiguous() and not (output.is_conj() or output.is_neg()):
        to = output
    else:
        to = torch.empty_like(output, memory_format=torch.contiguous_format)
    if body is not _reduce:
        _check_memory(body, call, to, source)
    tickets = body(call, to, source, options)
    # Autograd does not see writes by transports: mark tensors that it saved for a backward pass as modified.
    if not output.is_inference():  # autograd cannot save inference tensors
        torch.autograd.graph.increment_version(output)
    return Handle(tickets, None if to is output else (output, to))


def _check_memory(body: Body, call: _Call, output: Tensor, input: Tensor) -> None:
    """Raises ValueError if bytes would be read after being overwritten; both contiguous."""
    start, other = output.data_ptr(), input.data_ptr()
    if min(start + output.nbytes, other + input.nbytes) <= max(start, other):
        return
    whole, piece = (other, output) if body is _scatter else (start, input)
    if body is not _exchange and not call.recorded:
        if piece.data_ptr() == whole + call.transport.rank * piece.nbytes:
            return
    raise ValueError(
        f"{call.name}: output and input share memory, so input would be overwritten before it is read: pass "
        "input.clone(), or another output"
    )


class _Differentiable(torch.autograd.Function):
    """The derivative of a collective is another differentiable collective, so derivatives of any order exist."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, input: Tensor, body: Body, call: _Call, options: object, works: list[Handle]
    ) -> Tensor:
        ctx.mark_dirty(output)
        ctx.saved = body, call.transport, options, input.shape, input is output
        works.append(_start(body, call, output, output if input is output else input, options))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        body, transport, options, shape, in_place = ctx.saved
        if not (in_place or ctx.needs_input_grad[1]):  # the previous content of `output` has no influence
            return (None,) * 6
        grad = grads[0]
        result = grad.new_empty(shape)
        if body is _gather:
            _run(_scatter, "backward of all_gather", transport, result, grad, False, "sum")
        elif body is _scatter:
            _run(_gather, "backward of reduce_scatter", transport, result, grad, False, None)
        elif body is _reduce:
            result = grad.clone(memory_format=torch.contiguous_format)
            _run(_reduce, "backward of all_reduce", transport, result, result, False, "sum")
        else:
            takes, gives = options
            _run(_exchange, "backward of all_to_all", transport, result, grad, False, (gives, takes))
        if options == "mean":
            result = result / transport.world
        return (result if in_place else None, None if in_place else result, None, None, None, None)


def _reduction(name: str, op: Reduction, dtype: torch.dtype) -> str:
    if op not in _NAMES:
        raise ValueError(f"{name}: op {op} is not supported: use ReduceOp.SUM, AVG, MAX or MIN")
    if dtype not in _REDUCED:
        raise ValueError(f"{name}: {dtype} is not supported: convert the tensor (complex: torch.view_as_real)")
    if not dtype.is_floating_point and _NAMES[op] == "mean":
        raise ValueError(
            f"{name}: AVG of {dtype} would be rounded: convert the tensor to a floating-point dtype, or use SUM and "
            "divide"
        )
    return _NAMES[op]


def _check_pair(name: str, a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(
            f"{name}: one tensor is {a.dtype} on {a.device}, the other {b.dtype} on {b.device}: convert one of them"
        )


def _check(name: str, larger: Tensor, piece: Tensor, elements: int, world: int) -> None:
    _check_pair(name, larger, piece)
    if larger.numel() != elements:
        raise ValueError(
            f"{name}: the larger tensor {list(larger.shape)} must have {world} times the elements of "
            f"{list(piece.shape)}"
        )


def _splits(name: str, argument: str, tensor: Tensor, sizes: Sequence[int] | None, world: int) -> list[int]:
    rows = tensor.shape[0]
    if sizes is None:
        if rows % world:
            raise ValueError(
                f"{name}: {rows} rows of {argument} are not divisible by {world} ranks: pass {argument}_split_sizes"
            )
        return [rows // world] * world
    if len(sizes) != world or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{name}: {argument}_split_sizes {list(sizes)} must be {world} numbers >= 0 that sum to {rows}"
        )
    return [int(size) for size in sizes]
