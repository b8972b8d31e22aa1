"""Qwen2.5-Vision before Llama 3 on drawn samples: seconds of a sample, steps as tables and schedules, for Entrain.

Work is counted from the published shapes of the models. Their speed on the paper's A40s is not printed. Three rates
replace it (`rates`), fitted together with the lengths of the data to the dissertation's figures (bench/length_fit.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench import baselines
from bench.baselines import ENCODER, LLM
from bench.lengths import draw
from bench.sample_order import reorder_samples
from interlace import balance, plan
from interlace.schedule import Op, Schedule, StageGraph, StepTable, one_f_one_b
from interlace.simulate import Timeline, simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TP = 2  # table 4.1
PEAK = 149.7e12  # FLOP/s of an A40 in bf16
EFFICIENCY = 0.1765  # of the encoder; fitted (bench.length_fit)
SPEED = {"1b": 0.915, "3b": 1.41}  # of the language models, relative to the encoder's; fitted too
SAMPLES = 20_000  # that represent a data set
DATASETS = {"SynthChartNet": "synthchartnet", "ChartQA": "chartqa", "CocoQA": "cocoqa", "LLaVA-150k": "llava_150k"}


@dataclass(frozen=True)
class Shape:
    """A stack of equal transformer layers with a gated MLP. kv: width of keys and values. head: width of the logits."""

    layers: int
    hidden: int
    intermediate: int
    kv: int
    head: int = 0

    @property
    def layer_parameters(self) -> int:
        return 2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.hidden * self.head


QWEN_VISION = Shape(32, 1280, 3420, 1280)
WINDOW, FULL_LAYERS = 64, 4  # patches of a window of 112 x 112; layers that attend to the whole picture
LLAMA = {"1b": Shape(16, 2048, 8192, 512, 128256), "3b": Shape(28, 3072, 8192, 1024, 128256)}


@dataclass(frozen=True, eq=False)
class Work:
    """Of each sample: FLOPs of a forward of the encoder and of the language model, and the tokens of each."""

    vision: Floats
    llm: Floats
    patches: Ints
    tokens: Ints


@functools.lru_cache(maxsize=32)
def work(dataset: str, model: str, n: int, seed: int) -> Work:
    """Work of `n` samples of a data set; model: "1b" or "3b"."""
    drawn = draw(DATASETS[dataset], n, seed=seed)
    patches, tokens = drawn.items["vision"] * drawn.tokens["vision"], drawn.total
    return Work(vision_flops(patches), llm_flops(tokens, model), patches, tokens)


def vision_flops(patches: NDArray[np.number]) -> Floats:
    """FLOPs of a forward of pictures with these numbers of patches."""
    own = QWEN_VISION
    attention = own.layers * np.minimum(patches, WINDOW) + FULL_LAYERS * np.maximum(patches - WINDOW, 0)
    return 2.0 * own.layers * own.layer_parameters * patches + 4.0 * own.hidden * patches * attention


def llm_flops(tokens: NDArray[np.number], model: str) -> Floats:
    """FLOPs of a forward of sequences with these numbers of tokens."""
    shape = LLAMA[model]
    return 2.0 * shape.parameters * tokens + 2.0 * shape.layers * shape.hidden * tokens**2  # half of it is masked


@functools.cache
def rates() -> dict[str, float]:
    """FLOP/s of a stage by module."""
    encoder = TP * PEAK * EFFICIENCY
    return {ENCODER: encoder, **{model: encoder * part for model, part in SPEED.items()}}


def seconds(own: Work, model: str) -> tuple[Floats, Floats]:
    """Forward seconds of each sample in the whole encoder and in the whole language model."""
    return own.vision / rates()[ENCODER], own.llm / rates()[model]


# ---------------------------------------------------------------------- assignment of samples


@dataclass(frozen=True, eq=False)
class Replica:
    """Work of one replica, chunk by chunk in the order of execution.

    samples: indices in the batch; other fields index `samples`. encoder: samples of each encoder chunk. microbatch:
    of each of these; a deferred chunk belongs to that of the chunk before it. slot: the LLM's microbatch of a sample.
    """

    samples: Ints
    encoder: list[Ints]
    microbatch: list[int]
    slot: Ints

    def forward(self, vision: Floats, llm: Floats) -> tuple[Floats, Floats]:
        """Seconds of a forward of each microbatch, in all stages of the encoder and in all of the language model."""
        own = vision[self.samples]
        encoder = np.bincount(self.microbatch, weights=[own[chunk].sum() for chunk in self.encoder])
        return np.asarray(encoder, float), np.bincount(self.slot, weights=llm[self.samples]).astype(float)


def _plain(parts: list[Ints]) -> Replica:
    """Encoder and language model use the same microbatches, given by indices in the batch."""
    slot = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Replica(np.concatenate(parts), _members(slot), list(range(len(parts))), slot)


def _members(slot: Ints) -> list[Ints]:
    return [np.flatnonzero(slot == k) for k in range(int(slot.max()) + 1)]


def _cut(samples: Ints, size: int) -> list[Ints]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def static(samples: int, replicas: int, size: int) -> list[Replica]:
    """Microbatches of `size` samples in the given order."""
    return [_plain(_cut(own, size)) for own in np.array_split(np.arange(samples), replicas)]


def disttrain(vision: Floats, llm: Floats, replicas: int, size: int, stages: tuple[int, int]) -> list[Replica]:
    """DistTrain: samples assigned to replicas by encoder work, microbatches of `size` in a better order (6.1, 6.2).

    stages: of the encoder and of the language model, for the order.
    """
    dealt = reorder_samples(vision, replicas)
    result = []
    for begin, end in itertools.pairwise(dealt.offsets):
        parts = _cut(dealt.order[begin:end].astype(np.int64), size)
        forward = np.array(
            [[vision[p].sum() / stages[0]] * stages[0] + [llm[p].sum() / stages[1]] * stages[1] for p in parts]
        )
        chosen = balance.reorder_microbatches(forward, 2 * forward, evaluations=0).order
        result.append(_plain([parts[i] for i in chosen]))
    return result


def dip(vision: Floats, samples: int, replicas: int, size: int) -> list[Replica]:
    """DIP: each microbatch of `size` samples as two sub-microbatches of similar encoder work, within its bounds."""
    result = []
    for own in np.array_split(np.arange(samples), replicas):
        parts = []
        for part in _cut(own, size):
            half = balance.assign(vision[part], min(2, len(part)))
            parts += [part[half == i] for i in range(int(half.max()) + 1)]
        result.append(_plain(parts))
    return result


def entrain(
    vision: Floats, llm: Floats, replicas: int, microbatches: int, *, as_printed: bool = False
) -> list[Replica]:
    """Entrain: samples to replicas, then algorithm 4; deferred samples form a separate encoder chunk."""
    of = balance.assign_replicas(vision, llm, replicas, as_printed=as_printed)
    result = []
    for replica in range(replicas):
        own = np.flatnonzero(of == replica)
        made = balance.assign_microbatches(vision[own], llm[own], microbatches, as_printed=as_printed)
        chunks, microbatch = [], []
        for k in range(made.microbatches):
            for reader in (k, k + 1):
                samples = np.flatnonzero((made.encoder_of == k) & (made.llm_of == reader))
                if len(samples):
                    chunks.append(samples)
                    microbatch.append(k)
        result.append(Replica(own, chunks, microbatch, made.llm_of.astype(np.int64)))
    return result


def undeferred(replica: Replica) -> Replica:
    """The same encoder microbatches, each read whole by one microbatch of the language model."""
    slot = np.empty_like(replica.slot)
    for chunk, k in zip(replica.encoder, replica.microbatch):
        slot[chunk] = k
    return Replica(replica.samples, _members(slot), list(range(int(slot.max()) + 1)), slot)


# ---------------------------------------------------------------------- steps


@dataclass(frozen=True, eq=False)
class Stages:
    """Cuts of a model. encoder, llm: layers of each stage. colocated: both on the same lanes (DIP)."""

    model: str
    encoder: Ints
    llm: Ints
    colocated: bool = False

    @classmethod
    def cut(cls, model: str, encoder: int, llm: int, colocated: bool = False) -> Stages:
        """Equal layers at their exact bottleneck (plan.partition); logits count as layers of the same work."""
        shape = LLAMA[model]
        costs = np.ones(shape.layers)
        costs[-1] += shape.hidden * shape.head / shape.layer_parameters
        return cls(
            model,
            np.diff(plan.partition(np.ones(QWEN_VISION.layers), encoder)).astype(np.int64),
            np.diff(plan.partition(costs, llm)).astype(np.int64),
            colocated,
        )

    @property
    def ranks(self) -> int:
        return len(self.llm) if self.colocated else len(self.encoder) + len(self.llm)

    def shares(self) -> dict[str, Floats]:
        """Fraction of a module's seconds in each of its stages."""
        shape = LLAMA[self.model]
        llm = self.llm.astype(float)
        llm[-1] += shape.hidden * shape.head / shape.layer_parameters
        return {ENCODER: self.encoder / self.encoder.sum(), LLM: llm / llm.sum()}

    def graph(self) -> StageGraph:
        """A lane per stage; colocated stages of both modules share theirs."""
        first = 0 if self.colocated else len(self.encoder)
        places = {ENCODER: list(range(len(self.encoder))), LLM: list(range(first, first + len(self.llm)))}
        return StageGraph.build(places, [(ENCODER, LLM)])


