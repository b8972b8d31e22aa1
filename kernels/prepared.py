"""Prepared launches: a pass whose arguments are bound once per plan and shapes; later calls only fill in addresses.

Making the arguments of a forward and backward takes Python hundreds of microseconds, and so does binding them in
Triton: longer than a small attention takes on a GPU. Both depend on the plan and on shapes, strides and types alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .bitfield_launch import Call

MOST_KINDS = 64  # of one plan: a scale that changes with every call must not fill the memory

_plans: WeakKeyDictionary[Any, dict[Hashable, Prepared | None]] = WeakKeyDictionary()


def launch(
    plan: Any, options: Hashable, given: Sequence[Tensor], calls: Callable[[], tuple[list[Call], list[Tensor]]]
) -> list[Tensor]:
    """Runs a pass over `plan` and returns its results, which `calls` makes beside the launches.

    given: the tensors that the pass reads beside those of the plan. options: whatever else its launches depend on.
    calls: makes the launches and the results, of tensors of these shapes; asked twice for each kind.
    """
    known = _plans.setdefault(plan, {})
    same = [id(x) for x in given]
    kind = (
        options,
        *[same.index(x) for x in same],  # which of them are one tensor
        *[part for x in given for part in (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)],
    )
    prepared = known.get(kind)
    if prepared is not None:
        return prepared(given)
    made, tensors = calls()
    kernels = [call.run() for call in made]
    if kind not in known:  # most plans of compiled code, and many others, are used once
        if len(known) >= MOST_KINDS:
            known.clear()
        known[kind] = None
    elif all(kernel is not None for kernel in kernels):
        known[kind] = Prepared(made, kernels, [*given, *tensors], len(given), plan.tensors())
    return tensors


class Prepared:
    """The launches of one pass over one plan.

    Tensors of the plan are bound by address: who holds this holds the plan. Results and work space are made anew.
    """

    def __init__(
        self, calls: list[Call], kernels: list[Any], tensors: list[Tensor], given: int, plan: list[Tensor]
    ) -> None:
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        of_plan = {id(tensor) for tensor in plan}
        fresh = tensors[given:]
        self.results = len(fresh)
        self.launches: list[tuple[Callable[..., None], list[Any], list[tuple[int, int, Any]]]] = []
        for call, kernel in zip(calls, kernels):
            if not call.programs:
                continue
            arguments = [call.arguments[parameter.name] for parameter in call.kernel.params]
            filled = []
            for at, value in enumerate(arguments):
                descriptor = value if hasattr(value, "block_shape") else None
                tensor = value if descriptor is None else descriptor.base
                if id(tensor) in of_plan:
                    arguments[at] = tensor.data_ptr()
                elif isinstance(tensor, Tensor) and tensor.numel() == 0:
                    arguments[at] = 0  # room for partial results where no row is split
                elif isinstance(tensor, Tensor):
                    if id(tensor) not in places:
                        places[id(tensor)] = given + len(fresh)
                        fresh.append(tensor)
                    filled.append((at, places[id(tensor)], descriptor and _of(descriptor)))
                    arguments[at] = None
            self.launches.append((kernel[(call.programs, 1, 1)], arguments, filled))
        self.fresh = [(tensor.shape, tensor.dtype) for tensor in fresh]

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        device = given[0].device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.fresh]
        tensors = [*given, *made]
        addresses = [tensor.data_ptr() for tensor in tensors]
        for run, template, filled in self.launches:
            arguments = template.copy()
            for at, place, descriptor in filled:
                if descriptor is None:
                    arguments[at] = addresses[place]
                else:  # Triton makes a tensor map of each descriptor when it launches
                    kind, layout = descriptor
                    arguments[at] = kind(tensors[place], *layout)
            run(*arguments)
        return made[: self.results]


def _of(descriptor: Any) -> tuple[type, tuple[Any, ...]]:
    return type(descriptor), (descriptor.shape, descriptor.strides, descriptor.block_shape, descriptor.layout)
