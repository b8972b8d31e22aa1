"""Interpreter of Gluon kernels for Hopper on the CPU, from their own source: no other interpreter of Gluon exists.

`run` executes the launch of a `Call` on CPU tensors, also that of a small Triton kernel beside them. Under `launching`
all launches are executed this way. Functions of the kernel become plain Python by replacing `gl`, `mbarrier` and others
with the definitions below: tensors are torch's, layouts are ignored, and shared memory is a tensor in the order of its
swizzle atoms.

Asynchronous operations of Hopper happen at some later moment here: TMA loads in any order, products of a warpgroup in
issue order, each reading shared memory as it is then. Partitions are threads, one of which runs at a time; a seed
selects the one that continues at a barrier. Errors: a deadlock, an accumulator used before its product was waited for,
more arrivals than a phase takes, products or loads left over at the end.

Not modeled: visibility between proxies and warps (fences, barriers of a partition), and registers.
"""

from __future__ import annotations

import builtins
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction, JITFunction

from interlace.attention import _blocks
from interlace.kernels import (
    bitfield_gluon_backward,
    bitfield_gluon_forward,
    bitfield_gluon_producer,
    bitfield_gluon_query_gradient,
)
from interlace.kernels.bitfield_launch import Call

KERNELS = (
    bitfield_gluon_producer,
    bitfield_gluon_forward,
    bitfield_gluon_backward,
    bitfield_gluon_query_gradient,
)
PANEL = 64  # columns of 16 bits in a swizzle atom


class Broken(AssertionError):
    """A bug in the kernel."""


# ---------------------------------------------------------------------- memory


class Pointer:
    """Pointer into a flat tensor; offset: a number or a tensor of them."""

    def __init__(self, tensor: Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + other)


def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
    at = torch.as_tensor(pointer.offset)
    mask = torch.as_tensor(mask).expand(at.shape)
    if bool((mask & ((at < 0) | (at >= pointer.tensor.numel()))).any()):
        raise Broken("a load outside of its tensor")
    if not bool(mask.any()):
        return torch.full(at.shape, other, dtype=pointer.tensor.dtype)
    return torch.where(mask, pointer.tensor[torch.where(mask, at, 0)], torch.tensor(other, dtype=pointer.tensor.dtype))


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, mask, value = torch.broadcast_tensors(
        torch.as_tensor(pointer.offset), torch.as_tensor(mask), torch.as_tensor(value)
    )
    pointer.tensor[at[mask]] = value[mask].to(pointer.tensor.dtype)


class Shared:
    """Shared memory, by panels of 64 columns. `rows`: of a part of the tile."""

    def __init__(self, memory: Tensor, shape: Sequence[int], rows: slice = slice(None), swapped: bool = False) -> None:
        self.memory, self.shape, self.rows, self.swapped = memory, list(shape), rows, swapped
        self.dtype = memory.dtype

    def index(self, at: Any) -> Shared:
        size = self.memory.numel() // self.shape[0]
        if not 0 <= at < self.shape[0]:
            raise Broken("an index outside of shared memory")
        return Shared(self.memory[int(at) * size : (int(at) + 1) * size], self.shape[1:])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory, shape)

    def permute(self, order: Sequence[int]) -> Shared:
        assert tuple(order) == (1, 0)
        return Shared(self.memory, self.shape, self.rows, not self.swapped)

    def _tile(self) -> Tensor:
        """A view [panels, rows, columns of a panel]."""
        rows, columns = [1, *self.shape][-2:]
        return self.memory.view(-1, rows, min(columns, PANEL))[:, self.rows]

    def load(self, layout: Any = None) -> Tensor:
        tile = torch.cat(list(self._tile()), 1)
        if len(self.shape) == 1:
            return tile[0]
        return tile.mT if self.swapped else tile

    def store(self, value: Tensor) -> None:
        tile = self._tile()
        for panel, part in zip(tile, value.split(tile.shape[2], -1)):
            panel.copy_(part)


