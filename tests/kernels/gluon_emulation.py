"""Gluon kernels on the CPU: their Python source runs on torch tensors, with a model of shared memory, TMA, barriers and
wgmma. Triton has no interpreter for Gluon.

    with emulated(seed):  # Call.run then computes here, of Triton's kernels too
        bitfield_attention(q, k, v, plan, backend="gluon")

Each partition of a program is a thread. One runs at a time, and at every wait, arrival and product a random one goes
on, so that waits that are missing or wrong show up as wrong values or as a deadlock (`Broken`):

- bytes of a TMA load arrive at a random time before their barrier completes;
- a product reads its operands in shared memory at a random time between its issue and the wait that ends it, in order;
- a product in flight has no value that anything but another product or a wait could read;
- buffers and results are NaN before somebody writes them.

Not modelled: layouts, swizzling, registers, the memory model, and the order of proxies (fences do nothing).
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor

from interlace.attention import _blocks
from interlace.kernels.bitfield_launch import Call
from tests.kernels.turns import Broken, Turns

PANEL = 64  # columns of 16 bits: a swizzled tile in shared memory is made of panels of 128 bytes by row


# ---------------------------------------------------------------------- memory


@dataclass
class Pointer:
    """Addresses in a tensor: one, or a tensor of them."""

    memory: Tensor  # flat
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    __radd__ = __add__

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.at[index])


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    at, inside = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(True if mask is None else mask))
    _check(pointer.memory, at[inside])
    found = torch.full(at.shape, other, dtype=pointer.memory.dtype)
    found[inside] = pointer.memory[at[inside].long()]
    return found


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, inside, value = torch.broadcast_tensors(
        torch.as_tensor(pointer.at), torch.as_tensor(True if mask is None else mask), torch.as_tensor(value)
    )
    _check(pointer.memory, at[inside])
    pointer.memory[at[inside].long()] = value[inside].to(pointer.memory.dtype)


def _check(memory: Tensor, at: Tensor) -> None:
    if at.numel() and not (0 <= int(at.min()) and int(at.max()) < memory.numel()):
        raise Broken(f"addresses {int(at.min())} to {int(at.max())} of {memory.numel()}")


@dataclass
class Plain:
    """Shared memory whose layout is that of the tensor."""

    data: Tensor

    def index(self, i: Any) -> Plain:
        if not 0 <= int(i) < self.data.shape[0]:
            raise Broken(f"buffer {int(i)} of {self.data.shape[0]}")
        return Plain(self.data[int(i)])

    def load(self, layout: Any = None) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape
        self.data.copy_(value)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


@dataclass
class Tile:
    """A tile of 16 bits, or several, in panels: [..., panels, rows, PANEL]. Products and TMA see [rows, columns].

    first, rows: the slice that is meant. transposed: rows and columns change places.
    """

    data: Tensor
    first: int = 0
    rows: int = 0
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> Tile:
        return Tile(Plain(self.data).index(i).data, 0, self.data.shape[-2])

    def reshape(self, shape: list[int]) -> Tile:
        assert list(self.load().shape) == [int(size) for size in shape]
        return self

    def slice(self, start: int, length: int) -> Tile:
        assert 0 <= start and start + length <= self.rows
        return Tile(self.data, self.first + start, length, self.transposed)

    def permute(self, order: tuple[int, int]) -> Tile:
        assert order == (1, 0)
        return Tile(self.data, self.first, self.rows, not self.transposed)

    def load(self, layout: Any = None) -> Tensor:
        part = self.data[:, self.first : self.first + self.rows].transpose(0, 1).flatten(1)
        return part.mT if self.transposed else part

    def store(self, value: Tensor) -> None:
        self.data.copy_(value.unflatten(1, (-1, PANEL)).transpose(0, 1))


def reinterpret(x: Tile, dtype: Any, shape: list[int], layout: Any) -> Plain:
    return Plain(x.data.view(dtype).view(shape))


@dataclass
class Barrier:
    """An mbarrier: a phase is complete when `count` arrivals and all expected bytes have come."""

    turns: Turns
    count: int = 0
    phase: int = 0
    arrived: int = 0
    missing: int = 0

    def index(self, i: Any) -> Barrier:
        raise Broken("a barrier is not a list")

    def arrive(self, missing: int = 0) -> None:
        self.missing += missing
        self.arrived += 1
        if self.arrived > self.count:
            raise Broken("more arrivals than the phase takes")
        self._advance()

    def copied(self, size: int) -> None:
        self.missing -= size
        self._advance()

    def _advance(self) -> None:
        if self.arrived == self.count and self.missing == 0:
            self.phase, self.arrived = self.phase + 1, 0


@dataclass
class Barriers:
    each: list[Barrier]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


class Descriptor:
    """A TMA descriptor, of what the launch gives."""

    def __init__(self, given: Any) -> None:
        base = given.base
        self.tensor = torch.as_strided(base, given.shape, given.strides, base.storage_offset())
        self.box = list(given.block_shape)
        self.dtype, self.layout = base.dtype, given.layout
        size = base.element_size() * torch.Size(self.box).numel()
        self.block_type = types.SimpleNamespace(shape=self.box, nbytes=size)

    def read(self, coordinates: list[Any]) -> Tensor:
        """The box there; zeros beyond the tensor."""
        box = torch.zeros(self.box, dtype=self.dtype)
        starts = [int(x) for x in coordinates]
        sizes = [max(0, min(n, length - at)) for n, length, at in zip(self.box, self.tensor.shape, starts)]
        part = self.tensor
        for axis, (at, size) in enumerate(zip(starts, sizes)):
            part = part.narrow(axis, min(at, self.tensor.shape[axis]), size)
        box[tuple(slice(size) for size in sizes)] = part
        return box.flatten(0, -2) if len(self.box) > 1 else box


# ---------------------------------------------------------------------- products


@dataclass(eq=False)
class Product:
    """A wgmma that was issued: acc + a @ b."""

    a: Any
    b: Tile
    acc: Any
    value: Tensor | None = None

    def evaluate(self) -> None:
        a = self.a.load() if isinstance(self.a, Tile) else self.a
        b = self.b.load()
        assert a.dtype == b.dtype and a.dtype.itemsize == 2
        self.value = a.float() @ b.float()
        if self.acc is not None:
            self.value = self.value + (self.acc.value if isinstance(self.acc, Product) else self.acc)


@dataclass
class Program:
    """What one program of a launch shares."""

    number: int
    turns: Turns
    flights: dict[int, list[Product]] = field(default_factory=dict)

    @property
    def flight(self) -> list[Product]:
        """Products of this warpgroup that no wait has ended, in the order of issue."""
        return self.flights.setdefault(threading.get_ident(), [])

    def settle(self, pending: int) -> None:
        while len(self.flight) > pending:
            product = self.flight.pop(0)
            if product.value is None:
                product.evaluate()

    def specialize(self, partitions: list[Any], warps: list[int], registers: list[int]) -> None:
        self.turns.run([lambda f=f, arguments=a: f(*arguments) for f, a in partitions])

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            barriers = [Barrier(self.turns) for _ in range(shape[0])]
            return barriers[0] if len(shape) == 1 else Barriers(barriers)
        if len(shape) == 2:
            return Plain(torch.full(shape, torch.nan, dtype=dtype))
        stages, _, _, rows, columns = shape
        return Tile(torch.full((stages, columns // PANEL, rows, PANEL), torch.nan, dtype=dtype))

    def copy(self, descriptor: Descriptor, coordinates: list[Any], barrier: Barrier, to: Any) -> None:
        coordinates = [int(x) for x in coordinates]

        def arrive() -> None:
            to.store(descriptor.read(coordinates))
            barrier.copied(descriptor.block_type.nbytes)

        self.turns.start(arrive)

    def multiply(
        self, a: Any, b: Tile, acc: Any, use_acc: bool = True, is_async: bool = False, **_: Any
    ) -> Product | Tensor:
        product = Product(a, b, acc if use_acc else None)
        self.flight.append(product)
        self.turns.until(lambda: True)
        settled = [other.value is not None for other in self.flight[:-1]]
        if all(settled) and self.turns.random.random() < 0.5:
            product.evaluate()
        return product if is_async else self.wait_products(0, [product])

    def wait_products(self, pending: int, deps: list[Any]) -> Any:
        self.turns.until(lambda: True)
        self.settle(pending)
        found = [x.value if isinstance(x, Product) and x not in self.flight else x for x in deps]
        return found[0] if len(found) == 1 else tuple(found)

    def names(self) -> dict[str, Any]:
        """What kernels find under the names that they import."""

        def wait(barrier: Barrier, parity: Any) -> None:
            self.turns.until(lambda: barrier.phase & 1 != int(parity))

        def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
            self.turns.until(lambda: True)
            if pred:
                barrier.arrive()

        def init(barrier: Barrier, count: int) -> None:
            barrier.count = count

        barriers = types.SimpleNamespace(
            wait=wait, arrive=arrive, init=init, expect=lambda barrier, size: barrier.arrive(size),
            MBarrierLayout=lambda: None,
        )  # fmt: skip
        return dict(
            gl=_Language(self), tl=_Language(self), mbarrier=barriers, tma_load=self.copy, reinterpret=reinterpret,
            warpgroup_mma=self.multiply, warpgroup_mma_wait=self.wait_products, warpgroup_mma_init=lambda x: x,
            fence_async_shared=lambda: None, INTERPRETED=True,
        )  # fmt: skip


class _Layout:
    """Of registers: layouts do not change values."""

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def parent(self) -> _Layout:
        return self


class _Language:
    """The functions of triton.language and of Gluon's that kernels use."""

    NVMMADistributedLayout = SliceLayout = DotOperandLayout = BlockedLayout = SwizzledSharedLayout = _Layout
    float32, int64, int32 = torch.float32, torch.int64, torch.int32
    load, store = staticmethod(load), staticmethod(store)
    minimum, maximum = (staticmethod(lambda a, b, f=f: f(torch.as_tensor(a), torch.as_tensor(b)))
                        for f in (torch.minimum, torch.maximum))  # fmt: skip
    exp2, log2 = staticmethod(torch.exp2), staticmethod(torch.log2)
    constexpr = staticmethod(lambda x: x)
    convert_layout = staticmethod(lambda x, layout: x)
    static_range = staticmethod(range)
    range = staticmethod(lambda *bounds, **_: range(*map(int, bounds)))
    arange = staticmethod(lambda start, end, layout=None: torch.arange(start, end, dtype=torch.int32))
    zeros = staticmethod(lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    cdiv = staticmethod(lambda a, b: -(-a // b))
    static_assert = staticmethod(lambda *_: None)

    def __init__(self, program: Program) -> None:
        self.warp_specialize, self.allocate_shared_memory = program.specialize, program.allocate
        self.program_id = lambda axis: torch.tensor(program.number, dtype=torch.int32)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Tensor:
        return torch.where(torch.as_tensor(condition), a, b)

    @staticmethod
    def full(shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
        return torch.full([int(size) for size in shape], value, dtype=dtype)

    @staticmethod
    def max(x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    @staticmethod
    def min(x: Tensor, axis: int) -> Tensor:
        return x.amin(axis)

    @staticmethod
    def sum(x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)


# ---------------------------------------------------------------------- kernels as functions


def function(kernel: Any, names: dict[str, Any], done: dict[Any, Any]) -> Callable[..., Any]:
    """The Python function of a kernel, in which `names`, kernels and constants are the emulated ones."""
    source = getattr(kernel, "fn", kernel)
    if source in done:
        return done[source]
    known: dict[str, Any] = {"__builtins__": __builtins__}
    made = done[source] = types.FunctionType(source.__code__, known, source.__name__, source.__defaults__)
    for name in source.__code__.co_names:
        value = names.get(name, source.__globals__.get(name))
        if value is None:
            continue
        if name not in names and hasattr(value, "fn"):
            value = function(value, names, done)
        known[name] = value.value if isinstance(value, tl.constexpr) else value
    return made


def run(call: Call, seed: int) -> None:
    """One launch, program by program."""
    arguments = {
        parameter.name: _argument(call.arguments[parameter.name], parameter) for parameter in call.kernel.params
    }
    for number in range(call.programs):
        program = Program(number, Turns(seed * 100_003 + number))
        function(call.kernel, program.names(), {})(**arguments)


def _argument(value: Any, parameter: Any) -> Any:
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if isinstance(value, Tensor):
        storage = torch.tensor([], dtype=value.dtype).set_(value.untyped_storage())
        return Pointer(storage, torch.tensor(value.storage_offset()))
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)  # a launch rounds numbers to it
    return value if parameter.is_constexpr else torch.tensor(value, dtype=torch.int32)


@contextmanager
def emulated(seed: int = 0) -> Iterator[list[str]]:
    """Launches run here; gives the names of those that did."""
    ran: list[str] = []

    def run_here(call: Call) -> None:
        ran.append(call.name)
        run(call, seed)

    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with (
        mock.patch.object(Call, "run", run_here),
        mock.patch.object(torch, "empty", poisoned),
        mock.patch.object(_blocks, "reads_maps", lambda device, block: True),  # plans have bitmaps, as on a GPU
    ):
        yield ran
