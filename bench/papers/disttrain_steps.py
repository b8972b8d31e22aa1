"""DistTrain's models, data and steps: shapes of table 1, sequences of images and captions, and their simulation.

A step has three modules: ViT-Huge encodes the images of a sequence of 8,192 tokens, Llama reads the whole sequence, and
Stable Diffusion 2.1 is trained on each image. Every module has its own tp, pp and dp. Within a tensor-parallel group of
the encoder or the generator each GPU processes different images (DistTrain section 8.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from bench.lengths import Lognormal
from bench.papers.shapes import A800, Transformer, causal_pairs, unet
from bench.sample_order import reorder_samples
from interlace import balance
from interlace import plan as planning
from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.plan import LinkModel, ModuleWork
from interlace.schedule import Chunk, Edge, Op, StageGraph, StepTable, one_f_one_b
from interlace.simulate import simulate

ENCODER, LLM, GENERATOR = "encoder", "language_model", "generator"
MODULES = (ENCODER, LLM, GENERATOR)
SEQUENCE = 8192
VIT_HUGE = Transformer.of(32, 1280, 5120)
LLAMA = {  # table 1; the vocabulary is Llama 3's
    "MLLM-9B": Transformer.of(32, 4096, 11008, heads=32, kv_heads=32, gated=True, vocabulary=128256),
    "MLLM-15B": Transformer.of(40, 5120, 13824, heads=40, kv_heads=40, gated=True, vocabulary=128256),
    "MLLM-72B": Transformer.of(80, 8192, 28672, heads=64, kv_heads=8, gated=True, vocabulary=128256),
}
GENERATED = {"MLLM-9B": 512, "MLLM-15B": 512, "MLLM-72B": 1024}  # pixels of a side (section 8)
MEGATRON_STAGES = {"MLLM-9B": 1, "MLLM-15B": 2, "MLLM-72B": 10}  # of the language model (section 8.1)
TP = (1, 2, 4, 8)
NETWORK = LinkModel(10e-6, 1 / 12.5e9)  # of one GPU: a node's 4 x 200 Gbit/s, shared by 8
GPU_MEMORY = 80e9
# Bytes of a parameter with its gradient (16 and 32 bit) and of its optimizer state; of an activation, per token and
# channel of a layer (16 bit, flash attention, sequence parallelism).
WEIGHT_BYTES, STATE_BYTES, ACTIVATION_BYTES = 6, 12, 34

# LAION-400M: of 413 M images 211 M, 67 M and 9.6 M have both sides of at least 256, 512 and 1,024 pixels (laion.ai). A
# lognormal side matches all three. Captions: assumed.
SIDE = Lognormal(260.0, 0.69, 64, 1024)
CAPTION = Lognormal(13.0, 0.7, 3, 256)

FROZEN: Mapping[str, frozenset[str]] = {  # setting -> frozen modules; projectors are always trained
    "nothing frozen": frozenset(),
    "all modules frozen": frozenset(MODULES),
    "encoder trained": frozenset({LLM, GENERATOR}),
    "language model trained": frozenset({ENCODER, GENERATOR}),
    "generator trained": frozenset({ENCODER, LLM}),
}
ASSUMED = (
    f"seconds from FLOPs at {A800}, for every module and system alike",
    "tensor parallelism costs two all-reduces of 16-bit activations per layer each way over 150 GB/s, not hidden, in "
    "all systems",
    "images of LAION-400M: a lognormal side through its published counts (median 260 pixels), 16 x 16 pixels a token, "
    "captions of 13 tokens in the median, interleaved up to 8,192 tokens; every image is encoded and generated",
    "the generator is the U-Net alone, on latents of 64 x 64 (512 pixels) or 128 x 128 (1,024 pixels)",
    "nothing is recomputed; 80 GB of memory, of which the generator's activations take what the encoder's do; 12.5 "
    "GB/s of network per GPU for sums of gradients and between modules",
)


@dataclass(frozen=True, eq=False)
class Samples:
    """n sequences. tokens: per sequence, int64 [images] with the tokens of each image. text: int64 [n]."""

    tokens: tuple[NDArray[np.int64], ...]
    text: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.text)

    @property
    def images(self) -> NDArray[np.int64]:
        return np.array([len(each) for each in self.tokens])


@lru_cache(maxsize=8)
def draw(n: int, seed: int = 0) -> Samples:
    """Pairs of image and caption fill one sequence after the other, in drawn order."""
    rng = np.random.default_rng(seed)
    result, texts, images, text = [], [], [], 0
    while len(result) < n:
        sides = SIDE.draw(rng, 1024)
        for side, caption in zip(sides.tolist(), CAPTION.draw(rng, 1024).tolist()):
            tokens = max(1, round(side / 16)) ** 2
            if sum(images) + text + tokens + caption > SEQUENCE:
                result.append(np.array(images, np.int64))
                texts.append(text)
                images, text = [], 0
            images.append(tokens)
            text += caption
    return Samples(tuple(result[:n]), np.array(texts[:n], np.int64))


# ---------------------------------------------------------------------- costs


@dataclass(frozen=True)
class Model:
    """One of the three models, with its frozen modules."""

    name: str
    frozen: frozenset[str] = frozenset()

    def image_flops(self, module: str, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """FLOPs of the forward of each image in the encoder or the generator."""
        if module == ENCODER:
            return (
                2.0 * VIT_HUGE.parameters * tokens + 4.0 * VIT_HUGE.layers * VIT_HUGE.hidden * tokens.astype(float) ** 2
            )
        return np.full(len(tokens), unet(GENERATED[self.name] // 8).flops)

    @property
    def llm_flops(self) -> float:
        """FLOPs of the forward of a sequence."""
        return LLAMA[self.name].flops(SEQUENCE, causal_pairs(SEQUENCE))

    def tp_seconds(self, tp: int) -> float:
        """Seconds of the all-reduces in the language model's forward of a sequence."""
        llm = LLAMA[self.name]
        return 2 * llm.layers * A800.link.all_reduce(2.0 * SEQUENCE * llm.hidden, tp) if tp > 1 else 0.0

    def passes(self, module: str) -> float:
        """Forward and backward of a module in units of its forward. Trained projectors are before the language model
        and before the generator. None is before the encoder, whose first layer therefore has no input gradient."""
        layers = np.ones(VIT_HUGE.layers if module == ENCODER else 1)
        frozen = np.full(len(layers), module in self.frozen)
        return float(planning.frozen_costs(layers, layers, layers, frozen, trainable_before=module != ENCODER).mean())

    def flops(self, samples: Samples) -> float:
        """FLOPs of training on `samples`, backward included."""
        media = sum(
            self.passes(module) * float(self.image_flops(module, tokens).sum())
            for module in (ENCODER, GENERATOR)
            for tokens in samples.tokens
        )
        return media + self.passes(LLM) * self.llm_flops * len(samples)

    def works(self, samples: Samples) -> dict[str, ModuleWork]:
        """Input of `orchestrate`: means over samples, forward and backward."""
        result = {}
        for module in MODULES:
            if module == LLM:
                llm = LLAMA[self.name]
                parameters, layers, hidden = llm.parameters, llm.layers, llm.hidden
                seconds = [A800.seconds(self.llm_flops) / tp + self.tp_seconds(tp) for tp in TP]
                held = float(ACTIVATION_BYTES * SEQUENCE * hidden * layers)
            else:
                mean = np.mean([self.image_flops(module, tokens).sum() for tokens in samples.tokens])
                seconds = [A800.seconds(float(mean)) / tp for tp in TP]
                parameters, layers = (VIT_HUGE.parameters, 32) if module == ENCODER else (int(unet(64).parameters), 1)
                held = float(ACTIVATION_BYTES * SEQUENCE * VIT_HUGE.hidden * VIT_HUGE.layers)
            trained = module not in self.frozen
            result[module] = ModuleWork(
                forward=[self.passes(module) * each for each in seconds],
                layers=layers,
                weight_bytes=float((WEIGHT_BYTES if trained else 2) * parameters),
                optimizer_bytes=float(STATE_BYTES * parameters) if trained else 0.0,
                activation_bytes=held,
                gradient_bytes=2.0 * parameters if trained else 0.0,
                output_bytes=2 * 2.0 * SEQUENCE * LLAMA[self.name].hidden,
            )
        return result