def play(stages: Stages, replica: Replica, vision: Floats, llm: Floats) -> Timeline:
    """The step of one replica under 1F1B, or under DIP's order if encoder and language model are colocated.

    A backward takes twice its forward; transfers are free. The schedule is proved by `check`.
    """
    graph, table = stages.graph(), baselines.table_of(replica.encoder, replica.slot)
    shares = stages.shares()
    seconds = {ENCODER: vision[replica.samples], LLM: llm[replica.samples]}
    forward = [float(seconds[chunk.module][chunk.samples].sum()) for chunk in table.chunks]

    def duration(op: Op, module: str, stage: int, chunk: int) -> float:
        return forward[chunk] * float(shares[module][stage]) * (1.0 if op is Op.FORWARD else 2.0)

    if stages.colocated:
        schedule = encoder_first(graph, table, duration)
    else:
        schedule = one_f_one_b(graph, table, reduce_grad=False, durations=duration)
    step = baselines.proven(schedule, duration)
    return simulate(step.schedule, step.durations)


def encoder_first(graph: StageGraph, table: StepTable, duration: baselines.Durations) -> Schedule:
    """DIP's order (figure 4.2c): all forwards of the encoder, 1F1B of the language model, the encoder's backwards."""
    phase = {(Op.FORWARD, ENCODER): 0, (Op.BACKWARD, ENCODER): 2}
    place = {work: i for i, work in enumerate(baselines.llm_order(table, graph.layout.world))}
    order = baselines.play(
        graph, table, duration, lambda work: (phase.get(work[:2], 1), place.get(work, work[3])), strict=True
    )
    return baselines.lists(graph, table, order)


def iteration(stages: Stages, replicas: Sequence[Replica], vision: Floats, llm: Floats) -> tuple[float, list[Timeline]]:
    """(seconds of a step, timeline of each replica): replicas wait for each other at its end only (4.7.1)."""
    timelines = [play(stages, replica, vision, llm) for replica in replicas]
    return max(timeline.makespan for timeline in timelines), timelines
