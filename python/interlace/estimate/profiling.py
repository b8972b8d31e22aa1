"""Times each kind of layer of a model on this machine, at a few sizes, in seconds: the measurements of `FittedCosts`.

One of several identical layers is timed, with its own random weights. So the model may be on the meta device, and of
any size. The first and the last layer of a module include the modules before and after the layers. The time that a
stage spends once, independent of its number of layers (attention plan, rotary angles, start of autograd), is separated
by timing three identical layers and one of them, or the first two layers together and each alone. Collation is timed
separately.

Rounds over all layers and sizes repeat until the budget is used up, so a temporary slowdown of the machine affects all
equally. The result is the median of the rounds; the first is a warm-up. Tensor parallelism is timed on one rank's
pieces with a no-op transport: transfers are only counted, and their cost follows from the links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from interlace import _device
from interlace.comm.transports.silent import SilentTransport
from interlace.costs.fitted import FREE, LinkModel
from interlace.costs.profile import time_layer
from interlace.costs.step import NOTHING, PARTS, Fit, FittedCosts, LaneTraffic, LayerFit, ModuleFits, fit
from interlace.estimate.sample_sizes import key_bytes_of
from interlace.model.multimodal import LANGUAGE_MODEL
from interlace.model.probe.stand_in import kind_of
from interlace.parallel import Ranks
from interlace.plan import backward_needs, trainable_before
from interlace.run.lanes import cut, how_cut
from interlace.run.tables.batch import collated
from interlace.run.tables.sizes import size_of

if TYPE_CHECKING:
    from interlace.model import MultimodalModel, Sample

Average = Callable[..., Any]
"""np.median, or another function of an array and an axis."""
ROUNDS = 7  # at most, after the warm-up


@dataclass(frozen=True)
class ProfileOptions:
    """Options for timing the layers of a model.

    largest: samples of the largest chunk (default: all). tps: module -> the tensor-parallel degrees to time (default:
    1). device, autocast, sequence_parallel: as in `parallelize`.
    """

    largest: int | None = None
    tps: Mapping[str, Collection[int]] = field(default_factory=dict)
    device: torch.device | str = "cpu"
    autocast: torch.dtype | None = None
    sequence_parallel: bool = True


ON_CPU = ProfileOptions()


def profile_costs(
    mllm: MultimodalModel,
    samples: Sequence[Sample],
    options: ProfileOptions = ON_CPU,
    *,
    budget: float = 4.0,
    optimizer: LinkModel = FREE,
) -> FittedCosts:
    """Costs of the layers of `mllm`, with its current frozen flags.

    samples: of the data, decoded. budget: seconds; no round starts that would end later. The warm-up and one round
    always run. optimizer: as in `FittedCosts`.

    Raises ValueError for no sample, and for a module that a tp cannot cut. A module without items in any sample costs
    nothing.
    """
    begin = time.perf_counter()
    profile = Profile(mllm, samples, options)
    profile.round()  # warm-up: allocators, caches and choices of libraries at their first call
    profile.forget()
    spent, rounds = 0.0, 0
    while rounds < ROUNDS and (not rounds or time.perf_counter() - begin + spent / rounds < budget):
        spent, rounds = spent + profile.round(), rounds + 1
    return profile.costs(optimizer=optimizer)


class Profile:
    """The layers of a model, timed in rounds. To compare settings (numbers of threads, busy neighbours), alternate
    their rounds: a temporary slowdown of the machine then affects all equally.

    Arguments and errors as in `profile_costs`.
    """

    def __init__(self, mllm: MultimodalModel, samples: Sequence[Sample], options: ProfileOptions = ON_CPU) -> None:
        if not samples:
            raise ValueError("no samples to profile: pass some of the data")
        self.device = torch.device(options.device)
        self.rounds: dict[Hashable, list[float]] = {}
        """Setting -> seconds of each of its rounds."""
        self._threads: dict[Hashable, int] = {}
        self._modules: dict[str, _Module] = {}
        elements = options.autocast or next(mllm.language_model.parameters()).dtype
        self._key_bytes = key_bytes_of(mllm, itemsize=elements.itemsize)
        order = mllm.modules_order()
        before = trainable_before({n: any(x.trainable for x in mllm.layers(n)) for n in order}, mllm.edges())
        with self._keep_random_state():
            for name in order:
                batches = _batches(mllm, name, samples, options.largest or len(samples))
                degrees = sorted({1, *options.tps.get(name, ())})
                self._modules[name] = _Module(mllm, name, batches, degrees, before[name], options)
        _keep_memory(self.device)

    def _keep_random_state(self) -> AbstractContextManager[None]:
        """Context that leaves the state of random generators unchanged."""
        return torch.random.fork_rng([self.device] if _device.on_gpu(self.device) else [], device_type=_device.KIND)

    def round(self, setting: Hashable = None, *, lanes: bool = True) -> float:
        """Time all layers at all sizes once with the current process settings; returns the seconds of the round.

        lanes: whether to time tensor-parallel pieces, too.
        """
        start = time.perf_counter()
        with self._keep_random_state():
            for module in self._modules.values():
                module.time_all(setting, lanes)
        seconds = time.perf_counter() - start
        self.rounds.setdefault(setting, []).append(seconds)
        self._threads[setting] = torch.get_num_threads()
        return seconds

    def forget(self) -> None:
        """Drop all times so far as warm-up."""
        self.rounds = {}
        for module in self._modules.values():
            module.forget()

    def costs(
        self, setting: Hashable = None, *, optimizer: LinkModel = FREE, of_rounds: Average = np.median
    ) -> FittedCosts:
        """Costs from a setting's rounds. of_rounds: np.median, or np.min to exclude disturbance by other processes."""
        module = torch.get_device_module(self.device)
        kind = module.get_device_name(self.device) if _device.on_gpu(self.device) else "CPU"
        rounds = len(self.rounds[setting])
        count = f"{rounds} round{'s' * (rounds != 1)}"
        origin = f"timed on this machine ({kind}, {self._threads[setting]} threads, {count})"
        fits = {
            name: replace(module.fits(setting, of_rounds), key_bytes=self._key_bytes[name])
            for name, module in self._modules.items()
        }
        return FittedCosts(fits, optimizer, origin)