class Descriptor:
    def __init__(self, given: Any) -> None:
        self.dtype, self.layout = given.base.dtype, given.layout
        self.tensor = torch.as_strided(given.base.detach(), given.shape, given.strides, given.base.storage_offset())
        size = given.base.element_size() * torch.Size(given.block_shape).numel()
        self.block_type = types.SimpleNamespace(shape=list(given.block_shape), nbytes=size)

    def box(self, *at: int) -> Tensor:
        """[rows, columns], or [columns]; zeros beyond the tensor."""
        part = self.tensor[tuple(slice(first, first + size) for first, size in zip(at, self.block_type.shape))]
        box = torch.zeros(self.block_type.shape, dtype=self.dtype)
        box[tuple(slice(size) for size in part.shape)] = part
        return box.view(self.block_type.shape[-2:])


# ---------------------------------------------------------------------- time


class Barrier:
    def __init__(self) -> None:
        self.count = self.phase = self.arrived = self.expected = 0

    def advance(self) -> None:
        if self.arrived > self.count:
            raise Broken("more arrivals than the phase takes")
        if self.arrived == self.count and self.expected == 0:
            self.phase, self.arrived = self.phase + 1, 0


class Barriers:
    def __init__(self, barriers: list[Barrier]) -> None:
        self.barriers = barriers

    def index(self, at: Any) -> Barriers:
        return Barriers([self.barriers[int(at)]])


class Accumulator:
    """Result of an asynchronous product."""

    def __init__(self) -> None:
        self.value: Tensor | None = None