# ---------------------------------------------------------------------- assignment of GPUs

Degrees = dict[str, ParallelSpec]


def megatron(model: Model, gpus: int, batch: int) -> Degrees:
    """The same tp of 8 and the same dp for all; encoder and generator have one stage each (section 2.1)."""
    stages = MEGATRON_STAGES[model.name]
    dp = max(d for d in range(1, gpus // (8 * (stages + 2)) + 1) if batch % d == 0)
    return {module: ParallelSpec(tp=8, pp=stages if module == LLM else 1, dp=dp) for module in MODULES}


def by_flops(model: Model, samples: Samples, gpus: int, batch: int) -> Degrees:
    """GPUs in proportion to FLOPs (the ratio-based strategy of section 8.2.1), the language model as in Megatron."""
    work = model.works(samples)
    total = sum(each.forward[0] for each in work.values())
    stages = MEGATRON_STAGES[model.name]
    share = {module: gpus * work[module].forward[0] / total for module in MODULES}
    most = max(1, int(share[LLM]) // (8 * stages))
    dp = max(d for d in range(1, most + 1) if batch % d == 0)
    degrees = {LLM: ParallelSpec(tp=8, pp=stages, dp=dp)}
    for module in (ENCODER, GENERATOR):
        own = max(1, min(round(share[module]), 8 * dp))
        groups = max(d for d in range(1, min(own, dp) + 1) if dp % d == 0)
        tp = max(t for t in TP if t <= max(1, own // groups))
        degrees[module] = ParallelSpec(tp=tp, dp=groups)
    return {module: degrees[module] for module in MODULES}


def orchestrated(model: Model, samples: Samples, gpus: int, batch: int) -> Degrees:
    """DistTrain's orchestration over the project's exact planner."""
    result = planning.orchestrate(
        model.works(samples), gpus, batch, language_model=LLM, tp=TP, gpu_memory=GPU_MEMORY, stage_link=NETWORK,
        data_link=NETWORK,
    )  # fmt: skip
    return dict(result.specs)


def gpus_of(degrees: Degrees) -> int:
    return sum(spec.ranks for spec in degrees.values())


def describe(degrees: Degrees) -> str:
    return "; ".join(f"{name[:3]} tp {s.tp} pp {s.pp} dp {s.dp}" for name, s in degrees.items())


@dataclass(frozen=True, eq=False)
class Step:
    """Degrees and the order of samples: order[r, k] is the k-th of replica r of the language model."""

    model: Model
    samples: Samples
    degrees: Degrees
    order: NDArray[np.int64]

    def lane(self, module: str, replica: int) -> int:
        """The replica of `module` that serves a replica of the language model: neighbours share one."""
        return replica * self.degrees[module].dp // self.degrees[LLM].dp

    @cached_property
    def media_seconds(self) -> dict[str, NDArray[np.float64]]:
        """Module -> forward of each of its replicas' chunks, [dp, microbatches]: the busiest GPU of the group."""
        result = {}
        for module in (ENCODER, GENERATOR):
            spec = self.degrees[module]
            times = np.zeros((spec.dp, self.order.shape[1]))
            own: list[list[int]] = [[] for _ in range(spec.dp)]
            for replica in range(len(self.order)):
                own[self.lane(module, replica)].append(replica)
            for lane, replicas in enumerate(own):
                for k in range(self.order.shape[1]):
                    tokens = np.concatenate([self.samples.tokens[i] for i in self.order[replicas, k]])
                    cost = self.model.image_flops(module, tokens)
                    share = balance.assign(cost, spec.tp)
                    busiest = np.bincount(share, weights=cost, minlength=spec.tp).max()
                    times[lane, k] = A800.seconds(float(busiest)) / spec.pp
            result[module] = times
        return result

    def llm_seconds(self) -> float:
        """Seconds of the forward of a sequence in one stage."""
        spec = self.degrees[LLM]
        return (A800.seconds(self.model.llm_flops) / spec.tp + self.model.tp_seconds(spec.tp)) / spec.pp

    def table(self) -> StepTable:
        """Step table in which the k-th chunks of all modules belong together."""
        replicas, count = self.order.shape
        chunks: list[Chunk] = []
        at: dict[tuple[str, int, int], int] = {}
        for module in MODULES:
            for lane in range(self.degrees[module].dp):
                mine = [r for r in range(replicas) if self.lane(module, r) == lane]
                for k in range(count):
                    at[module, lane, k] = len(chunks)
                    chunks.append(Chunk(module, lane, k, self.order[mine, k].astype(np.int32)))
        pieces: dict[str, list[tuple[int, int, int, int, int]]] = {ENCODER: [], GENERATOR: []}
        for r in range(replicas):
            for k in range(count):
                for module in pieces:
                    lane = self.lane(module, r)
                    row = [s for s in range(replicas) if self.lane(module, s) == lane].index(r)
                    ends = (at[module, lane, k], at[LLM, r, k])
                    pieces[module].append(
                        (ends[0], row, ends[1], 0, 1) if module == ENCODER else (ends[1], 0, ends[0], row, 1)
                    )
        return StepTable(
            tuple(chunks),
            (
                Edge(ENCODER, LLM, "embeds", np.array(pieces[ENCODER], np.int32)),
                Edge(LLM, GENERATOR, "embeds", np.array(pieces[GENERATOR], np.int32)),
            ),
        )

    def graph(self) -> StageGraph:
        """One rank for each lane. A stage counts as one layer. Projectors are in the last stage of the encoder and the
        first of the generator."""
        modules, trainable, first = {}, {}, 0
        for module in MODULES:
            spec = self.degrees[module]
            pipelines = []
            for replica in range(spec.dp):
                lanes = range(first, first + spec.pp)
                first += spec.pp
                stages = tuple(Stage(module, i, i, i + 1, Lane((rank,))) for i, rank in enumerate(lanes))
                pipelines.append(Pipeline(module, replica, stages))
            modules[module] = (ParallelSpec(pp=spec.pp, dp=spec.dp), tuple(pipelines))
            flags = [module not in self.model.frozen] * spec.pp
            if module == ENCODER:
                flags[-1] = True
            if module == GENERATOR:
                flags[0] = True
            trainable[module] = tuple(flags)
        return StageGraph(Layout(modules, first), ((ENCODER, LLM), (LLM, GENERATOR)), trainable)

    def seconds(self) -> float:
        """Seconds of the iteration, simulated."""
        table, graph = self.table(), self.graph()
        media, llm = self.media_seconds, self.llm_seconds()

        def duration(op: Op, module: str, stage: int, chunk: int) -> float:
            result = table.chunks[chunk]
            forward = llm if module == LLM else float(media[module][result.replica, result.index])
            return forward if op is Op.FORWARD else forward * (self.model.passes(module) - 1)

        works = self.model.works(self.samples)

        def reduce_grad(action: object) -> float:
            module = action.module  # type: ignore[attr-defined]
            spec = self.degrees[module]
            return NETWORK.all_reduce(works[module].gradient_bytes / (spec.tp * spec.pp), spec.dp)

        hidden = NETWORK.transfer(2.0 * SEQUENCE * LLAMA[self.model.name].hidden / self.degrees[LLM].tp)
        schedule = one_f_one_b(graph, table, durations=duration)
        return simulate(schedule, duration, transfer=hidden, reduce_grad=reduce_grad).makespan

    def throughput(self) -> float:
        """Samples per second."""
        return len(self.samples) / self.seconds()

    def mfu(self, seconds: float) -> float:
        return self.model.flops(self.samples) / (gpus_of(self.degrees) * A800.peak * seconds)


def in_order(samples: int, replicas: int) -> NDArray[np.int64]:
    """Drawn order: the samples of a replica are consecutive."""
    return np.arange(samples).reshape(replicas, -1)


def reordered(model: Model, samples: Samples, degrees: Degrees) -> NDArray[np.int64]:
    """DistTrain's two reorderings: samples assigned to replicas by their media, then microbatches reordered."""
    cost = sum(
        (
            np.array([model.passes(m) * model.image_flops(m, tokens).sum() / gpus for tokens in samples.tokens])
            for m, gpus in ((m, degrees[m].ranks) for m in (ENCODER, GENERATOR))
        ),
        start=np.zeros(len(samples)),
    )
    dealt = reorder_samples(cost, degrees[LLM].dp)
    order = dealt.order.reshape(degrees[LLM].dp, -1).astype(np.int64)
    step = Step(model, samples, degrees, order)
    media, llm = step.media_seconds, np.full(order.shape[1], step.llm_seconds())
    columns, passes = [], []
    for module in MODULES:
        forward = llm if module == LLM else media[module].max(axis=0)
        columns += [forward] * degrees[module].pp
        passes += [model.passes(module) - 1] * degrees[module].pp
    stages = np.stack(columns, axis=1)
    return order[:, balance.reorder_microbatches(stages, stages * np.array(passes)).order]


def pictures(samples: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Tokens of all images of some sequences."""
    return np.concatenate(list(samples))