def _keep_memory(device: torch.device) -> None:
    """Make the C library keep freed memory, as it does during training. Otherwise all memory of a slice would be
    returned to the system with its graph, and allocating it again would take a third of a forward."""
    if device.type == "cpu":  # glibc keeps twice as much as was ever freed at once, up to 64 MiB
        torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)


def _batches(mllm: MultimodalModel, module: str, samples: Sequence[Sample], largest: int) -> list[list[Sample]]:
    """A few chunks of `module` of different sizes: the shortest sample; the longest sample; a quarter and all of the
    largest chunk with samples of all lengths; half of it with the longest samples."""
    having = [sample for sample in samples if module == LANGUAGE_MODEL or sample.media.get(module)]
    having.sort(key=lambda sample: size_of(mllm, module, [sample]))
    if not having:
        return []
    largest = min(largest, len(having))

    def spread(count: int) -> tuple[int, ...]:
        return tuple(sorted({(2 * i + 1) * len(having) // (2 * count) for i in range(count)}))

    half = -(-largest // 2)
    longest = tuple(range(len(having) - half, len(having)))
    every = len(having) - 1
    chosen = dict.fromkeys([(0,), (every,), spread(-(-largest // 4)), longest, spread(largest)])
    return [[having[i] for i in places] for places in chosen]


class _Times(NamedTuple):
    """Seconds of a forward, and of backwards: for all gradients, for the input alone, for weights alone."""

    forward: float
    whole: float
    inputs: float
    weights: float


@dataclass
class _Slice:
    """Layers [start, stop) of a module on one rank of a lane, with its times."""

    start: int
    stop: int
    part: nn.Module
    parameters: list[Tensor]
    transport: SilentTransport | None
    wanted: tuple[bool, bool, bool]
    """Whether some layer of its kind computes gradients of its input alone, of both, of its weights alone."""
    times: dict[Hashable, list[list[_Times]]] = field(default_factory=dict)
    """Setting -> the rounds of each batch."""
    traffic: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    """Messages and bytes per row of a forward, and of a backward, at the largest size so far."""
    rows: float = 0.0


class _Module:
    """The timed slices of one module."""

    def __init__(
        self,
        mllm: MultimodalModel,
        name: str,
        batches: Sequence[Sequence[Sample]],
        degrees: Sequence[int],
        before: bool,
        options: ProfileOptions,
    ) -> None:
        self.mllm, self.name, self.batches, self.options = mllm, name, batches, options
        self.device = torch.device(options.device)
        self.sizes = [size_of(mllm, name, batch) for batch in batches]
        self.trainable = tuple(bool(layer.trainable) for layer in mllm.layers(name))
        self.kinds = self._kinds()
        weight, inputs = backward_needs([not flag for flag in self.trainable], trainable_before=before)
        self._needs = list(zip((inputs & ~weight).tolist(), (inputs & weight).tolist(), (weight & ~inputs).tolist()))
        self.collating: dict[Hashable, list[list[float]]] = {}
        self.slices = {tp: self._slices(tp) if batches else {} for tp in degrees}

    def _kinds(self) -> tuple[str, ...]:
        """Name of the kind of each layer, after the first layer of the kind."""
        mllm, name, layers = self.mllm, self.name, self.mllm.layer_list(self.name)
        root = mllm.language_model if name == LANGUAGE_MODEL else mllm.encoders[name].module
        count, known, names = len(layers), dict[Any, str](), []
        for i, layer in enumerate(layers):
            trained = tuple(parameter.requires_grad for parameter in layer.parameters())
            key = (kind_of(root, layer, i, count), trained, i == 0, i == count - 1)
            names.append(known.setdefault(key, "first" if i == 0 else "last" if i == count - 1 else f"like {i}"))
        return tuple(names)

    # -- timing --------------------------------------------------------------------------------------------------

    def _slices(self, tp: int) -> dict[tuple[int, int], _Slice]:
        """One layer of each kind, and the slices that give the one-time costs of a stage."""
        count = len(self.kinds)
        ranges = {(self.kinds.index(kind), self.kinds.index(kind) + 1) for kind in self.kinds}
        ranges |= {self._alike} if self._alike else {(0, 2), (1, 2)} if count > 1 else set()
        return {each: self._slice(*each, tp) for each in sorted(ranges)}

    @property
    def _alike(self) -> tuple[int, int] | None:
        """Three consecutive layers of one kind; None if there are none."""
        kinds = self.kinds
        for i in range(len(kinds) - 2):
            if kinds[i] == kinds[i + 1] == kinds[i + 2] and kinds.index(kinds[i]) == i:
                return i, i + 3
        return None

    def _slice(self, start: int, stop: int, tp: int) -> _Slice:
        part = self.mllm.slice(self.name, start, stop, copy=True, checkpointing="none")
        transport = None
        if tp > 1:
            whole = self.mllm.slice(self.name, 0, len(self.kinds))
            how = how_cut(self.mllm, self.name, whole, tp, sequence_parallel=self.options.sequence_parallel)
            ranks = Ranks.at(0, tp)
            cut(part, ranks, rows=how.rows)
            transport = SilentTransport(tp, device=self.device, computes=True)
            ranks.connect(transport)
        _give_weights(part, self.device)
        part.train()
        parameters: list[Tensor] = [p for p in part.parameters() if p.requires_grad]
        of_kinds = [self._needs[i] for i, kind in enumerate(self.kinds) if kind in self.kinds[start:stop]]
        one, both, alone = (any(flags) for flags in zip(*of_kinds, strict=True))
        return _Slice(start, stop, part, parameters, transport, (one, both, alone))

    def time_all(self, setting: Hashable, lanes: bool) -> None:
        """A round over all sizes."""
        collating = self.collating.setdefault(setting, [[] for _ in self.batches])
        for place, batch in enumerate(self.batches):
            begin = time.perf_counter()
            inputs = collated(self.mllm, self.name, batch, self.device, decode=True)
            collating[place].append(time.perf_counter() - begin)
            for tp, slices in self.slices.items():
                if lanes or tp == 1:
                    self._time(slices, setting, place, inputs, batch)

    def _time(
        self,
        slices: Mapping[tuple[int, int], _Slice],
        setting: Hashable,
        place: int,
        inputs: dict[str, Any],
        batch: Sequence[Sample],
    ) -> None:
        hidden = self._features(batch)
        given = hidden
        for each in slices.values():
            value = given if each.start == 0 else hidden
            times, output = self._parts(each, self._run(each, inputs, batch), value, place)
            each.times.setdefault(setting, [[] for _ in self.batches])[place].append(times)
            if (each.start, each.stop) == (0, 1):
                hidden = output

    def _run(self, each: _Slice, inputs: dict[str, Any], batch: Sequence[Sample]) -> Callable[[Tensor], Tensor]:
        """The slice as a function of its hidden state; with the first layer, of all features that it reads."""
        counts, autocast = self._counts(batch), self.options.autocast

        def run(value: Tensor) -> Tensor:
            given, hidden = inputs, None if each.start == 0 else value
            if each.start == 0 and counts:
                given = {**inputs, "features": dict(zip(counts, value.split(list(counts.values())), strict=True))}
            with nullcontext() if autocast is None else torch.autocast(self.device.type, dtype=autocast):
                out: Tensor = each.part(given, hidden)
            return out

        return run

    def _counts(self, batch: Sequence[Sample]) -> dict[str, int]:
        """Encoder -> rows of its features that a chunk of the language model reads."""
        if self.name != LANGUAGE_MODEL:
            return {}
        counts = {n: sum(i.tokens for sample in batch for i in sample.media.get(n, ())) for n in self.mllm.encoders}
        return {name: count for name, count in counts.items() if count}

    def _features(self, batch: Sequence[Sample]) -> Tensor:
        """Placeholder input of the first slice: features, or integers, which have no gradient."""
        count = sum(self._counts(batch).values())
        if not count:
            return torch.zeros(1, dtype=torch.int64, device=self.device)
        language_model: Any = self.mllm.language_model
        return torch.randn(count, language_model.get_input_embeddings().weight.shape[1], device=self.device)

    def _parts(self, each: _Slice, run: Callable[[Tensor], Tensor], value: Tensor, place: int) -> tuple[_Times, Tensor]:
        """Times of a slice, for the gradients that layers of its kind compute, and its output."""
        one, both, alone = each.wanted
        inputs = [value] if value.is_floating_point() and (one or both) else []
        weights, grad, only = each.parameters, 0.0, 0.0
        if each.transport is not None:
            self._count(each, run, value, inputs, self.sizes[place].rows)
        if not (one or both or alone):
            with torch.no_grad():
                forward, _, output = time_layer(run, value, [], [])
            return _Times(forward, 0.0, 0.0, 0.0), output
        forward, whole, output = time_layer(run, value, inputs, weights, accumulate=True)
        if inputs:
            grad = time_layer(run, value, inputs, [], frozen=weights, accumulate=True)[1] if weights else whole
        if alone:
            only = time_layer(run, value, [], weights, accumulate=True)[1] if inputs else whole
        return _Times(forward, whole, grad, only), output

    def _count(
        self, each: _Slice, run: Callable[[Tensor], Tensor], value: Tensor, inputs: list[Tensor], rows: float
    ) -> None:
        """Count messages and bytes to other ranks in a forward and a backward, if the size is the largest so far."""
        transport = each.transport
        if transport is None or rows <= each.rows:
            return
        each.rows, transport.messages, transport.bytes = rows, 0, 0
        with torch.enable_grad():
            output = run(value.detach().requires_grad_(bool(inputs)))
        there = transport.messages, transport.bytes / rows
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        back = transport.messages - there[0], transport.bytes / rows - there[1]
        each.traffic = np.array([*there, *back])

    def forget(self) -> None:
        """Drop all times so far as warm-up."""
        self.collating = {}
        for slices in self.slices.values():
            for each in slices.values():
                each.times = {}

    # -- fits ----------------------------------------------------------------------------------------------------

    def fits(self, setting: Hashable, of_rounds: Average) -> ModuleFits:
        """The fits of all times of a setting."""
        if not self.batches:
            nothing = LayerFit(NOTHING, NOTHING, NOTHING, NOTHING)
            kinds = {tp: dict.fromkeys(self.kinds, nothing) for tp in self.slices}
            return ModuleFits(self.kinds, self.trainable, kinds)
        timed = {
            tp: slices for tp, slices in self.slices.items() if all(setting in each.times for each in slices.values())
        }
        fits = {tp: self._fits(slices, setting, of_rounds) for tp, slices in timed.items()}
        collate = fit(self.sizes, [float(of_rounds(seconds)) for seconds in self.collating[setting]])
        kinds, traffic = {tp: each[0] for tp, each in fits.items()}, {tp: each[2] for tp, each in fits.items()}
        return ModuleFits(self.kinds, self.trainable, kinds, collate, *fits[1][1], traffic)

    def _fits(
        self, slices: Mapping[tuple[int, int], _Slice], setting: Hashable, of_rounds: Average
    ) -> tuple[dict[str, LayerFit], tuple[Fit, Fit], LaneTraffic]:
        times = {
            key: np.array([of_rounds(batch, axis=0) for batch in each.times[setting]]) for key, each in slices.items()
        }
        once = self._once(times)
        traffic = {key: each.traffic[None] for key, each in slices.items()}
        constant_traffic = self._once(traffic, [0, 1, 2, 3])
        kinds = {}
        for kind in dict.fromkeys(self.kinds):
            key = (self.kinds.index(kind), self.kinds.index(kind) + 1)
            own = np.maximum(times[key] - once, 0.0) * (times[key] > 0)
            per_layer = np.maximum(traffic[key] - constant_traffic, 0.0)
            if self._alike and key[0] == self._alike[0]:  # more accurate than a difference of differences
                own = np.maximum(times[self._alike] - times[key], 0.0) / 2
            forward, whole, inputs, weights = own.T
            parts = dict(zip(PARTS, (forward, inputs, np.maximum(whole - inputs, 0.0), weights), strict=True))
            fits = {
                part: fit(self.sizes, seconds, scale=times[key][:, int(part != PARTS[0])])
                for part, seconds in parts.items()
            }
            kinds[kind] = LayerFit(**fits, traffic=LaneTraffic(*per_layer[0].tolist()))
        ahead, behind = (fit(self.sizes, once[:, part], scale=times[0, 1][:, part]) for part in (0, 1))
        return kinds, (ahead, behind), LaneTraffic(*constant_traffic[0].tolist())

    def _once(
        self, times: Mapping[tuple[int, int], NDArray[np.float64]], columns: Sequence[int] = (0, 1, 1, 1)
    ) -> NDArray[np.float64]:
        """[sizes, parts of _Times]: time of a stage independent of its number of layers. The start of a backward costs
        the same for all its gradients."""
        constant = np.zeros_like(times[0, 1])
        if self._alike:
            first = (self._alike[0], self._alike[0] + 1)
            constant = times[first] - (times[self._alike] - times[first]) / 2
        elif len(self.kinds) > 1:
            constant = times[0, 1] + times[1, 2] - times[0, 2]
        return np.maximum(constant[:, list(columns)], 0.0)


def _give_weights(part: nn.Module, device: torch.device) -> None:
    """Replace all parameters by new random ones, and buffers without values by zeros."""
    replacements: dict[
        int, tuple[nn.Parameter, nn.Parameter]
    ] = {}  # id -> the model's (kept so that its id is not reused), own
    for module in part.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replacements:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                values = values.normal_(0.0, 0.02) if values.is_floating_point() else values.zero_()
                replacements[id(parameter)] = parameter, nn.Parameter(values, parameter.requires_grad)
            module._parameters[key] = replacements[id(parameter)][1]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