class Machine:
    """Runs one program at a time: its partitions, and operations in flight."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.slow = self.random.choice(["load", "product", 0, 1, 2])  # it rarely gets scheduled
        self.loads: list[Callable[[], None]] = []
        self.products: dict[int, list[Callable[[], None]]] = {}  # by partition
        self.failure: BaseException | None = None
        self.ready: dict[int, Callable[[], bool]] = {}  # waiting partitions and their conditions
        self.turns: dict[int, threading.Semaphore] = {}
        self.me = threading.local()

    def until(self, ready: Callable[[], bool]) -> None:
        """Lets others run; returns when `ready`, or raises if no partition is ready."""
        me = self.me.partition
        self.ready[me] = ready
        self._pass_on()
        self.turns[me].acquire()
        if self.failure:
            raise SystemExit

    def _pass_on(self) -> None:
        """Completes an operation in flight or resumes a partition."""
        try:
            while self.ready and not self.failure:
                can = [("load", load) for load in self.loads]
                can += [("product", queue[0]) for queue in self.products.values() if queue]
                can += [(partition, partition) for partition, ready in self.ready.items() if ready()]
                if not can:
                    raise Broken("nobody can go on")
                quick = [each for each in can if each[0] != self.slow or self.random.random() < 0.02]
                _, chosen = self.random.choice(quick or can)
                if isinstance(chosen, int):
                    del self.ready[chosen]
                    self.turns[chosen].release()
                    return
                for queue in (self.loads, *self.products.values()):
                    if chosen in queue:
                        queue.remove(chosen)
                chosen()
        except BaseException as error:
            self.failure = error
        if self.failure:
            for turn in self.turns.values():
                turn.release()

    def warp_specialize(self, partitions: Sequence[tuple[Callable[..., None], Sequence[Any]]], *_: Any) -> None:
        def run(partition: int) -> None:
            self.me.partition = partition
            self.turns[partition].acquire()
            try:
                if not self.failure:
                    function, arguments = partitions[partition]
                    function(*arguments)
            except SystemExit:
                return
            except BaseException as error:
                self.failure = self.failure or error
            self._pass_on()

        self.turns = {partition: threading.Semaphore(0) for partition in range(len(partitions))}
        self.products = {partition: [] for partition in self.turns}
        self.ready = {partition: lambda: True for partition in self.turns}
        threads = [threading.Thread(target=run, args=[partition]) for partition in self.turns]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        if self.loads or any(self.products.values()):
            raise Broken("the program ends before what it started")

    # mbarrier, TMA and wgmma

    def init(self, barrier: Barriers, count: int) -> None:
        barrier.barriers[0].count = count

    def expect(self, barrier: Barriers, size: int) -> None:
        barrier.barriers[0].arrived += 1
        barrier.barriers[0].expected += size
        barrier.barriers[0].advance()

    def arrive(self, barrier: Barriers, count: int) -> None:
        barrier.barriers[0].arrived += count
        barrier.barriers[0].advance()
        self.until(lambda: True)

    def wait(self, barrier: Barriers, parity: Any, pred: Any = True) -> None:
        self.until(lambda: not pred or barrier.barriers[0].phase & 1 != int(parity))

    def tma_load(self, descriptor: Descriptor, at: Sequence[Any], barrier: Barriers, to: Shared) -> None:
        def happens() -> None:
            Shared(to.memory, descriptor.block_type.shape).store(descriptor.box(*at))
            barrier.barriers[0].expected -= descriptor.block_type.nbytes
            barrier.barriers[0].advance()

        at = [int(x) for x in at]
        self.loads.append(happens)

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Tensor | Accumulator, use_acc: bool = True, is_async: bool = False
    ) -> Accumulator:
        def happens() -> None:
            left = a.load() if isinstance(a, Shared) else a
            product = left.float() @ b.load().float()
            before = acc.value if isinstance(acc, Accumulator) else acc  # products are in order
            result.value = product + before if use_acc else product

        assert is_async
        result = Accumulator()
        self.products[self.me.partition].append(happens)
        return result

    def warpgroup_mma_wait(self, outstanding: int, deps: Sequence[Any]) -> Any:
        queue = self.products[self.me.partition]
        self.until(lambda: len(queue) <= outstanding)
        values = [x.value if isinstance(x, Accumulator) else x for x in deps]
        if any(value is None for value in values):
            raise Broken("an accumulator is used before its product was waited for")
        return values[0] if len(values) == 1 else tuple(values)

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared | Barriers:
        if layout == "barrier":
            return Barriers([Barrier() for _ in range(shape[0])])
        return Shared(torch.full([torch.Size(shape).numel()], torch.nan, dtype=dtype), shape)


# ---------------------------------------------------------------------- language


def _minimum(a: Any, b: Any) -> Tensor:
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def _maximum(a: Any, b: Any) -> Tensor:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), a, b)


def _reduce(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    first, *others = x.unbind(axis)
    for other in others:
        first = combine(first, other)
    return first


def _assembly(text: str, constraints: str, arguments: Sequence[Tensor], **_: Any) -> Any:
    """Inline assembly used by kernels: packing and unpacking pairs of 16 bits."""
    kind = _["dtype"][0] if isinstance(_["dtype"], tuple) else {"b": torch.bfloat16, "f": torch.float16}[text[7]]
    if text.startswith("cvt.rn.") and text.endswith("x2.f32 $0, $2, $1;"):
        low, high = (x.to(kind).view(torch.int16).int() for x in arguments)
        return high << 16 | low & 0xFFFF
    assert text == "mov.b32 {$0, $1}, $2;"
    (pair,) = arguments
    return tuple((x << 16 >> 16).to(torch.int16).view(kind) for x in (pair, pair >> 16))


def language(machine: Machine, program: int) -> types.SimpleNamespace:
    """Replacement of `gl` and `tl`."""

    def ignored(*_: Any, **__: Any) -> None:
        return None

    layouts = "NVMMADistributedLayout SliceLayout DotOperandLayout BlockedLayout NVMMASharedLayout".split()
    layouts.append("SwizzledSharedLayout")
    return types.SimpleNamespace(
        **dict.fromkeys(layouts, ignored), static_assert=ignored, constexpr=lambda value: value,
        float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16, int32=torch.int32, int64=torch.int64,
        program_id=lambda axis: torch.tensor(program, dtype=torch.int32), load=load, store=store,
        arange=lambda start, stop, layout=None: torch.arange(start, stop, dtype=torch.int32),
        cdiv=lambda a, b: -(-a // b),
        zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        convert_layout=lambda x, layout: x, where=_where, minimum=_minimum, maximum=_maximum,
        max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis), sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2, log2=torch.log2, reduce=_reduce, static_range=builtins.range,
        split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack([a, b], -1), inline_asm_elementwise=_assembly,
        allocate_shared_memory=machine.allocate, warp_specialize=machine.warp_specialize,
    )  # fmt: skip


def interpret(kernel: JITFunction, machine: Machine, program: int, **others: str) -> Callable[..., None]:
    """The kernel as a Python function. others: sources that replace functions of the same name."""
    gl = language(machine, program)
    names = dict(
        gl=gl, tl=gl, INTERPRETED=True, tma_load=machine.tma_load, fence_async_shared=lambda: None,
        warpgroup_mma=machine.warpgroup_mma, warpgroup_mma_wait=machine.warpgroup_mma_wait,
        mbarrier=types.SimpleNamespace(
            init=machine.init, expect=machine.expect, arrive=machine.arrive, wait=machine.wait,
            MBarrierLayout=lambda: "barrier",
        ),
        reinterpret=lambda memory, dtype, shape, layout: Shared(memory.memory.view(dtype), shape),
    )  # fmt: skip
    modules: dict[str, dict[str, Any]] = {}

    def module(name: str) -> dict[str, Any]:
        if name not in modules:
            modules[name] = result = {"__builtins__": builtins}
            here = [key for key in others if getattr(vars(sys.modules[name]).get(key), "__module__", None) == name]
            for key in here:
                exec(others[key], result)
            for key, value in vars(sys.modules[name]).items():
                if key not in here:
                    result[key] = names.get(key, plain(value)) if not key.startswith("__") else value
        return modules[name]

    def plain(value: Any) -> Any:
        if isinstance(value, (JITFunction, ConstexprFunction)):
            of = value.fn
            if of.__name__ in others:
                return module(of.__module__)[of.__name__]
            return types.FunctionType(of.__code__, module(of.__module__), of.__name__, of.__defaults__)
        return value.value if isinstance(value, constexpr) else value

    result: Callable[..., None] = plain(kernel)
    return result


def run(call: Any, seed: int = 0, **others: str) -> None:
    """Runs all programs of a `Call`, one after the other."""
    for program in range(call.programs):
        machine = Machine(seed + program)
        kernel = interpret(call.kernel, machine, program, **others)
        kernel(**{parameter.name: _argument(parameter, call.arguments) for parameter in call.kernel.params})


@contextmanager
def launching(seed: int = 0, **others: str) -> Iterator[list[str]]:
    """Context that interprets launches on memory filled with NaN, with bitmaps in plans; yields the names of
    launches."""
    ran: list[str] = []
    empty = torch.empty

    def run_here(call: Call) -> None:
        ran.append(call.name)
        run(call, seed, **others)

    def poisoned(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with (
        mock.patch.object(Call, "run", run_here),
        mock.patch.object(torch, "empty", poisoned),
        with_bitmaps(),
    ):
        yield ran


def with_bitmaps() -> Any:
    """Context in which plans on the CPU have bitmaps."""
    return mock.patch.object(_blocks, "reads_maps", lambda device, block: True)


def edited(name: str, *changes: tuple[str, str]) -> dict[str, str]:
    """A function of the kernels with part of its text replaced, for `run` and `launching`."""
    source = inspect.getsource(next(vars(module)[name] for module in KERNELS if name in vars(module)).fn)
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return {name: source[source.index("def ") :]}


def _argument(parameter: Any, arguments: dict[str, Any]) -> Any:
    value = arguments[parameter.name]
    if value is None:
        return None
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if isinstance(value, Tensor):
        return Pointer(torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()), value.storage_offset())
    return value if parameter.is_constexpr else torch.tensor(value)
