"""REDUCE_GRAD: sums gradients of parameters that several ranks hold; the result is bit-identical on each rank.

A sum starts after the last backward of its weights, and overlaps with the rank's next actions. Gradients are packed
into buckets: flat tensors of at most `BUCKET_BYTES`, followed by one flag per parameter. A parameter without a gradient
on any rank keeps none. So absent modalities leave parameters and optimizer state untouched, as in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from interlace.comm.channels.base import Channel, Pending
from interlace.parallel.region import Region
from interlace.parallel.sending import to_device

BUCKET_BYTES = 32 << 20


class Sum:
    """The sum of the gradients of `parameters` over `ranks`, which all pass the same list. Starts on construction."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Sequence[int], channel: Channel, key: str) -> None:
        self._parts: list[tuple[list[nn.Parameter], Tensor, Pending]] = []
        for number, bucket in enumerate(buckets([p for p in parameters if p.requires_grad])):
            gradients = [p.grad for p in bucket]
            pieces = [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for p, g in zip(bucket, gradients)]
            flags = torch.tensor([float(g is not None) for g in gradients], dtype=bucket[0].dtype)
            flat = torch.cat([*pieces, to_device(flags, bucket[0].device)])
            for p in bucket:
                p.grad = None  # the bucket has it: avoids a second copy while the sum is in flight
            del gradients, pieces
            pending = channel.start_all_reduce(flat, ranks, f"{key} {number}")
            self._parts.append((bucket, flat, pending))

    def wait(self) -> None:
        """Wait for the sums and put them in `.grad` of the parameters."""
        for _, _, pending in self._parts:
            pending.wait()
        flags = iter(present([flat[-len(bucket) :] for bucket, flat, _ in self._parts]))
        for bucket, flat, _ in self._parts:
            *pieces, _ = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for p, piece in zip(bucket, pieces, strict=True):
                p.grad = piece.view_as(p) if next(flags) else None
        self._parts = []


def buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in buckets of one dtype each."""
    groups: list[list[nn.Parameter]] = []
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        size = BUCKET_BYTES
        for p in parameters:
            if p.dtype is dtype:
                if size + p.nbytes > BUCKET_BYTES:
                    groups.append([])
                    size = 0
                groups[-1].append(p)
                size += p.nbytes
    return groups


def present(flags: Sequence[Tensor]) -> list[bool]:
    """Whether each flag is set, in one read: a single synchronization with the GPU."""
    nonzero: list[bool] = torch.cat([each != 0 for each in flags]).tolist() if flags else []
    return nonzero


class GradientNorm:
    """The norm of the gradients over the whole model. Each gradient counts on one rank only, even if several hold it.

    parameters: those that an optimizer trains in this process. counts: names of those that this process counts.
    channel: None if one process runs all ranks.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], counts: Collection[str], channel: Channel | None
    ) -> None:
        self._parameters, self._counts, self._channel = parameters, counts, channel
        self._known: tuple[float, list[tuple[int, int]]] | None = None  # the norm, and the gradients that it is of

    def squares(self) -> list[Tensor]:
        """`squares` of the gradients that this process counts."""
        counted = (p.grad for name, p in self._parameters.items() if name in self._counts)
        return squares([gradient for gradient in counted if gradient is not None])

    def set(self, norm: float | None) -> None:
        """Set the norm of the current gradients; None: it is not known."""
        self._known = None if norm is None else (norm, self._signature())

    def clip(self, max_norm: float, recompute: bool) -> float:
        """See `ParallelModel.clip_grad_norm_`."""
        if recompute:
            [square] = totals(self.squares())
            if self._channel is not None:
                numbers = torch.tensor([square], dtype=torch.float64)
                square = float(self._channel.start_all_gather(numbers, "gradient norm").wait().sum())
            norm = square**0.5
        elif self._known is None:
            raise ValueError("there is no gradient norm yet: call step() first, or pass recompute=True on every rank")
        elif self._known[1] != self._signature():
            raise ValueError("gradients were changed since step(): pass recompute=True on every rank")
        else:
            norm = self._known[0]
        if norm > max_norm and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
        self.set(min(norm, max_norm))
        return norm

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def _signature(self) -> list[tuple[int, int]]:
        """Identity and version of all gradients, to detect changes."""
        return [(id(gradient), gradient._version) for gradient in self._gradients()]


def squares(gradients: Sequence[Tensor]) -> list[Tensor]:
    """A list with the sum of the squares of all elements, fp64; empty without gradients."""
    if not gradients:
        return []
    norms = torch._foreach_norm([gradient.detach() for gradient in gradients])
    return [torch.stack([norm.double() for norm in norms]).square().sum()]


def totals(*groups: Sequence[Tensor]) -> list[float]:
    """The sum of each group, 0 for an empty one, in one read: a single synchronization with the GPU."""
    sums = [torch.stack(list(group)).sum().double() for group in groups if group]
    read = iter(torch.stack(sums).tolist() if sums else ())
    return [next(read) if group else 0.0 for group in groups]


def whole_gradients(
    mllm: nn.Module, counted: Mapping[int, tuple[nn.Parameter, Region | None]], channel: Channel
) -> dict[str, Tensor | None]:
    """Name -> gradient of every parameter of `mllm`, on every rank. Each comes from the rank that counts it, or from
    the ranks that count its pieces or slices.

    counted: id of a parameter of `mllm` -> this rank's parameter and region of it. One all-reduce over all
    gradients: for small models only.
    """
    parts = []
    for parameter in mllm.parameters():
        held, cut = counted.get(id(parameter), (None, None))
        gradient = None if held is None else held.grad
        whole = torch.zeros(parameter.shape, device=channel.device)
        if gradient is not None:
            whole.copy_(gradient) if cut is None else cut.put(whole, gradient)
        parts.append(torch.cat([whole.reshape(-1), whole.new_tensor([float(gradient is not None)])]))
    whole = torch.cat(parts)
    everyone = list(range(channel.world))
    channel.add_groups([everyone])
    channel.start_all_reduce(whole, everyone, "full gradients").wait()
    sums = whole.split([len(part) for part in parts])
    return {
        name: part[:-1].view(parameter.shape) if part[-1] else None
        for (name, parameter), part in zip(mllm.named_parameters(), sums, strict=True)
    }
